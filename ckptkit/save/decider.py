"""Whether a step is taken, and for which tiers: the same on every process.

If a decision depends only on the step, every process makes it itself. A policy that uses a clock, saves in flight, or
anything else that may differ between processes is asked on process 0; the others receive its answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from ckptkit.durable.orbax.manager import default_save_policy
from ckptkit.job.coordination import Coordinator, LocalCoordinator, ScopedCoordinator
from ckptkit.model.tiers import DURABLE, Tier, TierClockPolicy, TierSavePolicy
from ckptkit.util import clock

_LOOKED_BACK_STEPS = 10_000  # a bound on what a restart looks through


@dataclass(frozen=True)
class StepInfo:
    """The facts about a step for Orbax's policies (`PolicyCheckpointInfo`)."""

    step: int
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    metrics: Any = None
    is_locked: bool = False


class _Continuous:
    """Orbax's `ContinuousCheckpointingPolicy` for one process that is asked for all.

    In Orbax's own, the primary process sends its decision to the others; here they are not asked. Orbax's also counts
    an operation on each process, and Orbax's saves wait for each other by that number.
    """

    def __init__(self, policy: policies.ContinuousCheckpointingPolicy):
        self._least_s = policy.minimum_interval_secs or 0

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether no save is in flight, and the interval since the last one has passed. It counts as passed if the time
        of the last one is in the future, so that a clock that was set back delays no save by more than the interval."""
        if context.is_saving_in_progress:
            return False
        if not self._least_s or not previous_steps:
            return True
        return not 0 <= (step.time - previous_steps[-1].time).total_seconds() < self._least_s


_REMEMBERED_STEPS = 1000  # durable steps, newest last, that a policy is shown


class Decider:
    """Remembers what was taken, so that a decision never depends on how far a background save has come."""

    def __init__(
        self,
        options: ocp.CheckpointManagerOptions,
        tiers: Sequence[Tier],
        durable_steps: Iterable[StepInfo],
        coordinator: Coordinator | None = None,
        *,
        latest: Callable[[], int | None] = lambda: None,
    ):
        """`latest`: the newest step that is there, asked for as long as this run has taken none."""
        self._tiers = tiers
        self._options = options
        self._read_only = options.read_only
        self._asks_user = options.save_decision_policy is not None or options.should_save_fn is not None
        self._policy = options.save_decision_policy or default_save_policy(options)
        self._coordinator = ScopedCoordinator(coordinator or LocalCoordinator())
        self._alone = self._coordinator.count == 1 or _is_of_the_step_alone(self._policy)
        if not self._alone:
            self._policy = _asked_by_one(self._policy)
        self._last: int | None = None  # the step that was taken last, or from which the run continues
        self._latest = latest
        self._base: int | None = None  # the step from which the run continues, until it saves
        self._durable_owed = False
        self._by_step = [(tier.name, tier.save) for tier in tiers if isinstance(tier.save, TierSavePolicy)]
        self._by_clock = [(tier.name, tier.save) for tier in tiers if isinstance(tier.save, TierClockPolicy)]
        self._taken_s: dict[str, float] = {}  # by tier, when it last took a step, or one was restored; monotonic
        self.refill(durable_steps)

    @contextmanager
    def asked_in(self, call: str) -> Iterator[None]:
        """The questions in the block belong to this call, which has the same name on all processes. Later questions
        belong to the call before again: a signal handler may save in the middle of a save."""
        before = self._coordinator.about
        self._coordinator.begin(call)
        try:
            yield
        finally:
            self._coordinator.begin(before)

    def refill(self, durable_steps: Iterable[StepInfo]) -> None:
        """The durable tier was read again: it holds these, in the order in which they were saved."""
        self._durable = [info for info in durable_steps if self._base is None or info.step <= self._base]
        self._last = self._base

    def forget(self, step: int) -> None:
        """The step was deleted: it does not count any more."""
        self._durable = [info for info in self._durable if info.step != step]
        self._base = None if step == self._base else self._base
        self._last = self._base

    def not_taken(self, step: int) -> None:
        """The save of `step` raised here: it may be tried again. Of several processes none forgets: the others may not
        have raised, and what one knows alone must decide nothing."""
        if self._coordinator.count == 1:
            self.forget(step)

    def continue_from(self, step: int) -> None:
        """The run continues from `step`: later steps, of an abandoned branch, do not count any more.

        A restart may take a step from a fast tier that was due in the durable tier but is not there (the process died
        in the upload). Then the next save is durable too. So the loss of a host costs at most one interval.
        """
        self._durable = [info for info in self._durable if info.step <= step]
        self._last = self._base = step
        self._taken_s = {tier.name: clock.monotonic_s() for tier in self._tiers}
        if self._asks_user:  # a policy or function of the caller's is asked once per step, in order, and only then
            self._durable_owed = step not in [info.step for info in self._durable]
            return
        behind_from = max(self._durable[-1].step + 1 if self._durable else 0, step - _LOOKED_BACK_STEPS)
        self._durable_owed = any(self._durable_due(each, False, False) for each in range(behind_from, step + 1))

    def refusal(self, step: int, *, force: bool) -> str | None:
        """The reason why no tier can take `step` under any policy; None if the policies decide."""
        last = self._last if self._last is not None else self._latest()
        if self._read_only:
            return "the option read_only is set"
        if last is not None and step <= last and not force:
            return f"step {last} is saved already, and a save at or below it needs force=True"
        return None

    def due(self, step: int, *, reached_preemption: bool, force: bool, is_saving: bool = False) -> frozenset[str]:
        """The tiers that take `step`; none for a step at or below the last one, unless `force`.

        `is_saving` is whether a save is in flight, as this process sees it.
        """
        if self.refusal(step, force=force) is not None:
            return frozenset()
        due = {tier.name for tier in self._tiers} if force else self._fast_due(step)
        if force or self._durable_due(step, reached_preemption, is_saving) or (due and self._durable_owed):
            due.add(DURABLE)
        return frozenset(due)

    def taken(self, step: int, due: frozenset[str], metrics: Any = None) -> None:
        """Records that `step` was taken for the tiers of `due`."""
        self._last, self._base = step, None
        self._taken_s |= {name: clock.monotonic_s() for name in due}
        if DURABLE in due:
            # The same on every process, even if each has pruned other steps: policies look at the last few.
            self._durable = [*self._durable[1 - _REMEMBERED_STEPS :], StepInfo(step, metrics=metrics)]
            self._durable_owed = False

    def _fast_due(self, step: int) -> set[str]:
        """The fast tiers whose policies take `step`; those that look at a clock are asked on process 0."""
        due = {name for name, policy in self._by_step if policy.due(step)}
        if self._by_clock:
            due |= set(self._coordinator.ask_process_0("tiers-by-clock", self._due_by_clock))
        return due

    def _due_by_clock(self) -> list[str]:
        now_s = clock.monotonic_s()
        passed_s = {name: now_s - taken_s for name, taken_s in self._taken_s.items()}
        return [name for name, policy in self._by_clock if policy.due_after(passed_s.get(name))]

    def _durable_due(self, step: int, reached_preemption: bool, is_saving: bool) -> bool:
        checks = self._options.enable_should_save_is_saving_in_progress_check
        context = policies.DecisionContext(
            is_saving_in_progress=is_saving and checks,
            reached_preemption=reached_preemption,
            multiprocessing_options=self._options.multiprocessing_options,
        )

        def ask() -> bool:
            return bool(self._policy.should_save(StepInfo(step), self._durable, context=context))  # pyright: ignore[reportArgumentType]

        return ask() if self._alone else self._coordinator.ask_process_0("decision", ask)


def _is_of_the_step_alone(policy: Any) -> bool:
    """Whether a policy's answer follows from what all processes know: Orbax's own that look at no clock."""
    if type(policy) is policies.AnySavePolicy:
        return all(map(_is_of_the_step_alone, policy.policies))
    return type(policy) in (
        policies.FixedIntervalPolicy,
        policies.SpecificStepsPolicy,
        policies.PreemptionCheckpointingPolicy,
        policies.InitialSavePolicy,
    )


def _asked_by_one(policy: Any) -> Any:
    """The policy as one process can be asked for all."""
    if type(policy) is policies.AnySavePolicy:
        return policies.AnySavePolicy([_asked_by_one(each) for each in policy.policies])
    return _Continuous(policy) if type(policy) is policies.ContinuousCheckpointingPolicy else policy
