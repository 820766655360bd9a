"""torch's zip archives, read without torch: a pickle that is read, never executed, and a member per storage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ckptkit.durable.lifecycle.places import readable
from ckptkit.errors import CheckpointError
from ckptkit.formats.dtypes import TORCH, checked_shape, noted
from ckptkit.formats.pickles import Rebuilt, UnsupportedValueError, unpickled
from ckptkit.formats.ranges import METADATA_BYTES_MAX, Ranges, fetch_strided, ranges_to_keep
from ckptkit.formats.tensors import DEPTH_MAX, LEAVES_MAX, Checkpoint, FormatFacts, Tensor
from ckptkit.formats.zips import EntryRanges, ZipEntry, read_entries
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.model.manifest import describe

PICKLE = "data.pkl"
NOTES = "ckptkit.json"  # a member with the notes of `formats.dtypes`, which torch does not look at
_NODES_MAX = LEAVES_MAX
_REPEATED_BYTES_MAX = 1 << 30  # of all views together, beyond what is stored: a file of 1 KiB must not fill a disk
_REPEATED_TIMES_MAX = 16  # what is stored, where that is more: layers that share their weights
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
STORAGE_OF = {name: kind for kind, name in _STORAGES.items() if kind != "UntypedStorage"}


def open_torch(path: str) -> Checkpoint:
    """A file of `torch.save`. Cost: the archive's directory, its pickle, and a small read per storage.

    Raises `CheckpointError` for a pickle that needs more than tensors and containers: nothing of it is executed. Raises
    `CorruptCheckpointError` for a damaged one.
    """
    with ranges_to_keep(path) as ranges, readable(path):
        try:
            tensors, others = _read(ranges)
        except UnsupportedValueError as error:
            raise CheckpointError(f"{path}: {error}", path=path) from error
    return Checkpoint(
        path=path,
        format="torch",
        tensors=tensors,
        layout="zip",
        others=[("tree", leaf) for leaf in others],
        facts=FormatFacts(stored_bytes=ranges.size),
        close=ranges.close,
    )


def pickle_member(names: Any) -> str | None:
    """The member with the pickle; None where an archive is not torch's."""
    found = [name for name in names if name.rpartition("/")[2] == PICKLE]
    return found[0] if len(found) == 1 else None


def _read(ranges: Ranges) -> tuple[list[Tensor], list[LeafInfo]]:
    entries = read_entries(ranges)
    name = pickle_member(entries)
    if name is None:
        raise ValueError(f"an archive without {PICKLE} is not torch's")
    prefix = name.removesuffix(PICKLE)
    order = entries.get(f"{prefix}byteorder")
    if order is not None and _content(ranges, order) != b"little":
        raise ValueError("its bytes are in big-endian order, which is not read")
    notes = json.loads(_content(ranges, entries[f"{prefix}{NOTES}"])) if f"{prefix}{NOTES}" in entries else {}
    tensors, others = [], []
    view_bytes, stored_bytes = (
        0,
        sum(each.size_bytes for each in entries.values() if each.name.startswith(f"{prefix}data/")),
    )
    limit_bytes = stored_bytes + max(_REPEATED_BYTES_MAX, _REPEATED_TIMES_MAX * stored_bytes)
    for path, value in _walked(unpickled(_content(ranges, entries[name]))):
        if isinstance(value, Rebuilt):
            tensors.append(_tensor(ranges, entries, prefix, path, value, notes))
            view_bytes += tensors[-1].nbytes
            if view_bytes > limit_bytes:
                last = f"{tensors[-1].name} is {describe(tensors[-1].dtype.name, tensors[-1].shape)}"
                raise UnsupportedValueError(
                    f"{last}, and with it the tensors have {view_bytes} bytes, expanded from storages of "
                    f"{stored_bytes} bytes to more than {limit_bytes}, which is not supported; save the tensors before "
                    "they are expanded instead"
                )
        elif isinstance(value, bool | int | float) and not (isinstance(value, int) and abs(value) >= 1 << 63):
            array = np.asarray(value)
            leaf = LeafInfo(path=path, kind=type(value).__name__, dtype=array.dtype.name, shape=())
            tensors.append(Tensor(item="tree", leaf=leaf, fetch=lambda box, array=array: array[box.slices()]))
        else:
            others.append(
                LeafInfo(path=path, kind={"NoneType": "None", "str": "string"}.get(type(value).__name__, "other"))
            )
    return tensors, others


def _content(ranges: Ranges, entry: ZipEntry) -> bytes:
    if entry.size_bytes > METADATA_BYTES_MAX:
        raise ValueError(f"member {entry.name} has {entry.size_bytes} bytes, and at most {METADATA_BYTES_MAX} are read")
    return EntryRanges(ranges, entry).read(0, entry.size_bytes)


def _walked(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested containers, without recursion; bounded, because one container may occur in many places."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), root)]
    nodes = 0
    while stack:
        path, value = stack.pop()
        nodes += 1
        if nodes > _NODES_MAX or len(path) > DEPTH_MAX:
            raise ValueError(f"containers nested more than {DEPTH_MAX} deep, or more than {_NODES_MAX} values")
        if isinstance(value, dict) and value:
            stack += [((*path, str(key)), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list | tuple) and value:
            stack += [((*path, str(at)), value[at]) for at in reversed(range(len(value)))]
        else:
            yield path, value


def _tensor(
    ranges: Ranges, entries: dict[str, ZipEntry], prefix: str, path: tuple[str, ...], value: Rebuilt, notes: Any
) -> Tensor:
    name = ".".join(path)
    word = value.dtype or _STORAGES.get(value.storage.kind, "")
    if word not in TORCH:
        raise UnsupportedValueError(
            f"{name} has dtype {word or value.storage.kind!r}, which is not supported; save it in another dtype instead"
        )
    dtype, shape, strides = TORCH[word], checked_shape(value.shape), checked_shape(value.strides)
    if len(shape) != len(strides):
        raise ValueError(f"{name} has shape {shape} and strides {strides}")
    entry = entries.get(f"{prefix}data/{value.storage.key}")
    if entry is None:
        raise ValueError(f"the storage of {name} is not in the archive")
    last = value.offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    elements = math.prod(shape)
    if elements and (value.offset < 0 or (last + 1) * dtype.itemsize > entry.size_bytes):
        raise ValueError(f"{name} is {dtype}{list(shape)}, and its storage has {entry.size_bytes} bytes")
    start = value.offset * dtype.itemsize
    dtype, shape, key_impl = noted(dtype, shape, notes.get(name), set(TORCH.values()))
    if shape != checked_shape(value.shape):  # pairs of floats that are complex numbers
        strides = tuple(stride // 2 for stride in strides[:-1])
    return Tensor(
        item="tree",
        leaf=LeafInfo(path=path, kind="tensor", dtype=dtype.name, shape=shape, key_impl=key_impl),
        fetch=partial(fetch_strided, EntryRanges(ranges, entry), start, shape, strides, dtype),
    )
