"""Which steps are taken: what stock Orbax decides for the durable tier, and each fast tier's own policy."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

from ckptkit.model.tiers import DURABLE, EverySteps, Tier
from ckptkit.save import decider
from ckptkit.save.decider import Decider, StepInfo
from tests.cases import long_except

Options = ocp.CheckpointManagerOptions

OPTIONS: dict[str, Callable[[], Options]] = {
    "default": Options,
    "interval": lambda: Options(save_interval_steps=3),
    "interval 1": lambda: Options(save_interval_steps=1),
    "on steps": lambda: Options(save_interval_steps=100, save_on_steps=[2, 5, 6, 30]),
    "interval and on steps": lambda: Options(save_interval_steps=4, save_on_steps=[3, 7]),
    "function of the step": lambda: Options(should_save_fn=lambda step, last: step % 5 == 2),
    "function of the distance": lambda: Options(should_save_fn=lambda step, last: last is None or step - last >= 3),
    "fixed interval policy": lambda: Options(save_decision_policy=policies.FixedIntervalPolicy(4)),
    "specific steps policy": lambda: Options(save_decision_policy=policies.SpecificStepsPolicy([1, 4, 9])),
    "initial policy": lambda: Options(save_decision_policy=policies.InitialSavePolicy()),
    "any policy": lambda: Options(
        save_decision_policy=policies.AnySavePolicy([policies.FixedIntervalPolicy(5), policies.InitialSavePolicy()])
    ),
    "read only": lambda: Options(read_only=True, create=False),
}
STEPS = [
    list(range(15)),
    [3, 5, 6, 9, 10, 12],  # begins in the middle
    [0, 4, 4, 2, 8, 7, 9],  # repeats, and goes back
    [7],
]


def infos(steps: Iterable[int]) -> list[StepInfo]:
    return [StepInfo(step) for step in steps]


def ours(options: Options, steps: Iterable[int], before: Sequence[int] = (), tiers: Sequence[Tier] = ()) -> list[Any]:
    """The decisions for `steps`, in order, with the existing durable steps `before`."""
    decider = Decider(options, tiers, infos(before), latest=lambda: max(before, default=None))
    decided = []
    for step in steps:
        due = decider.due(step, reached_preemption=False, force=False)
        if due:
            decider.taken(step, due)
        decided.append(due)
    return decided


def orbaxs(root: Path, options: Options, steps: Iterable[int], before: Sequence[int] = ()) -> list[bool]:
    """The decisions and acts of stock Orbax's manager."""
    root.mkdir()
    state = {"x": np.zeros(2)}
    if before:
        with ocp.CheckpointManager(root, options=Options(save_interval_steps=1)) as manager:
            for step in before:
                manager.save(step, args=ocp.args.StandardSave(state))
    decided = []
    with ocp.CheckpointManager(root, options=options) as manager:
        for step in steps:
            said = manager.should_save(step)
            if said:
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            decided.append(said)
    return decided


@pytest.mark.parametrize("name", long_except(["default", "interval and on steps", "function of the distance"], OPTIONS))
def test_durable_tier_saves_the_same_steps_as_orbax(tmp_path: Path, name: str) -> None:
    """If it failed, swapping the import would change which steps a job finds in its bucket."""
    for number, (steps, before) in enumerate(itertools.product(STEPS, [(), (3, 4)])):
        expected = orbaxs(tmp_path / f"{number}", OPTIONS[name](), steps, before)
        found = [DURABLE in due for due in ours(OPTIONS[name](), steps, before)]
        assert found == expected, (name, steps, before)


