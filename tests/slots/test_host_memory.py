"""The host memory that snapshots may take, and the error if it is not enough."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptkit.errors import StoreFullError
from ckptkit.model.manifest import SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.host_memory import CONTAINER_SHM_BYTES, HostMemory, mount_room
from ckptkit.util.pages import PAGE_BYTES as PAGE
from ckptkit.util.words import size_text
from tests.mounts import Mounts

GIB = 1 << 30


class Groups:
    """A machine's control groups, as files."""

    def __init__(self, root: Path):
        self._root = root
        self._root.mkdir()

    def add(self, path: str, limit: str, used: int, clean: int = 0) -> None:
        """One group of version 2, or, below `memory/`, of version 1."""
        group = self._root / path
        group.mkdir(parents=True, exist_ok=True)
        first = path.startswith("memory")
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(limit + "\n")
        (group / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        prefix = "total_" if first else ""
        (group / "memory.stat").write_text(
            f"anon 5\n{prefix}inactive_file {clean}\n{prefix}active_file 0\nshmem 77\ninactive_file 999999999999\n"
            if first
            else f"anon 5\ninactive_file {clean}\nactive_file 0\nshmem 77\n"
        )

    def memory(self, line: str, bytes_max: int | None = None) -> HostMemory:
        """The limits of a process whose /proc/self/cgroup holds `line`."""
        proc = self._root / "self-cgroup"
        proc.write_text(f"12:cpu,cpuacct:/elsewhere\n{line}\n")
        return HostMemory(bytes_max, proc=proc, groups=self._root)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path / "cgroup")


def frees(memory: HostMemory, taken: int = 0) -> list[int]:
    return [room.free_bytes for room in memory.rooms(taken)]


