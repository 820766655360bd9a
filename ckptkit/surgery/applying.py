"""Reads the leaves that a surgery takes, and combines them with those of the new model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ckptkit.conversion.casting import rounded
from ckptkit.conversion.quantized_values import (
    LeafError,
    dequantize,
    error_of,
    largest,
    quantize,
    scales_for,
    spread,
)
from ckptkit.durable.lifecycle.places import Place, item_kind
from ckptkit.durable.lifecycle.step_records import sidecar_processes
from ckptkit.errors import StepNotFoundError, SurgeryError
from ckptkit.manager.checkpoint_manager import CheckpointManager
from ckptkit.model import paths
from ckptkit.model.manifest import LeafRecord
from ckptkit.restore.request import Choice
from ckptkit.restore.tree import abstract_keys, key_shape, put_at
from ckptkit.snapshot.abstract import state_of
from ckptkit.store.roots import root_url
from ckptkit.surgery.planning import Leaf, Origin, SurgeryPlan, plan_surgery
from ckptkit.surgery.rules import Rule
from ckptkit.surgery.stock import read_chosen
from ckptkit.util.own_context import own_context
from ckptkit.util.plain import plain_fields

_LOOK_S = 60.0  # for the listing that distinguishes a root from a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SurgeryReport:
    """The result of a surgery: the plan, the step that it read, and from where. `proven`: every byte matched its
    digest. `errors` are those of the leaves that were quantised."""

    plan: SurgeryPlan
    where: str
    step: int | None  # None for a directory that is not a step
    item: str
    read_bytes: Mapping[str, int]  # by tier
    proven: bool
    errors: Mapping[str, LeafError] = field(default_factory=dict)

    def __str__(self) -> str:
        what = f"step {self.step}, item {self.item}" if self.step is not None else f"item {self.item}"
        proof = "proven" if self.proven else "not proven: read by Orbax, which compares no checksums"
        counts = (
            f"{len(self.plan.taken)} taken, {len(self.plan.initialised)} initialised, {len(self.plan.skipped)} skipped"
        )
        errors = "".join(
            f"\nerror        {name} max abs {error.max_abs:.3g}, relative RMS {error.relative_rms:.2%}"
            for name, error in self.errors.items()
        )
        return f"{self.where}, {what} ({proof}): {counts}\n{self.plan}{errors}"

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**plain_fields(self, without=("plan",)), **self.plan.to_json()}


def restore_into(
    source: CheckpointManager | str | os.PathLike[str],
    step: int | None,
    target: Any,
    rules: Sequence[Rule],
    *,
    item: str | None = None,
) -> tuple[Any, SurgeryReport]:
    """Restores a part of a checkpoint into a changed model by `rules`. Returns the state and a record of the work.

    Every leaf of `target` is either taken from the checkpoint, to the bit or (with `Cast` and `Quantize`) in its own
    dtype, or keeps its own value because of an `Init`. Every stored leaf is taken or skipped by a rule. Only the taken
    leaves are read. Bytes of ckptkit's steps are verified as in `CheckpointManager.restore`; those of stock Orbax have
    no digests.

    Args:
      source: a manager (all its tiers are looked at), a root with steps, a step's directory, or the directory of one
        array item. Items of our steps are read with their checksums, items outside of a step by Orbax.
      step: which step of a manager or a root; None for the newest whose taken leaves verify.
      target: the new model (an NNX node gives its `nnx.State`), or any tree. Leaves that are `ShapeDtypeStruct`s can
        be taken and not initialised; where they name a sharding, the arrays get it, else that of the save.
      rules: see `plan_surgery`.
      item: which array item, where the step has several.

    The state has the structure of `target` (of its state, for NNX: give it to `nnx.update`). Values that are kept are
    those of `target` themselves, not copies: use one of the two.

    Cost: reads and memory for what is taken, in its stored dtype; a leaf that is cast or quantised is held twice, one
    after the other. In a job of several processes all call
    it together. Raises `SurgeryError` with all differences before anything is read, and what `restore` raises.
    """
    state = state_of(target)
    if not isinstance(source, CheckpointManager) and step is None:
        source, step, item = _in_its_root(root_url(source), item)
    surgery = _Surgery(state, tuple(rules), item)
    with _opened(source, step) as (read, where):
        found, read_step, read_bytes, proven = read(surgery)
    plan, name = surgery.planned()
    made, errors = _assembled(state, plan, found[name])
    return made, SurgeryReport(
        plan=plan, where=where, step=read_step, item=name, read_bytes=read_bytes, proven=proven, errors=errors
    )


@dataclass(slots=True)
class _Surgery:
    """The plan is made where the stored leaves become known, which is inside the restore."""

    state: Any
    rules: tuple[Rule, ...]
    item: str | None
    plans: dict[str, SurgeryPlan] = field(default_factory=dict)  # of the last candidate alone

    def choose(self, stored: Mapping[str, Sequence[LeafRecord]]) -> dict[str, Any]:
        """The leaves to read of the item, as nested dicts by the stored names."""
        name = self._item_of(stored)
        plan = plan_surgery([_of_record(record) for record in stored[name]], self.state, self.rules)
        self.plans = {name: plan}
        leaves = jax.tree.leaves(self.state)
        chosen: dict[str, Any] = {}
        for origin, leaf in zip(plan.origins, leaves, strict=True):
            if origin.stored is not None and origin.act != "scales":
                put_at(chosen, origin.stored.path or ("",), _wanted(leaf, origin.stored))
            if origin.scale is not None and origin.act == "dequantised":
                put_at(chosen, origin.scale.path, _wanted(leaf, origin.scale, whole=True))
        return {name: chosen.get("", chosen)}

    def read_stock(self, step_url: str) -> dict[str, Any]:
        """The leaves to read, from a step of stock Orbax or from one item's own directory."""
        return read_chosen(step_url, self.choose)

    def planned(self) -> tuple[SurgeryPlan, str]:
        """The plan of what was read, and its item."""
        ((name, plan),) = self.plans.items()
        return plan, name

    def _item_of(self, stored: Mapping[str, Any]) -> str:
        if self.item is not None and self.item in stored:
            return self.item
        if self.item is None and len(stored) == 1:
            return next(iter(stored))
        asked = "name one with item=" if self.item is None else f"there is no {self.item!r}"
        raise SurgeryError([f"the checkpoint has the array items {sorted(stored)}: {asked}"])


