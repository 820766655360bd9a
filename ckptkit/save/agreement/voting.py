"""One save in one tier, by the same steps in every tier: copy, commit here, vote, keep or drop, release.

Process 0 decides each vote and logs its commits (`commit_log`). A process that does not receive a verdict keeps what it
committed here until it learns the decision, with the next verdict on whatever. It holds at most one such save in each
tier, and vetoes the next ones meanwhile: a vetoed save is dropped for certain, so nothing more is held.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CheckpointError, CoordinationError, SaveFailedError
from ckptkit.job.meeting import Order
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import MEMORY
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.protocol import Agree, Do, Effect, Recall, SaveProtocol, Veto
from ckptkit.save.book.outcomes import Outcomes, describe
from ckptkit.save.records import Refusal, Save

POLICIES = ("skip", "report", "wait", "veto")  # the last one is what somebody has to look at: being too early passes
_REASONS_MAX = 4

Held = Callable[[str], list[SaveId] | None]


class SaveTier(ABC):
    """One tier of saves on this process. `Voting.run` calls each method for a save once at most, in this order."""

    def __init__(self, name: str, channel: str):
        """`channel` is that of the tier's votes."""
        self.name, self.channel = name, channel

    @abstractmethod
    def copy(self, save: Save) -> SaveProtocol:
        """Copies the save and commits it here; this process refuses the save where it raises."""

    def ballot(self, save: Save) -> dict[str, Any]:
        """This process's value in the vote besides its refusal, as JSON."""
        del save
        return {}

    def decide(self, save: Save, ballots: list[dict[str, Any] | None]) -> dict[str, Any]:
        """On process 0: the verdict on these, besides the refusal."""
        del save, ballots
        return {}

    def explain(self, save: Save, verdict: Verdict) -> SaveProtocol:
        """The verdict with a reason that is known only after the vote."""
        del save
        return verdict
        yield

    @abstractmethod
    def keep(self, save: Save) -> None:
        """All processes hold the save in this tier."""

    @abstractmethod
    def drop(self, save: Save) -> None:
        """The save is left out of this tier: what was committed here goes."""

    @abstractmethod
    def release(self, save: Save) -> None:
        """Nothing of the save is needed for this tier any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a save for all processes: `refusal` None keeps it. `more` is the result of `SaveTier.decide`."""

    refusal: Refusal | None
    more: dict[str, Any]


Voted = Generator[Effect, Any, Verdict | None]


