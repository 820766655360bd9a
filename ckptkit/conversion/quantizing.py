"""`convert --quantize`: weights as int8 or float8 with scales, as Hugging Face's tools read them, and back.

The names and `quantization_config` are those of the format `compressed-tensors`: `X.weight` with `X.weight_scale`. A
Flax kernel has its scales in `kernel_scale`. Nothing is held of a weight but the block that is read, and its scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

import numpy as np

from ckptkit.conversion.leaf_patterns import without_nnx_leaf
from ckptkit.conversion.mapping import LeafNames, Tensors, is_floating
from ckptkit.conversion.quantized_values import (
    LeafError,
    Quantized,
    dequantize,
    error_of,
    quantize,
    scales_for,
    spread,
)
from ckptkit.conversion.scales import SCALE, block_of, per_block, scale_name, scale_of
from ckptkit.errors import CheckpointError, StepNotFoundError
from ckptkit.formats.tensors import Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.model.manifest import describe

_PART = 1 << 18  # elements that are made wide at once
# Embeddings and the head stay as they are by default, as in the recipes of the public tools.
_LEFT_OUT = re.compile(r"embed|(?:^|[._])(?:wte|wpe|shared|lm_head|head)(?:[._]|$)")
_EMBEDDING = re.compile(r"embed|(?:^|[._])(?:wte|wpe)(?:[._]|$)")
# An optimizer's state, whose leaves have the names of the weights that they are about.
_OPTIMIZER = frozenset({"opt_state", "optimizer", "mu", "nu", "trace", "moments"})
_WORDS = re.compile(r"(?:(?P<pattern>.+)=)?(?P<to>int8|fp8|none)(?::(?P<rows>[1-9]\d{0,6})x(?P<columns>[1-9]\d{0,6}))?")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are written: `to` is a narrow dtype, or `none`, which gives weights back from values and scales.

    One scale for each output channel, or for each `block` of (rows, columns). `pattern` names the weights. Without it:
    every leaf `weight` and `kernel` of two dimensions that is neither an embedding nor the head, nor of an optimizer.
    """

    to: Quantized | Literal["none"]
    block: tuple[int, int] | None = None
    pattern: str | None = None

    @classmethod
    def of_words(cls, words: str) -> Quantization:
        """From `[PATTERN=]int8`, `fp8:128x128` or `none`. Raises ValueError for anything else."""
        match = _WORDS.fullmatch(words)
        if match is None or (match["to"] == "none" and (match["rows"] or match["pattern"])):
            raise ValueError(f"{words!r} is not none, or [PATTERN=]int8 or fp8, with :ROWSxCOLUMNS for blocks")
        to: Any = match["to"]
        block = (int(match["rows"]), int(match["columns"])) if match["rows"] else None
        return cls(to, block, match["pattern"])

    def __str__(self) -> str:
        block = f":{self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.pattern}={self.to}{block}" if self.pattern else f"{self.to}{block}"


@final
class Weight:
    """One weight that is quantised while it is read.

    Cost: the weight is read twice, the first time for all its scales. They stay in `kept`, which the weights of a
    conversion share and which holds those of one. The error is known once every element was read.
    """

    def __init__(
        self,
        source: Tensor,
        dtype: np.dtype[Any],
        block: tuple[int, ...],
        memory_bytes: int,
        kept: dict[Weight, np.ndarray],
    ):
        self._source = source
        self._dtype = dtype
        self._block = block
        self._memory_bytes = memory_bytes
        self._kept = kept
        self._read = 0
        self._squares = self._lost_squares = self._max_abs = 0.0

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of the scales: one scale for each block."""
        return tuple(size // rows for size, rows in zip(self._source.shape, self._block, strict=True))

    def values(self, box: Box) -> np.ndarray:
        """A box of the quantised weight."""
        all_scales, weights = self._all_scales(), self._source.read(box)
        values = np.empty(box.shape, self._dtype)
        for part in _parts(box):
            of_box = part.slices(box.start)
            scales = spread(all_scales, self._block, part.start, part.stop)
            values[of_box] = quantize(weights[of_box], scales, self._dtype)
            self._measure(weights[of_box], dequantize(values[of_box], scales))
        return values

    def scales(self, box: Box) -> np.ndarray:
        """A box of the scales."""
        return self._all_scales()[box.slices()]

    @property
    def error(self) -> LeafError | None:
        """None if a part of the weight was not read, or was read twice: an interrupted run has written the rest."""
        if self._read != math.prod(self._source.shape):
            return None
        return error_of(self._squares, self._lost_squares, self._max_abs)

    def _measure(self, weights: np.ndarray, restored: np.ndarray) -> None:
        np.subtract(weights, restored, out=restored, casting="same_kind", dtype=np.float32)
        self._read += weights.size
        self._max_abs = max(self._max_abs, float(np.abs(restored).max(initial=0.0)))
        self._lost_squares += float(np.square(restored).sum(dtype=np.float64))
        self._squares += float(np.square(weights.astype(np.float32)).sum(dtype=np.float64))

    def _all_scales(self) -> np.ndarray:
        if self not in self._kept:
            self._kept.clear()
            self._kept[self] = scales_for(self._largest(), self._dtype)
        return self._kept[self]

    def _largest(self) -> np.ndarray:
        largest = np.zeros(self.scales_shape, np.float32)
        for box in self._source.blocks(self._memory_bytes):
            weights = self._source.read(box)
            for part in _parts(box):
                found = np.abs(weights[part.slices(box.start)].astype(np.float32))
                places = []
                for axis, (size, low, high) in enumerate(zip(self._block, part.start, part.stop, strict=True)):
                    edges = [low, *range((low // size + 1) * size, high, size)]
                    found = np.maximum.reduceat(found, [edge - low for edge in edges], axis=axis)
                    places.append(slice(low // size, low // size + len(edges)))
                known = largest[tuple(places)]
                np.maximum(known, found, out=known)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                f"{self._source.name} has values that are not finite in float32; leave it out with a pattern"
            )
        return largest


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """The weights of a conversion by name, and the content of Hugging Face's `config.json` next to them, if any."""

    by_name: Mapping[str, Weight]
    config: Mapping[str, Any] | None

    @property
    def errors(self) -> dict[str, LeafError | None]:
        """The error of each quantised leaf, once it is written; None where an interrupted run has written a part."""
        return {name: weight.error for name, weight in self.by_name.items()}


