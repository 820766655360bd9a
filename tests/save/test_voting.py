"""The votes of a save in one tier, by two processes over one service: what is kept, dropped, and learnt later."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, final

import jax
import pytest

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.errors import SaveFailedError
from ckptkit.model.manifest import SaveId
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.protocol import Do, SaveProtocol, drive
from ckptkit.save.agreement.voting import SaveTier, Voting, joined
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.records import Refusal
from tests.job.fake_service import FakeJob


@final
class Work(SaveTier):
    """A tier, with one save whose acts are written down; `error` is what committing it here raises."""

    def __init__(self, step: int, error: Exception | None = None, tier: str = "ram"):
        super().__init__(tier, {"ram": "commit", "ssd": "disk-commit"}[tier])
        self.save: Any = SimpleNamespace(save_id=SaveId(1, step, step), step=step, name=f"0.{step}.0")
        self.done: list[str] = []
        self._error = error

    def copy(self, save: Any) -> SaveProtocol:
        yield Do("commit here", lambda: self.done.append("copy"))
        if self._error is not None:
            raise self._error

    def keep(self, save: Any) -> None:
        self.done.append("keep")

    def drop(self, save: Any) -> None:
        self.done.append("drop")

    def release(self, save: Any) -> None:
        self.done.append("release")


class Process:
    """The votes of one process of the job."""

    def __init__(self, coordinator: Any):
        self.coordinator = coordinator
        self.ledger = Ledger(Ancestry(epoch=1))
        self.reports: list[tuple[Any, ...]] = []
        outcomes: Any = SimpleNamespace(
            health=SimpleNamespace(overdue=lambda: None, announce=lambda _: None),
            keep_only=self.ledger.keep_only,
            losing=lambda save_id, tier, policy, gone: None,
            refused=lambda save, tier, error: Refusal(policy="veto", reason=str(error)),
            skipped=lambda save_id, tier, refusal, gone: self.reports.append(("skipped", save_id.step, refusal.reason)),
            failed=lambda save_id, tier, error: self.reports.append(("failed", save_id.step, str(error))),
            degraded=lambda step, tier, error: self.reports.append(("degraded", step, str(error))),
        )
        log = CommitLog(self.ledger, lambda *_: None)
        self.voting = Voting(log, outcomes, coordinator.process, lambda _: None)

    def run(self, work: Work, refusal: Refusal | None = None) -> Any:
        return drive(self.voting.run(work, work.save, refusal=refusal), self.coordinator)

    @property
    def steps(self) -> list[int]:
        return [save_id.step for save_id in sorted(self.ledger.committed_in("ram"))]


class Pair:
    """Two processes; process 1 can miss verdicts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        with monkeypatch.context() as patched:
            self.job = FakeJob(patched, 2)
        self.processes = [Process(coordinator) for coordinator in self.job.processes]
        self.missed: list[str] = []  # parts of the keys that process 1 does not see
        get = self.job.service.blocking_key_value_get

        def lossy(key: str, timeout_ms: int) -> str:
            if key.endswith("/out") and any(part in key for part in self.missed):
                time.sleep(0.01)
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: lost")
            return get(key, timeout_ms)

        monkeypatch.setattr(self.job.service, "blocking_key_value_get", lossy)
        monkeypatch.setattr("ckptkit.job.meeting._VERDICT_SPARE_S", 0.1)

    def save(
        self, step: int, errors: tuple[Exception | None, Exception | None] = (None, None), tier: str = "ram"
    ) -> list[Work]:
        works = [Work(step, error, tier) for error in errors]
        self.processes[1].coordinator.timeout_s = 0.1 if self.missed else 60.0
        self.job.all(lambda coordinator: self.processes[coordinator.process].run(works[coordinator.process]))
        return works


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


def test_save_is_kept_by_all_or_dropped_by_all(pair: Pair) -> None:
    """A step that one process holds and another does not would be restored in halves."""
    for errors in ((None, OSError("full")), (OSError("full"), None)):
        works = pair.save(1, errors)
        assert [work.done for work in works] == [["copy", "drop", "release"]] * 2
        number = errors.index(None) ^ 1
        assert pair.processes[0].reports[-1] == ("skipped", 1, f"process {number}: full")
        assert pair.processes[1].reports[-1] == pair.processes[0].reports[-1]
    assert [work.done for work in pair.save(2)] == [["copy", "keep", "release"]] * 2
    assert [process.steps for process in pair.processes] == [[2], [2]]


