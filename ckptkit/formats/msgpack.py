"""Flax's legacy msgpack checkpoints: nested maps whose arrays are extension values. Only the bytes between the arrays
are read; those of the arrays are skipped."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from ckptkit.durable.lifecycle.places import readable
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dtypes import checked_shape, plain_dtype
from ckptkit.formats.ranges import Ranges, c_strides, fetch_strided, ranges_to_keep
from ckptkit.formats.tensors import DEPTH_MAX, LEAVES_MAX, Checkpoint, FormatFacts, Tensor
from ckptkit.model.leaf_info import LeafInfo

_NAME_BYTES_MAX = 1 << 16
_WINDOW_BYTES = 1 << 16
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # Flax's extension codes
_CHUNKED = "__msgpack_chunked_array__"  # Flax splits arrays of more than 1 GiB
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_SIZES |= {0xC7: 1, 0xC8: 2, 0xC9: 4}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def open_msgpack(path: str) -> Checkpoint:
    """A file of `flax.serialization`. Cost: its maps are read, its arrays are not."""
    with ranges_to_keep(path) as ranges, readable(path):
        tensors, others = [], []
        for leaf in _leaves(_Tokens(ranges)):
            (tensors if isinstance(leaf, Tensor) else others).append(leaf)
            if len(tensors) + len(others) > LEAVES_MAX:
                raise ValueError(f"more than {LEAVES_MAX} leaves")
    return Checkpoint(
        path=path,
        format="msgpack",
        tensors=tensors,
        layout="one file",
        others=[("tree", leaf) for leaf in others],
        facts=FormatFacts(stored_bytes=ranges.size),
        close=ranges.close,
    )


@final
class _Tokens:
    """The values of a file one after the other, through a window that moves over it."""

    def __init__(self, ranges: Ranges):
        self.ranges = ranges
        self.at = 0
        self._window, self._start = b"", 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > _WINDOW_BYTES:
            raise ValueError(f"{count} bytes at {self.at} that are not an array")
        if self.at < self._start or self.at + count > self._start + len(self._window):
            self._start = self.at
            size = max(count, min(_WINDOW_BYTES, self.ranges.size - self.at))
            self._window = self.ranges.read(self.at, size)
        found = self._window[self.at - self._start : self.at - self._start + count]
        self.at += count
        return found

    def next(self) -> tuple[str, Any]:
        """The kind and the value at this place: for a container its length, for bytes their position."""
        code = self.take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return "number", code if code < 0x80 else code - 0x100
        if code < 0x90:
            return "map", code - 0x80
        if code < 0xA0:
            return "array", code - 0x90
        if code < 0xC0:
            return "text", self._text(code - 0xA0)
        if code in (0xC0, 0xC2, 0xC3):
            return ("none", None) if code == 0xC0 else ("number", code == 0xC3)
        if code in _NUMBERS:
            return "number", struct.unpack(_NUMBERS[code], self.take(struct.calcsize(_NUMBERS[code])))[0]
        if 0xD4 <= code <= 0xD8:
            return self._skipped("extension", 1 << (code - 0xD4))
        if code not in _SIZES:
            raise ValueError(f"byte {code:#x} at {self.at - 1}")
        count = int.from_bytes(self.take(_SIZES[code]), "big")
        if code <= 0xC6:
            return self._skipped("bytes", count)
        if code <= 0xC9:
            return self._skipped("extension", count)
        return ("text", self._text(count)) if code <= 0xDB else ("array" if code <= 0xDD else "map", count)

    def _text(self, count: int) -> str:
        if count > _NAME_BYTES_MAX:
            raise ValueError(f"a text of {count} bytes at {self.at}")
        return self.take(count).decode()

    def _skipped(self, kind: str, count: int) -> tuple[str, Any]:
        code = None if kind == "bytes" else self.take(1)[0]
        start = self.at
        if start + count > self.ranges.size:
            raise ValueError(f"{count} bytes at {start} end behind the file, which is truncated")
        self.at += count
        return kind, (code, start, start + count)


def _leaves(tokens: _Tokens) -> Iterator[Tensor | LeafInfo]:
    kind, value = tokens.next()
    if kind not in ("map", "array"):
        raise ValueError("it holds no map, as Flax's checkpoints do")
    yield from _below(tokens, (), kind, value)
    if tokens.at != tokens.ranges.size:
        raise ValueError(f"its value ends at byte {tokens.at} of {tokens.ranges.size}")


def _below(tokens: _Tokens, path: tuple[str, ...], kind: str, count: int) -> Iterator[Tensor | LeafInfo]:
    if len(path) > DEPTH_MAX:
        raise ValueError(f"maps are nested more than {DEPTH_MAX} deep")
    if count > min(LEAVES_MAX, tokens.ranges.size - tokens.at):
        raise ValueError(f"a {kind} of {count} entries at byte {tokens.at}")
    if count == 0 and path:
        yield LeafInfo(path=path, kind="Dict" if kind == "map" else "List")
    names: set[str] = set()
    for index in range(count):
        name = _name(tokens) if kind == "map" else str(index)
        if name in names:
            raise ValueError(f"{'.'.join((*path, name))} stands twice")
        names.add(name)
        if name == _CHUNKED and kind == "map" and index == 0:
            tokens.next()
            yield _chunked(tokens, path, count - 1)
            return
        yield from _value(tokens, (*path, name))


def _name(tokens: _Tokens) -> str:
    kind, value = tokens.next()
    if kind not in ("text", "number"):
        raise ValueError(f"a {kind} as the name of a map's entry at byte {tokens.at}")
    return str(value)


def _value(tokens: _Tokens, path: tuple[str, ...]) -> Iterator[Tensor | LeafInfo]:
    kind, value = tokens.next()
    if kind in ("map", "array"):
        yield from _below(tokens, path, kind, value)
    elif kind == "number":
        array = np.asarray(value, np.uint64 if type(value) is int and value >= 1 << 63 else None)
        yield _held(path, array, type(value).__name__)
    elif kind == "extension" and value[0] == _COMPLEX:
        yield _held(path, np.asarray(complex(*_floats(tokens, value))), "complex")
    elif kind == "extension" and value[0] in (_NDARRAY, _SCALAR):
        yield _array(tokens, path, value)
    elif kind == "extension":
        raise ValueError(f"{'.'.join(path)} is an extension {value[0]}, which Flax does not write")
    else:
        yield LeafInfo(path=path, kind={"none": "None", "text": "string"}.get(kind, kind))


def _held(path: tuple[str, ...], array: np.ndarray, kind: str) -> Tensor:
    leaf = LeafInfo(path=path, kind=kind, dtype=array.dtype.name, shape=())
    return Tensor(item="tree", leaf=leaf, fetch=lambda box: array[box.slices()])


def _floats(tokens: _Tokens, span: tuple[int, int, int]) -> list[float]:
    inner = _inside(tokens, span)
    if inner.next() != ("array", 2):
        raise ValueError(f"no complex number at byte {span[1]}")
    found = [inner.next(), inner.next()]
    if any(kind != "number" for kind, _ in found):
        raise ValueError(f"no complex number at byte {span[1]}")
    return [float(value) for _, value in found]


def _inside(tokens: _Tokens, span: tuple[int, int, int]) -> _Tokens:
    inner = _Tokens(tokens.ranges)
    inner.at = span[1]
    return inner


class _Packed(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def _array(tokens: _Tokens, path: tuple[str, ...], span: tuple[int, int, int]) -> Tensor:
    packed = _packed(tokens, path, span)
    return Tensor(
        item="tree",
        leaf=LeafInfo(path=path, kind="numpy", dtype=packed.dtype.name, shape=packed.shape),
        fetch=partial(fetch_strided, tokens.ranges, packed.start, packed.shape, c_strides(packed.shape), packed.dtype),
    )


def _packed(tokens: _Tokens, path: tuple[str, ...], span: tuple[int, int, int]) -> _Packed:
    """Flax packs `(shape, name of the dtype, bytes in C order)`."""
    inner = _inside(tokens, span)
    if inner.next() != ("array", 3):
        raise ValueError(f"{'.'.join(path)} is no array")
    kind, count = inner.next()
    if kind != "array" or count > 32:
        raise ValueError(f"{'.'.join(path)} has no shape")
    shape = checked_shape([inner.next()[1] for _ in range(count)])
    dtype = plain_dtype(inner.next()[1])
    kind, found = inner.next()
    if kind != "bytes" or found[2] > span[2] or found[2] - found[1] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{'.'.join(path)} is {dtype}{list(shape)}, and its bytes are not as many")
    return _Packed(dtype, shape, found[1], found[2])


def _chunked(tokens: _Tokens, path: tuple[str, ...], count: int) -> Tensor:
    """`{mark: True, shape: {"0": ...}, chunks: {"0": flat array, ...}}` as one array."""
    shape: tuple[int, ...] | None = None
    chunks: list[_Packed] = []
    for _ in range(count):
        name = _name(tokens)
        kind, entries = tokens.next()
        if kind not in ("map", "array") or name not in ("shape", "chunks"):
            raise ValueError(f"{'.'.join(path)} is not an array in chunks")
        if name == "shape":
            shape = checked_shape([_entry_of(tokens, kind, at)[1] for at in range(min(entries, 33))])
        else:
            for at in range(min(entries, LEAVES_MAX)):
                kind_of, value = _entry_of(tokens, kind, at)
                if kind_of != "extension" or value[0] != _NDARRAY:
                    raise ValueError(f"{'.'.join(path)} has a chunk that is not an array")
                chunks.append(_packed(tokens, (*path, str(at)), value))
    if shape is None or not chunks or len({chunk.dtype for chunk in chunks}) != 1:
        raise ValueError(f"{'.'.join(path)} is not an array in chunks")
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {'.'.join(path)} are not as many elements as its shape {shape}")
    leaf = LeafInfo(path=path, kind="numpy", dtype=chunks[0].dtype.name, shape=shape)
    pieces = _Pieces(tokens.ranges, chunks)
    fetch = partial(fetch_strided, pieces, 0, shape, c_strides(shape), chunks[0].dtype)
    return Tensor(item="tree", leaf=leaf, fetch=fetch)


def _entry_of(tokens: _Tokens, kind: str, at: int) -> tuple[str, Any]:
    """Entry `at`. Flax goes by the names "0", "1", ...; one that sorts them would put "10" before "2"."""
    if kind == "map" and (name := _name(tokens)) != str(at):
        raise ValueError(f"entry {at} of an array in chunks is named {name!r}, and only those in order are read")
    return tokens.next()


@final
class _Pieces:
    """The bytes of several chunks as one."""

    def __init__(self, ranges: Ranges, chunks: list[_Packed]):
        self._ranges = ranges
        self._chunks = chunks

    def read_into(self, start: int, into: np.ndarray) -> None:
        """See `Ranges.read_into`."""
        at = 0
        for chunk in self._chunks:
            size = chunk.stop - chunk.start
            if start < size and at < into.nbytes:
                count = min(size - start, into.nbytes - at)
                self._ranges.read_into(chunk.start + start, into[at : at + count])
                at, start = at + count, 0
            else:
                start = max(0, start - size)
        if at < into.nbytes:
            raise CorruptCheckpointError(f"{self._ranges.path} ends before its array", path=self._ranges.path)