def test_memory_limit_of_any_ancestor_group_applies(groups: Groups) -> None:
    """A pod's limit is above its container's: a snapshot beyond it is an OOM kill."""
    groups.add("pod", str(4 * GIB), used=3 * GIB)
    groups.add("pod/container", "max", used=GIB)
    groups.add("pod/container/leaf", str(2 * GIB), used=GIB // 2)
    memory = groups.memory("0::/pod/container/leaf")
    assert frees(memory) == [3 * GIB // 2, GIB]
    assert [room.where.split("cgroup/")[-1] for room in memory.rooms(0)] == ["pod/container/leaf", "pod"]


def test_cgroup_v1_is_read_and_its_maximum_means_unlimited(groups: Groups) -> None:
    """Every host without version 2 would look unlimited, or limited to 8 exabytes less what is used."""
    groups.add("memory", "9223372036854771712", used=GIB)
    groups.add("memory/docker/abc", str(GIB), used=GIB // 4)
    assert frees(groups.memory("4:memory:/docker/abc")) == [3 * GIB // 4]


def test_container_mount_is_its_own_control_group(groups: Groups) -> None:
    """Without a namespace the process's path is the host's, which the container cannot see: no limit would be found."""
    groups.add("memory", str(GIB), used=GIB // 2)
    assert frees(groups.memory("4:hugetlb,memory:/docker/abc")) == [GIB // 2]


def test_clean_file_pages_count_as_free_and_ramdisk_does_not(groups: Groups) -> None:
    """A job that has read its data set would seem to have no memory left."""
    groups.add("pod", str(4 * GIB), used=3 * GIB, clean=2 * GIB)
    assert frees(groups.memory("0::/pod")) == [3 * GIB]


def test_free_bytes_are_never_negative(groups: Groups) -> None:
    """A negative number of free bytes would pass for some."""
    groups.add("pod", str(GIB), used=2 * GIB)
    assert frees(groups.memory("0::/pod", bytes_max=100), taken=30) == [0, 70]
    assert frees(groups.memory("0::/other", bytes_max=100), taken=130) == [0]


def test_missing_control_groups_mean_no_limit(tmp_path: Path) -> None:
    """A kernel without them would make every save an error."""
    assert frees(HostMemory(proc=tmp_path / "none", groups=tmp_path)) == []


def test_control_groups_of_this_machine_are_read() -> None:
    """The paths would be right in the tests alone."""
    for room in HostMemory().rooms(0):
        assert room.free_bytes >= 0


def test_slots_respect_the_lowest_limit(groups: Groups, tmp_path: Path) -> None:
    """The kernel would kill the job, or the setting would be a comment."""
    groups.add("pod", str(100 * PAGE), used=0)
    said = r"needs 120.0 KiB more for 3 slots of 40.0 KiB, 100.0 KiB are free under host_bytes_max="
    arena = Arena(tmp_path, slots=3, synced=False, memory=groups.memory("0::/pod", bytes_max=25 * PAGE))
    with pytest.raises(
        StoreFullError,
        match=said + r"\d+; raise host_bytes_max, give fewer slots .*, or leave this tier",
    ):
        arena.check_room(10 * PAGE - 5)
    for step in (1, 2):
        assert arena.acquire(10 * PAGE) is not None, step
    said = r"slot .*slot-2.bin needs 40.0 KiB, 20.0 KiB are free under host_bytes_max"
    with pytest.raises(StoreFullError, match=said):
        arena.acquire(10 * PAGE)
    anonymous = Arena(None, slots=2, synced=False, memory=groups.memory("0::/pod"))
    said = r"the staging memory needs 480.0 KiB more for 2 slots of 240.0 KiB, 400.0 KiB are free in "
    with pytest.raises(StoreFullError, match=said + r"control group .*pod; raise the container's .*, lower"):
        anonymous.check_room(60 * PAGE)
    arena.close()
    anonymous.close()


def test_existing_slots_are_used_if_no_more_fit(tmp_path: Path) -> None:
    """One slot too many would stop a tier that has room for two."""
    arena = Arena(tmp_path, slots=3, synced=False, memory=HostMemory(20 * PAGE, proc=tmp_path / "none"))
    names = []
    for number in range(4):
        slot = arena.acquire(10 * PAGE)
        assert slot is not None
        slot.save_id = SaveId(1, number, number)
        arena.protect(slot.save_id)
        arena.release(slot)
        names.append(slot.name)
    assert names == ["slot-0.bin", "slot-1.bin", "slot-0.bin", "slot-1.bin"]
    arena.close()


def test_container_shm_error_says_what_to_mount(tmp_path: Path, mounts: Mounts) -> None:
    """Everybody who runs in a container would have to find out for themselves."""
    small_tmpfs = mounts.small(tmp_path / "shm", str(CONTAINER_SHM_BYTES))
    arena = Arena.open(small_tmpfs / "host", 0, slots=3, synced=False)
    free = mount_room(small_tmpfs, is_disk=False).free_bytes
    with pytest.raises(StoreFullError) as caught:
        arena.check_room(100 << 20)
    assert str(caught.value) == (
        f"{small_tmpfs}/host/0 needs 300.0 MiB more for 3 slots of 100.0 MiB, {size_text(free)} are free in "
        f"{small_tmpfs}/host/0; the whole mount has 64.0 MiB, as a container's own /dev/shm does: "
        "run Docker with --shm-size, or mount a Kubernetes emptyDir with medium: Memory and give its path to Tier.ram, "
        "give fewer slots (`slots` or `keep` of the tier, `in_flight_max`), or leave this tier out"
    )
    arena.check_room(20 << 20)  # what fits is not refused
    arena.close()


def test_slots_that_are_being_made_are_no_lack_of_room(tmp_path: Path, mounts: Mounts) -> None:
    """The first save of a run whose slots just fit would be refused, or wait until they all are made."""
    mount = mounts.small(tmp_path / "shm", "300m")
    arena = Arena.open(mount / "host", 0, slots=3, synced=False)
    making = threading.Thread(target=arena.reserve, args=(98 << 20,))
    making.start()
    looks = 0
    while making.is_alive():
        arena.check_room(98 << 20)
        looks += 1
    making.join()
    assert looks > 10, "it never looked while slots were made"
    arena.close()
