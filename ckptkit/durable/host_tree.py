"""The save arguments of an array item, made of host memory: what each process is to write, and its sidecar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.shards import HostShards
from ckptkit.manifest import LeafRecord, Manifest
from ckptkit.sharding import Box, choose_writers


class StandardTreeSave(ocp.args.PyTreeSave):
    """A tree that the caller saved with `StandardSave`: the step's metadata says so."""


def host_tree(
    leaves: Sequence[tuple[LeafRecord, Mapping[Box, tuple[int, ...]], Mapping[Box, np.ndarray]]],
    treedef: Any,
    manifest: Manifest,
    item: str,
    on_written: Callable[[], None],
    *,
    standard: bool = False,
    custom_metadata: Any = None,
) -> ocp.args.PyTreeSave:
    """The save arguments of one array item: the boxes that this process is to write, and its sidecar.

    `leaves` has for each leaf its record with digests, who holds each box, and this process's blocks. `standard`:
    the caller saved it with `StandardSave`, not `PyTreeSave`; `custom_metadata` is the item's own.
    """
    process = jax.process_index()
    writers = choose_writers([holders for _, holders, _ in leaves], [leaf.itemsize for leaf, _, _ in leaves])
    written = [
        dataclasses.replace(
            leaf,
            boxes=tuple(dataclasses.replace(box, offset=-1) for box in leaf.boxes if chosen.get(box.box) == process),
        )
        for (leaf, _, _), chosen in zip(leaves, writers, strict=True)
    ]
    sidecar = dataclasses.replace(manifest, slot="", arrays={item: tuple(written)}).to_bytes()
    values = [
        HostShards(
            record=leaf,
            blocks=[(box.box, blocks[box.box]) for box in leaf.boxes if box.box.size],
            sidecar=sidecar,
            on_written=on_written,
        )
        if leaf.kind == "jax"
        else _plain_value(leaf, next(iter(blocks.values())))
        for leaf, (_, _, blocks) in zip(written, leaves, strict=True)
    ]
    kind = StandardTreeSave if standard else ocp.args.PyTreeSave
    return kind(jax.tree_util.tree_unflatten(treedef, values), custom_metadata=custom_metadata)


def _plain_value(leaf: LeafRecord, block: np.ndarray) -> Any:
    return block if leaf.kind == "numpy" else block.item()
