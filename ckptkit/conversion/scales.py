"""Which leaf has the scales of a quantised one, which of its values share a scale, and how it becomes floats again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ckptkit.conversion.leaf_patterns import without_nnx_leaf
from ckptkit.conversion.quantized_values import block_that_fits, blocks_of_scales, blocks_text
from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import CheckpointError
from ckptkit.formats.tensors import Checkpoint, Tensor
from ckptkit.model.manifest import describe
from ckptkit.util.words import command_line

CONFIG = "config.json"  # of Hugging Face's models
SCALE = "_scale"
_SUFFIXES = (SCALE, "_scale_inv")  # the second is that of models whose `quant_method` is `fp8`; it is multiplied too
_FP8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz)
_QUANTISED = frozenset(map(np.dtype, (np.int8, *_FP8)))


def scale_name(name: str, suffix: str = SCALE) -> str:
    """The name of the leaf with the scales of a leaf; NNX's last `value` stays the last."""
    short = without_nnx_leaf(name)
    return short + suffix + name[len(short) :]


def scale_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The leaf with the scales of a leaf of int8 or float8; None if it has none, and its values mean themselves."""
    if tensors[name].dtype not in _QUANTISED:
        return None
    return next((scale for suffix in _SUFFIXES if (scale := scale_name(name, suffix)) in tensors), None)


def scaled_text(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Words for a message that a leaf is quantised; None if it is not."""
    scale = scale_of(name, tensors)
    return None if scale is None else f"{name} is quantised: its scale is {scale}"


def plain_advice(sources: Sequence[Checkpoint]) -> str:
    """The commands that write these checkpoints as floats, each into the working directory."""
    if any(source.path not in source.sources for source in sources):  # one that was put together of several
        return "Give the weights back as float32 first: `ckptkit convert --quantize none` of the checkpoint with them"
    commands = " and ".join(f"`{_plain_command(source)}`" for source in sources)
    return f"Give the weights back as float32 first: {commands}"


def _plain_command(source: Checkpoint) -> str:
    name = source.path.rstrip("/").rpartition("/")[2]
    if source.facts.kind != "file":
        to, target = "hf" if source.facts.kind == "directory" else "orbax", f"{name}-float32"
    else:
        to = source.format if source.format in ("npz", "torch") else "safetensors"
        target = f"{name.rpartition('.')[0] or name}-float32.{to}"
    return command_line("convert", source.path, target, "--to", to, "--quantize", "none")


def model_config(source: Checkpoint, timeout_s: float) -> dict[str, Any]:
    """Hugging Face's `config.json` of a directory, or next to a source of another kind; empty if there is none."""
    place = Place.open(config_directory(source), timeout_s=timeout_s)
    text = place.read(CONFIG)
    try:
        found = json.loads(text or b"{}")
        return dict(found.items())
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{place.url}/{CONFIG} cannot be used: {error}", path=source.path) from error


def config_directory(source: Checkpoint) -> str:
    """Where `config.json` of a source is looked for."""
    path = source.path.rstrip("/")
    parent = path.rpartition("/")[0] or "/"
    return path if source.facts.kind == "directory" or parent.endswith(":/") else parent  # `gs://bucket` has none


def config_blocks(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The blocks of rows and columns that share a scale by a `quantization_config`; none where it has none.

    `weight_block_size` is that of `quant_method` fp8, `block_structure` and `group_size` those of compressed-tensors.
    """
    described = config.get("quantization_config")
    return list(dict.fromkeys(_blocks(described))) if isinstance(described, dict) else []


def _blocks(described: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    groups = described.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    for each in (described, *(each for each in weights if isinstance(each, dict))):
        for found in (each.get("weight_block_size"), each.get("block_structure"), [1, each.get("group_size")]):
            sizes = found.split("x") if isinstance(found, str) else found
            if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdecimal() for size in sizes):
                rows, columns = map(int, sizes)
                if rows and columns:
                    yield rows, columns


def block_of(
    name: str, values: Tensor, scale: str, scales: Tensor, known: Sequence[tuple[int, int]], where: str
) -> tuple[int, ...]:
    """The values that share a scale, along each dimension: one of the `known` blocks, or the only one that fits.

    Raises `CheckpointError` for scales that fit no block, and for those that fit several. `where` is the directory in
    which a configuration was looked for.
    """
    fitting = [block for each in known if (block := block_that_fits(values.shape, scales.shape, each)) is not None]
    fitting = list(dict.fromkeys(fitting)) or blocks_of_scales(values.shape, scales.shape)
    if len(fitting) == 1:
        return fitting[0]
    its = f"{scale} is {describe(scales.dtype.name, scales.shape)}"
    of = f"{name}, {describe(values.dtype.name, values.shape)}"
    if not fitting:
        raise CheckpointError(f"{its}: its dimensions do not divide those of {of}")
    raise CheckpointError(
        f"{its}: its scales may be of {blocks_text(fitting)} of {of}. Put the model's {CONFIG} into {where}, or one "
        'with the right block: {"quantization_config": {"weight_block_size": [ROWS, COLUMNS]}}'
    )


def per_block(scales: Tensor, ndim: int) -> Tensor:
    """The scales with a dimension for each of the weight's: one scale of a whole tensor is often stored without."""
    if math.prod(scales.shape) != 1 or len(scales.shape) == ndim:
        return scales
    shape = (1,) * ndim
    leaf = replace(scales.leaf, shape=shape, cell=None)
    return Tensor(
        item=scales.item, leaf=leaf, fetch=lambda box: scales.read().reshape(shape)[box.slices()], sources=(scales,)
    )
