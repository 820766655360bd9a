"""Whether a step is taken, and for which tiers: decided from the step and the options, the same on every process."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from ckptkit.manager.taken import DURABLE
from ckptkit.policy import Tier

_LOOKED_BACK_STEPS = 10_000  # a bound on what a restart looks through


@dataclass(frozen=True)
class StepInfo:
    """What Orbax's policies look at of a step (`PolicyCheckpointInfo`)."""

    step: int
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    metrics: Any = None
    is_locked: bool = False


class _ShouldSaveFunction:
    """`CheckpointManagerOptions.should_save_fn` as a policy."""

    def __init__(self, function: Any):
        self._function = function

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Asks the function with the step and the one saved last."""
        del context
        return bool(self._function(step.step, previous_steps[-1].step if previous_steps else None))


class Decider:
    """Remembers what was taken, so that a decision never depends on how far a background save has come."""

    def __init__(self, options: ocp.CheckpointManagerOptions, tiers: Sequence[Tier], durable_steps: Iterable[int]):
        self._tiers = tiers
        self._read_only = options.read_only
        self._asks_user = options.save_decision_policy is not None or options.should_save_fn is not None
        self._policy = options.save_decision_policy or _default_policy(options)
        self._durable = [StepInfo(step) for step in sorted(durable_steps)]
        self._last: int | None = None
        self._durable_owed = False

    def continue_from(self, step: int) -> None:
        """The run goes on from `step`: later ones, of an abandoned branch, do not count any more.

        Where a fast tier gave a step that the durable tier was due and does not have (the process died in the
        upload), the next save is durable too: the next lost host must not fall back further than one interval.
        """
        self._durable = [info for info in self._durable if info.step <= step]
        self._last = step
        if self._asks_user:  # a policy or function of the caller's is asked once per step, in order, and only then
            self._durable_owed = step not in [info.step for info in self._durable]
            return
        behind_from = max(self._durable[-1].step + 1 if self._durable else 0, step - _LOOKED_BACK_STEPS)
        self._durable_owed = any(self._durable_due(each, False) for each in range(behind_from, step + 1))

    def due(self, step: int, *, last: int | None, reached_preemption: bool, force: bool) -> frozenset[str]:
        """The tiers that take `step`; none for a step at or below the last one, unless `force`."""
        last = self._last if self._last is not None else last
        if self._read_only or (last is not None and step <= last and not force):
            return frozenset()
        due = {tier.name for tier in self._tiers if force or tier.save.due(step)}
        if force or self._durable_due(step, reached_preemption) or (due and self._durable_owed):
            due.add(DURABLE)
        return frozenset(due)

    def taken(self, step: int, due: frozenset[str]) -> None:
        """Records that `step` was taken for the tiers of `due`."""
        self._last = step
        if DURABLE in due:
            self._durable.append(StepInfo(step))
            self._durable_owed = False

    def _durable_due(self, step: int, reached_preemption: bool) -> bool:
        context = policies.DecisionContext(
            is_saving_in_progress=False,
            reached_preemption=reached_preemption,
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
        )
        return self._policy.should_save(StepInfo(step), self._durable, context=context)  # pyright: ignore[reportArgumentType]


def _default_policy(options: ocp.CheckpointManagerOptions) -> Any:
    """What Orbax makes of its options when no policy is given."""
    chosen: list[Any] = [policies.PreemptionCheckpointingPolicy()]
    if options.should_save_fn is not None:
        return policies.AnySavePolicy([_ShouldSaveFunction(options.should_save_fn), *chosen])
    if options.save_interval_steps is not None:
        chosen.append(policies.FixedIntervalPolicy(options.save_interval_steps))
    if options.save_on_steps is not None:
        chosen.append(policies.SpecificStepsPolicy(options.save_on_steps))
    return policies.AnySavePolicy([*chosen, policies.InitialSavePolicy()])
