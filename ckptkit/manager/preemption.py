"""The last save before a preemption: agreed by all processes, for the tiers that the grace has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptkit.errors import CheckpointError
from ckptkit.events import Kind
from ckptkit.job.coordination import ScopedCoordinator
from ckptkit.manager.build import Components
from ckptkit.manager.save import OrbaxArguments, Saver
from ckptkit.manager.settings import Settings
from ckptkit.model.tiers import DURABLE
from ckptkit.save.last_save import LastSave, LastSavePlan, PreemptionPace, TierRates, plan_last_save
from ckptkit.save.records import LastTurn
from ckptkit.snapshot.items import save_items
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.plain import plain_fields

_LEAST_S = 1.0  # for the fastest tier: what has gone of the grace is an upper bound
_ANSWER_S = 5.0  # of the grace, at least, for the agreement itself


class LastSaver:
    """Belongs to the step loop's thread; called by all processes together."""

    def __init__(self, settings: Settings, components: Components, saver: Saver):
        self._tiers = (*(tier.name for tier in components.storage.tiers), DURABLE)
        self._read_only = settings.options.read_only
        self._stock = components.storage.durable.stock
        self._events = components.job.events
        self._rates, self.pace = TierRates(), PreemptionPace()
        self._events.observe(self._rates)
        self._pipeline = components.pipeline
        self._branch = components.history.branch
        self._saver = saver
        self._coordinator = ScopedCoordinator(components.job.coordinator)

    def save(self, step: int, args: Any, grace_s: float, metrics: Any = None, custom_metadata: Any = None) -> LastSave:
        """See `CheckpointManager.save_last`."""
        if self._read_only:
            raise CheckpointError("save_last: the option read_only is set", step=step)
        if not grace_s > 0:
            raise ValueError(f"grace_s is {grace_s}: give the seconds between the signal and the end, more than 0")
        self._coordinator.begin(self._branch.enter(step, "save_last"))
        start_s = clock.monotonic_s()
        by_name, default_item = self._stock.save_args(None, None, args)
        arguments = OrbaxArguments(
            self._saver,
            step,
            by_name,
            default_item=default_item,
            metrics=metrics,
            force=True,
            custom_metadata=custom_metadata,
        )
        held = save_items(by_name)
        size_bytes = 0 if isinstance(held, str) else self._pipeline.describe(held.trees).held_bytes
        return self._save(arguments, size_bytes, grace_s, start_s)

    def _save(self, arguments: OrbaxArguments, size_bytes: int, grace_s: float, start_s: float) -> LastSave:
        step, spent_s = arguments.step, self.pace.spent_s(clock.monotonic_s())
        plan, spent_s = self._agree(self._rates.needs_s(size_bytes), spent_s, grace_s)
        deadline = Deadline(max(_LEAST_S, grace_s - spent_s))
        was_there = self._was_there(step, deadline)
        tiers = self._lacking(step, plan.tiers, deadline) if was_there else plan.tiers
        if tiers:
            last = LastTurn(tiers=frozenset(tiers), deadline=deadline, again=was_there)
            with self._pipeline.entered(step) as call:
                self._saver.take(call, arguments, start_s=start_s, last=last)
        # A slow tier that is not done must not cost the step that faster ones have: nothing is raised here.
        self._pipeline.run(self._pipeline.threads.settle(deadline))
        held = self._held(step)
        lacking = tuple(tier for tier in plan.tiers if tier not in held)
        unfinished = () if self._pipeline.threads.idle else lacking
        why = "the step was saved before, and not to this tier"
        result = LastSave(
            step=step,
            tiers=tuple(tier for tier in self._tiers if tier in held),
            unfinished=unfinished,
            left_out={**plan.left_out, **(dict.fromkeys(lacking, why) if was_there and not unfinished else {})},
            spent_s=round(spent_s, 3),
            grace_s=grace_s,
        )
        self._events.emit(Kind.PREEMPTED, **plain_fields(result))
        return result

    def _was_there(self, step: int, deadline: Deadline) -> bool:
        """Whether this run has saved the step before, and not the branch that it left: the same on every process. A
        save that is in flight may have come too early, and be dropped: then this one is made."""
        self._pipeline.run(self._pipeline.threads.wait_decided(deadline))
        there = any(record.step == step for record in self._branch.records())
        wait_s = max(_ANSWER_S, deadline.left_s)
        return bool(self._coordinator.agree("last-save-there", there, any, timeout_s=wait_s))

    def _lacking(self, step: int, planned: Sequence[str], deadline: Deadline) -> Sequence[str]:
        """The tiers that a step is saved to once more, agreed by all processes: those of the plan that lack it, and the
        fastest. No tier is then newer than the fastest. None while a tier is still being written."""
        self._pipeline.run(self._pipeline.threads.settle(deadline))

        def decide(values: list[Any]) -> list[str]:
            lacking = [tier for tier in planned if any(tier not in held for held, _ in values)]
            again = [tier for tier in planned if tier in lacking or (tier == self._tiers[0] != DURABLE)]
            return again if lacking and not any(busy for _, busy in values) else []

        mine = [sorted(self._held(step)), not self._pipeline.threads.idle]
        return self._coordinator.agree("last-save-again", mine, decide, timeout_s=max(_ANSWER_S, deadline.left_s))

    def _held(self, step: int) -> set[str]:
        return {tier for record in self._branch.records() if record.step == step for tier in record.tiers}

    def _agree(self, needs_s: dict[str, float], spent_s: float, grace_s: float) -> tuple[LastSavePlan, float]:
        """One plan for all: for the times of the slowest process, and the deadline of the first that was notified."""

        def decide(values: list[list[Any]]) -> list[Any]:
            needs = {tier: max(v[0].get(tier, 0.0) for v in values) for tier in self._tiers}
            spent = max(v[1] for v in values)
            plan = plan_last_save(self._tiers, needs, max(0.0, min(v[2] for v in values) - spent))
            return [list(plan.tiers), dict(plan.left_out), spent]

        wait_s = max(_ANSWER_S, grace_s - spent_s)
        said = self._coordinator.agree("last-save", [needs_s, spent_s, grace_s], decide, timeout_s=wait_s)
        return LastSavePlan(tiers=tuple(said[0]), left_out=said[1]), said[2]
