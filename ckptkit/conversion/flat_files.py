"""Writers of safetensors, npz and torch's zip. The place of every tensor is known before the first is written.

So tensors may be written in any order and in parts, and interrupted work is continued at the tensor where it stopped.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from ckptkit.conversion.mapping import Tensors
from ckptkit.conversion.passes import read_ahead
from ckptkit.errors import CheckpointError
from ckptkit.formats.dtypes import SAFETENSORS_WORDS, TORCH_WORDS, note_of, stored_as
from ckptkit.formats.npz import known_dtypes
from ckptkit.formats.ranges import METADATA_BYTES_MAX, c_strides
from ckptkit.formats.safetensors import NOTES
from ckptkit.formats.tensors import LEAVES_MAX, Tensor
from ckptkit.formats.torch import NOTES as TORCH_NOTES
from ckptkit.formats.torch import STORAGE_OF
from ckptkit.model.boxes import Box
from ckptkit.util.disk_file import FileWrites, write_all
from ckptkit.util.pages import PAGE_BYTES

FlatFormat = Literal["safetensors", "npz", "torch"]

_ALIGN = 64  # of the bytes of a tensor in a zip, as torch does, so that they can be mapped
_ROOT = "archive"
_AT_ONCE_BYTES = 1 << 20
_NAME_BYTES_MAX = 0xFFFF  # of a zip member (APPNOTE 4.4.10)
_SHOWN = 60  # characters of a name in a message
_PARTS = "choose a part with `ckptkit extract`, or convert to a directory (hf, orbax)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Bytes of the file: `data` itself, or those of a tensor; `name` and `comment` are of a zip member."""

    start: int
    size: int
    data: bytes = b""
    tensor: str | None = None
    name: str = ""
    header_at: int = 0
    comment: bytes = b""
    before: bytes = b""  # of a tensor in a zip: the bytes before it in the same member


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFile:
    """The plan of one file. `size` is without the directory that ends a zip, which is written last."""

    name: str
    format: FlatFormat
    members: tuple[Member, ...]
    size: int


def plan_file(name: str, format: FlatFormat, tensors: Tensors) -> FlatFile:
    """The layout of one file. Pure. Raises `CheckpointError` for a name that the format cannot have, and for more
    tensors than could be read again."""
    if len(tensors) > LEAVES_MAX:
        raise CheckpointError(f"{name} would have {len(tensors)} tensors, and at most {LEAVES_MAX} are read; {_PARTS}")
    if format == "safetensors":
        return _plan_safetensors(name, tensors)
    return _plan_zip(name, format, tensors)


def require_readable(what: str, nbytes: int) -> None:
    """Raises `CheckpointError` where a header, pickle, directory or index is larger than what is read of one."""
    if nbytes > METADATA_BYTES_MAX:
        raise CheckpointError(f"{what} would have {nbytes} bytes, and at most {METADATA_BYTES_MAX} are read; {_PARTS}")


def write_tensor(writes: FileWrites, plan: FlatFile, member: Member, tensor: Tensor, memory_bytes: int) -> int | None:
    """Writes the bytes of one tensor at their place, in C order. Cost: the tensor is read once.

    Returns the checksum of these bytes and of those before them in the same member of a zip. Returns None if they were
    not written in order, and for files without checksums.
    """
    if tensor.nbytes <= _AT_ONCE_BYTES:  # a thread for each of many small tensors costs more than they do
        found = ((box, tensor.read(box)) for box in tensor.blocks(memory_bytes))
    else:
        found = read_ahead(tensor.read, tensor.blocks(memory_bytes))
    runs = (run for box, block in found for run in _runs(member.start, block, box, tensor))
    if plan.format == "safetensors":
        for start, run in runs:
            writes.write(run, start)
        return None
    return _write_summed(writes, member, runs, tensor.nbytes)


def write_frame(fd: int, plan: FlatFile, sums: Mapping[str, int]) -> None:
    """Writes the bytes between the tensors, and the directory of a zip. `sums` holds the known checksums by tensor; the
    other tensors are read once more."""
    for member in plan.members:
        if member.tensor is None:
            write_all(fd, member.data, member.start)
    if plan.format != "safetensors":
        _write_zip_frame(fd, plan, sums)


def _write_summed(
    writes: FileWrites, member: Member, runs: Iterator[tuple[int, np.ndarray]], nbytes: int
) -> int | None:
    """Each run is summed while it is written: zlib takes about as long as a disk."""
    found, at = zlib.crc32(member.before), member.start
    known = True
    with nullcontext() if nbytes <= _AT_ONCE_BYTES else ThreadPoolExecutor(1, thread_name_prefix="ckptkit-sum") as pool:
        for start, run in runs:
            known, at = known and start == at, start + run.nbytes
            if pool is None or not known:
                found = zlib.crc32(run.data, found) if known else found
                writes.write(run, start)
                continue
            summed = pool.submit(zlib.crc32, run.data, found)
            writes.write(run, start)
            found = summed.result()
    return found if known else None