_Read = tuple[Mapping[str, Any], int | None, Mapping[str, int], bool]


def _in_its_root(url: str, item: str | None) -> tuple[str, int | None, str | None]:
    """An item of a step of ours as its root, step and name, by which its checksums are compared; any other as it is."""
    above, _, name = url.rpartition("/")
    root, _, directory = above.rpartition("/")
    step = paths.step_of_name(directory)
    if not root or step is None or directory != str(step) or item not in (None, name):
        return url, None, item
    place = Place.open(above, timeout_s=_LOOK_S)
    known = paths.STEP_METADATA in place.names() and f"{name}/" in place.names()
    if known and item_kind(place.below(name)) == "arrays" and sidecar_processes(place.below(name)):
        return root, step, name
    return url, None, item


@contextmanager
def _opened(source: Any, step: int | None) -> Iterator[tuple[Any, str]]:
    """How to read from a source, and what to call it."""
    if isinstance(source, CheckpointManager):
        yield (lambda choice: _from_manager(source, step, choice)), str(source.directory)
        return
    url = root_url(source)
    place = Place.open(url, timeout_s=_LOOK_S)
    names = place.names()
    is_item = item_kind(place) == "arrays"
    items = [name for name in place.directories() if paths.step_of_name(name) is None and item_kind(place.below(name))]
    is_step = paths.STEP_METADATA in names or bool(items)
    number = paths.step_of_name(place.name)
    if (is_item or is_step) and (number is None or is_item):
        yield (lambda choice: (choice.read_stock(url), number, {}, False)), url
        return
    if not names:
        raise StepNotFoundError(f"{url} is empty or not there; give a root with steps, or a step's directory", path=url)
    if is_step:
        url, step = url.rpartition("/")[0], number
    options = ocp.CheckpointManagerOptions(read_only=True, create=False)
    with CheckpointManager(url, options=options) as manager:
        yield (lambda choice: _from_manager(manager, step, choice)), url


def _from_manager(manager: CheckpointManager, step: int | None, choice: Choice) -> _Read:
    restored = manager.inner.restore_chosen(step, choice)
    return restored.items, restored.save_id.step, restored.read_bytes, restored.proven


def _of_record(record: LeafRecord) -> Leaf:
    dtype = abstract_keys(record).dtype.name if "key_impl" in record.extra else record.dtype
    return Leaf(path=record.path, shape=key_shape(record), dtype=dtype)


def _wanted(leaf: Any, stored: Leaf, *, whole: bool = False) -> Any:
    """The abstract array for a stored leaf: its stored dtype, and the placement of the target's leaf, or `whole` on
    each of its devices."""
    if isinstance(leaf, np.ndarray | np.generic | complex | int | float):
        return np.broadcast_to(np.zeros((), np.dtype(stored.dtype)), stored.shape)
    dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(stored.dtype)
    return jax.ShapeDtypeStruct(stored.shape, dtype, sharding=_whole(leaf.sharding) if whole else leaf.sharding)


def _taken(tree: Any, path: tuple[str, ...]) -> Any:
    """A leaf, which `tree` has no more: what is made of it takes its place."""
    for name in path[:-1]:
        tree = tree[name]
    return tree.pop(path[-1]) if path else tree


