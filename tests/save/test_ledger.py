"""The book of steps: what a run has, over all tiers, and never a step of an abandoned branch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckptkit.durable.lifecycle.epochs import Ancestry, Rollback
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.save.book.ledger import Branch, Calls, Ledger, StepRecord

SAVES = st.builds(SaveId, st.integers(1, 3), st.integers(0, 6), st.just(0))
TIERS = st.sampled_from(["ram", "ssd", "durable"])


@dataclass
class Known:
    """The model's record of one save."""

    tiers: set[str] = field(default_factory=set)


class BookAgainstModel(RuleBasedStateMachine):
    """The book against a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.ancestry = Ancestry(3, (Rollback(3, 4),))
        self.book = Ledger(self.ancestry)
        self.model: dict[SaveId, Known] = {}

    @rule(save=SAVES)
    def begin(self, save: SaveId) -> None:
        if save not in self.model:  # a save is begun once
            self.book.begin(save)
            self.model[save] = Known()

    @rule(save=SAVES, tier=TIERS)
    def commit(self, save: SaveId, tier: str) -> None:
        self.book.commit(save, tier)
        self.model.setdefault(save, Known()).tiers.add(tier)

    @rule(save=SAVES)
    def fail(self, save: SaveId) -> None:
        self.book.fail(save)
        if save in self.model and not self.model[save].tiers:
            del self.model[save]

    @rule(held=st.sets(SAVES), tier=TIERS)
    def keep_only(self, held: set[SaveId], tier: str) -> None:
        self.book.keep_only(tier, held)
        for save, known in list(self.model.items()):
            if tier in known.tiers and save not in held:
                known.tiers.discard(tier)
                if not known.tiers:
                    del self.model[save]

    @invariant()
    def the_records_are_the_models(self) -> None:
        """If it failed, `latest_step` would name a step that no tier holds, or hide one that some tier has."""
        expected = [
            StepRecord(
                step=save.step,
                save_id=save,
                state="committed" if known.tiers else "in_flight",
                tiers=tuple(sorted(known.tiers)),
            )
            for save, known in sorted(self.model.items())
            if not (save.epoch < 3 and save.step > 4)
        ]
        assert self.book.records() == expected
        came = [save for save in self.model if not (save.epoch < 3 and save.step > 4)]
        assert self.book.latest_step() == (max(came).step if came else None)


TestBook = BookAgainstModel.TestCase
TestBook.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)


def test_rollback_hides_abandoned_steps_immediately() -> None:
    """If it failed, `latest_step` right after a rollback's first save would be the abandoned branch's (FACTS 14)."""
    book = Ledger(Ancestry(1))
    for step in (10, 20, 30):
        book.commit(SaveId(1, step, step), "ram")
    assert book.latest_step() == 30
    book.ancestry = book.ancestry.begin(2, SaveId(1, 10, 10), new_id())
    book.begin(SaveId(2, 15, 31))
    assert [record.step for record in book.records()] == [10, 15]
    assert book.latest_step() == 15


def test_failed_save_stays_committed_in_tiers_that_hold_it() -> None:
    """If it failed, one failed upload would make a run forget a step that its ramdisk has."""
    book = Ledger(Ancestry(1))
    save = SaveId(1, 5, 0)
    book.begin(save)
    assert [(r.step, r.state) for r in book.records()] == [(5, "in_flight")]
    book.commit(save, "ram")
    book.fail(save)
    assert [(r.state, r.tiers) for r in book.records()] == [("committed", ("ram",))]


def test_missed_call_is_ordered_by_its_name() -> None:
    """A process that missed a call would take process 0 to be ahead of it, and lose save after save."""
    branch = Branch(Ledger(Ancestry()), 1, new_id())
    names = [branch.enter(step) for step in (2, 3, 3)]
    assert names == ["0.2.0", "0.3.0", "0.3.1"]
    assert [branch.order(name) for name in names] == sorted(branch.order(name) for name in names)
    assert branch.order("0.1.0") < branch.order("0.2.0"), "process 0 is still at a call that did not begin here"
    assert branch.order("0.2.0") < branch.order("0.2.1") < branch.order("0.3.0")
    assert branch.order("0.4.0") == branch.order("1.1.0") == math.inf, "process 0 is ahead"
    assert branch.order("restore-0") == math.inf


@given(st.lists(st.tuples(st.sampled_from(["save", "should_save"]), st.integers(0, 40)), max_size=200))
@settings(deadline=None, max_examples=200)
def test_names_of_calls_never_repeat(calls: list[tuple[str, int]]) -> None:
    """A process would read the verdict, and the identity, of an earlier save of the same step."""
    branch, seen = Branch(Ledger(Ancestry()), 1, new_id()), dict[tuple[str, int], int]()
    for call, step in calls:
        before = seen.get((call, step), 0)
        assert branch.enter(step, call) == f"0.{step}.{before}"
        seen[call, step] = before + 1


def test_process_that_missed_calls_has_the_names_of_the_others_at_the_next_step() -> None:
    """One call that raised before it began here would separate the processes for the rest of the run."""
    first, other = (Branch(Ledger(Ancestry()), 1, new_id()) for _ in range(2))
    for step in (10, 20, 21, 10, 11):
        first.enter(step)
    for step in (10, 11):
        other.enter(step)
    assert first.enter(30) == other.enter(30)
    assert first.enter(12) == other.enter(12), "a lower step that both have not saved yet"


def test_counting_calls_of_a_long_loop_takes_constant_memory() -> None:
    """A loop that asks at each of ten million steps would fill the host."""
    calls = Calls()
    for step in range(0, 300_000, 3):
        assert calls.enter(step) == 0
        assert calls.enter(step) == 1
    assert [len(steps._runs) for steps in calls._made] == [1, 1]


def test_save_in_the_middle_of_another_overtakes_it_at_every_line() -> None:
    """The interrupted save would count as the later one, and the loop's next save would raise that its step exists."""
    lines = 1
    while True:
        branch, left = Branch(Ledger(Ancestry()), 1, new_id()), [lines]
        outer, inner = branch.enter(1), list[str]()

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            del arg
            left[0] -= event == "line"  # noqa: B023
            if event == "line" and left[0] == 0:  # noqa: B023
                sys.settrace(None)
                inner.append(branch.enter(2))  # noqa: B023
                branch.next_save(inner[0], 2)  # noqa: B023
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            branch.next_save(outer, 1)
        finally:
            sys.settrace(before)
        if not inner:
            break
        assert branch.is_overtaken(outer)
        assert not branch.is_overtaken(inner[0])
        lines += 1
    assert lines > 4