class Voting:
    """The votes of one process. Safe from several threads; a channel belongs to one of them."""

    def __init__(self, log: CommitLog, outcomes: Outcomes, process: int, held: Held, order: Order | None = None):
        """`held` lists the saves that this process has committed in a tier; None for one that it cannot list. `order`
        numbers the names of saves."""
        self._log = log
        self._outcomes = outcomes
        self._process = process
        self._held = held
        self._order = order
        self._undecided: dict[str, tuple[SaveTier, Save]] = {}  # by channel
        self._lock = threading.RLock()

    @property
    def undecided(self) -> Collection[tuple[SaveTier, Save]]:
        """The saves of which this process does not know the decision: at most one for each tier."""
        with self._lock:
            return list(self._undecided.values())

    def run(self, tier: SaveTier, save: Save, *, refusal: Refusal | None = None, gone: bool = True) -> Voted:
        """Takes a save through one tier; the result is None where this process does not know the decision.

        `gone`: no other tier will hold a save that is refused here. Raises nothing but what comes from outside.
        """
        keeps = False
        try:
            refusal = refusal or (yield from self.settle(tier.channel))
            if refusal is None:
                try:
                    yield from tier.copy(save)
                except CoordinationError as error:  # process 0 has not come to this save: no verdict will come either
                    self._outcomes.failed(save.save_id, tier.name, error)
                    yield from self._veto(tier, save, error)
                    yield from self._conclude("drop", tier, save, tier.drop)
                    return None
                except SaveFailedError as error:  # process 0 reports an earlier loss: this one is not a new failure
                    refusal = Refusal(policy="report", reason=describe(error))
                except Exception as error:  # noqa: BLE001  voted on: a process that does not vote stops the others
                    refusal = self._outcomes.refused(save, tier.name, error)
            try:
                verdict = yield from self._vote(tier, save, refusal, gone=gone)
                verdict = yield from tier.explain(save, verdict)
            except CheckpointError as error:
                self._outcomes.failed(save.save_id, tier.name, error)
                # A save without process 0's decision is not committed; staging memory does not outlive the process.
                keeps = refusal is None and self._process != 0 and tier.name != MEMORY
                if not keeps:
                    yield from self._conclude("drop", tier, save, tier.drop)
                return None
            if verdict.refusal is None:
                yield from self._conclude("keep", tier, save, tier.keep)
            else:
                yield from self._conclude("drop", tier, save, tier.drop)
                self._outcomes.skipped(save.save_id, tier.name, verdict.refusal, gone=gone)
            return verdict
        finally:
            if keeps:
                self._leave_undecided(tier, save)
            else:
                tier.release(save)
            if self._process == 0:
                self._log.passed(save.save_id, tier.name)

    def _veto(self, tier: SaveTier, save: Save, error: Exception) -> SaveProtocol:
        """Puts this process's veto where process 0 finds it, if it comes yet, and waits for nobody."""
        ballot, judge = self.veto_of(error)
        try:
            yield Veto(tier.channel, save.name, ballot, judge)
        except CheckpointError:
            return

    def _conclude(self, what: str, tier: SaveTier, save: Save, act: Callable[[Save], None]) -> SaveProtocol:
        """Keeps or drops a save; what fails degrades the tier, and leaves the decision as it is."""
        try:
            yield Do(what, lambda: act(save))
        except (CheckpointError, OSError) as error:
            self._outcomes.degraded(save.step, tier.name, error)

    def _vote(
        self, tier: SaveTier, save: Save, refusal: Refusal | None, *, gone: bool
    ) -> Generator[Effect, Any, Verdict]:
        """All processes' refusals of a save as one verdict; raises if the exchange fails."""
        save_id, held = save.save_id, self._held(tier.name)

        def decide(ballots: list[Any]) -> dict[str, Any]:
            refused = joined([ballot and ballot["refusal"] for ballot in ballots])
            more = tier.decide(save, [ballot and ballot["more"] for ballot in ballots])
            kept = None
            if refused is None:
                self._log.append(save_id, tier.name)
                sets = [{tuple(save) for save in ballot["held"]} for ballot in ballots if ballot["held"] is not None]
                kept = sorted(set.intersection(*sets)) if sets else None
            else:
                self.losing(save_id, tier.name, refused[0], gone=gone)
            return {"refusal": refused, "more": more, "held": kept}

        ballot = {
            "refusal": None if refusal is None else [refusal.policy, refusal.reason],
            "more": tier.ballot(save),
            "held": None if held is None else [save.to_list() for save in held],
        }
        told = yield from self.agree(
            tier.channel, save.name, ballot, decide, lambda ballot: ballot["refusal"] is not None, settles=True
        )
        if told["refusal"] is not None:
            policy, reason = told["refusal"]
            return Verdict(refusal=Refusal(policy=policy, reason=reason), more=told["more"])
        if told["held"] is not None:
            self._outcomes.keep_only(tier.name, [SaveId.from_list(save) for save in told["held"]])
        return Verdict(refusal=None, more=told["more"])

    def agree(
        self,
        channel: str,
        about: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        is_veto: Callable[[Any], bool] | None = None,
        *,
        settles: bool = False,
    ) -> SaveProtocol:
        """An exchange in which every process also learns the decisions of process 0 that it missed.

        `settles`: the exchanges of this channel are about saves in order, so an earlier save that is not committed by
        now never will be.
        """

        def judge(ballots: list[Any]) -> dict[str, Any]:
            verdict = decide([None if ballot is None else ballot["value"] for ballot in ballots])
            news = self._log.news(ballot and ballot["known"] for ballot in ballots)
            return {"verdict": verdict, "news": news, "overdue": self._outcomes.health.overdue()}

        told = yield Agree(
            channel,
            about,
            {"value": value, "known": self._log.state()},
            judge,
            None if is_veto is None else (lambda ballot: ballot is not None and is_veto(ballot["value"])),
            self._order,
        )
        complete = self._learn(told["news"])
        self._outcomes.health.announce(told.get("overdue"))
        if settles and complete and "early" not in told:
            self._learned(channel)
        return told["verdict"]

    def _learn(self, news: dict[str, Any]) -> bool:
        if self._process == 0:
            return True
        complete = self._log.learn(news)
        if complete:
            self._learned()
        return complete

    def losing(self, save_id: SaveId, tier: str, policy: str = "veto", *, gone: bool = False) -> None:
        """On process 0, in a judgement: it will tell all processes to leave a save out of `tier`."""
        self._outcomes.losing(save_id, tier, policy, gone=gone)

    def known(self) -> list[int]:
        """The decisions of process 0 that this process knows, for a message to process 0."""
        return self._log.state()

    def veto_of(self, error: BaseException) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The ballot of a process that raised in `save`, and process 0's verdict where it is that process."""
        reason = describe(error)
        refusal = ["report" if isinstance(error, SaveFailedError) else "veto", reason]
        # Out of turn: an earlier save of the channel may still be undecided on process 0.
        verdict = {"refusal": [refusal[0], f"process {self._process}: {reason}"], "more": {}, "held": None}

        def judge(_: list[Any]) -> dict[str, Any]:
            return {"verdict": verdict, "news": self._log.news([]), "early": True}

        return {"value": {"refusal": refusal, "more": None, "held": None}, "known": self._log.state()}, judge

    def settle(self, channel: str) -> Generator[Effect, Any, Refusal | None]:
        """Learns the decision on the save that is undecided here, or returns why the next one has to wait for it."""
        with self._lock:
            undecided = self._undecided.get(channel)
        if undecided is None:
            return None
        tier, earlier = undecided
        if self._log.has_passed(earlier.save_id, tier.name):  # learnt before it was known to be undecided
            self._learned()
            return None
        try:
            found, told = yield Recall(channel, earlier.name)
        except CheckpointError:  # process 0 has decided: not committed
            found, told = True, None
        if found and (told is None or self._learn(told["news"])):
            self._learned(channel)
            return None
        return Refusal(policy="veto", reason=f"the decision on step {earlier.step} is not known here yet")

    def _leave_undecided(self, tier: SaveTier, save: Save) -> None:
        with self._lock:
            self._undecided[tier.channel] = tier, save

    def _learned(self, channel: str | None = None) -> None:
        """A verdict of `channel` came: every earlier save of it is committed, or never will be. Of other channels the
        commits are known, and how far process 0 has come."""
        with self._lock:
            known = {
                each: (tier, save)
                for each, (tier, save) in self._undecided.items()
                if each == channel
                or self._log.has(save.save_id, tier.name)
                or self._log.has_passed(save.save_id, tier.name)
            }
            for each in known:
                del self._undecided[each]
        for tier, save in known.values():
            try:
                if self._log.has(save.save_id, tier.name):
                    tier.keep(save)
                else:
                    tier.drop(save)
            except (CheckpointError, OSError) as error:
                self._outcomes.degraded(save.step, tier.name, error)
            finally:
                tier.release(save)


def joined(refusals: Sequence[Sequence[str] | None]) -> list[str] | None:
    """The refusals of all processes as one, with the processes named; None where there is none."""
    said = [(process, *each) for process, each in enumerate(refusals) if each is not None]
    if not said:
        return None
    policies = [policy for _, policy, _ in said]
    reasons = [f"process {process}: {reason}" for process, _, reason in said]
    return [max(policies, key=POLICIES.index), "; ".join(reasons[:_REASONS_MAX])]
