"""How much host memory snapshots may still take: the least of the setting, the control groups and the mount."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ckptkit.errors import StoreFullError
from ckptkit.store.local import disk_room
from ckptkit.util.words import size_text

CONTAINER_SHM_BYTES = 64 << 20  # what Docker and Kubernetes give /dev/shm where nobody asks for more
LESS_ON_MOUNT = "give fewer slots (`slots` or `keep` of the tier, `in_flight_max`), or leave this tier out"
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a huge number, rounded to pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The room under one limit: bytes, its place, and how to get more."""

    free_bytes: int
    where: str
    more: str


@final
class HostMemory:
    """The host memory of one process's snapshots: at most `bytes_max`, and what its control groups leave.

    Control groups of both versions are asked from the process's own up to the mount's root; what they could reclaim
    at once (clean file pages) counts as free, memory-backed files do not. `proc` and `groups` are for tests.
    """

    def __init__(
        self,
        bytes_max: int | None = None,
        *,
        proc: Path = Path("/proc/self/cgroup"),
        groups: Path = Path("/sys/fs/cgroup"),
    ):
        self._bytes_max = bytes_max
        self._proc = proc
        self._groups = groups
        self._takers: list[Callable[[], int]] = []

    def add_taker(self, taken_bytes: Callable[[], int]) -> None:
        """Counts its bytes from now on: all slots of a process share one limit."""
        self._takers.append(taken_bytes)

    @property
    def taken_bytes(self) -> int:
        """The bytes taken by all counted ones."""
        return sum(taken() for taken in self._takers)

    def rooms(self, taken_bytes: int) -> list[Room]:
        """The room under each limit for a process whose snapshots have `taken_bytes`. Cost: some 10 small file
        reads."""
        rooms = [
            Room(free_bytes=max(0, free), where=f"in control group {group}", more="raise the container's memory limit")
            for group, free in self._group_frees()
        ]
        if self._bytes_max is not None:
            left = max(0, self._bytes_max - taken_bytes)
            rooms.append(
                Room(free_bytes=left, where=f"under host_bytes_max={self._bytes_max}", more="raise host_bytes_max")
            )
        return rooms

    def _group_frees(self) -> Iterator[tuple[Path, int]]:
        try:
            lines = self._proc.read_text().splitlines()
        except OSError:  # no control groups here
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for root in (self._groups, self._groups / "unified"):
                    yield from _frees(root, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                root = self._groups / "memory"
                yield from _frees(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@final
class SlotRoom:
    """The room of the slots of one directory, or of anonymous ones (`directory=None`). `memory`: the limits that they
    share with others; None for a disk."""

    def __init__(self, directory: Path | None, memory: HostMemory | None, *, is_disk: bool = False):
        self.name = str(directory or "the staging memory")
        self._directory = directory
        self._memory, self._is_disk = memory, is_disk
        self._less = LESS_ON_MOUNT if directory else "lower in_flight_max, or shard the state over more processes"

    def narrowest(self, *, on_mount: bool = True) -> Room | None:
        """The room under the narrowest limit; None without limits. `on_mount=False` asks those of host memory alone."""
        rooms = [] if self._memory is None else self._memory.rooms(self._memory.taken_bytes)
        if on_mount and self._directory is not None:
            rooms.append(mount_room(self._directory, is_disk=self._is_disk))
        return min(rooms, key=lambda room: room.free_bytes, default=None)

    def refuse_beyond(self, room: Room | None, missing_bytes: int, needs: str) -> None:
        """Raises `StoreFullError` where `missing_bytes` are more than there is room.

        Ask for the room before the bytes: slots that grow in between are then counted in neither.
        """
        if room is not None and missing_bytes > room.free_bytes:
            raise store_full(room, needs, self._less)


def store_full(room: Room, needs: str, less: str) -> StoreFullError:
    """The error of a snapshot that has no room: what it needs, what is free and where, and the ways out."""
    return StoreFullError(f"{needs}, {size_text(room.free_bytes)} are free {room.where}; {room.more}, {less}")


def mount_room(directory: Path, *, is_disk: bool) -> Room:
    """The room on the mount of `directory`; for a container's small /dev/shm, how to get more."""
    total_bytes, free_bytes = _mount_bytes(directory)
    more = "free some space on that disk" if is_disk else "mount a larger ramdisk"
    if total_bytes <= CONTAINER_SHM_BYTES and not is_disk:
        more = (
            f"the whole mount has {size_text(total_bytes)}, as a container's own /dev/shm does: run Docker with "
            "--shm-size, or mount a Kubernetes emptyDir with medium: Memory and give its path to Tier.ram"
        )
    return Room(free_bytes=free_bytes, where=f"in {directory}", more=more)


def _mount_bytes(directory: Path) -> tuple[int, int]:
    return disk_room(str(directory)) or (_UNLIMITED_BYTES, _UNLIMITED_BYTES)


def _frees(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[Path, int]]:
    """Every group from the process's own up to the root of the hierarchy that has a limit, and what it leaves.

    In a container the process's path often is not there, because the mount's root is its own group: what is there of
    the way up is asked.
    """
    own = root / path.lstrip("/")
    for group in [own, *(parent for parent in own.parents if parent.is_relative_to(root))]:
        with suppress(OSError, ValueError):  # not there, or "max"
            limit_bytes = int((group / limit).read_text())
            if limit_bytes < _UNLIMITED_BYTES:
                used_bytes = int((group / usage).read_text()) - _reclaimable_bytes(group / "memory.stat", prefix)
                yield group, limit_bytes - used_bytes


def _reclaimable_bytes(stat: Path, prefix: str) -> int:
    """File pages that the kernel may drop; pages of a ramdisk are not among them (they count as anonymous)."""
    counted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    lines = (line.split() for line in stat.read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in counted)
