"""The plan of a surgery: made from names, shapes and dtypes alone, before a byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.conversion.leaf_patterns import Rename, matches, short_names
from ckptkit.conversion.quantized_values import DTYPES, block_that_fits, blocks_of_scales, blocks_text
from ckptkit.errors import SurgeryError
from ckptkit.model.manifest import describe
from ckptkit.snapshot.describe import leaf_path
from ckptkit.surgery.rules import Cast, Init, Quantize, Rule, Skip, Take

LeafOutcome = Literal["taken", "initialised", "quantised", "scales", "dequantised"]

_NARROW = frozenset(dtype.name for dtype in DTYPES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf on either side: its path, and what it is. A typed key has a key dtype (`key<fry>`) and a key's shape."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    has_value: bool = True  # False for a leaf that is only described

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one leaf of the new model comes from. `source` and `stored` are None where it keeps its own value.

    `scale` is the leaf with the scales: of the new model where the leaf is quantised, of the checkpoint where it is
    read back. A leaf of scales (`scales`) has the weight that they are made from as its source.
    """

    target: str
    leaf: Leaf
    act: LeafOutcome
    source: str | None = None
    stored: Leaf | None = None
    scale: Leaf | None = None
    blocks: tuple[tuple[int, ...], ...] = ()  # that share a scale: one in a plan

    @property
    def cast(self) -> bool:
        """Whether the stored value changes its dtype."""
        return self.stored is not None and self.stored.dtype != self.leaf.dtype

    def __str__(self) -> str:
        if self.stored is None:
            return f"initialised  {self.target} {self.leaf}"
        name = "" if self.source == self.target else f" from {self.source}"
        if self.act != "taken":
            return f"{self.act:13}{self.target} {self.leaf}{name} {self.stored.dtype}"
        dtype = f" cast from {self.stored.dtype}" if self.cast else ""
        return f"taken        {self.target} {self.leaf}{name}{dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurgeryPlan:
    """Every leaf of the new model with its origin, in the order of its tree; the stored leaves that are left out."""

    origins: tuple[Origin, ...]
    skipped: tuple[str, ...]
    unused_rules: tuple[Rule, ...]  # those that matched nothing

    @property
    def taken(self) -> tuple[Origin, ...]:
        """The leaves that come from the checkpoint."""
        return tuple(origin for origin in self.origins if origin.stored is not None)

    @property
    def initialised(self) -> tuple[Origin, ...]:
        """The leaves that keep the new model's value."""
        return tuple(origin for origin in self.origins if origin.stored is None)

    def __str__(self) -> str:
        lines = [str(origin) for origin in self.origins]
        lines += [f"skipped      {name}" for name in self.skipped]
        lines += [f"no leaf for  {rule}" for rule in self.unused_rules]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "taken": [
                {
                    "target": o.target,
                    "source": o.source,
                    "act": o.act,
                    "dtype": o.leaf.dtype,
                    "stored_dtype": o.stored.dtype,
                }
                for o in self.origins
                if o.stored is not None
            ],
            "initialised": [origin.target for origin in self.initialised],
            "skipped": list(self.skipped),
            "unused_rules": [repr(rule) for rule in self.unused_rules],
        }


def plan_surgery(stored: Any, target: Any, rules: Sequence[Rule]) -> SurgeryPlan:
    """Which stored leaf goes to which leaf of `target`. Pure: reads nothing, touches no device.

    The first of `Take`, `Rename` and `Skip` that matches a stored leaf decides about it. A leaf of the target is filled
    by the one stored leaf that goes to it, or keeps its value because an `Init` matches it. No other way and no default
    exist. `stored` and `target` are trees (concrete or abstract) or sequences of `Leaf`.

    Raises `SurgeryError` with all differences. Differences are: a leaf on either side that no rule covers, two stored
    leaves for one target, a leaf that is both taken and initialised. So are a different shape or (without `Cast`)
    dtype, and an `Init` of a leaf without a value.
    """
    sources, targets = named(leaves_of(stored)), named(leaves_of(target))
    used: set[Rule] = set()
    moves, skipped, differences = _moves(sources, targets, rules, used)
    scaled = _Scaled(sources, targets, moves, rules, used)
    origins = []
    for name, leaf in targets.items():
        init = _first(rules, Init, name, used)
        coming = moves.get(name, [])
        weight = scaled.weights.get(name)
        if weight is not None and not coming and init is None:
            source = moves[weight][0]
            origins.append(Origin(target=name, leaf=leaf, act="scales", source=source, stored=sources[source]))
            continue
        differences += _target_differences(name, leaf, coming, init)
        if init is not None:
            origins.append(Origin(target=name, leaf=leaf, act="initialised"))
        elif coming:
            origin = scaled.origin(name, leaf, coming[0])
            differences += _leaf_differences(origin, _first(rules, Cast, name, used) is not None)
            origins.append(origin)
    if differences:
        raise SurgeryError(differences)
    unused = tuple(rule for rule in rules if rule not in used)
    return SurgeryPlan(origins=tuple(origins), skipped=tuple(skipped), unused_rules=unused)


