"""Estimates the cost of a durable save, of a state or of a checkpoint's contents, before anything is written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.diagnosis.tuner.forecasting import SaveForecast, forecast
from ckptkit.errors import CheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.model.boxes import Box, boxes_by_process, cell_shape
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.store.backends import properties_of
from ckptkit.store.roots import root_url

_CELLS_MAX = 10_000_000  # of a leaf: a forecast takes 10 microseconds of each


def explain(
    directory: str | os.PathLike[str],
    args: Any,
    *,
    durable: DurableProfile = DurableProfile(),  # noqa: B008  frozen
    processes: int | None = None,
    unchanged: Sequence[str] = (),
) -> SaveForecast:
    """Estimates the cost of saving `args` to the durable root: files, requests, bytes, peak memory. No I/O.

    Leaves that match a pattern of `unchanged` (`["base.*"]`) have the bytes of the two saves before, and are not
    written again (`shared_bytes`). The estimate takes all other leaves as changed.
    `args` are those of `CheckpointManager.save` (`StandardSave`, `PyTreeSave`, `JsonSave`, `Composite`) or a tree;
    leaves may be abstract (`jax.ShapeDtypeStruct`), with the shardings that they will have. `processes` is the number
    of processes of the job (default: this one's). Raises TypeError for an item that is neither arrays nor JSON,
    because Orbax writes it.
    """
    items = dict(args.items()) if isinstance(args, ocp.args.Composite) else {"default": args}
    trees, json_items = {}, 0
    for name, item in items.items():
        if isinstance(item, ocp.args.JsonSave):
            json_items += 1
        elif isinstance(item, ocp.args.CheckpointArgs) and not isinstance(
            item, ocp.args.StandardSave | ocp.args.PyTreeSave
        ):
            raise TypeError(f"item {name!r} is {type(item).__name__}, which Orbax's own handler writes as it likes")
        else:
            tree = item.item if isinstance(item, ocp.args.StandardSave | ocp.args.PyTreeSave) else item
            trees[name] = [_record(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return forecast(
        trees,
        durable,
        remote=properties_of(root_url(directory)).round_trips,
        json_items=json_items,
        processes=processes or jax.process_count(),
        unchanged=unchanged,
    )


def explain_checkpoint(
    directory: str | os.PathLike[str],
    like: str,
    *,
    durable: DurableProfile = DurableProfile(),  # noqa: B008  frozen
    processes: int = 1,
    unchanged: Sequence[str] = (),
    timeout_s: float = 20.0,
) -> SaveForecast:
    """Estimates the cost of saving the contents of the checkpoint `like`, of any format. Reads its metadata.

    `unchanged` as of `explain`.

    Its chunks are taken as the cells; without chunks, each leaf is one box. Raises what `open_checkpoint` raises, and
    `CheckpointError` for a leaf of more than 10 million cells: a damaged shape would take all memory.
    """
    items: dict[str, list[LeafRecord]] = {}
    with open_checkpoint(like, timeout_s=timeout_s) as opened:
        for tensor in opened.tensors:
            cell = tensor.leaf.cell or cell_shape(tensor.shape, tensor.shape, tensor.dtype.itemsize)
            count = math.prod(-(-size // step) for size, step in zip(tensor.shape, cell, strict=True))
            if count > _CELLS_MAX:
                raise CheckpointError(
                    f"{like}: leaf {tensor.name} has {count} chunks, and a forecast counts at most {_CELLS_MAX} of a "
                    "leaf; check the checkpoint with `ckptkit verify`",
                    path=like,
                )
            items.setdefault(tensor.item, []).append(_whole(tensor.name, tensor.shape, tensor.dtype, tuple(cell)))
    remote = properties_of(root_url(directory)).round_trips
    return forecast(items, durable, remote=remote, processes=processes, unchanged=unchanged)


def _record(path: Any, leaf: Any) -> LeafRecord:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    shape, dtype, sharding = tuple(array.shape), np.dtype(array.dtype), getattr(array, "sharding", None)
    if sharding is None:
        return _whole(name, shape, dtype, cell_shape(shape, shape, dtype.itemsize) if hasattr(leaf, "dtype") else shape)
    boxes = list(boxes_by_process(sharding, shape))
    cell = cell_shape(shape, boxes[0].shape, dtype.itemsize)
    return _leaf(name, shape, dtype, cell, boxes)


def _whole(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], cell: tuple[int, ...]) -> LeafRecord:
    return _leaf(name, shape, dtype, cell, [Box.whole(shape)])


def _leaf(
    name: str, shape: tuple[int, ...], dtype: np.dtype[Any], cell: tuple[int, ...], boxes: list[Box]
) -> LeafRecord:
    records = tuple(BoxRecord(box=box, offset=-1, digests=()) for box in boxes)
    return LeafRecord(path=(name,), keys="", kind="jax", shape=shape, dtype=dtype.name, cell=cell, boxes=records)
