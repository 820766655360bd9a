"""From Orbax's save arguments to what a save holds: trees of arrays, and small items, captured now."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostTreeSave, TextLeaf, can_be_stored, host_tree
from ckptkit.durable.orbax.manager import METRICS_ITEM
from ckptkit.model.handler_files import with_file_digests
from ckptkit.model.manifest import STRUCTURE, Manifest
from ckptkit.snapshot.describe import Description, box_array, leaf_path
from ckptkit.snapshot.empty_nodes import empty_nodes
from ckptkit.snapshot.small_items import capture, captured_files, file_leaves
from ckptkit.util.own_context import own_context


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveItems:
    """The content of one save: trees of arrays, and small items that are stored inline, captured now."""

    trees: Mapping[str, Any]
    inline: Mapping[str, Mapping[str, Any]]
    durable: Mapping[str, FilesSave]  # the small items as files
    tree_words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of `host_tree`, for each tree
    custom_metadata: Mapping[str, Any] | None = None  # the step's
    chunk_bytes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)  # asked for, by leaf of a tree
    files: Mapping[str, str] = field(default_factory=dict)  # the trees that are files of a handler, with its name


_NO_LIMIT = 1 << 62

WriteFiles = Callable[[str, Any], FilesSave | None]


def save_items(
    args: Mapping[str, Any],
    *,
    metrics: Any = None,
    custom_metadata: Any = None,
    write_files: WriteFiles = lambda name, arg: None,
    plain: Collection[str] = (),
) -> SaveItems | str:
    """The items of `args` (by name), or the name of one that only Orbax's own handlers can hold.

    `metrics` are those to find again at a restart, or None. `write_files` lets an item's handler write it; None if that
    is left to Orbax. Raises the errors of capturing the caller's values (invalid JSON, for example), and of handlers.
    In the `plain` items, which no handler of the caller's own writes, a leaf that no array on disk can hold is a
    ValueError: Orbax would fail in the background, or drop a mask.
    """
    trees: dict[str, Any] = {}
    inline: dict[str, Mapping[str, Any]] = {}
    durable: dict[str, FilesSave] = {}
    tree_words: dict[str, Mapping[str, Any]] = {}
    chunk_bytes: dict[str, tuple[int | None, ...]] = {}
    written: dict[str, str] = {}

    def take_files(name: str, files: FilesSave) -> None:
        written[name] = files.handler
        if files.is_large:
            inline[name], _ = captured_files(FilesSave(files={}, handler=files.handler))
            trees[name] = file_leaves(files)
        else:
            inline[name], durable[name] = captured_files(files)

    for name, arg in args.items():
        if isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave):
            tree = _held_tree(arg)
            if tree is None:
                if name in plain:
                    _refuse_unstorable(arg)
                return name
            trees[name] = tree
            asked = getattr(arg, "ocdbt_target_data_file_size", None)
            tree_words[name] = {
                "standard": isinstance(arg, ocp.args.StandardSave),
                "custom_metadata": as_it_is(arg.custom_metadata),
                "file_bytes": None if asked is None else asked or _NO_LIMIT,
            }
            if any(wished := _chunk_bytes(arg)):
                chunk_bytes[name] = wished
            # Slots do not hold an item's own metadata: what is made of them later has to know that there was some.
            more = {} if arg.custom_metadata is None else {"custom": True}
            if (empty := empty_nodes(jax.tree_util.tree_structure(tree))) or more:
                inline[name] = {"kind": STRUCTURE, "value": empty, **more}
        elif (captured := capture(arg)) is not None:
            inline[name], durable[name] = captured
        elif (files := write_files(name, arg)) is not None:
            take_files(name, files)
        else:
            return name
    if metrics is not None:
        # As JSON gives them back: manifests sort keys, and in those of a caller a number may be next to text.
        inline[METRICS_ITEM] = {"kind": "metrics", "value": json.loads(json.dumps(metrics))}
    return SaveItems(
        trees=trees,
        inline=inline,
        durable=durable,
        tree_words=tree_words,
        custom_metadata=custom_metadata,
        chunk_bytes=chunk_bytes,
        files={name: handler for name, handler in written.items() if name in trees},
    )


def as_it_is(value: Any) -> Any:
    """Containers of its own for what the caller may change as soon as `save` returns: metrics, custom metadata.

    Each keeps its type (`OrderedDict`, `defaultdict`): `best_fn` gets what the caller gave.
    """
    if isinstance(value, dict):
        own = {} if type(value) is dict else copy.copy(value)
        own.update((name, as_it_is(each)) for name, each in value.items())
        return own
    if isinstance(value, list):
        own = [] if type(value) is list else copy.copy(value)
        own[:] = map(as_it_is, value)
        return own
    if isinstance(value, tuple):
        return getattr(value, "_make", type(value))(map(as_it_is, value))
    return value


def abstract_items(args: Mapping[str, Any]) -> SaveItems | None:
    """The trees of `args` as they would be stored; None where no leaf is a ShapeDtypeStruct.

    Leaves may be `jax.ShapeDtypeStruct`; one without a sharding counts as an array in host memory, whole on every
    process.
    """
    trees = {name: arg for name, arg in args.items() if isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave)}
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for arg in trees.values() for leaf in jax.tree.leaves(arg.item)):
        return None

    def stored(arg: Any) -> Any:
        def of(leaf: Any, wish: Any = None) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                dtype = getattr(wish, "dtype", None)
                leaf = leaf if dtype is None else leaf.update(dtype=dtype)
                return _in_host_memory(leaf) if leaf.sharding is None else leaf
            found = _stored(leaf, wish, isinstance(arg, ocp.args.StandardSave))
            return leaf if found is None else found

        return jax.tree.map(of, arg.item, *([] if arg.save_args is None else [arg.save_args]))

    with own_context():
        held = {name: stored(arg) for name, arg in trees.items()}
    return SaveItems(
        trees=held,
        inline={},
        durable={},
        chunk_bytes={name: wished for name, arg in trees.items() if any(wished := _chunk_bytes(arg))},
    )


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # takes no memory


def _held_tree(arg: Any) -> Any:
    """The tree with the dtypes that it is to be stored in; None where a leaf is nothing that we store.

    Orbax's handlers report the error of a tree that cannot be saved. Casts run on the devices that hold the
    leaf, without collectives.
    """
    is_standard = isinstance(arg, ocp.args.StandardSave)
    leaves, treedef = jax.tree_util.tree_flatten(arg.item)
    no_tree = arg.item is None or (is_standard and treedef.num_nodes == 1 and leaves)
    if no_tree or not _texts_fit(arg.item, leaves):
        return None
    if arg.save_args is None:
        # The step loop waits for this: leaves on a device are told by their type, the few others are looked at.
        on_device = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
        others = [leaf for leaf in leaves if type(leaf) not in on_device]
        if all(_stored(leaf, None, is_standard) is leaf for leaf in others):
            return arg.item
    wishes: list[Any] = [None] * len(leaves)
    if arg.save_args is not None:
        wishes = treedef.flatten_up_to(arg.save_args)
    with own_context():
        stored = [_stored(leaf, wish, is_standard) for leaf, wish in zip(leaves, wishes, strict=True)]
    if any(leaf is None for leaf in stored):
        return None
    return jax.tree_util.tree_unflatten(treedef, stored)


def _chunk_bytes(arg: Any) -> tuple[int | None, ...]:
    """The most bytes that a chunk of each leaf is to have; None where nothing is asked for."""
    if arg.save_args is None:
        return ()
    wishes = jax.tree_util.tree_structure(arg.item).flatten_up_to(arg.save_args)
    return tuple(getattr(wish, "chunk_byte_size", None) for wish in wishes)


def _texts_fit(tree: Any, leaves: Sequence[Any]) -> bool:
    """Whether every text of a tree can be found by its name; a tree that is one text is Orbax's."""
    if not any(isinstance(leaf, str) for leaf in leaves):
        return True
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [".".join(leaf_path(path)[0]) for path, leaf in flat if isinstance(leaf, str)]
    return all(map(can_be_stored, names)) and all(names)


