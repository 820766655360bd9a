"""Process 0's decisions: the commits of a run in order, which every process records from the same source.

Process 0 appends a commit while it decides a vote. Every verdict carries the commits since the oldest that some
process has not booked yet. So a process that missed a verdict learns of its commits from the next verdict of any kind,
and the books of all processes are equal after that. Every verdict also carries how far process 0 has come
in each tier: up to there, a save that is not committed never will be.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, MEMORY
from ckptkit.save.book.ledger import Ledger

_LIKELY = 8  # changes that a process has missed of which nothing is known
_KEPT = 256  # changes, of about 40 bytes; a process that has missed more gets the whole book

_NONE = (-1, -1)  # older than any save

Change = tuple[SaveId, str, bool]  # a save, a tier, and whether the tier holds it from now on


class CommitLog:
    """The changes of the book that this process knows of, and on process 0 those that it decided. Safe from several
    threads."""

    def __init__(self, ledger: Ledger, booked: Callable[[SaveId, str], None]):
        """`booked` is called for each commit that this process learns, in order, after the ledger has it."""
        self._ledger = ledger
        self._booked = booked
        self._lock = threading.RLock()
        self._changes: deque[Change] = deque(maxlen=_KEPT)
        self._number = 0  # of changes so far
        self._passed: dict[str, tuple[int, int]] = {}  # by tier, the newest save that process 0 is done with
        self._digested: tuple[Ancestry, str] | None = None

    def state(self) -> list[Any]:
        """This process's report to process 0: the number of changes that it knows, and the checksum of its ancestry."""
        with self._lock:
            return [self._number, self._ancestry_digest()]

    def append(self, save_id: SaveId, tier: str) -> None:
        """Process 0 has decided that all processes hold `save_id` in `tier`."""
        with self._lock:
            self._add(save_id, tier, True)

    def passed(self, save_id: SaveId, tier: str) -> None:
        """Process 0 is done with `save_id` in `tier`, whether its vote had a verdict or not."""
        with self._lock:
            self._passed[tier] = max(self._passed.get(tier, _NONE), _age(save_id))

    def has_passed(self, save_id: SaveId, tier: str) -> bool:
        """Whether process 0 is known to be done with `save_id` in `tier`: `has` is the decision then."""
        with self._lock:
            return _age(save_id) <= self._passed.get(tier, _NONE)

    def drop_durable(self, kept: Iterable[int]) -> None:
        """Process 0 has found that of the durable steps that are booked only `kept` are there."""
        steps = set(kept)
        with self._lock:
            for save_id in sorted(self._ledger.committed_in(DURABLE)):
                if save_id.step not in steps:
                    self._add(save_id, DURABLE, False)

    def news(self, states: Iterable[Sequence[Any] | None]) -> dict[str, Any]:
        """The changes that processes with these states have missed. A process that did not report (None) may have
        missed the last few changes. If it has missed more, this is not enough for it, and it reports next time."""
        with self._lock:
            reported = list(states)
            known = [state for state in reported if state is not None]
            behind = self._number - min((state[0] for state in known), default=self._number)
            if len(known) < len(reported) or not reported:
                behind = min(max(behind, _LIKELY), len(self._changes))
            lost = behind > len(self._changes)
            ancestry = self._ledger.ancestry
            lagging = any(state[1] != self._ancestry_digest() for state in known)
            changes = [] if lost or not behind else list(self._changes)[-behind:]
            return {
                "number": self._number,
                "changes": [[save.to_list(), tier, held] for save, tier, held in changes],
                "book": self._book() if lost else None,
                "ancestry": ancestry.to_json() if lagging else None,
                "passed": {tier: list(newest) for tier, newest in self._passed.items()},
            }

    def learn(self, news: dict[str, Any]) -> bool:
        """Records the changes that this process has missed, in process 0's order; False if it missed more than `news`
        holds."""
        with self._lock:
            if news["ancestry"] is not None:
                self._ledger.ancestry = Ancestry.from_json(news["ancestry"])
            if news["book"] is not None and news["number"] > self._number:
                held = {SaveId.from_list(save): tiers for save, tiers in news["book"]}
                self._number = news["number"]
                self._ledger.refill(held)
            first = news["number"] - len(news["changes"])
            if first > self._number:
                return False
            for at, (save, tier, held) in enumerate(news["changes"], first):
                if at >= self._number:
                    self._add(SaveId.from_list(save), tier, held)
            for tier, newest in news["passed"].items():
                self._passed[tier] = max(self._passed.get(tier, _NONE), tuple(newest))
            return True

    def has(self, save_id: SaveId, tier: str) -> bool:
        """Whether all processes are known to hold `save_id` in `tier`."""
        with self._lock:
            return (save_id, tier, True) in self._changes or save_id in self._ledger.committed_in(tier)

    def _add(self, save_id: SaveId, tier: str, held: bool) -> None:
        self._changes.append((save_id, tier, held))
        self._number += 1
        if not held:
            self._ledger.drop(tier, [save_id])
        elif tier != MEMORY:  # staging memory holds a save for the tiers that follow; it is not a tier
            self._ledger.commit(save_id, tier)
            self._booked(save_id, tier)

    def _ancestry_digest(self) -> str:
        ancestry = self._ledger.ancestry
        if self._digested is None or self._digested[0] is not ancestry:
            text = json.dumps(ancestry.to_json(), sort_keys=True)
            self._digested = (ancestry, digest_of(text.encode())[:16])
        return self._digested[1]

    def _book(self) -> list[list[Any]]:
        records = [record for record in self._ledger.every() if record.tiers]
        return [[record.save_id.to_list(), list(record.tiers)] for record in records]


def _age(save_id: SaveId) -> tuple[int, int]:
    """Grows from save to save of a run, over its restores."""
    return save_id.epoch, save_id.number
