"""Faults put back into the protocol: what the simulator has to find, or it finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from ckptkit.model.tiers import SSD
from ckptkit.save.commit_log import CommitLog
from ckptkit.save.flusher import Flusher
from ckptkit.save.health import SaveHealth
from ckptkit.save.ledger import Branch
from ckptkit.save.pipeline import SavePipeline
from ckptkit.save.protocol import Do, SaveProtocol
from ckptkit.save.records import Save, Snapshot
from ckptkit.save.voting import TierWork, Voting
from ckptkit.util import clock
from tests.mutating import all_of
from tests.mutating import mutated as of_these


def _undecided_for_ever() -> Any:
    """Each save without a verdict keeps its slot until a later one is committed; none is ever committed."""
    kept: list[TierWork] = []

    def settle(self: Voting, channel: str) -> Any:
        del self, channel
        return None
        yield

    def leave(self: Voting, work: TierWork) -> None:
        del self
        kept.append(work)

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

    def voted(self: Voting, work: TierWork, refusal: Any, *, gone: bool) -> Any:
        verdict = yield from vote(self, work, refusal, gone=gone)
        if verdict.refusal is None and self._process != 0:
            self._log.append(work.save.save_id, work.tier)
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

    def submit(self: SavePipeline, ticket: Any, items: Any, description: Any, due: Any, *rest: Any) -> SaveProtocol:
        metrics, start_s, turn = rest
        save = Save(
            ticket=ticket,
            items=replace(items, trees={}, inline={}, durable={}),
            description=description,
            due=due,
            forced=turn.forced,
            metrics=metrics,
            snapshot=None,
            staged_s=start_s,
        )
        slot, refusal = yield from self._admit(save, turn)
        snapshot = None if slot is None else (yield from _staged_without_care(self, save, items, slot))
        save = replace(save, items=replace(items, trees={}), snapshot=snapshot)
        self._ledger.begin(save.save_id)
        self._hand_over(save, refusal)

    return mock.patch.object(SavePipeline, "submit", submit)


def _staged_without_care(pipeline: SavePipeline, save: Any, items: Any, slot: Any) -> SaveProtocol:
    """`SavePipeline._begin_staging` without its handler."""
    disk = pipeline.flusher.begin_disk(save, slot, (), save.description.slot_bytes) if SSD in save.due else None
    begin = pipeline._machinery.begin_staging
    begun = yield Do("stage", lambda: begin("auto", save.description, items.trees, slot.memory, None, []))
    return Snapshot(slot=slot, staging=begun, disk=disk, local_replicas=())


def _no_veto() -> Any:
    """A process that raises in `save` tells nobody."""

    def veto(self: SavePipeline, name: str, error: BaseException) -> SaveProtocol:
        del self, name, error
        return
        yield

    return mock.patch.object(SavePipeline, "veto", veto)


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

    def promise(self: Flusher, save: Save) -> bool:
        del save
        return self._disk.idle

    return mock.patch.object(Flusher, "_promise_disk", promise)


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