def _stored(leaf: Any, wish: Any, is_standard: bool) -> Any:
    dtype = getattr(wish, "dtype", None)
    if isinstance(leaf, jax.Array):
        return leaf if dtype is None or leaf.dtype == np.dtype(dtype) else leaf.astype(dtype)
    if isinstance(leaf, np.generic) and leaf.dtype.kind in "biuf" and not is_standard:
        leaf = leaf.item()  # Orbax stores and restores it as a number
    if isinstance(leaf, np.ndarray | np.generic):
        if not _is_numeric(leaf.dtype) or isinstance(leaf, np.ma.MaskedArray):
            return None
        return np.asarray(leaf) if dtype is None else np.asarray(leaf).astype(dtype)
    if isinstance(leaf, bool | int | float) and np.asarray(leaf).dtype.kind in "biuf":
        return leaf if dtype is None else np.asarray(leaf).astype(dtype).item()
    if isinstance(leaf, str) and not is_standard:
        return TextLeaf(str(leaf))
    if hasattr(leaf, "__array__") and is_standard:
        return np.asarray(leaf)
    return None


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" or dtype.isbuiltin == 2


def _refuse_unstorable(arg: Any) -> None:
    """Raises ValueError with each leaf that no array on disk can hold, and the call that is right."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(arg.item)
    wishes = [None] * len(flat) if arg.save_args is None else treedef.flatten_up_to(arg.save_args)
    found: dict[str, list[str]] = {}
    for (path, leaf), wish in zip(flat, wishes, strict=True):
        if getattr(wish, "dtype", None) is None and (why := _why_unstorable(leaf)):
            found.setdefault(why, []).append(".".join(leaf_path(path)[0]))
    if found:
        reasons = [f"{', '.join(sorted(names))} ({why})" for why, names in sorted(found.items())]
        raise ValueError(f"these leaves cannot be saved: {'; '.join(reasons)}")


def _why_unstorable(leaf: Any) -> str | None:
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array would lose its mask: save np.ma.getdata(x) and np.ma.getmaskarray(x) as two leaves"
    if isinstance(leaf, int) and np.asarray(leaf).dtype.kind not in "biu":
        return (
            "an integer of more than 64 bits: save it in an item of its own, with ocp.args.JsonSave (so the state of a "
            "NumPy Generator), or with ocp.args.NumpyRandomKeySave (np.random.get_state())"
        )
    if isinstance(leaf, np.ndarray | np.generic) and not isinstance(leaf, str | bytes) and not _is_numeric(leaf.dtype):
        return f"an array of {leaf.dtype}, which is not a number: save numbers, or an item with ocp.args.JsonSave"
    return None


def array_items(
    description: Description,
    manifest: Manifest,
    memory: np.ndarray,
    held: SaveItems,
    on_written: Callable[[], None] = lambda: None,
) -> dict[str, HostTreeSave | FilesSave]:
    """The save arguments of the array items for Orbax's layout. `description` has the place of a box in `memory`."""
    items: dict[str, HostTreeSave | FilesSave] = {}
    manifest = with_file_digests(manifest)
    for item, sources in description.items.items():
        if item in held.files:
            files = {leaf.path[1]: box_array(leaf.boxes[0], leaf, memory) for leaf in manifest.arrays[item]}
            items[item] = FilesSave(files=files, handler=held.files[item])
            continue
        leaves = [
            (leaf, source.holders, {r.box: box_array(r, leaf, memory) for r in leaf.boxes})
            for leaf, source in zip(manifest.arrays[item], sources, strict=True)
        ]
        treedef, words = description.treedefs[item], held.tree_words.get(item, {})
        items[item] = host_tree(leaves, treedef, manifest, item, on_written, **words)
    return items
