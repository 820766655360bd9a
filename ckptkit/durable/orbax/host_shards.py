"""This process's part of an array item: leaves in host memory, as the writer of steps takes them.

Orbax keeps all text of an item in one JSON file next to its arrays; a manifest keeps it among the nodes without leaves.
So a text is a node here (`TextLeaf`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.model.boxes import Box, cells_before, cells_of, choose_writers
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest

STRINGS_FILE = "_strings.json"
TEXT_TYPE = "string"  # in Orbax's `_METADATA`


@final
@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class TextLeaf:
    """A text as a node without children, so that code for the arrays of a tree skips it."""

    value: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """See `jax.tree_util.register_pytree_node_class`."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: str, _: Any) -> TextLeaf:
        """See `jax.tree_util.register_pytree_node_class`."""
        return cls(value)


def is_text_leaf(node: Any) -> bool:
    """For `is_leaf` of `jax.tree.map`."""
    return isinstance(node, TextLeaf)


def with_plain_text(tree: Any, of_leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A tree in which each `TextLeaf` is its text again, and other leaves are what `of_leaf` makes of them."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_text_leaf)  # half the time of a map
    return treedef.unflatten([node.value if is_text_leaf(node) else of_leaf(node) for node in nodes])


def can_be_stored(name: str) -> bool:
    """Whether Orbax finds a text by the name of its leaf: it is a pointer into JSON, in which two characters differ."""
    return "/" not in name and "~" not in name


@dataclass(eq=False, slots=True, kw_only=True)
class HostShards:
    """The boxes of one leaf that this process writes: disjoint over all processes, whole cells each.

    `blocks` are views of host memory that must not change until the save has finished.
    """

    record: LeafRecord
    blocks: list[tuple[Box, np.ndarray]]


def shards_of(tree: Any) -> list[HostShards]:
    """The leaves of a tree that are `HostShards`, in its order."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, HostShards)]


@dataclass(frozen=True, slots=True)
class HostTreeSave:
    """A tree of host memory. `sidecar` is what this process records of the whole item; `on_written` is called once the
    item's bytes are written, and before the step is committed. Every process has to give the same `of_one_process`."""

    item: Any
    handler: str = ocp.PyTreeCheckpointHandler.typestr()  # of Orbax, that reads the item
    custom_metadata: Any = None
    sidecar: bytes | None = None
    on_written: Callable[[], None] = lambda: None
    data_file_bytes: int | None = None  # instead of `DurableProfile.data_file_bytes`
    of_one_process: tuple[tuple[str, int], ...] = ()  # jax leaves that one process alone holds, with that process


def host_tree(
    leaves: Sequence[tuple[LeafRecord, Mapping[Box, tuple[int, ...]], Mapping[Box, np.ndarray]]],
    treedef: Any,
    manifest: Manifest,
    item: str,
    on_written: Callable[[], None],
    *,
    standard: bool = False,
    custom_metadata: Any = None,
    file_bytes: int | None = None,
) -> HostTreeSave:
    """The save arguments of one array item: the boxes that this process is to write, and its sidecar.

    `leaves` has for each leaf its record with digests, who holds each box, and this process's blocks. `standard`:
    the caller saved it with `StandardSave`, not `PyTreeSave`; `custom_metadata` is the item's own, and `file_bytes` the
    size of its data files.
    """
    process = jax.process_index()
    records = [leaf for leaf, _, _ in leaves]
    writers = choose_writers(
        [holders for _, holders, _ in leaves], [leaf.itemsize for leaf in records], [leaf.cell for leaf in records]
    )
    mine = [
        [(box, part) for box in leaf.boxes for part, writer in chosen.get(box.box, ()) if writer == process]
        for leaf, chosen in zip(records, writers, strict=True)
    ]
    written = [
        dataclasses.replace(leaf, boxes=tuple(_part_of(leaf, box, part) for box, part in parts))
        for leaf, parts in zip(records, mine, strict=True)
    ]
    sidecar = dataclasses.replace(manifest, slot="", arrays={item: tuple(written)}).to_bytes()
    values = [
        HostShards(
            record=leaf,
            blocks=[(part, blocks[box.box][part.slices(box.box.start)]) for box, part in parts if part.size],
        )
        if leaf.kind == "jax"
        else _plain_value(leaf, next(iter(blocks.values())))
        for leaf, parts, (_, _, blocks) in zip(written, mine, leaves, strict=True)
    ]
    kind = ocp.StandardCheckpointHandler if standard else ocp.PyTreeCheckpointHandler
    tree = with_plain_text(jax.tree_util.tree_unflatten(treedef, values))
    alone = tuple(
        (leaf.name, next(iter(who))[0])
        for leaf, holders, _ in leaves
        if leaf.kind == "jax" and len(who := set(holders.values())) == 1 and len(next(iter(who))) == 1
    )
    return HostTreeSave(
        tree,
        handler=kind.typestr(),
        custom_metadata=custom_metadata,
        sidecar=sidecar,
        on_written=on_written,
        of_one_process=alone,
        data_file_bytes=file_bytes,
    )


def _part_of(leaf: LeafRecord, box: BoxRecord, part: Box) -> BoxRecord:
    """The record of a part of a box (`choose_writers`), in no slot."""
    first = cells_before(box.box, part, leaf.cell)
    return BoxRecord(box=part, offset=-1, digests=box.digests[first : first + len(cells_of(part, leaf.cell))])


def _plain_value(leaf: LeafRecord, block: np.ndarray) -> Any:
    return block if leaf.kind == "numpy" else block.item()
