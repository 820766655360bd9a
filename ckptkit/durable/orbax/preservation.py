"""Which durable steps are kept: Orbax's own policies, asked about the steps of the run's own branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies


class BranchPreservation:
    """An Orbax preservation policy that does not count abandoned steps, and keeps none of them.

    They would push good steps out of `max_to_keep`, and be kept in their place. If `best_fn` chooses, the newest step
    is kept whatever its metrics are: a restart continues from it. Orbax deletes unpreserved steps only after the new
    step is committed. `let_go` gets the steps that this process would delete, and returns the steps to delete, the same
    on every process. Orbax calls it once per save, on every process. `order` sorts steps as they were saved: Orbax
    lists them by number when it looks at a root.
    """

    def __init__(
        self,
        options: ocp.CheckpointManagerOptions,
        let_go: Callable[[list[int]], frozenset[int]],
        order: Callable[[int], Any],
    ):
        self._release, self._order = let_go, order
        self._policy: Any = options.preservation_policy or _default_policy(options)
        self._keeps_newest = options.best_fn is not None and options.preservation_policy is None
        self.abandoned: frozenset[int] = frozenset()  # set before each save, the same on every process

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each of `checkpoints`."""
        branch = [checkpoint for checkpoint in checkpoints if checkpoint.step not in self.abandoned]
        branch.sort(key=lambda checkpoint: self._order(checkpoint.step))
        chosen = list(self._policy.should_preserve(branch, context=context))
        if self._keeps_newest and chosen:
            chosen[-1] = True
        kept = {checkpoint.step for checkpoint, keep in zip(branch, chosen, strict=True) if keep}
        gone = self._release([each.step for each in checkpoints if each.step not in kept])
        return [each.step not in gone for each in checkpoints]


def prunes(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether these options ever delete a step."""
    return options.max_to_keep is not None or options.preservation_policy is not None


def replaced_options(policy: BranchPreservation) -> dict[str, Any]:
    """The options with `policy` in place of Orbax's own: the two ways to set it exclude each other."""
    return {"preservation_policy": policy, "max_to_keep": None, "keep_time_interval": None, "keep_period": None}


def _default_policy(options: ocp.CheckpointManagerOptions) -> Any:
    """The policy that Orbax builds from its options when none is given."""
    chosen: list[Any] = []
    if options.keep_period is not None:
        chosen.append(policies.preservation_policy.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        seconds = int(options.keep_time_interval.total_seconds())
        chosen.append(policies.preservation_policy.EveryNSeconds(interval_secs=seconds))
    if options.best_fn is None:
        chosen.append(policies.preservation_policy.LatestN(n=options.max_to_keep))
    else:
        best = policies.preservation_policy.BestN(
            get_metric_fn=options.best_fn,
            reverse=options.best_mode == "min",
            n=options.max_to_keep,
            keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
        )
        chosen.append(best)
    return policies.preservation_policy.AnyPreservationPolicy(chosen)
