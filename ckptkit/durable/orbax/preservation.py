"""Which durable steps are kept: Orbax's own policies, asked about the steps of the run's own branch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint import checkpoint_managers as policies


class BranchPreservation:
    """The steps that Orbax's policies do not keep, where abandoned steps do not count and are not kept.

    Abandoned steps would push good steps out of `max_to_keep`, and be kept in their place. If `best_fn` chooses, the
    newest step is kept with any metrics: a restart continues from it. `order` sorts steps as they were saved:
    Orbax lists them by number when it looks at a root.
    """

    def __init__(self, options: ocp.CheckpointManagerOptions, order: Callable[[int], Any]):
        self._order = order
        default = checkpoint_manager._get_default_preservation_policy
        self._policy: Any = _in_one_order(options.preservation_policy or default(options))
        self._keeps_newest = options.best_fn is not None and options.preservation_policy is None

    def doomed(self, checkpoints: Sequence[Any], abandoned: Collection[int]) -> list[int]:
        """The steps of `checkpoints` (Orbax's `CheckpointInfo`) that are not kept. Raises what the policies raise."""
        branch = [checkpoint for checkpoint in checkpoints if checkpoint.step not in abandoned]
        branch.sort(key=lambda checkpoint: self._order(checkpoint.step))
        chosen = list(self._policy.should_preserve(branch, context=policies.preservation_policy.PreservationContext()))
        if self._keeps_newest and chosen:
            chosen[-1] = True
        kept = {checkpoint.step for checkpoint, keep in zip(branch, chosen, strict=True) if keep}
        return [each.step for each in checkpoints if each.step not in kept]


def by_metrics(best_fn: Callable[[Any], Any], *, minimum: bool) -> Callable[[Any], Any]:
    """The sort key of metrics, for a sort that is reversed where the `minimum` is best: the best is last. NaN is worse
    than every number: Python's order of it depends on the order in which it was saved.

    The key raises what `best_fn` raises, and TypeError where it returns anything but a number or numbers: a step with
    such metrics counts as one without any.
    """

    def key(metrics: Any) -> tuple[bool, tuple[Any, ...]]:
        value = best_fn(metrics)
        numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
        if not numbers or not all(map(_is_number, numbers)):
            raise TypeError(f"best_fn returned {value!r} for these metrics; it must return a number")
        is_nan = any(bool(each != each) for each in numbers)
        return is_nan == minimum, () if is_nan else numbers

    return key


def _is_number(value: Any) -> bool:
    """Whether it has a place among numbers; an array of one element does."""
    if isinstance(value, str | bytes) or getattr(getattr(value, "dtype", None), "kind", "") == "c":
        return False
    try:
        float(value.item() if hasattr(value, "item") else value)
    except OverflowError:  # an integer beyond every float
        return True
    except (TypeError, ValueError):
        return False
    return True


class _OrderedBestN:
    """A `BestN` of Orbax's, with the order of `by_metrics`."""

    def __init__(self, policy: Any):
        self._key = by_metrics(policy.get_metric_fn, minimum=policy.reverse)
        self._policy = dataclasses.replace(policy, get_metric_fn=self._key)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """As Orbax's. A step whose metrics have no place in the order is one without metrics."""
        return self._policy.should_preserve(list(map(self._ranked, checkpoints)), context=context)

    def _ranked(self, checkpoint: Any) -> Any:
        if checkpoint.metrics is None:
            return checkpoint
        try:
            self._key(checkpoint.metrics)
        except Exception:  # noqa: BLE001  the caller's function, on metrics of any run: it would end every save
            return dataclasses.replace(checkpoint, metrics=None)
        return checkpoint


def _in_one_order(policy: Any) -> Any:
    """A policy of Orbax's whose order of metrics, if it has one, is that of `by_metrics`."""
    if type(policy) is policies.preservation_policy.AnyPreservationPolicy:
        return dataclasses.replace(policy, policies=[_in_one_order(each) for each in policy.policies])
    return _OrderedBestN(policy) if type(policy) is policies.preservation_policy.BestN else policy


def prunes(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether these options ever delete a step."""
    return options.max_to_keep is not None or options.preservation_policy is not None


def without_deletions(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """The options of a manager that deletes no step: `DurableSteps` does, by the options as the caller gave them."""
    return dataclasses.replace(
        options,
        preservation_policy=policies.preservation_policy.LatestN(n=None),
        max_to_keep=None,
        keep_time_interval=None,
        keep_period=None,
        todelete_subdir=None,
        todelete_full_path=None,
        enable_background_delete=False,
    )
