"""Checkpoints taken apart and put together: sub-trees out, several into one, LoRA into its base, the mean of several.

Nothing is computed when these are called, but for the comparison of what a mean cannot be taken of: the tensors that
they give read their sources box by box.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.conversion.journal import fingerprint
from ckptkit.conversion.mapping import MapRule, Tensors, is_floating, mapped
from ckptkit.errors import CheckpointError, MergeError, StepNotFoundError
from ckptkit.formats.tensors import MEMORY_BYTES, Checkpoint, FormatFacts, Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_patterns import matches
from ckptkit.model.manifest import describe
from ckptkit.store.backends import properties_of

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's, beside an adapter's weights

_PART = 1 << 20  # elements that are made wide at once
_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<of>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_NNX = re.compile(r"(?P<of>.+)\.lora_(?P<side>[ab])")  # flax.nnx.LoRA: x @ lora_a @ lora_b


def extracted(source: Checkpoint, only: Sequence[str], without: Sequence[str] = ()) -> Checkpoint:
    """The tensors of `source` that are in one of the sub-trees `only` (none given: in all) and in none of `without`.

    `params` is the leaf or sub-tree of that name; a pattern with wildcards (see `surgery.rules`) is of whole names.
    Raises `StepNotFoundError` for one that matches nothing.
    """
    tensors = source.by_name()
    for pattern in (*only, *without):
        if not any(_within(pattern, name) for name in tensors):
            tops = sorted({name.partition(".")[0] for name in tensors})
            some = ", ".join(tops[:8]) + ", ..." * (len(tops) > 8)
            raise StepNotFoundError(f"{source.path} has no leaf {pattern}, nor a sub-tree; at its top are {some}")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if (not only or any(_within(pattern, name) for pattern in only))
        and not any(_within(pattern, name) for pattern in without)
    }
    return _checkpoint([source], kept, parts=True)


def combined(sources: Sequence[Checkpoint], rules: Sequence[MapRule] = ()) -> Checkpoint:
    """The tensors of all sources, each after those `rules` that match it.

    Raises `MergeError` for names that two have, `StepNotFoundError` for a rule that matches in none.
    """
    for rule in rules:
        if not any(matches(rule.old[0], name) for source in sources for name in source.by_name()):
            raise StepNotFoundError(f"the rule for {rule.old[0]} matches no leaf of any of them")
    made: dict[str, Tensor] = {}
    owner: dict[str, str] = {}
    conflicts = []
    for source in sources:
        for name, tensor in _ruled(source, rules).items():
            if name in made:
                conflicts.append(f"{name} is in {owner[name]} and in {source.path}")
            made[name], owner[name] = tensor, source.path
    if conflicts:
        raise MergeError(conflicts, advice="Take parts with `ckptkit extract`, or rename them with --map.")
    return _checkpoint(sources, made)


def averaged(sources: Sequence[Checkpoint], *, memory_bytes: int = MEMORY_BYTES) -> Checkpoint:
    """The mean of the floating-point tensors of `sources`, which all have the same leaves; other ones must be equal.

    Summed in float32 (float64 and complex128 of what is that wide, and of float32), and rounded once. Cost when called:
    every tensor that is not floating point is read and compared. Raises `MergeError` with every difference.
    """
    first, *others = [(source.path, source.by_name()) for source in sources]
    differences = []
    for path, tensors in others:
        for name in sorted(first[1].keys() ^ tensors.keys()):
            differences.append(f"{name} is only in {first[0] if name in first[1] else path}")
        for name in sorted(first[1].keys() & tensors.keys()):
            one, two = first[1][name], tensors[name]
            if (one.shape, one.dtype, one.leaf.key_impl) != (two.shape, two.dtype, two.leaf.key_impl):
                ours, theirs = describe(one.dtype.name, one.shape), describe(two.dtype.name, two.shape)
                differences.append(f"{name} is {ours} in {first[0]}, {theirs} in {path}")
            elif not is_floating(one) and not _equal(one, two, memory_bytes):
                differences.append(f"{name} is {one.dtype.name}, has no mean, and differs in {path}")
    if differences:
        raise MergeError(differences, advice="Take the same parts of all with `ckptkit extract --only` first.")
    made = {}
    for name, tensor in first[1].items():
        several = [tensor, *(tensors[name] for _, tensors in others)]
        mean = Tensor(item=tensor.item, leaf=tensor.leaf, fetch=partial(_mean, several))
        made[name] = mean if is_floating(tensor) else tensor
    return _checkpoint(sources, made)


def lora_merged(base: Checkpoint, adapter: Checkpoint, *, alpha: float | None = None) -> Checkpoint:
    """The tensors of `base` with the low-rank updates of `adapter` added: W + alpha / rank x (the product of the two).

    PEFT's names (`base_model.model.X.lora_A.weight` of [rank, in], `lora_B` of [out, rank], for `X.weight`) and NNX's
    (`X.lora_a` of [in, rank], `lora_b` of [rank, out], for `X.kernel`); E. Hu et al., "LoRA", 2021, section 4.1.
    `alpha` is that of PEFT's `adapter_config.json` beside the adapter unless it is given. Computed in float32, or
    float64 where the base is, and rounded once.

    Raises `MergeError` for an update without a base, without its other half, of other shapes, or for tensors of the
    adapter that are no update; `CheckpointError` where nobody says alpha.
    """
    config = _adapter_config(adapter)
    given = alpha if alpha is not None else config.get("lora_alpha")
    if given is None:
        raise CheckpointError(f"{adapter.path} has no {ADAPTER_CONFIG} that says lora_alpha; give --lora-alpha")
    tensors, made = base.by_name(), dict(base.by_name())
    differences, pairs = [], dict[str, dict[str, Tensor]]()
    for name, tensor in adapter.by_name().items():
        match = _PEFT.fullmatch(name) or _NNX.fullmatch(name)
        if match is None:
            differences.append(f"{name} of {adapter.path} is no low-rank update")
            continue
        kind = "weight" if match["side"] in "AB" else "kernel"
        pairs.setdefault(f"{match['of']}.{kind}", {})[match["side"]] = tensor
    for name, halves in pairs.items():
        why = _unfit(name, halves, tensors.get(name))
        if why is not None:
            differences.append(why)
            continue
        # W is [out, in] in PEFT, [in, out] in NNX: the left factor has its rows.
        left, right = (halves["B"], halves["A"]) if "A" in halves else (halves["a"], halves["b"])
        rank = left.shape[1]
        scale = float(given) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        made[name] = replace(tensors[name], fetch=partial(_updated, tensors[name], left, right, scale), spans=())
    if differences:
        raise MergeError(differences, advice="Rename the leaves of one side with `ckptkit convert --map`.")
    return _checkpoint([base, adapter], made)


def state_of(sources: Sequence[Checkpoint]) -> str:
    """Of the files as they are now, an adapter's config too: work that is gone on with must be of the same."""
    paths = [source.path for source in sources]
    configs = [str(Path(path).parent / ADAPTER_CONFIG) for path in paths if properties_of(path).file_system]
    return fingerprint({"paths": paths}, [*paths, *configs])[:16]