def _runs(start: int, block: np.ndarray, box: Box, tensor: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """Offsets in the file, and the bytes of a block for them: row by row if the box is not one run of the file."""
    if not block.size:
        return
    shape, itemsize, strides = tensor.shape, tensor.dtype.itemsize, c_strides(tensor.shape)
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = box.shape[: max(0, inner - 1)]
    raw = block.reshape(-1).view(np.uint8)
    run = raw.nbytes // max(1, math.prod(outer))
    first = start + itemsize * sum(a * s for a, s in zip(box.start, strides, strict=True))
    for number, index in enumerate(np.ndindex(*outer)):
        at = first + itemsize * sum(i * s for i, s in zip(index, strides, strict=False))
        yield at, raw[number * run : (number + 1) * run]


def _plan_safetensors(name: str, tensors: Tensors) -> FlatFile:
    header: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    at, places = 0, []
    for key, tensor in tensors.items():
        if key == "__metadata__":
            raise CheckpointError("no safetensors tensor can be named __metadata__; rename it with --map")
        dtype, shape = stored_as(tensor.dtype, tensor.shape, SAFETENSORS_WORDS)
        note = note_of(tensor.dtype, tensor.shape, SAFETENSORS_WORDS, tensor.leaf.key_impl)
        notes.update({} if note is None else {key: note})
        places.append((key, at, tensor.nbytes))
        at += tensor.nbytes
        header[key] = {"dtype": SAFETENSORS_WORDS[dtype], "shape": list(shape), "data_offsets": [places[-1][1], at]}
    metadata = {"format": "pt", **({NOTES: json.dumps(notes)} if notes else {})}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    # So that the tensors begin at a multiple of 8, as the format asks; large ones with a page, as direct I/O does.
    text += b" " * (-(8 + len(text)) % (PAGE_BYTES if at >= _AT_ONCE_BYTES else 8))
    require_readable(f"the header of {name}", len(text))
    base = 8 + len(text)
    members = [Member(start=0, size=base, data=struct.pack("<Q", len(text)) + text)]
    members += [Member(start=base + start, size=size, tensor=key) for key, start, size in places]
    return FlatFile(name=name, format="safetensors", members=tuple(members), size=base + at)


def _plan_zip(name: str, format: FlatFormat, tensors: Tensors) -> FlatFile:
    packer = _Packer()
    for key in tensors:
        _require_zip_name(key, format)
    if format == "npz":
        for key, tensor in tensors.items():
            if key.startswith("/") or ".." in key.split("/") or "\\" in key or "\0" in key:
                raise CheckpointError(f"{key!r} would be a path outside the archive; rename it with --map")
            if f"{key}.npy" in tensors:  # and NumPy takes that name for the member of this one
                raise CheckpointError(f"npz cannot tell {key!r} from {key + '.npy'!r}; rename one of them with --map")
            note = note_of(tensor.dtype, tensor.shape, known_dtypes(), tensor.leaf.key_impl)
            comment = b"" if note is None else json.dumps(note).encode()
            packer.add(f"{key}.npy", _npy_header(tensor), key, tensor.nbytes, comment)
    else:
        pickle = _torch_pickle(tensors)
        require_readable(f"the pickle in {name}", len(pickle))
        packer.add(f"{_ROOT}/data.pkl", pickle)
        packer.add(f"{_ROOT}/byteorder", b"little")
        notes = {
            key: note
            for key, tensor in tensors.items()
            if (note := note_of(tensor.dtype, tensor.shape, TORCH_WORDS, tensor.leaf.key_impl)) is not None
        }
        if notes:
            packer.add(f"{_ROOT}/{TORCH_NOTES}", json.dumps(notes).encode())
        for number, (key, tensor) in enumerate(tensors.items()):
            packer.add(f"{_ROOT}/data/{number}", b"", key, tensor.nbytes)
        packer.add(f"{_ROOT}/version", b"3\n")
    entries = [_ENTRY_BYTES + len(each.name.encode()) + len(each.comment) for each in packer.members if each.name]
    require_readable(f"the directory of {name}", sum(entries))
    return FlatFile(name=name, format=format, members=tuple(packer.members), size=packer.at)


def _require_zip_name(key: str, format: FlatFormat) -> None:
    """Raises `CheckpointError` for a name that is too long where it names a member."""
    size = len(f"{key}.npy".encode())
    if format == "npz" and size > _NAME_BYTES_MAX:
        raise CheckpointError(
            f"{key[:_SHOWN]!r}... has a name of {size} bytes with .npy, and npz has at most {_NAME_BYTES_MAX}; rename "
            "it with --map"
        )


@final
class _Packer:
    """Lays zip members one after the other, the tensors' bytes aligned."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.at = 0

    def add(self, name: str, head: bytes, tensor: str | None = None, size: int = 0, comment: bytes = b"") -> None:
        """A member of `head` and then the bytes of a tensor."""
        header_at = self.at
        fixed = header_at + 30 + len(name.encode()) + _EXTRA.size + 4
        data_at = fixed + (-(fixed + len(head)) % _ALIGN)
        self.members.append(
            Member(
                start=data_at,
                size=len(head),
                data=head,
                name=name,
                header_at=header_at,
                comment=comment,
            )
        )
        self.at = data_at + len(head) + size
        if tensor is not None:
            self.members.append(Member(start=data_at + len(head), size=size, tensor=tensor, before=head))


_ENTRY_BYTES = 46 + 28  # of a member in the directory of a zip, besides its name and comment
_EXTRA = struct.Struct("<HHQQ")  # zip64: sizes of 8 bytes, for small members too


def _write_zip_frame(fd: int, plan: FlatFile, sums: Mapping[str, int]) -> None:
    """Local headers, the directory and its end. APPNOTE 6.3.10 of PKWARE, sections 4.3 and 4.5.3."""
    named = [at for at, member in enumerate(plan.members) if member.name]
    directory = []
    for at in named:
        member = plan.members[at]
        tensor = (
            plan.members[at + 1] if at + 1 < len(plan.members) and plan.members[at + 1].tensor is not None else None
        )
        size = member.size + (0 if tensor is None else tensor.size)
        crc = None if tensor is None or tensor.tensor is None else sums.get(tensor.tensor)
        crc = _crc_of(fd, member.start, size) if crc is None else crc
        name = member.name.encode()
        padding = member.start - (member.header_at + 30 + len(name) + _EXTRA.size + 4)
        extra = _EXTRA.pack(1, 16, size, size) + struct.pack("<HH", 0x4246, padding) + b"\0" * padding
        common = struct.pack("<HHHHHI", 45, 0x800, 0, 0, 0x21, crc) + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF)
        local = b"PK\x03\x04" + common + struct.pack("<HH", len(name), len(extra)) + name + extra
        write_all(fd, local, member.header_at)
        central_extra = struct.pack("<HHQQQ", 1, 24, size, size, member.header_at)
        tail = struct.pack("<HHHHHII", len(name), len(central_extra), len(member.comment), 0, 0, 0, 0xFFFFFFFF)
        directory.append(b"PK\x01\x02" + struct.pack("<H", 45) + common + tail + name + central_extra + member.comment)
    text = b"".join(directory)
    start, count = plan.size, len(named)
    end64 = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(text), start)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, start + len(text), 1)
    short = min(count, 0xFFFF)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, short, short, min(len(text), 0xFFFFFFFF), 0xFFFFFFFF, 0)
    write_all(fd, text + end64 + locator + end, start)


def _crc_of(fd: int, start: int, size: int) -> int:
    crc, at = 0, start
    while at < start + size:
        part = os.pread(fd, min(4 << 20, start + size - at), at)
        crc, at = zlib.crc32(part, crc), at + len(part)
    return crc


def _npy_header(tensor: Tensor) -> bytes:
    """NEP 1, version 1.0 (2.0 where the header is long), padded to a multiple of 64."""
    raw = tensor.dtype not in known_dtypes()
    descr = f"|V{tensor.dtype.itemsize}" if raw else tensor.dtype.str
    text = repr({"descr": descr, "fortran_order": False, "shape": tensor.shape})
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _torch_pickle(tensors: Tensors) -> bytes:
    """The pickle of `{name: tensor}` as torch writes it (protocol 2)."""

    def text(word: str) -> bytes:
        data = word.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def number(value: int) -> bytes:
        if value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(9, "little", signed=True)
        return b"\x8a\x09" + data

    parts = [b"\x80\x02}("]
    for at, (name, tensor) in enumerate(tensors.items()):
        dtype, shape = stored_as(tensor.dtype, tensor.shape, TORCH_WORDS)
        word = TORCH_WORDS[dtype]
        untyped = word not in STORAGE_OF
        module, storage = ("torch.storage", "UntypedStorage") if untyped else ("torch", STORAGE_OF[word])
        elements = math.prod(shape) * (dtype.itemsize if untyped else 1)
        parts += [text(name), f"ctorch._utils\n_rebuild_tensor_v{3 if untyped else 2}\n((".encode(), text("storage")]
        parts += [f"c{module}\n{storage}\n".encode(), text(str(at)), text("cpu"), number(elements), b"tQ", number(0)]
        parts += [
            b"(",
            *map(number, shape),
            b"t(",
            *map(number, c_strides(shape)),
            b"t\x89ccollections\nOrderedDict\n)R",
        ]
        parts += [f"ctorch\n{word}\n".encode()] if untyped else []
        parts += [b"tR"]
    return b"".join([*parts, b"u."])
