"""Metrics and metadata of steps, from any tier that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.host_shards import is_text_leaf
from ckptkit.durable.orbax.manager import DEFAULT_ITEM, METRICS_ITEM, sharding_metadata, tree_metadata
from ckptkit.durable.orbax.preservation import by_metrics
from ckptkit.durable.read_step import without_identity
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import StepNotFoundError
from ckptkit.model.manifest import STRUCTURE, Manifest, merged_leaves, metrics_of
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.local_tiers import LocalSave
from ckptkit.restore.request import stored_tree
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.decider import StepInfo

_PRUNED_AT = 64  # metrics, before those of deleted steps are looked for


class MetadataIndex:
    """Answers about steps. Reads on this process alone."""

    def __init__(
        self,
        options: ocp.CheckpointManagerOptions,
        durable: DurableSteps,
        inventory: Inventory,
        known: Callable[[], Iterable[int]],
    ):
        """`known` returns the steps in some tier or in flight."""
        self._options = options
        self._known = known
        self._durable = durable
        self._inventory = inventory
        self._metrics: dict[int, Any] = {}
        self._pruned_at = _PRUNED_AT
        self._as_saved = False  # a step was restored as it was saved, and Orbax does not know its kinds yet

    def restored_as_saved(self) -> None:
        """A step was restored without arguments: Orbax's metadata knows its trees from then on."""
        self._as_saved = True

    def refill(self, steps: Iterable[int]) -> None:
        """The tiers were read again: they hold these steps."""
        durable = {info.step: info.metrics for info in self._durable.stock.infos()}
        if self._options.best_fn is None or self._options.lightweight_initialize:
            self._metrics = durable
            return
        fast = {save_id.step: metrics_of(save.manifests) for save_id, save in self._inventory.local.saves().items()}
        self._metrics = {step: durable.get(step) if durable.get(step) is not None else fast.get(step) for step in steps}

    def taken(self, step: int, metrics: Any) -> None:
        """A save of `step` was taken with these metrics. Those of steps that were deleted since are dropped."""
        if len(self._metrics) >= self._pruned_at:
            known = set(self._known())
            self._metrics = {step: metrics for step, metrics in list(self._metrics.items()) if step in known}
            self._pruned_at = max(_PRUNED_AT, 2 * len(self._metrics))
        self._metrics[step] = metrics

    def best_of(self, steps: Sequence[int]) -> int | None:
        """The best of `steps` by the options' `best_fn`, the last saved of equals, a NaN after all others; None where
        none has metrics. Raises what `best_fn` raises, where it can read the metrics of no step."""
        assert self._options.best_fn is not None
        minimum = self._options.best_mode == "min"
        key, ranked, unread = by_metrics(self._options.best_fn, minimum=minimum), list[tuple[Any, int]](), None
        for step in steps:
            if (metrics := self._metrics.get(step)) is not None:
                try:
                    ranked.append((key(metrics), step))
                except Exception as error:  # noqa: BLE001  the caller's function, on metrics of any run
                    unread = unread or error
        if unread is not None and not ranked:
            raise unread
        ranked.sort(key=lambda each: each[0], reverse=minimum)
        return ranked[-1][1] if ranked else None

    def cached_metrics(self, step: int) -> Any:
        """The metrics of `step` that were seen so far, None where none were."""
        return self._metrics.get(step)

    def metrics(self, step: int) -> Any:
        """The metrics that a tier has of `step`, None where there are none."""
        found = self._durable.stock.orbax.metrics(step)
        if found is None and (save := self._local(step)) is not None:
            found = metrics_of(save.manifests)
        return found

    def metadata(self, step: int) -> Any:
        """Orbax's `StepMetadata`; raises `StepNotFoundError` where no tier has the step whole.

        Raises `CorruptCheckpointError` where `custom_metadata` is not what was saved.
        """
        try:
            found = self._durable.stock.orbax.metadata(step)
        except (FileNotFoundError, ValueError) as error:
            save = self._local(step)
            if save is None:
                raise StepNotFoundError(
                    f"step {step} is not in {self._durable.url} or in the fast tiers of this host", step=step
                ) from error
            return self._of_manifests(save.manifests)
        if self._as_saved:
            self._as_saved = False
            self._durable.stock.learn_kinds(found.item_handlers)
            found = self._durable.stock.orbax.metadata(step)
        found.custom_metadata = without_identity(found.custom_metadata)
        self._durable.reader(step).check_custom(found.custom_metadata)
        return found

    def _local(self, step: int) -> LocalSave | None:
        saves = [save for save_id, save in self._inventory.local.saves().items() if save_id.step == step]
        return max(saves, key=lambda save: save.save_id, default=None)

    def _of_manifests(self, manifests: Sequence[Manifest]) -> Any:
        trees = {name: _tree_metadata(manifests, name) for manifest in manifests for name in manifest.trees}
        small = {n: None for m in manifests for n, stored in m.inline.items() if stored["kind"] != STRUCTURE}
        items = {**small, **trees}
        default_item = set(items) - {METRICS_ITEM} == {DEFAULT_ITEM} and self._durable.stock.default_item is not False
        return ocp.metadata.StepMetadata(
            item_metadata=items[DEFAULT_ITEM] if default_item else ocp.args.Composite(**items),
            metrics=metrics_of(manifests) or {},
        )


def durable_infos(ledger: Ledger, durable: DurableSteps) -> list[StepInfo]:
    """The facts that policies use about the steps of the durable tier, in the order in which they were saved."""
    known = {info.step: StepInfo(info.step, info.time, info.metrics) for info in durable.stock.infos()}
    held = dict.fromkeys(record.step for record in ledger.records() if DURABLE in record.tiers)
    return [known[step] for step in held if step in known]


def _tree_metadata(manifests: Sequence[Manifest], item: str) -> Any:
    stored = merged_leaves(manifests, item)
    whole = stored_tree(manifests, item, stored)
    names = {leaf.path: leaf.name for leaf in stored}

    def of(keypath: Any, leaf: Any) -> Any:
        path = tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in keypath)
        name = names.get(path, ".".join(path))
        if is_text_leaf(leaf):
            return ocp.metadata.StringMetadata(name=name, directory=None)  # pyright: ignore[reportArgumentType]
        if isinstance(leaf, bool | int | float):
            return ocp.metadata.ScalarMetadata(name=name, directory=None, dtype=np.asarray(leaf).dtype)  # pyright: ignore[reportArgumentType]
        sharding = getattr(leaf, "sharding", None)
        words = None if sharding is None else sharding_metadata(sharding)
        return ocp.metadata.ArrayMetadata(
            name=name, directory=None, shape=tuple(leaf.shape), sharding=words, dtype=leaf.dtype
        )  # pyright: ignore[reportArgumentType]

    return tree_metadata(jax.tree_util.tree_map_with_path(of, whole, is_leaf=is_text_leaf))