def _checkpoint(sources: Sequence[Checkpoint], tensors: Mapping[str, Tensor], *, parts: bool = False) -> Checkpoint:
    """One that is read like any other. Its tensors are of one item, so that their names stay what they are.

    Unless it is of `parts`, it knows what else the sources have, which whoever writes it has to leave out.
    """
    first = sources[0]
    named = [
        replace(tensor, item="", leaf=tensor.leaf if tensor.name == name else _renamed(tensor, name))
        for name, tensor in tensors.items()
    ]
    values = {name: value for source in sources for name, value in source.facts.values.items() if not parts}
    problems = tuple(problem for source in sources for problem in source.facts.problems)
    facts = FormatFacts(kind=first.facts.kind, step=first.facts.step, values=values, problems=problems)
    return Checkpoint(
        path=" + ".join(source.path for source in sources),
        format=first.format,
        tensors=named,
        layout=first.layout,
        others=[each for source in sources for each in source.others if not parts],
        facts=facts,
        sources=[path for source in sources for path in source.sources],
    )


def _renamed(tensor: Tensor, name: str) -> Any:
    return replace(tensor.leaf, path=tuple(name.split(".")))


def _ruled(source: Checkpoint, rules: Sequence[MapRule]) -> Tensors:
    """The rules that match nothing of this source are for another one."""
    tensors = source.by_name()
    return mapped(tensors, [rule for rule in rules if any(matches(rule.old[0], name) for name in tensors)])


def _within(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or matches(pattern, name)


def _equal(one: Tensor, two: Tensor, memory_bytes: int) -> bool:
    return all(one.read(box).tobytes() == two.read(box).tobytes() for box in one.blocks(memory_bytes // 2))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what a sum over elements of a dtype is taken."""
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    return np.dtype(np.float64 if dtype.itemsize >= 4 else np.float32)


def _add_into(total: np.ndarray, found: np.ndarray) -> None:
    """Adds a block that may be of a narrower dtype, made wide part by part."""
    flat, other = total.reshape(-1), found.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, other.size, _PART):
            flat[at : at + _PART] += other[at : at + _PART].astype(total.dtype)


def _mean(several: Sequence[Tensor], box: Box) -> np.ndarray:
    dtype = several[0].dtype
    total = np.zeros(box.shape, _wide(dtype))
    for tensor in several:
        _add_into(total, tensor.read(box))
    total /= len(several)
    with np.errstate(over="ignore", invalid="ignore"):
        return total.astype(dtype)


def _updated(base: Tensor, left: Tensor, right: Tensor, scale: float, box: Box) -> np.ndarray:
    wide = np.dtype(np.float64 if base.dtype.itemsize == 8 else np.float32)
    rows = left.read(Box((box.start[0], 0), (box.stop[0], left.shape[1]))).astype(wide)
    columns = right.read(Box((0, box.start[1]), (right.shape[0], box.stop[1]))).astype(wide)
    made = rows @ columns
    made *= wide.type(scale)
    _add_into(made, base.read(box))
    return made.astype(base.dtype)


def _unfit(name: str, halves: Mapping[str, Tensor], base: Tensor | None) -> str | None:
    if base is None:
        return f"{name} has an update and is not in the base"
    if len(halves) != 2 or not (set(halves) == {"A", "B"} or set(halves) == {"a", "b"}):
        return f"{name} has one half of an update: lora_{next(iter(halves))}"
    left, right = (halves["B"], halves["A"]) if "A" in halves else (halves["a"], halves["b"])
    fits = len(left.shape) == len(right.shape) == 2 and left.shape[1] == right.shape[0]
    if not fits or base.shape != (left.shape[0], right.shape[1]) or not is_floating(base):
        what = describe(base.dtype.name, base.shape)
        return f"{name} is {what}, and its update {list(left.shape)} x {list(right.shape)}"
    return None


def _adapter_config(adapter: Checkpoint) -> dict[str, Any]:
    if not properties_of(adapter.path).file_system:
        return {}
    root = Path(adapter.path)
    path = (root if root.is_dir() else root.parent) / ADAPTER_CONFIG
    try:
        found = json.loads(path.read_text())
        alpha = found.get("lora_alpha")
        if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
            raise ValueError("its lora_alpha is no number")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}", path=str(path)) from error