def quantized(
    tensors: Tensors, wanted: Quantization, dtype: np.dtype[Any], memory_bytes: int, *, for_hf: bool
) -> tuple[dict[str, Tensor], dict[str, Weight]]:
    """The tensors with the wanted weights as `dtype`, each followed by its scales.

    Raises `StepNotFoundError` if no leaf is a weight or matches the pattern, `CheckpointError` for a weight that the
    blocks do not divide, and (`for_hf`) one that Hugging Face's tools would not read.
    """
    names = _chosen(tensors, wanted)
    weights: dict[str, Weight] = {}
    kept: dict[Weight, np.ndarray] = {}
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in names:
            made[name] = tensor
            continue
        _require_weight(name, tensor, for_hf=for_hf)
        scale = scale_name(name)
        if (other := scale_of(name, tensors) or scale) in tensors:
            raise CheckpointError(f"{other} exists already: is {name} quantised? Give --quantize none first")
        weight = weights[name] = Weight(tensor, dtype, _block(name, tensor, wanted), memory_bytes, kept)
        made[name] = replace(
            tensor,
            leaf=replace(tensor.leaf, dtype=dtype.name),
            fetch=weight.values,
            stored=None,
            sources=(tensor,),
        )
        leaf = LeafInfo(
            path=_scale_path(name, tensor), kind=tensor.leaf.kind, dtype="float32", shape=weight.scales_shape
        )
        made[scale] = Tensor(item=tensor.item, leaf=leaf, fetch=weight.scales, sources=(tensor,))
    return made, weights


def dequantized(
    tensors: Tensors, blocks: Sequence[tuple[int, int]] = (), where: str = "its directory"
) -> dict[str, Tensor]:
    """The tensors with every pair of values and scales as one float32 weight.

    `blocks` are those of the model's configuration (see `config_blocks`), which is looked for in `where`. Raises
    `StepNotFoundError` if there is no such pair, `CheckpointError` for scales that fit no block of their weight, or
    several, and for a zero point.
    """
    pairs = {name: scale for name in tensors if (scale := scale_of(name, tensors)) is not None}
    if not pairs:
        raise StepNotFoundError(
            "--quantize none: no leaf of int8 or float8_e4m3fn has its scales in a leaf of the same name and _scale"
        )
    left_out = set(pairs.values())
    made = {}
    for name, tensor in tensors.items():
        if name in pairs:
            if (zero := name + "_zero_point") in tensors:
                raise CheckpointError(f"{name} has a zero point ({zero}), and only symmetric weights are read")
            scales = tensors[pairs[name]]
            block = block_of(name, tensor, pairs[name], scales, blocks, where)
            fetch = partial(_restored, tensor, per_block(scales, len(block)), block)
            made[name] = Tensor(
                item=tensor.item, leaf=replace(tensor.leaf, dtype="float32"), fetch=fetch, sources=(tensor, scales)
            )
        elif name not in left_out:
            made[name] = tensor
    return made


def optimizer_leaves(tensors: Tensors, wanted: Quantization) -> list[str]:
    """The leaves that only their place in an optimizer's state keeps from being quantised."""
    if wanted.pattern is not None or wanted.to == "none":
        return []
    return [name for name, tensor in tensors.items() if _is_weight(tensor, name) and _is_of_optimizer(tensor, name)]