class _Scaled:
    """The weights that are quantised or read back, where a `Quantize` matches and the other side has floats."""

    def __init__(
        self,
        sources: Mapping[str, Leaf],
        targets: Mapping[str, Leaf],
        moves: dict[str, list[str]],
        rules: Sequence[Rule],
        used: set[Rule],
    ):
        self._sources = sources
        self._scales: dict[str, tuple[LeafOutcome, Leaf, tuple[tuple[int, ...], ...]]] = {}  # by leaf of the new model
        self.weights: dict[str, str] = {}  # of the new model, by the leaf with their scales
        for goal, coming in list(moves.items()):
            source, target = sources[coming[0]], targets[goal]
            if (source.dtype in _NARROW) == (target.dtype in _NARROW):
                continue
            side, name = (sources, coming[0]) if source.dtype in _NARROW else (targets, goal)
            rule, scale = _scale_of(name, rules)
            if rule is None or scale is None or scale not in side:
                continue
            used.add(rule)
            blocks = _blocks(rule, side[name], side[scale])
            if side is targets:
                self._scales[goal] = ("quantised", targets[scale], blocks)
                self.weights[scale] = goal
            else:
                self._scales[goal] = ("dequantised", sources[scale], blocks)

    def origin(self, name: str, leaf: Leaf, source: str) -> Origin:
        """The origin of a leaf that a stored one goes to."""
        act, scale, blocks = self._scales.get(name, ("taken", None, ()))
        stored = self._sources[source]
        return Origin(target=name, leaf=leaf, act=act, source=source, stored=stored, scale=scale, blocks=blocks)


def _blocks(rule: Quantize, weight: Leaf, scale: Leaf) -> tuple[tuple[int, ...], ...]:
    """The blocks that scales may be of: the one of the rule, or those that the shapes allow."""
    if rule.block is None:
        return tuple(blocks_of_scales(weight.shape, scale.shape))
    block = block_that_fits(weight.shape, scale.shape, rule.block)
    return () if block is None else (block,)


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a tree, or a sequence of `Leaf` as it is."""
    if isinstance(tree, Sequence) and all(isinstance(each, Leaf) for each in tree):
        return list(tree)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [_leaf(path, value) for path, value in flat]


def named(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Leaves by the names that rules see (see `short_names`)."""
    leaves = list(leaves)
    return dict(zip(short_names([".".join(leaf.path) for leaf in leaves]), leaves, strict=True))


def _leaf(keypath: Sequence[Any], value: Any) -> Leaf:
    path, _ = leaf_path(keypath)
    has_value = not isinstance(value, jax.ShapeDtypeStruct)
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Leaf(path=path, shape=tuple(value.shape), dtype=value.dtype.name, has_value=has_value)
    return Leaf(path=path, shape=tuple(value.shape), dtype=np.dtype(value.dtype).name, has_value=has_value)


