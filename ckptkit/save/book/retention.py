"""The saves that each fast tier keeps of those committed by all processes, and the slots that they need."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Collection, Mapping, Sequence

from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, PEER, KeepBytes, Tier, kept_beside
from ckptkit.save.book.ledger import Ledger
from ckptkit.slots.arena import Arena
from ckptkit.util.words import size_text

_log = logging.getLogger("ckptkit")


class Retention:
    """Decides which saves the arenas protect, and which they release. Safe from several threads.

    Its decisions follow from the ledger: the saves that all processes have committed. So the newest such save is never
    released, and a save that is still being written, or whose verdict is unknown, is not touched. The same holds for
    the newest one with copies on other hosts, here and in the arenas with others' copies, which have no tier's name.

    The ledger alone decides which saves leave it, so that all processes list the same steps. A process whose host was
    away, and lacks some of these saves, keeps older ones in their place.
    """

    def __init__(self, tiers: Sequence[Tier], arenas: Mapping[str, Arena], ledger: Ledger, in_flight_max: int):
        # Copies are in memory as the ramdisk is: what is only there was not flushed.
        names = [*(tier.name for tier in tiers if tier.medium != PEER), DURABLE]
        self._tiers = {tier.name: tier for tier in tiers}
        self._beside = {tier.name: kept_beside(tier, tiers) for tier in tiers}
        self._slower = dict(itertools.pairwise(names))
        self._arenas = {name: arena for name, arena in arenas.items() if name in self._tiers}
        self._peer_arenas = [arena for name, arena in arenas.items() if name not in self._tiers]
        self._ledger = ledger
        self._in_flight_max = in_flight_max
        self._share_bytes: int | None = None  # the largest of all processes, in a slot
        self._copied: SaveId | None = None  # the newest save with copies on other hosts
        self._lock = threading.RLock()

    def opened(self) -> None:
        """After inspecting the tiers: protects the saves that their policies keep. Releases none: no newer save
        exists."""
        with self._lock:
            for name in self._arenas:
                self._protect(name)

    def restored(self, save_id: SaveId) -> None:
        """The run continues from this save: it is kept wherever it is held."""
        with self._lock:
            self._copied = save_id
            for name, arena in self._arenas.items():
                if save_id not in arena.held():
                    continue
                if not self._waits_for_size(self._tiers[name]):
                    arena.protect(save_id, *self._kept(name, arena.held()))
                if self._beside[name]:
                    arena.protect(save_id, why=PEER)  # until a newer one has its copies elsewhere
            for peer_arena in self._peer_arenas:
                if save_id in peer_arena.held():
                    peer_arena.protect(save_id)

    def sized(self, share_bytes: int, slot_bytes: int) -> bool:
        """A save takes `slot_bytes` of a slot here and at most `share_bytes` on any process; returns whether a tier has
        another number of slots now."""
        with self._lock:
            if self._share_bytes == share_bytes:
                return False
            self._share_bytes = share_bytes
            slots = {
                name: self._tiers[name].slots_for(share_bytes, self._in_flight_max, beside=self._beside[name])
                for name in self._arenas
            }
            changed = [self._resize(name, arena, slots[name]) for name, arena in self._arenas.items()]
            if slots:
                counts = ", ".join(f"{count} in {name}" for name, count in slots.items())
                _log.info("slots of %s in this process: %s", size_text(slot_bytes), counts)
            return any(changed)

    def committed(self, save_id: SaveId, tier: str) -> list[tuple[str, Exception]]:
        """All processes hold the save in `tier`, and the ledger records it: releases the saves that it replaces.

        Returns what could not be, by tier: a disk that fails costs no other tier its save, and the next commit tries
        again.
        """
        problems: list[tuple[str, Exception]] = []
        with self._lock:
            for name, arena in self._arenas.items():
                if not self._give_up(name, problems) and name == tier:
                    arena.protect(save_id)
        return problems

    def copied(self, save_id: SaveId) -> list[tuple[str, Exception]]:
        """Every process's slot of the save has copies on other hosts, and the ledger records it: it is kept, here and
        there, until a newer one has copies. Returns the result of `committed`."""
        problems: list[tuple[str, Exception]] = []
        with self._lock:
            self._copied = save_id
            for name, arena in self._arenas.items():
                if self._beside[name]:
                    arena.protect(save_id, why=PEER)
                    self._give_up(name, problems)
            for peer_arena in self._peer_arenas:
                peer_arena.protect(save_id)
            self._ledger.keep_only(PEER, [save_id])
        return problems

    def _give_up(self, name: str, problems: list[tuple[str, Exception]]) -> bool:
        """Forgets the saves that neither the tier's policy nor another reason keeps. False if no policy can decide yet:
        then it forgets only saves that a rollback of a run without a record abandoned, because a restart would not know
        of that rollback."""
        self._protect(name)
        kept, arena = self._kept(name), self._arenas[name]
        unrecorded = [save_id for save_id in arena.held() if save_id.after]
        abandoned = {save_id for save_id in unrecorded if self._ledger.ancestry.superseded(save_id)}
        if kept or abandoned:
            beside = {self._copied} if self._beside[name] else set[SaveId | None]()
            forgotten = self._ledger.committed_in(name) - {*kept, *beside} if kept else abandoned
            try:
                arena.forget(forgotten - arena.protected)
            except (CheckpointError, OSError) as error:
                problems.append((name, error))
            else:
                self._ledger.drop(name, forgotten)
        return bool(kept)

    def _protect(self, name: str) -> None:
        arena = self._arenas[name]
        if kept := self._kept(name, arena.held()):
            arena.protect(*kept)

    def _kept(self, name: str, held: Collection[SaveId] | None = None) -> list[SaveId]:
        """The saves of a tier that a policy keeps, newest first; empty without a policy, or if it cannot decide yet.
        `held`: as if these alone were there."""
        tier = self._tiers[name]
        if tier.keep is None or self._waits_for_size(tier):
            return []
        records = [record for record in reversed(self._ledger.records()) if name in record.tiers]
        flushed = {record.save_id for record in records if self._slower[name] in record.tiers}
        newest_first = [record.save_id for record in records if held is None or record.save_id in held]
        return tier.keep.kept(newest_first, flushed, tier.kept_max(self._share_bytes or 0))

    def _waits_for_size(self, tier: Tier) -> bool:
        """Whether the size of the state has to be known first: until then everything that was found is protected."""
        return isinstance(tier.keep, KeepBytes) and self._share_bytes is None

    def _resize(self, name: str, arena: Arena, slots: int) -> bool:
        changed = arena.resize(slots)
        self._protect(name)
        return changed
