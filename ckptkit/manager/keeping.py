"""What each fast tier keeps of what all processes have committed to it, and how many slots that takes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence

from ckptkit.arena import Arena
from ckptkit.manager.book import Book
from ckptkit.manager.taken import DURABLE
from ckptkit.manifest import SaveId
from ckptkit.policy import KeepBytes, Tier

_log = logging.getLogger("ckptkit")


class Keeper:
    """Says to arenas which saves are protected, and which are given up. Safe from several threads.

    What it decides follows from the book: what all processes have committed. So the newest such save is never given up,
    and one that is still being written, or of which nobody knows the verdict, is not touched.
    """

    def __init__(self, tiers: Sequence[Tier], arenas: Mapping[str, Arena], book: Book, in_flight_max: int):
        names = [*(tier.name for tier in tiers), DURABLE]
        self._tiers = {tier.name: tier for tier in tiers}
        self._slower = dict(itertools.pairwise(names))
        self._arenas = arenas
        self._book = book
        self._in_flight_max = in_flight_max
        self._share_bytes: int | None = None  # the largest of all processes, in a slot
        self._lock = threading.Lock()

    def opened(self) -> None:
        """The tiers were looked at: what their policies keep is protected. Nothing is given up: nothing newer came."""
        with self._lock:
            for name in self._arenas:
                self._protect(name)

    def restored(self, save_id: SaveId) -> None:
        """The run goes on from this save: it is kept wherever it is held."""
        with self._lock:
            for name, arena in self._arenas.items():
                if save_id in arena.held() and not self._waits_for_size(self._tiers[name]):
                    arena.protect(save_id, *self._kept(name))

    def sized(self, share_bytes: int, slot_bytes: int) -> bool:
        """A save takes `slot_bytes` of a slot here and at most `share_bytes` on any process; returns whether a tier has
        another number of slots now."""
        with self._lock:
            if self._share_bytes == share_bytes:
                return False
            self._share_bytes = share_bytes
            changed = [self._resize(name, arena, slot_bytes) for name, arena in self._arenas.items()]
            return any(changed)

    def committed(self, save_id: SaveId, tier: str) -> None:
        """All processes hold the save in `tier`, and the book says so: what it replaces is given up."""
        with self._lock:
            for name, arena in self._arenas.items():
                if self._tiers[name].keep is not None and (kept := self._protect(name)):
                    arena.forget(self._book.committed_in(name).difference(kept))
                elif name == tier:
                    arena.protect(save_id)
                self._book.keep_only(name, arena.held())

    def _protect(self, name: str) -> list[SaveId]:
        kept = self._kept(name)
        if kept:
            self._arenas[name].protect(*kept)
        return kept

    def _kept(self, name: str) -> list[SaveId]:
        """What a policy keeps of a tier, newest first; nothing where there is none, or it cannot be said yet."""
        tier = self._tiers[name]
        if tier.keep is None or self._waits_for_size(tier):
            return []
        held = set(self._arenas[name].held())
        records = [record for record in reversed(self._book.records()) if name in record.tiers]
        flushed = {record.save_id for record in records if self._slower[name] in record.tiers}
        newest_first = [record.save_id for record in records if record.save_id in held]
        return tier.keep.kept(newest_first, flushed, tier.kept_max(self._share_bytes or 0))

    def _waits_for_size(self, tier: Tier) -> bool:
        """Whether the size of the state has to be known first: until then everything that was found is protected."""
        return isinstance(tier.keep, KeepBytes) and self._share_bytes is None

    def _resize(self, name: str, arena: Arena, slot_bytes: int) -> bool:
        tier, share_bytes = self._tiers[name], self._share_bytes or 0
        slots = tier.slots_for(share_bytes, self._in_flight_max)
        changed = arena.resize(slots)
        self._protect(name)
        _log.info(
            "tier %s: %d slots of %d bytes are %d bytes in this process: %d for steps that are kept (%s), "
            "the others for those being written, or read by slower tiers",
            name,
            slots,
            slot_bytes,
            slots * slot_bytes,
            tier.kept_max(share_bytes),
            tier.keep or "the newest one",
        )
        return changed
