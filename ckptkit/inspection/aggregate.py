"""The file in which old versions of Orbax kept a tree: its structure, and the leaves that are not arrays of their own.

Orbax restores such a leaf from this file, whatever else describes it. For the others the file has a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from ckptkit.durable.lifecycle.places import Place, readable
from ckptkit.errors import BeyondLimitError
from ckptkit.model import paths
from ckptkit.model.leaf_info import LeafInfo, dtype_name
from ckptkit.store import open_store

FILE_BYTES_MAX: Final = 1 << 30  # it is read whole
_PLACEHOLDERS: Final = ("PLACEHOLDER://", "AGGREGATED://")
_CHUNKED: Final = "__msgpack_chunked_array__"  # an array of more than 1 GiB
_DEPTH_MAX: Final = 64
_LEAVES_MAX: Final = 1 << 20
_NDARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4  # the codes of Orbax and Flax for what msgpack does not have

Path = tuple[str, ...]


def read_aggregate(item: Place, *, timeout_s: float) -> dict[Path, np.ndarray | LeafInfo] | None:
    """The leaves in an item's file: an array for each number and array, a `LeafInfo` without dtype for text, None and
    empty containers; a placeholder is not a leaf. None without such a file. Cost: the file is read, and held.

    Raises `BeyondLimitError` for a file that is too large to be held, `CorruptCheckpointError` for a damaged one.
    """
    if paths.AGGREGATE not in item.signs():
        return None
    where = f"{item.url}/{paths.AGGREGATE}"
    store = open_store(item.url, deadline_s=timeout_s)
    found = store.stat(paths.AGGREGATE)
    if found is not None and found.size_bytes > FILE_BYTES_MAX:
        raise BeyondLimitError(
            f"{where} has {found.size_bytes} bytes, and at most {FILE_BYTES_MAX} of a tree in one file are read: "
            "restore it with Orbax and save it again",
            path=where,
        )
    with readable(where):
        leaves = dict(islice(_leaves(_unpacked(store.get(paths.AGGREGATE)), ()), _LEAVES_MAX + 1))
        if len(leaves) > _LEAVES_MAX:
            raise ValueError(f"more than {_LEAVES_MAX} leaves")
        return leaves


class _Packed(NamedTuple):
    """A tuple that is not unpacked yet: done from within msgpack, deep ones would take the whole stack of the
    process."""

    data: bytes


def _unpacked(data: bytes) -> Any:
    limits = {"max_array_len": _LEAVES_MAX, "max_map_len": _LEAVES_MAX}
    return msgpack.unpackb(data, ext_hook=_extension, raw=False, strict_map_key=False, **limits)


def _extension(code: int, data: bytes) -> Any:
    if code in (_NDARRAY, _SCALAR):
        shape, dtype, buffer = msgpack.unpackb(data, raw=False)
        return np.frombuffer(buffer, dtype_name(dtype)).reshape(shape)
    if code == _COMPLEX:
        return complex(*msgpack.unpackb(data))
    if code == _TUPLE:
        return _Packed(data)
    raise ValueError(f"an extension {code}, which Orbax does not write")


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, np.ndarray | LeafInfo]]:
    if len(path) > _DEPTH_MAX:
        raise ValueError(f"containers are nested more than {_DEPTH_MAX} deep")
    if isinstance(value, _Packed):
        value = _unpacked(value.data)
        if isinstance(value, _Packed):
            raise ValueError("a tuple is packed twice")
    if isinstance(value, Mapping) and _CHUNKED in value:
        yield path, _joined(value)
    elif isinstance(value, Mapping | list) and value:
        for name, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(below, (*path, str(name)))
    elif isinstance(value, Mapping | list):
        yield path, LeafInfo(path=path, kind="Dict" if isinstance(value, Mapping) else "List")
    elif isinstance(value, np.ndarray | bool | int | float | complex):
        yield path, np.asarray(value)
    elif not (isinstance(value, str) and value.startswith(_PLACEHOLDERS)):
        yield path, LeafInfo(path=path, kind="None" if value is None else "string")


def _joined(chunked: Mapping[str, Any]) -> np.ndarray:
    shape, chunks = chunked["shape"], chunked["chunks"]
    flat = np.concatenate([chunks[str(at)] for at in range(len(chunks))])
    return flat.reshape([shape[str(at)] for at in range(len(shape))])
