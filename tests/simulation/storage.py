"""Slots, disks and durable roots in memory. They outlive a simulated process, and report a broken rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, final

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.model.manifest import SaveId
from ckptkit.save.agreement.protocol import Agree, Do
from ckptkit.slots.files import reusable
from tests.simulation.scheduler import Violation

PART_BYTES = 4096


@dataclass(eq=False, slots=True)
class SimSlot:
    """A slot; `memory` holds one value, what the state was when it was staged."""

    name: str
    memory: list[Any] = field(default_factory=lambda: [None])
    save_id: SaveId | None = None
    leases: int = 0
    is_filled: bool = False


@final
class Medium:
    """The slots of one process on one tier, as the host keeps them: a crash leaves them, a wiped host does not.

    `committed` are those that have a manifest, with what the slot holds.
    """

    def __init__(self) -> None:
        self.contents: dict[str, Any] = {}  # by slot
        self.committed: dict[SaveId, str] = {}  # the slot of each
        self.fault: str | None = None  # "full", "read only"

    def wipe(self) -> None:
        """The host lost it."""
        self.contents.clear()
        self.committed.clear()

    def content(self, save_id: SaveId) -> Any:
        """The current content of the slot of a committed save."""
        return self.contents.get(self.committed[save_id])


@final
class SimArena:
    """An arena over a `Medium`, with the rule of the real one for which slot may be written (`slots.arena.reusable`).

    `acquire` is a protocol: it waits in virtual time.
    """

    directory = "simulated"
    method = "simulated"
    crowded = False

    def __init__(self, medium: Medium, slots: int, *, synced: bool, until: Callable[..., Any]):
        """`until(condition, timeout_s)` makes the effect that waits."""
        self.medium, self.synced, self.until = medium, synced, until
        self.written: Callable[[SaveId, bytes], None] = lambda save_id, manifest: None
        self._slots = [SimSlot(f"slot-{n}") for n in range(slots)]
        self._protected: dict[str, frozenset[SaveId]] = {}
        for save_id, name in medium.committed.items():
            for slot in self._slots:
                if slot.name == name:
                    slot.save_id, slot.memory = save_id, [medium.contents.get(name)]
        self._protected["committed by all"] = frozenset(sorted(self.held())[-1:])

    @property
    def protected(self) -> frozenset[SaveId]:
        """See `Arena.protected`."""
        return frozenset().union(*self._protected.values())

    @property
    def leases(self) -> int:
        """All leases together."""
        return sum(slot.leases for slot in self._slots)

    def acquire(self, size_bytes: int, *, timeout_s: float = 0.0) -> Iterator[Any]:
        """See `Arena.acquire`."""
        del size_bytes
        yield self.until(self._free, timeout_s)
        slot = self._free()
        if slot is None:
            return None
        self._check()
        if slot.save_id is not None and slot.save_id in self.protected:
            raise Violation(f"slot {slot.name} is written although save {slot.save_id} is protected")
        slot.leases, slot.is_filled = 1, False
        self.discard(slot)
        return slot

    def write(self, slot: SimSlot, content: Any) -> None:
        """Overwrites a leased slot."""
        if slot.leases < 1:
            raise Violation(f"slot {slot.name} is written without a lease")
        slot.memory, slot.is_filled = [content], True
        self.medium.contents[slot.name] = content

    def commit(self, slot: SimSlot, save_id: SaveId, manifest: bytes) -> None:
        """See `Arena.commit`."""
        self._check()
        self.written(save_id, manifest)
        if save_id in self.medium.committed:
            raise Violation(f"save {save_id} is committed twice on one process")
        self.medium.committed[save_id] = slot.name
        slot.save_id = save_id

    def discard(self, slot: SimSlot) -> None:
        """See `Arena.discard`."""
        if slot.save_id is not None:
            self.medium.committed.pop(slot.save_id, None)
        slot.save_id = None

    def forget(self, save_ids: Any) -> None:
        """See `Arena.forget`."""
        for slot in self._slots:
            if slot.save_id in save_ids:
                self.discard(slot)

    def protect(self, *save_ids: SaveId, why: str = "committed by all") -> None:
        """See `Arena.protect`."""
        self._protected[why] = frozenset(save_ids)

    def lease(self, slot: SimSlot) -> None:
        """See `Arena.lease`."""
        slot.leases += 1

    def release(self, slot: SimSlot) -> None:
        """See `Arena.release`."""
        slot.leases -= 1
        if slot.leases < 0:
            raise Violation(f"slot {slot.name} is released too often")

    def held(self) -> list[SaveId]:
        """See `Arena.held`."""
        return [slot.save_id for slot in self._slots if slot.save_id is not None]

    def resize(self, slots: int) -> bool:
        """See `Arena.resize`."""
        return slots != len(self._slots)

    def reserve(self, size_bytes: int, turn: Callable[[], None]) -> None:
        """See `Arena.reserve`."""

    def _free(self) -> SimSlot | None:
        return reusable(self._slots, self.protected)  # pyright: ignore[reportArgumentType, reportReturnType]

    def _check(self) -> None:
        if self.medium.fault == "full":
            raise StoreFullError("no space left (simulated)")
        if self.medium.fault == "read only":
            raise StoreError("read-only file system (simulated)")


@final
class SimDiskCopy:
    """A copy into a disk arena: what the source holds when the copy ends."""

    kept_bytes = 0

    def __init__(self, source: SimSlot, extents: Any, size_bytes: int, arena: SimArena, digests: Any = None):
        del extents, digests
        self._source, self._size_bytes, self._arena = source, size_bytes, arena
        self._abandoned = False

    def filled(self, start: int, stop: int, digest: str) -> None:
        """See `DiskCopy.filled`."""

    def abandon(self) -> None:
        """See `DiskCopy.abandon`."""
        self._abandoned = True

    def run(self) -> Any:
        """See `DiskCopy.run`."""
        slot = yield from self._arena.acquire(self._size_bytes, timeout_s=60.0)
        if slot is None:
            raise StoreFullError("no free slot (simulated)")
        try:
            yield self._arena.until(lambda: self._source.is_filled or self._abandoned)
            yield Do("disk pieces", lambda: None)
            if self._abandoned:
                self._arena.release(slot)
                return None
            self._arena.write(slot, self._source.memory[0])
        except BaseException:
            self._arena.release(slot)
            raise
        return slot


@dataclass(slots=True)
class Root:
    """A durable root: committed steps with the parts of all processes, and whether it answers."""

    steps: dict[int, tuple[SaveId, Mapping[int, Any]]] = field(default_factory=dict)
    away: bool = False
    slow_s: float = 0.0


@final
class SimDurable:
    """One process's hand on a root. A step is begun by process 0, written by all, and committed by process 0."""

    url = "gs://simulated/run"
    profile = None

    def __init__(self, root: Root, process: int, count: int, kept_max: int):
        self._root, self._process, self._count, self._kept_max = root, process, count, kept_max
        self._parts: dict[str, dict[int, Any]] = {}
        self._kept: list[int] = sorted(root.steps)
        self.shared: dict[str, int] = {}
        self.stock = SimpleNamespace(orbax=SimpleNamespace(reached_preemption=lambda step: False))
        self.urgent = set[str]()  # the saves that durable writes let pass
        self.pace = SimpleNamespace(taken_bytes=0, begin_urgent=self.urgent.add, end_urgent=self.urgent.discard)

    def save(
        self,
        save_id: SaveId,
        items: Mapping[str, Any],
        *,
        ancestry: Ancestry,
        check_epoch: Callable[[], None],
        about: str,
        **_: Any,
    ) -> Any:
        """See `DurableSteps.save`."""
        self._check()
        yield Agree("step-begun", about, None, lambda _: None)
        yield Do("durable part", self._check)

        def commit(parts: Sequence[Any]) -> None:
            self._check()
            check_epoch()
            self._put(save_id, dict(enumerate(parts)), ancestry)

        yield Agree("step-written", about, items.get("content"), commit)
        self._kept = sorted(self._root.steps)

    def _put(self, save_id: SaveId, parts: Mapping[int, Any], ancestry: Ancestry) -> None:
        there = self._root.steps.get(save_id.step)
        if there is not None and not ancestry.superseded(there[0]):
            raise Violation(f"durable step {there[0]} would be replaced by {save_id}")
        for step, (each, _) in list(self._root.steps.items()):
            if ancestry.superseded(each):
                del self._root.steps[step]
        self._root.steps[save_id.step] = (save_id, parts)
        for step in sorted(self._root.steps, key=lambda step: self._root.steps[step][0])[: -self._kept_max]:
            del self._root.steps[step]

    def holds(self, save_id: SaveId) -> bool:
        """See `DurableSteps.holds`."""
        self._check()
        return self._root.steps.get(save_id.step, (None,))[0] == save_id

    def kept(self) -> list[int]:
        """See `DurableSteps.kept`."""
        return self._kept

    def wait_until_pruned(self) -> None:
        """See `DurableSteps.wait_until_pruned`."""

    def _check(self) -> None:
        if self._root.away:
            raise TransientStoreError("503 (simulated)")
