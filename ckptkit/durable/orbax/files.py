"""The small files of an Orbax step, as Orbax would write them. Pure: nothing here touches a disk.

Private names of Orbax: `InternalTreeMetadata` and its entries, the names of empty nodes, the step's serialization.
`tests/interop/test_orbax_files.py` fails if they change: it compares every file with stock Orbax's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.metadata import empty_values, step_metadata_serialization, value_metadata_entry
from orbax.checkpoint._src.metadata import tree as orbax_tree
from orbax.checkpoint._src.metadata.pytree_metadata_options import PYTREE_METADATA_OPTIONS
from orbax.checkpoint._src.tree import utils as tree_utils

from ckptkit.durable.orbax.host_shards import STRINGS_FILE, TEXT_TYPE, HostShards
from ckptkit.durable.orbax.partial import names_in
from ckptkit.durable.orbax.shardings import without_devices
from ckptkit.model import paths

_TYPES = {
    HostShards: "jax.Array",
    np.ndarray: "np.ndarray",
    int: "scalar",
    float: "scalar",
    bool: "scalar",
    str: TEXT_TYPE,
}


def tree_files(tree: Any, custom_metadata: Any = None, *, ocdbt: bool = True) -> dict[str, bytes]:
    """The files that describe the whole of a tree, for which see `tree_text`: its structure, and its shardings and
    texts where it has any."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    texts = {".".join(names_in(keypath)): leaf for keypath, leaf in flat if isinstance(leaf, str)}
    files = {paths.TREE_METADATA: tree_text(tree, custom_metadata, ocdbt=ocdbt)}
    if (shardings := shardings_text([leaf for _, leaf in flat if isinstance(leaf, HostShards)])) is not None:
        files[paths.SHARDINGS] = shardings
    if texts:
        files[STRINGS_FILE] = json.dumps(texts)
    return {name: text.encode() for name, text in files.items()}


def tree_text(tree: Any, custom_metadata: Any = None, *, ocdbt: bool = True) -> str:
    """`_METADATA` of a tree whose leaves are `HostShards`, NumPy arrays, numbers and text; `ocdbt`: they are stored in
    one database, and not in a directory each.

    The text for a structure is remembered: a training loop saves the same one again and again.
    """
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    kinds = tuple(_Kind(_typestr(leaf), leaf.record.cell if isinstance(leaf, HostShards) else None) for leaf in leaves)
    try:
        return _tree_text(treedef, kinds, json.dumps(custom_metadata), ocdbt)
    except (TypeError, ValueError):  # a node's own data that has no hash, or cannot be compared
        return _tree_text.__wrapped__(treedef, kinds, json.dumps(custom_metadata), ocdbt)


class _Kind(NamedTuple):
    """The metadata of a leaf: the name of its type, and the cell if ckptkit wrote it."""

    typestr: str
    cell: tuple[int, ...] | None


@lru_cache(maxsize=8)
def _tree_text(treedef: Any, kinds: tuple[_Kind, ...], custom_metadata: str, ocdbt: bool) -> str:
    numbers = jax.tree_util.tree_unflatten(treedef, range(len(kinds)))  # a leaf is the place of its kind
    entries = []
    for keypath, value in jax.tree_util.tree_flatten_with_path(numbers, is_leaf=tree_utils.is_empty_or_leaf)[0]:
        kind = kinds[value] if type(value) is int else _Kind(_typestr(value), None)
        entry = value_metadata_entry.ValueMetadataEntry(
            value_type=kind.typestr,
            skip_deserialize=empty_values.is_empty_typestr(kind.typestr),
            write_shape=kind.cell,
        )
        names = str(tuple(str(tree_utils.get_key_name(key)) for key in keypath))
        entries.append(orbax_tree.InternalTreeMetadataEntry(names, orbax_tree.KeyMetadataEntry.build(keypath), entry))
    metadata = orbax_tree.InternalTreeMetadata(
        tree_metadata_entries=entries,
        use_ocdbt=ocdbt,
        use_zarr3=False,
        custom_metadata=json.loads(custom_metadata),
        store_array_data_equal_to_fill_value=True,
        pytree_metadata_options=PYTREE_METADATA_OPTIONS,
    )
    return json.dumps(metadata.to_json())


def _typestr(value: Any) -> str:
    if (known := _TYPES.get(type(value))) is not None:
        return known
    if empty_values.is_supported_empty_value(value):
        return empty_values.get_empty_value_typestr(value, PYTREE_METADATA_OPTIONS)
    return empty_values.RESTORE_TYPE_NONE  # a named tuple without fields


def process_files(shards: Sequence[HostShards], process: int, sidecar: bytes | None = None) -> dict[str, bytes]:
    """The files that each process of a save puts into an array item: its sidecar, and the metadata of its arrays, which
    has the sign of sidecars. In this order: an item with the sign and without a sidecar is a damaged one."""
    metadatas = _array_metadatas_text(shards, has_sidecar=sidecar is not None)
    files = {} if sidecar is None else {f"{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}": sidecar}
    return files | {f"{paths.ARRAY_METADATAS}/process_{process}": metadatas.encode()}


def _array_metadatas_text(shards: Sequence[HostShards], *, has_sidecar: bool) -> str:
    """`array_metadatas/process_<i>`: without it typed keys come back as plain integers. And the sign of sidecars."""
    # Leaf by leaf: the encoder holds thrice the text in pieces until it has all of it.
    entries = [
        json.dumps(
            {
                "array_metadata": {
                    "param_name": each.record.name,
                    "write_shape": list(each.record.cell),
                    "chunk_shape": list(each.record.cell),
                    "ext_metadata": {"random_key_impl": impl} if (impl := each.record.extra.get("key_impl")) else None,
                }
            }
        )
        for each in shards
    ]
    # Orbax reads the first key. The second records that a sidecar belongs to the item, wherever that is.
    sign = f', "{paths.SIDECAR_SIGN}": true' if has_sidecar else ""
    return f'{{"array_metadatas": [{", ".join(entries)}]{sign}}}'


def shardings_text(shards: Sequence[HostShards]) -> str | None:
    """`_sharding`: what a restore without a template takes; None where no leaf has words for its sharding."""
    shardings = {
        base64.urlsafe_b64encode(each.record.name.encode()).decode(): without_devices(each.record.extra["sharding"])
        for each in shards
        if "sharding" in each.record.extra
    }
    return json.dumps(shardings) if shardings else None


def step_text(handlers: Mapping[str, str], init_ns: int, commit_ns: int, custom_metadata: Any) -> str:
    """`_CHECKPOINT_METADATA`; `handlers` are the names of Orbax's handlers by item."""
    recorded = step_metadata_serialization.serialize(
        ocp.metadata.StepMetadata(  # pyright: ignore[reportAttributeAccessIssue]
            item_handlers=dict(handlers),
            init_timestamp_nsecs=init_ns,
            commit_timestamp_nsecs=commit_ns,
            custom_metadata=dict(custom_metadata or {}),
        )
    )
    return json.dumps(recorded)
