"""Checkpoints taken apart and put together: sub-trees out, several into one, LoRA into its base, the mean of several.

These functions compute nothing when they are called, except that `averaged` compares the tensors that have no mean. The
returned tensors read their sources box by box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ckptkit.conversion import lora
from ckptkit.conversion.journal import fingerprint
from ckptkit.conversion.mapping import LeafNames, MapRule, Tensors, add_into, is_floating, mapped
from ckptkit.conversion.scales import plain_advice, scaled_text
from ckptkit.errors import MergeError, StepNotFoundError
from ckptkit.formats.tensors import MEMORY_BYTES, Checkpoint, FormatFacts, Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import describe


def extracted(source: Checkpoint, only: Sequence[str], without: Sequence[str] = ()) -> Checkpoint:
    """The tensors of `source` that are in one of the sub-trees `only` (none given: in all) and in none of `without`.

    `params` is the leaf or sub-tree of that name, `state:params` that of an item; a pattern with wildcards (see
    `leaf_patterns`) is of whole names. NNX's last `value` may be left out.
    Raises `StepNotFoundError` for one that matches nothing, `CheckpointError` for one that several items have.
    """
    tensors = source.by_name()
    names = LeafNames(tensors)
    found = {pattern: names.below(pattern) for pattern in (*only, *without)}
    for pattern, below in found.items():
        if not below:
            tops = sorted({name.partition(".")[0] for name in tensors})
            some = ", ".join(tops[:8]) + ", ..." * (len(tops) > 8)
            raise StepNotFoundError(f"{source.path} has no leaf {pattern}, nor a sub-tree; at its top are {some}")
    chosen = set().union(*(found[pattern] for pattern in only)) if only else tensors.keys()
    left_out = set().union(*(found[pattern] for pattern in without))
    kept = {name: tensor for name, tensor in tensors.items() if name in chosen and name not in left_out}
    return _checkpoint([source], kept, parts=True)


def combined(sources: Sequence[Checkpoint], rules: Sequence[MapRule] = ()) -> Checkpoint:
    """The tensors of all sources, each after those `rules` that match it.

    Raises `MergeError` for names that two have, `StepNotFoundError` for a rule that matches in none.
    """
    for rule in rules:
        if not any(LeafNames(source.by_name()).matching(rule.old[0]) for source in sources):
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
        raise MergeError(
            conflicts,
            advice="Take parts with `ckptkit extract`, rename them with --map, or take the mean with --average.",
        )
    return _checkpoint(sources, made)


def averaged(sources: Sequence[Checkpoint], *, memory_bytes: int = MEMORY_BYTES) -> Checkpoint:
    """The mean of the floating-point tensors of `sources`, which all have the same leaves; other ones must be equal.

    Summed in float32 (float64 and complex128 of what is that wide, and of float32), and rounded once. Cost when called:
    every tensor that is not floating point is read and compared. Raises `MergeError` with every difference, or with
    every leaf whose values have scales.
    """
    first, *others = [(source.path, source.by_name()) for source in sources]
    scaled = {
        source: [f"{text} (in {source.path})" for name in tensors if (text := scaled_text(name, tensors)) is not None]
        for source, (_, tensors) in zip(sources, [first, *others], strict=True)
    }
    if any(scaled.values()):
        raise MergeError(
            [text for each in scaled.values() for text in each],
            advice=plain_advice([source for source, each in scaled.items() if each]),
        )
    differences = []
    for path, tensors in others:
        for name in sorted(first[1].keys() ^ tensors.keys()):
            differences.append(f"{name} is only in {first[0] if name in first[1] else path}")
        for name in sorted(first[1].keys() & tensors.keys()):
            one, two = first[1][name], tensors[name]
            if (one.shape, one.dtype, one.leaf.key_impl) != (two.shape, two.dtype, two.leaf.key_impl):
                ours, theirs = describe(one.dtype.name, one.shape), describe(two.dtype.name, two.shape)
                differences.append(f"{name} is {ours} in {first[0]}, {theirs} in {path}")
            elif not is_floating(one) and any(
                one.read(box).tobytes() != two.read(box).tobytes() for box in one.blocks(memory_bytes // 2)
            ):
                differences.append(f"{name} is {one.dtype.name}, has no mean, and differs in {path}")
    if differences:
        raise MergeError(differences, advice="Take the same parts of all with `ckptkit extract --only` first.")
    made = {}
    for name, tensor in first[1].items():
        several = [tensor, *(tensors[name] for _, tensors in others)]
        mean = Tensor(item=tensor.item, leaf=tensor.leaf, fetch=partial(_mean, several), sources=tuple(several))
        made[name] = mean if is_floating(tensor) else tensor
    return _checkpoint(sources, made)


def lora_merged(base: Checkpoint, adapter: Checkpoint, *, alpha: float | None = None) -> Checkpoint:
    """`base` with a LoRA adapter folded in: rules, costs and errors are those of `lora.lora_merged`."""
    return _checkpoint([base, adapter], lora.lora_merged(base, adapter, alpha=alpha))


def state_of(sources: Sequence[Checkpoint]) -> str:
    """A fingerprint of the files as they are now, including an adapter's config. Resumed work must have the same
    one."""
    paths = [source.path for source in sources]
    return fingerprint({"paths": paths}, [*paths, *map(lora.config_path, sources)])[:16]


def _checkpoint(sources: Sequence[Checkpoint], tensors: Mapping[str, Tensor], *, parts: bool = False) -> Checkpoint:
    """A checkpoint that is read like any other. Its names are the keys of `tensors`; each tensor is read by its own.

    Unless it is of `parts`, it also lists the other content of the sources, which a writer of it has to leave out.
    """
    first = sources[0]
    values = {name: value for source in sources for name, value in source.facts.values.items() if not parts}
    problems = tuple(problem for source in sources for problem in source.facts.problems)
    facts = FormatFacts(kind=first.facts.kind, step=first.facts.step, values=values, problems=problems)
    return Checkpoint(
        path=" + ".join(source.path for source in sources),
        format=first.format,
        tensors=tensors,
        layout=first.layout,
        others=[each for source in sources for each in source.others if not parts],
        facts=facts,
        sources=[path for source in sources for path in source.sources],
    )


def _ruled(source: Checkpoint, rules: Sequence[MapRule]) -> Tensors:
    """The rules that match nothing of this source are for another one."""
    tensors = source.by_name()
    names = LeafNames(tensors)
    return mapped(tensors, [rule for rule in rules if names.matching(rule.old[0])])


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which elements of `dtype` are summed."""
    if dtype.kind == "c":
        return np.dtype(np.complex128)
    return np.dtype(np.float64 if dtype.itemsize >= 4 else np.float32)


def _mean(several: Sequence[Tensor], box: Box) -> np.ndarray:
    dtype = several[0].dtype
    total = np.zeros(box.shape, _wide(dtype))
    for tensor in several:
        add_into(total, tensor.read(box))
    total /= len(several)
    with np.errstate(over="ignore", invalid="ignore"):
        return total.astype(dtype)