def quantization_config(tensors: Tensors, weights: Collection[str], wanted: Quantization) -> dict[str, Any]:
    """The `quantization_config` of Hugging Face's `config.json` for these weights; activations are not quantised."""
    strategy: dict[str, Any] = {"strategy": "channel"}
    if wanted.block is not None:
        is_group = wanted.block[0] == 1
        strategy = {"strategy": "group", "group_size": wanted.block[1]}
        strategy = strategy if is_group else {"strategy": "block", "block_structure": list(wanted.block)}
    kind = "int" if wanted.to == "int8" else "float"
    others = [name for name, tensor in tensors.items() if name not in weights and name.endswith(".weight")]
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": f"{kind}-quantized",  # without, int8 weights are expected to be packed
                "weights": {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, **strategy},
            }
        },
        "ignore": [name.removesuffix(".weight") for name in others if len(tensors[name].shape) == 2],
    }


def _restored(values: Tensor, scales: Tensor, block: tuple[int, ...], box: Box) -> np.ndarray:
    """A box of a weight from its values and scales."""
    low = tuple(a // size for a, size in zip(box.start, block, strict=True))
    high = tuple(-(-b // size) for b, size in zip(box.stop, block, strict=True))
    high = tuple(max(a, b) for a, b in zip(low, high, strict=True))
    of_scales, of_values = scales.read(Box(low, high)), values.read(box)
    made = np.empty(box.shape, np.float32)
    for part in _parts(box):
        of_box = part.slices(box.start)
        each = spread(of_scales, block, part.start, part.stop, origin=low)
        made[of_box] = dequantize(of_values[of_box], each)
    return made


def _parts(box: Box) -> Iterator[Box]:
    """The box in whole rows, with so few elements that temporary arrays are small."""
    rows = max(1, _PART // max(1, math.prod(box.shape[1:])))
    for low in range(box.start[0], box.stop[0], rows):
        yield Box((low, *box.start[1:]), (min(low + rows, box.stop[0]), *box.stop[1:]))


def _scale_path(name: str, tensor: Tensor) -> tuple[str, ...]:
    path = tensor.leaf.path if tensor.name == name else tuple(name.split("."))
    last = len(path) - (2 if without_nnx_leaf(name) != name else 1)
    return (*path[:last], path[last] + SCALE, *path[last + 1 :])


def _chosen(tensors: Tensors, wanted: Quantization) -> set[str]:
    if wanted.pattern is None:
        found = {name for name in tensors if _is_weight(tensors[name], name)}
        chosen = {name for name in found if not _is_of_optimizer(tensors[name], name)}
        if not chosen:
            but = " except in an optimizer's state" * bool(found)
            raise StepNotFoundError(
                f"--quantize {wanted}: no leaf `weight` or `kernel` has two dimensions{but}; name them"
            )
        return chosen
    found = {
        name
        for name in LeafNames(tensors).matching(wanted.pattern)
        if is_floating(tensors[name]) and len(tensors[name].shape) >= 2
    }
    if not found:
        raise StepNotFoundError(f"--quantize {wanted} matches no floating-point leaf of two dimensions or more")
    return found


def _is_weight(tensor: Tensor, name: str) -> bool:
    last = without_nnx_leaf(name).rpartition(".")[2]
    fits = last in ("weight", "kernel") and len(tensor.shape) == 2 and is_floating(tensor)
    return fits and not _LEFT_OUT.search(name)


def _is_of_optimizer(tensor: Tensor, name: str) -> bool:
    return not _OPTIMIZER.isdisjoint([tensor.item, *name.split(".")[:-1]])


def _require_weight(name: str, tensor: Tensor, *, for_hf: bool) -> None:
    if tensor.dtype.kind == "c" or not all(tensor.shape):
        raise CheckpointError(f"{name} is {describe(tensor.dtype.name, tensor.shape)}, which cannot be quantised")
    if for_hf and (not name.endswith(".weight") or len(tensor.shape) != 2 or _EMBEDDING.search(name)):
        raise CheckpointError(
            f"{name} is {describe(tensor.dtype.name, tensor.shape)}: Hugging Face's tools read quantised weights of "
            "linear layers alone, named X.weight and of two dimensions; rename it with --map, or leave it out"
        )


def _block(name: str, tensor: Tensor, wanted: Quantization) -> tuple[int, ...]:
    """The elements that share a scale: all but the output channel's axis, which is the last of a Flax kernel."""
    shape = tensor.shape
    if wanted.block is None:
        is_kernel = without_nnx_leaf(name).rpartition(".")[2] == "kernel"
        return (*shape[:-1], 1) if is_kernel else (1, *shape[1:])
    block = (*(1,) * (len(shape) - 2), *wanted.block)
    if any(size % rows for size, rows in zip(shape, block, strict=True)):
        raise CheckpointError(
            f"{name} is {describe(tensor.dtype.name, shape)}, which blocks of {wanted.block[0]}x{wanted.block[1]} do "
            "not divide; choose others, or leave it out with a pattern"
        )
    return block