@given(
    interval=st.integers(1, 6),
    on_steps=st.none() | st.lists(st.integers(0, 20), max_size=4),
    steps=st.lists(st.integers(0, 20), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decisions_equal_those_of_orbax_for_any_interval(
    tmp_path_factory: pytest.TempPathFactory, interval: int, on_steps: list[int] | None, steps: list[int]
) -> None:
    """If it failed, some combination of options would save other steps than Orbax."""

    def options() -> Options:
        return Options(save_interval_steps=interval, save_on_steps=on_steps)

    expected = orbaxs(tmp_path_factory.mktemp("any") / "run", options(), steps)
    assert [DURABLE in due for due in ours(options(), steps)] == expected


def test_step_at_a_preemption_is_saved() -> None:
    """If it failed, the step before a host is taken away would be lost."""
    decider = Decider(Options(save_interval_steps=100), (), infos([1]), latest=lambda: 1)
    assert decider.due(7, reached_preemption=False, force=False) == frozenset()
    assert decider.due(7, reached_preemption=True, force=False) == {DURABLE}


def test_fast_tiers_follow_their_own_policy() -> None:
    """If it failed, a ramdisk would be saved as seldom as the bucket, or the bucket as often as the ramdisk."""
    tiers = (Tier.ram("/r", save=EverySteps(2)), Tier.ssd("/s", save=EverySteps(3)))
    decided = ours(Options(save_interval_steps=4), range(1, 9), before=[0], tiers=tiers)
    assert decided == [
        set(),
        {"ram"},
        {"ssd"},
        {"ram", DURABLE},
        set(),
        {"ram", "ssd"},
        set(),
        {"ram", DURABLE},
    ]


def test_step_at_or_below_the_last_needs_force() -> None:
    """If it failed, a step would be saved twice, or `force` would mean nothing."""
    tiers = (Tier.ram("/r"),)
    decider = Decider(Options(), tiers, [], latest=lambda: 9)
    assert decider.due(5, reached_preemption=False, force=False) == frozenset()
    assert decider.due(5, reached_preemption=False, force=True) == {"ram", DURABLE}
    decider.taken(12, frozenset({"ram"}))
    assert decider.due(12, reached_preemption=False, force=False) == frozenset()
    assert decider.due(13, reached_preemption=False, force=False) == {"ram", DURABLE}


def test_read_only_manager_refuses_even_forced_saves() -> None:
    """If it failed, an evaluation job would write into the training job's bucket."""
    decider = Decider(Options(read_only=True), (Tier.ram("/r"),), [])
    assert decider.due(1, reached_preemption=True, force=True) == frozenset()


def test_rollback_drops_the_abandoned_steps() -> None:
    """If it failed, a run that went back to step 10 would not save before it passed step 30 again."""

    def far_enough(step: int, last: int | None) -> bool:
        return last is None or step - last >= 5

    decider = Decider(Options(should_save_fn=far_enough), (), infos([10, 20, 30]), latest=lambda: 30)
    decider.continue_from(10)
    assert decider.due(14, reached_preemption=False, force=False) == frozenset()
    assert decider.due(15, reached_preemption=False, force=False) == {DURABLE}


def test_durable_step_missed_by_a_crash_is_saved_next() -> None:
    """If it failed, a second lost host would fall back two durable intervals instead of one."""
    tiers = (Tier.ram("/r", save=EverySteps(2)),)
    decider = Decider(Options(save_interval_steps=10), tiers, infos([0, 10]), latest=lambda: 22)
    decider.continue_from(22)  # from the ramdisk: the upload of 20 died with the process
    assert decider.due(23, reached_preemption=False, force=False) == frozenset()
    assert decider.due(24, reached_preemption=False, force=False) == {"ram", DURABLE}
    decider.taken(24, frozenset({"ram", DURABLE}))
    assert decider.due(26, reached_preemption=False, force=False) == {"ram"}
    settled = Decider(Options(save_interval_steps=10), tiers, infos([0, 10, 20]), latest=lambda: 22)
    settled.continue_from(22)
    assert settled.due(24, reached_preemption=False, force=False) == {"ram"}


def test_decisions_ignore_the_clock_of_a_background_save() -> None:
    """If it failed, two processes could decide differently and one would wait for the other without an end."""
    policy_saw = []

    class Watching:
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            policy_saw.append((step.step, [info.step for info in previous_steps], context.is_saving_in_progress))
            return step.step % 2 == 0

    ours(Options(save_decision_policy=Watching()), range(4))
    assert policy_saw == [(0, [], False), (1, [0], False), (2, [0], False), (3, [0, 2], False)]


class Told:
    """One of two processes: it receives process 0's answer."""

    count = 2
    timeout_s = 5.0

    def agree(self, channel: str, value: Any, decide: Any, *, timeout_s: float | None = None, about: str = "") -> Any:
        pytest.fail(f"{channel}: a decision waits for everybody")

    def __init__(self, process: int, words: list[bool]):
        self.process = process
        self.words = words

    def ask_process_0(
        self,
        channel: str,
        decide: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        about: str = "",
        order: Any = None,
    ) -> Any:
        if self.process == 0:
            self.words.append(decide())
            return self.words[-1]
        return self.words.pop(0)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (lambda ask: Options(should_save_fn=lambda step, last: ask()), True),
        (lambda ask: Options(save_decision_policy=policies.AnySavePolicy([Clock(ask)])), True),
        (lambda ask: Options(save_interval_steps=2), False),
    ],
)
def test_policy_with_a_clock_is_evaluated_on_process_0(options: Any, asked: bool) -> None:
    """If it failed, two hosts whose clocks differ would take different steps, and deadlock."""
    words: list[bool] = []
    answers: list[list[int]] = [[], []]
    told: list[Any] = [Told(process, words) for process in (0, 1)]
    deciders = [Decider(options(lambda p=p: answers[p].append(1) or p == 0), (), infos([0]), told[p]) for p in (0, 1)]
    due = [[bool(decider.due(step, reached_preemption=False, force=False)) for decider in deciders] for step in (1, 3)]
    assert due == [[asked, asked]] * 2
    assert (len(answers[0]), len(answers[1])) == ((2, 0) if asked else (0, 0))