def _moves(
    sources: Mapping[str, Leaf], targets: Mapping[str, Leaf], rules: Sequence[Rule], used: set[Rule]
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Stored leaves by target; stored leaves that are left out; messages about differences."""
    moves: dict[str, list[str]] = {}
    skipped: list[str] = []
    differences: list[str] = []
    read_back = _scales_to_read_back(sources, targets, rules)
    for name, leaf in sources.items():
        if name in read_back:
            continue
        rule, goal = _rule_of(name, rules)
        if rule is None:
            differences.append(f"stored {name} {leaf} is covered by no rule: take, rename or skip it")
            continue
        used.add(rule)
        if goal is None:
            skipped.append(name)
        elif goal in targets:
            moves.setdefault(goal, []).append(name)
        else:
            differences.append(f"stored {name} {leaf} goes to {goal} by {rule}, and the new model has no such leaf")
    return moves, skipped, differences


def _scales_to_read_back(
    sources: Mapping[str, Leaf], targets: Mapping[str, Leaf], rules: Sequence[Rule]
) -> set[str | None]:
    """The stored leaves with the scales of weights that are read as floats: they have no target of their own."""
    found: set[str | None] = set()
    for name, leaf in sources.items():
        goal = _rule_of(name, rules)[1] if leaf.dtype in _NARROW else None
        if goal is not None and goal in targets and targets[goal].dtype not in _NARROW:
            found.add(_scale_of(name, rules)[1])
    return found


def _scale_of(name: str, rules: Sequence[Rule]) -> tuple[Quantize | None, str | None]:
    """The rule by which a weight has scales, and the leaf that holds them."""
    for rule in rules:
        if isinstance(rule, Quantize) and (scale := rule.scale_of(name)) is not None:
            return rule, scale
    return None, None


def _rule_of(name: str, rules: Sequence[Rule]) -> tuple[Rule | None, str | None]:
    """The rule that decides about a stored leaf, and its name in the new model (None: it is left out)."""
    for rule in rules:
        if isinstance(rule, Skip) and matches(rule.pattern, name):
            return rule, None
        if isinstance(rule, Take | Rename) and (goal := rule.target_of(name)) is not None:
            return rule, goal
    return None, None


def _first(rules: Sequence[Rule], kind: type[Init] | type[Cast], name: str, used: set[Rule]) -> Rule | None:
    for rule in rules:
        if isinstance(rule, kind) and matches(rule.pattern, name):
            used.add(rule)
            return rule
    return None


def _target_differences(name: str, leaf: Leaf, coming: Sequence[str], init: Rule | None) -> list[str]:
    if len(coming) > 1:
        return [f"{name} {leaf} is filled by {len(coming)} stored leaves: {', '.join(coming)}"]
    if coming and init is not None:
        return [f"{name} {leaf} is taken from {coming[0]} and initialised by {init}: skip the one, or init less"]
    if not coming and init is None:
        return [f"{name} {leaf} of the new model is covered by no rule: nothing goes there, no Init matches it"]
    if init is not None and not leaf.has_value:
        return [f"{name} {leaf} has no value to be initialised with: give the model itself, not its abstract state"]
    return []


def _leaf_differences(origin: Origin, may_cast: bool) -> list[str]:
    found, leaf = origin.stored, origin.leaf
    assert found is not None
    if found.shape != leaf.shape:
        return [f"{origin.target} is {leaf} in the new model, {found} in the checkpoint ({origin.source})"]
    if "complex" in found.dtype and "complex" not in leaf.dtype:
        how = "a cast would drop the imaginary part; skip it, or let the new leaf be complex"
        return [f"{origin.target} is {leaf} in the new model, {found} in the checkpoint: {how}"]
    if origin.scale is not None:
        return _scale_differences(origin, origin.scale)
    if found.dtype == leaf.dtype:
        return []
    if "key<" in found.dtype + leaf.dtype:
        return [f"{origin.target} is {leaf} in the new model, {found} in the checkpoint: keys cannot be cast"]
    if not may_cast:
        scaled = " (or Quantize, for a weight with scales)" * (found.dtype in _NARROW or leaf.dtype in _NARROW)
        add = f"add Cast({origin.target!r}){scaled}"
        return [f"{origin.target} is {leaf} in the new model, {found} in the checkpoint: {add}"]
    return []


def _scale_differences(origin: Origin, scale: Leaf) -> list[str]:
    assert origin.stored is not None
    name = ".".join(scale.path)
    weight = origin.stored if origin.act == "quantised" else origin.leaf
    if "float" not in weight.dtype or "key<" in weight.dtype:
        return [f"{origin.target} is {origin.leaf} in the new model, {origin.stored} in the checkpoint: scale floats"]
    if not origin.blocks:
        return [f"{origin.target} is {weight}, and the dimensions of its scales, {name} {scale}, do not divide it"]
    if len(origin.blocks) > 1:
        which = f"{blocks_text(origin.blocks)}: give Quantize(..., block={origin.blocks[-1]}), or the other"
        return [f"{origin.target} is {weight}, and its scales, {name} {scale}, may be of {which}"]
    if origin.act == "quantised" and scale.dtype != "float32":
        return [f"{name} is {scale} in the new model: scales are made as float32"]
    return []
