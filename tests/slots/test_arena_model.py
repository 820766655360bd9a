"""Any sequence of an arena's operations, with deaths in between, against a model."""

from __future__ import annotations

import os
import shutil

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptkit.model.manifest import SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.slots.latest_pointer import lost_newest
from tests.slots.arenas import PAGE, commit, die, fill, new_host, proven, save_of


class ArenaAgainstModel(RuleBasedStateMachine):
    """An arena of three slots, with every operation that the manager uses, and deaths in between."""

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.host = new_host()
        self.arena = self.opened()
        self.step = 0
        self.protected: SaveId | None = None
        self.held: dict[str, SaveId] = {}  # slot -> the save that its manifest names
        self.leases: dict[str, int] = {}
        self.writing: dict[str, Slot] = {}  # handed out and not committed
        self.reading: list[Slot] = []
        self.bytes_of: dict[str, int] = {}  # the largest that each slot was asked to be

    def opened(self) -> Arena:
        return Arena.open(self.host, 0, slots=self.SLOTS, synced=False)

    def teardown(self) -> None:
        self.arena.close()
        shutil.rmtree(self.host, ignore_errors=True)

    def free(self) -> list[str]:
        """The slots that may be handed out now."""
        names = [f"slot-{n}.bin" for n in range(self.SLOTS)]
        return [
            name
            for name in names
            if not self.leases.get(name) and (name not in self.held or self.held[name] != self.protected)
        ]

    @rule(pages=st.integers(0, 4), odd=st.integers(1, PAGE))
    def acquire(self, pages: int, odd: int) -> None:
        size = pages * PAGE + odd
        free = self.free()
        slot = self.arena.acquire(size)
        assert (slot is None) == (not free)
        if slot is None:
            return
        assert slot.name in free, "a slot that is protected or leased was handed out"
        empty = [name for name in free if name not in self.held]
        oldest = empty or [min(free, key=lambda name: self.held[name])]
        assert slot.name in oldest
        assert slot.memory.nbytes >= size
        assert slot.memory.nbytes % PAGE == 0
        self.held.pop(slot.name, None)
        self.leases[slot.name] = 1
        self.writing[slot.name] = slot
        slot.memory[:] = 0xEE  # as soon as it is ours it is overwritten

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), size=st.integers(1, PAGE))
    def commit(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(name)
        self.step += 1
        commit(self.arena, slot, fill(slot, save_of(self.step), size))
        self.held[name] = save_of(self.step)
        self.reading.append(slot)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A save that could not be written, or was vetoed before it was committed here."""
        name = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(name)
        self.arena.discard(slot)
        self.arena.release(slot)
        self.leases[name] -= 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), veto=st.booleans())
    def finish(self, data: st.DataObject, veto: bool) -> None:
        """The vote on a committed save: all have it, or it goes."""
        slot = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if slot.name in self.held and not veto:
            self.protected = self.held[slot.name]
            self.arena.protect(self.protected)
        elif slot.name in self.held:
            self.arena.discard(slot)
            del self.held[slot.name]
        self.arena.release(slot)
        self.leases[slot.name] -= 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def flush_begins(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.reading))
        self.arena.lease(slot)
        self.leases[slot.name] += 1
        self.reading.append(slot)

    @rule(closes=st.booleans())
    def reopen(self, closes: bool) -> None:
        """The process ends or dies; what it had committed is what the next one finds."""
        if closes:
            self.arena.close()
        else:
            die(self.arena)
        self.arena = self.opened()
        self.writing.clear()
        self.reading.clear()
        self.leases.clear()
        self.protected = max(self.held.values(), default=None)

    @invariant()
    def every_manifest_names_its_own_bytes(self) -> None:
        """If it failed, a restart would find a save whose bytes are another's."""
        assert proven(self.host / "0") == set(self.held.values())
        assert sorted(self.arena.held()) == sorted(self.held.values())

    @invariant()
    def the_directory_holds_nothing_else(self) -> None:
        """If it failed, files would pile up in memory until the host has none."""
        manifests = len(self.held)
        names = os.listdir(self.host / "0")
        assert len([name for name in names if name.startswith("step-")]) == manifests
        assert len(names) <= manifests + self.SLOTS + 2  # the lock, and which save is the newest

    @invariant()
    def nothing_seems_to_be_lost(self) -> None:
        """If it failed, every restart would report damage that is none."""
        assert lost_newest(self.host / "0", self.held.values()) is None


TestArena = ArenaAgainstModel.TestCase
TestArena.settings = settings(
    deadline=None, max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