class Clock:
    """A policy of the caller's own."""

    def __init__(self, ask: Callable[[], bool]):
        self.ask = ask

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.ask()


@pytest.mark.parametrize("primary", [0, 1])
def test_continuous_policy_of_orbax_runs_without_its_barrier(primary: int) -> None:
    """If process 1 is primary, process 0 would wait for its answer at every step, but process 1 is not asked. Process 0
    alone would count the operations by which Orbax's saves on several processes wait for each other."""
    meetings = ocp.options.MultiprocessingOptions(primary_host=primary)
    policy = policies.AnySavePolicy([policies.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)])
    words: list[bool] = []
    options = Options(save_decision_policy=policy, multiprocessing_options=meetings)
    before = OperationIdGenerator.get_current_operation_id()
    for process in (0, 1):
        told: Any = Told(process, words)
        decider = Decider(options, (), [], told)
        taken = []
        for step in range(3):
            due = decider.due(step, reached_preemption=False, force=False, is_saving=step == 0)
            decider.taken(step, due)
            taken.append(bool(due))
        assert taken == [False, True, False]
    assert OperationIdGenerator.get_current_operation_id() == before


@pytest.mark.parametrize(
    ("since_s", "is_due"), [(-3600.0, True), (-0.1, True), (0.0, False), (9.9, False), (10.0, True)]
)
def test_clock_that_was_set_back_delays_no_save_beyond_its_interval(since_s: float, is_due: bool) -> None:
    """A host whose clock was an hour ahead would save nothing for that hour."""
    policy = decider._Continuous(policies.ContinuousCheckpointingPolicy(minimum_interval_secs=10))
    last = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    step = StepInfo(2, last + datetime.timedelta(seconds=since_s))
    context = SimpleNamespace(is_saving_in_progress=False)
    assert policy.should_save(step, [StepInfo(1, last)], context=context) is is_due