def test_missed_verdict_is_read_before_the_next_save(pair: Pair) -> None:
    """A process that missed a commit would never free its slot, and list other steps than the others."""
    pair.missed = ["0.1.0"]
    works = pair.save(1)
    assert works[0].done == ["copy", "keep", "release"]
    assert works[1].done == ["copy"], "it is neither kept nor dropped before the decision is known"
    assert len(pair.processes[1].voting.undecided) == 1
    pair.missed = []
    assert [work.done for work in pair.save(2)] == [["copy", "keep", "release"]] * 2
    assert works[1].done == ["copy", "keep", "release"]
    assert len(pair.processes[1].voting.undecided) == 0
    assert [process.steps for process in pair.processes] == [[1, 2], [1, 2]]


def test_undecided_save_vetoes_the_next_until_it_is_known(pair: Pair) -> None:
    """Each vote without a verdict would hold one slot more, until no save finds a free one."""
    pair.missed = ["0.1.0"]
    first = pair.save(1)
    second = pair.save(2)  # the first verdict still cannot be read: this one carries it
    assert second[1].done == ["drop", "release"], "nothing more is held"
    reason = "process 1: the decision on step 1 is not known here yet"
    assert [process.reports[-1] for process in pair.processes] == [("skipped", 2, reason)] * 2
    assert first[1].done == ["copy", "keep", "release"]
    assert [work.done[-2:] for work in pair.save(3)] == [["keep", "release"]] * 2
    assert [process.steps for process in pair.processes] == [[1, 3], [1, 3]]


@pytest.mark.parametrize("late", [False, True])
def test_save_without_a_verdict_is_settled_by_a_vote_on_another_tier(pair: Pair, late: bool) -> None:
    """Process 0 lost its connection and gave the save up, which nobody could read. The tier's next save, which may be
    half an hour later, would be vetoed and lost."""
    works = [Work(1, tier="ssd"), Work(1, tier="ssd")]

    def vote_alone() -> None:
        pair.missed, pair.processes[1].coordinator.timeout_s = ["disk-commit/0.1.0"], 0.1
        pair.processes[1].run(works[1])
        assert works[1].done == ["copy"]
        pair.missed = []

    pair.job.service.gone = {1}
    pair.processes[0].run(works[0])
    pair.job.service.gone = set()
    if not late:
        vote_alone()
    pair.save(2)
    if late:
        vote_alone()
    else:
        assert works[1].done == ["copy", "drop", "release"]
    pair.missed = ["disk-commit/0.1.0"]
    assert [work.done for work in pair.save(3, tier="ssd")] == [["copy", "keep", "release"]] * 2
    assert [work.done for work in works] == [["copy", "drop", "release"]] * 2


def test_failed_verdict_drops_an_undecided_save(pair: Pair) -> None:
    """A save that process 0 gave up would stay committed on the process that did not receive that."""
    pair.job.service.gone = {1}
    works = [Work(1), Work(1)]
    pair.processes[0].run(works[0])  # process 1 is late
    assert works[0].done == ["copy", "drop", "release"]
    assert pair.processes[0].reports[-1][:2] == ("failed", 1)
    pair.processes[1].run(works[1])
    assert works[1].done == ["copy"]
    pair.job.service.gone = set()
    assert [work.done[-1] for work in pair.save(2)] == ["release"] * 2
    assert works[1].done == ["copy", "drop", "release"]
    assert [process.steps for process in pair.processes] == [[2], [2]]


def test_error_in_keep_leaves_the_decision_as_it_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails after the vote would make one process call a committed save lost."""

    def full(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(Work, "keep", full)
    works = pair.save(1)
    assert [work.done for work in works] == [["copy", "release"]] * 2
    assert [process.reports for process in pair.processes] == [[("degraded", 1, "full")]] * 2
    assert [process.steps for process in pair.processes] == [[1], [1]]


def test_interrupt_within_a_vote_releases_the_slot(pair: Pair) -> None:
    """Ctrl-C would leave a slot leased."""
    work = Work(1)
    protocol = pair.processes[0].voting.run(work, work.save)
    next(protocol)
    protocol.close()
    assert work.done == ["release"]


def test_refusals_are_joined_with_the_worst_policy() -> None:
    """A save that a process vetoed would count as one that came too early, and nobody would be told."""
    assert joined([None, None]) is None
    assert joined([["skip", "early"], None, ["veto", "full"]]) == ["veto", "process 0: early; process 2: full"]


def test_report_of_an_earlier_loss_is_no_new_failure(pair: Pair) -> None:
    """Each process would raise for the report of the one before, and no save would ever be taken again."""
    report = SaveFailedError("process 0: the save raised: step 4 was not committed")
    works = pair.save(5, (None, report))
    assert [work.done[-2:] for work in works] == [["drop", "release"]] * 2
    assert [kind for process in pair.processes for kind, *_ in process.reports] == ["skipped", "skipped"]
    _, judge = pair.processes[0].voting.veto_of(report)
    assert judge([])["verdict"]["refusal"][0] == "report"
    assert joined([["report", "x"], ["veto", "full"]]) == ["veto", "process 0: x; process 1: full"]
