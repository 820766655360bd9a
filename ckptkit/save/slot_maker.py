"""The slots of the fast tiers are made ahead of the saves that need them, in a thread of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ckptkit.errors import CheckpointError
from ckptkit.model.tiers import PEER, SSD
from ckptkit.save.agreement.protocol import Machinery
from ckptkit.save.book.outcomes import Outcomes
from ckptkit.save.book.retention import Retention
from ckptkit.save.records import SaveTargets
from ckptkit.slots.arena import Arena
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice

_RESTORE = "restore"
_LOOK_S = 0.1
_JOBS_MAX = 1000  # a paused thread must not stop who asks for more


@final
class SlotMaker:
    """Owner of the thread that makes the slots of every fast tier."""

    def __init__(self, tiers: SaveTargets, retention: Retention, outcomes: Outcomes, machinery: Machinery):
        self._tiers = tiers
        self._retention = retention
        self._outcomes = outcomes
        self._prepared_bytes = 0
        self._room_for_bytes = 0  # of a slot: what `require_room` has found room for
        self._worker = machinery.make_worker("ckptkit-arena", waiting_max=_JOBS_MAX)
        self._notice = Notice()
        self._holds: dict[str, Deadline | None] = {}  # by whom, and for how long
        self._has_left = False  # whether a save has taken the thread from a slot whose pages are not all there

    def prepare(self, slot_bytes: int, share_bytes: int, transfer_bytes: int = 0) -> None:
        """Begins to make the slots of every fast tier in the background.

        A save takes `slot_bytes` on this process, `share_bytes` at most on any process, and `transfer_bytes` of host
        memory for transfers from devices.

        Raises `StoreFullError` where a tier has no room for its slots, with the bytes needed and free.
        """
        self.size(slot_bytes, share_bytes)
        self._room_for_bytes = slot_bytes  # first: `require_room` does not raise the same again
        self._check_room(slot_bytes, transfer_bytes)
        self.reserve(slot_bytes)

    def require_room(self, slot_bytes: int) -> None:
        """The check of `prepare`, for a start without it: raises `StoreFullError` once for a size. None while what an
        ended job left here takes room: then each tier makes one slot only."""
        if slot_bytes <= self._room_for_bytes or self._crowded:
            return
        self._room_for_bytes = slot_bytes
        self._check_room(slot_bytes)

    def _check_room(self, slot_bytes: int, transfer_bytes: int = 0) -> None:
        self._tiers.staging.check_room(slot_bytes, others=self._peer_arenas, transfer_bytes=transfer_bytes)
        if self._tiers.disk is not None:
            self._tiers.disk.check_room(slot_bytes)

    def size(self, slot_bytes: int, share_bytes: int) -> None:
        """Sets the size of saves: the number of a tier's slots may follow from it."""
        if self._retention.sized(share_bytes, slot_bytes):
            self._prepared_bytes = 0  # the new slots are to be made

    def reserve(self, slot_bytes: int) -> None:
        """The work that `prepare` begins, without checking for room first: a full tier emits an event."""
        if self._prepared_bytes >= slot_bytes:
            return
        self._prepared_bytes = 0 if self._crowded else slot_bytes  # the rest of the slots is made by a later call

        def reserve(arena: Arena, tier: str) -> None:
            try:
                self._has_left = True
                while self._has_left:  # after the save it looks at that slot again
                    self._has_left = False
                    arena.reserve(slot_bytes, self._turn)
            except (CheckpointError, OSError) as error:
                self._outcomes.degraded(None, tier, error)

        self._worker.submit(lambda: reserve(self._tiers.staging, self._tiers.staging_name))
        if (disk := self._tiers.disk) is not None:
            self._worker.submit(lambda: reserve(disk, SSD))
        for peer_arena in self._peer_arenas:
            self._worker.submit(lambda peer_arena=peer_arena: reserve(peer_arena, PEER))

    def hold(self, limit_s: float | None = None) -> None:
        """The thread stops between two pieces of its work until `go_on`, for `limit_s` at most.

        A restore, and the first step after it, need the processors and memory for themselves. To fault in slots of 4.5
        GB took a quarter of the processor time from a loss to the next step (bench/LOG.md, 2026-11-23).
        """
        self._holds[_RESTORE] = None if limit_s is None else Deadline(limit_s)

    def go_on(self) -> None:
        """Ends `hold`, if there was one."""
        self._end(_RESTORE)

    @contextmanager
    def held_by(self, save: str) -> Iterator[None]:
        """The same for a save, while the step loop waits for it: the thread also leaves the slot that it is at."""
        self._holds[save] = None
        try:
            yield
        finally:
            self._end(save)

    def _end(self, by: str) -> None:
        if by in self._holds:
            self._holds.pop(by, None)
            self._notice.give()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finishes what is under way and joins the thread; False where it still runs after `timeout_s`."""
        self.go_on()
        return self._worker.close(timeout_s)

    def _turn(self, within: bool) -> bool:
        """Waits while a restore or a save holds the thread. False within a slot that a save may wait for."""
        while held := self._held_by():
            if within and held - {_RESTORE}:
                self._has_left = True
                return False
            self._notice.wait_for(lambda held=held: self._held_by() != held, _LOOK_S)
        return True

    def _held_by(self) -> set[str]:
        return {by for by, limit in tuple(self._holds.items()) if limit is None or not limit.passed}

    @property
    def _crowded(self) -> bool:
        arenas = (self._tiers.staging, self._tiers.disk, *self._peer_arenas)
        return any(arena is not None and arena.crowded for arena in arenas)

    @property
    def _peer_arenas(self) -> tuple[Arena, ...]:
        return () if self._tiers.peer_copies is None else self._tiers.peer_copies.peer_arenas
