"""NumPy's npz: a zip archive of npy files. Arrays without numbers (text, dates, records, objects) are left out.

NumPy's format has no names for bfloat16 and similar dtypes, and writes them as raw bytes (`V2`). The comment of the
archive's member, which NumPy ignores, records the dtype (`formats.dtypes`).
"""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import numpy as np

from ckptkit.durable.lifecycle.places import nothing_at, readable
from ckptkit.formats.dtypes import checked_shape, noted
from ckptkit.formats.ranges import Ranges, c_strides, fetch_strided, ranges_to_keep
from ckptkit.formats.tensors import Checkpoint, FormatFacts, Tensor, left_out
from ckptkit.formats.zips import EntryRanges, ZipEntry, read_entries
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.util.words import first_of

SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_HEADER_BYTES_MAX = 10_000  # NumPy's own bound
_KINDS = "biufcV"
_OTHERS = {"U": "text", "S": "text", "M": "dates", "m": "durations", "O": "objects, which are pickles"}


def open_npz(path: str) -> Checkpoint:
    """An archive. Cost: its directory and two small reads per array.

    An array that is compressed is read in order: cheap from its first block to its last. One that is read so, and to
    its end, is compared with the archive's checksum.
    """
    tensors: list[Tensor] = []
    not_read: list[str] = []
    compressed = 0
    with ranges_to_keep(path) as ranges:
        for name, entry in read_entries(ranges).items():
            try:
                tensors.append(_tensor(ranges, entry))
            except _NotReadError as why:
                not_read.append(f"{name.removesuffix(SUFFIX)} ({why})")
            else:
                compressed += entry.compressed and tensors[-1].nbytes > 0
        if not_read and not tensors:
            raise nothing_at(path, f"it is a zip archive with no array of numbers: {first_of(not_read, 5)}")
    return Checkpoint(
        path=path,
        format="npz",
        tensors=tensors,
        layout=f"zip, {compressed} of {len(tensors)} arrays compressed",
        facts=FormatFacts(notes=left_out("members", not_read), stored_bytes=ranges.size),
        close=ranges.close,
    )


class _NotReadError(Exception):
    """A sound member that holds no numbers: what it holds."""


def known_dtypes() -> frozenset[np.dtype[Any]]:
    """Whether NumPy's format has a name for the dtype."""
    names = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    return frozenset(map(np.dtype, names))


def _tensor(ranges: Ranges, entry: ZipEntry) -> Tensor:
    if not entry.name.endswith(SUFFIX):
        raise _NotReadError("not an array")
    inner = EntryRanges(ranges, entry, summed=True)  # as NumPy does; torch's archives may be written without sums
    with readable(inner.path):
        stored, fortran, shape, start = _header(inner)
        if start + math.prod(shape) * stored.itemsize != inner.size:
            raise ValueError(f"{stored}{list(shape)} in {inner.size - start} bytes")
        dtype, key_impl = stored, None
        if entry.comment[:1] == b"{":
            note = json.loads(entry.comment)
            meant = note.get("dtype")
            shown = np.dtype(f"V{stored.itemsize}") if meant else stored
            if meant and (stored != shown or note["shape"] != list(shape)):
                raise ValueError(f"an array of {stored}{list(shape)} cannot be {str(note)[:100]}")
            as_noted = np.dtype(f"int{8 * stored.itemsize}") if meant else stored  # raw bytes count as integers
            dtype, _, key_impl = noted(as_noted, shape, note, known_dtypes())
        if dtype.kind == "V" and dtype.isbuiltin != 2:
            raise ValueError(f"its dtype is {stored.str}, and no note names the real dtype")
    strides = c_strides(shape[::-1])[::-1] if fortran else c_strides(shape)
    name = entry.name.removesuffix(SUFFIX)
    plain = dtype.newbyteorder("=")

    def fetch(box: Box) -> np.ndarray:
        return fetch_strided(inner, start, shape, strides, dtype, box).astype(plain, copy=False)

    return Tensor(
        item="arrays",
        leaf=LeafInfo(path=tuple(name.split(".")), kind="numpy", dtype=plain.name, shape=shape, key_impl=key_impl),
        fetch=fetch,
    )


def _header(ranges: EntryRanges) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Dtype, whether in Fortran order, shape, and where the data begin."""
    begin = ranges.read(0, min(12, ranges.size))
    if begin[:6] != _MAGIC or begin[6] not in (1, 2, 3):
        raise ValueError("no npy file")
    width = 2 if begin[6] == 1 else 4
    length = int.from_bytes(begin[8 : 8 + width], "little")
    if length > _HEADER_BYTES_MAX:
        raise ValueError(f"a header of {length} bytes")
    text = ranges.read(8 + width, length).decode("latin1")
    try:
        facts = ast.literal_eval(text.strip())
        descr, fortran, shape = facts["descr"], facts["fortran_order"], facts["shape"]
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    if isinstance(descr, list):
        raise _NotReadError("records")
    dtype = np.dtype(descr)
    if dtype.kind in _OTHERS:
        raise _NotReadError(_OTHERS[dtype.kind])
    if dtype.kind not in _KINDS or dtype.itemsize == 0 or type(fortran) is not bool or not isinstance(shape, tuple):
        raise ValueError(f"dtype {descr!r}, shape {shape!r}")
    return dtype, fortran, checked_shape(shape), 8 + width + length
