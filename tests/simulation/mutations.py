"""Faults put back into the protocol: what the simulator has to find, or it finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.protocol import Do, Onto, SaveProtocol
from ckptkit.save.agreement.voting import SaveTier, Voting
from ckptkit.save.book.health import SaveHealth
from ckptkit.save.book.ledger import Branch
from ckptkit.save.flow import SaveFlow
from ckptkit.save.records import Save
from ckptkit.save.tiers import DiskTier, SlotTier
from ckptkit.util import clock
from tests.mutating import all_of
from tests.mutating import mutated as of_these


def _undecided_for_ever() -> Any:
    """Each save without a verdict keeps its slot until a later one is committed; none is ever committed."""
    kept: list[tuple[SaveTier, Save]] = []

    def settle(self: Voting, channel: str) -> Any:
        del self, channel
        return None
        yield

    def leave(self: Voting, tier: SaveTier, save: Save) -> None:
        del self
        kept.append((tier, save))

    return mock.patch.multiple(Voting, settle=settle, _leave_undecided=leave)


def _names_are_counted() -> Any:
    """Barriers are named by the saves that this process has taken: one that raised before does not count."""

    def enter(self: Branch, step: int, call: str = "save") -> str:
        del step, call
        return f"count-{self._number}"

    return mock.patch.object(Branch, "enter", enter)


def _books_are_local() -> Any:
    """Each process records the verdicts that it received, and counts epochs by its own records."""

    def news(self: CommitLog, states: Any) -> dict[str, Any]:
        del self, states
        return {"number": 0, "changes": [], "book": None, "ancestry": None}

    def learn(self: CommitLog, news: dict[str, Any]) -> bool:
        del self, news
        return True

    vote = Voting._vote

    def voted(self: Voting, tier: SaveTier, save: Save, refusal: Any, *, gone: bool) -> Any:
        verdict = yield from vote(self, tier, save, refusal, gone=gone)
        if verdict.refusal is None and self._process != 0:
            self._log.append(save.save_id, tier.name)
        return verdict

    def stay(self: Branch, state: Any) -> None:
        del self, state

    return all_of(
        mock.patch.multiple(CommitLog, news=news, learn=learn),
        mock.patch.object(Voting, "_vote", voted),
        mock.patch.object(Branch, "synchronise", stay),
    )


def _staging_on_the_caller() -> Any:
    """The copy runs in the caller's own frame, and an interrupt ends it between the lease and the hand-over."""
    flow = SaveFlow.save

    def save(self: SaveFlow, save: Save) -> SaveProtocol:
        steps, answer = flow(self, save), None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration as done:
                return done.value
            answer = None
            if not (isinstance(effect, Onto) and effect.worker is self._threads.stager):
                answer = yield effect

    return all_of(mock.patch.object(SaveFlow, "save", save), mock.patch.object(SlotTier, "stage", _staged_without_care))


def _staged_without_care(self: SlotTier, save: Save) -> SaveProtocol:
    """`SlotTier.stage` without its handler."""
    slot = save.slot
    if slot is None:
        return
    for tier in self.slower:
        tier.begin_early(save)
    begin = self._begin_staging
    save.staging = yield Do("stage", lambda: begin("auto", save.description, save.items.trees, slot.memory, None, []))


def _no_veto() -> Any:
    """A process that raises in `save` tells nobody."""

    def veto(self: SaveFlow, name: str, error: BaseException) -> SaveProtocol:
        del self, name, error
        return
        yield

    return mock.patch.object(SaveFlow, "veto", veto)


def _errors_without_end() -> Any:
    """Once too many saves were lost, every later `save` raises and tries nothing."""

    def keep_counting(self: SaveHealth) -> None:
        del self

    return mock.patch.object(SaveHealth, "_begin_again", keep_counting)


def _ages_by_the_clock() -> Any:
    """The age of a tier counts from its first loss to now, so one loss ends a run that saves seldom."""
    overdue = SaveHealth._overdue

    def by_the_clock(self: SaveHealth, most: int | None, **words: float) -> str | None:
        now_s = clock.monotonic_s()
        self._losses = {tier: (first_s, now_s, last) for tier, (first_s, _, last) in self._losses.items()}
        return overdue(self, most, **words)

    return mock.patch.object(SaveHealth, "_overdue", by_the_clock)


def _disk_unpromised() -> Any:
    """A save that is staged meanwhile takes the disk that all processes have voted to give to an earlier one."""

    def promise(self: DiskTier, save: Save) -> bool:
        del save
        return self.worker.idle

    return mock.patch.object(DiskTier, "_promise", promise)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "C2": _undecided_for_ever,
    "C3": _names_are_counted,
    "C4": _books_are_local,
    "C5": _staging_on_the_caller,
    "H6": _no_veto,
    "disk": _disk_unpromised,
    "limits": _errors_without_end,
    "age": _ages_by_the_clock,
}

mutated = partial(of_these, MUTATIONS)