@own_context()
def _assembled(state: Any, plan: SurgeryPlan, found: Any) -> tuple[Any, dict[str, LeafError]]:
    leaves, treedef = jax.tree_util.tree_flatten(state)
    by_path = {origin.leaf.path: leaf for origin, leaf in zip(plan.origins, leaves, strict=True)}
    made: dict[tuple[str, ...], Any] = {}
    errors: dict[str, LeafError] = {}
    for origin, leaf in zip(plan.origins, leaves, strict=True):
        if origin.stored is None:
            made[origin.leaf.path] = leaf
        elif origin.act == "quantised" and origin.scale is not None:
            weights, scale = _taken(found, origin.stored.path), origin.scale.path
            values, made[scale], errors[origin.target] = _quantised(origin, weights, leaf, by_path[scale])
            made[origin.leaf.path] = values
        elif origin.act == "dequantised" and origin.scale is not None:
            scales = _taken(found, origin.scale.path)
            made[origin.leaf.path] = _dequantised(origin, _taken(found, origin.stored.path), scales, leaf)
        elif origin.act == "taken":
            value = _taken(found, origin.stored.path)
            is_number = isinstance(leaf, complex | int | float) and not isinstance(leaf, np.generic)
            made[origin.leaf.path] = _number(origin, value, type(leaf)) if is_number else _cast(value, leaf)
    return jax.tree_util.tree_unflatten(treedef, [made[origin.leaf.path] for origin in plan.origins]), errors


def _quantised(origin: Origin, weights: Any, leaf: Any, scale: Any) -> tuple[Any, Any, LeafError]:
    """Values, scales and error of a weight; on the devices of `leaf` and `scale`, where they are arrays of JAX's."""
    (block,) = origin.blocks

    def narrow(weights: Any) -> tuple[Any, Any, Any]:
        xp = weights.__array_namespace__()
        magnitudes = largest(weights, block)
        scales = scales_for(magnitudes, np.dtype(leaf.dtype))
        each = spread(scales, block, (0,) * weights.ndim, weights.shape)
        values = quantize(weights, each, np.dtype(leaf.dtype))
        wide = xp.astype(weights, np.float32)
        lost = wide - dequantize(values, each)
        measured = (xp.sum(wide * wide), xp.sum(lost * lost), xp.max(xp.abs(lost)), xp.max(magnitudes))
        return values, scales.reshape(scale.shape), measured

    if isinstance(weights, jax.Array):
        auto = _auto(weights.sharding)
        made = jax.jit(narrow, out_shardings=(auto, _whole(auto), None))(jax.device_put(weights, auto))
        values, measured = jax.device_put(made[0], weights.sharding), made[2]
        scales = jax.device_put(made[1], getattr(scale, "sharding", None) or _whole(weights.sharding))
    else:
        values, scales, measured = narrow(weights)
    squares, lost_squares, max_abs, magnitude = map(float, measured)
    if not math.isfinite(magnitude):
        raise SurgeryError([f"{origin.target} cannot be quantised: {origin.source} has values that are not finite"])
    return values, scales, error_of(squares, lost_squares, max_abs)


def _dequantised(origin: Origin, values: Any, scales: Any, leaf: Any) -> Any:
    """The weight, rounded once to the dtype of `leaf`; on its devices, where it is an array of JAX's."""
    (block,) = origin.blocks

    def wide(values: Any, scales: Any) -> Any:
        scales = scales.reshape((1,) * len(block)) if scales.size == 1 else scales
        each = spread(scales, block, (0,) * values.ndim, values.shape)
        return dequantize(values, each).astype(leaf.dtype)

    if isinstance(values, jax.Array):
        auto = [jax.device_put(each, _auto(each.sharding)) for each in (values, scales)]
        return jax.device_put(jax.jit(wide, out_shardings=_auto(values.sharding))(*auto), values.sharding)
    return wide(values, scales)


def _auto(sharding: Any) -> Any:
    """The same devices on a mesh whose axes the compiler follows: with explicit ones, blocks could not be formed."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    assert mesh.devices is not None, "an array is on devices"
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return NamedSharding(auto, sharding.spec, memory_kind=sharding.memory_kind)


def _whole(sharding: Any) -> Any:
    """On all devices of `sharding`, for an array of another shape."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding


def _number(origin: Origin, value: Any, kind: type) -> Any:
    """An array without dimensions as a Python number. Raises `SurgeryError` for a value that it cannot hold."""
    plain = np.asarray(value).astype(object)[()]
    with suppress(ValueError, TypeError, OverflowError):
        made = kind(plain)
        if made == plain or (made != made and plain != plain):  # NaN stays NaN
            return made
    raise SurgeryError(
        [f"{origin.target} is {kind.__name__} in the new model: {plain} of {origin.source} would change"]
    )


def _cast(value: Any, leaf: Any) -> Any:
    """`value` in the dtype of `leaf`; on its devices, where it is an array of JAX's."""
    if value.dtype == leaf.dtype:
        return value
    if isinstance(value, jax.Array):
        return jax.jit(lambda array: array.astype(leaf.dtype), out_shardings=value.sharding)(value)
    return rounded(value, leaf.dtype)
