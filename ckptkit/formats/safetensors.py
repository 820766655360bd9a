"""safetensors: one file, or the files of a directory with Hugging Face's index.

The layout is that of the format's own specification: the length of the header (uint64, little-endian), a JSON header,
then the bytes of the tensors in C order, without holes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from ckptkit.durable.lifecycle.places import Place, readable
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dtypes import SAFETENSORS, SAFETENSORS_WORDS, checked_shape, noted
from ckptkit.formats.ranges import METADATA_BYTES_MAX, Ranges, c_strides, fetch_strided, open_ranges, ranges_to_keep
from ckptkit.formats.tensors import LEAVES_MAX, Checkpoint, FormatFacts, Tensor, left_out
from ckptkit.model.leaf_info import LeafInfo, name_of
from ckptkit.util.words import count_text

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_PART = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}")
_NAMED = 5  # in a note
NOTES = "ckptkit"  # the key of `__metadata__` with the notes of `formats.dtypes`, as JSON by name


def open_safetensors(path: str) -> Checkpoint:
    """One file. Cost: two reads. Raises `CorruptCheckpointError` for a header that no writer writes."""
    with ranges_to_keep(path) as ranges:
        tensors, metadata = _tensors(ranges)
    return Checkpoint(
        path=path,
        format="safetensors",
        tensors=tensors,
        layout="one file",
        facts=FormatFacts(notes=left_out("metadata", metadata), stored_bytes=ranges.size),
        close=ranges.close,
    )


def open_sharded(place: Place) -> Checkpoint:
    """A directory of Hugging Face's: the files that its index names, or without one all that end in `.safetensors`.

    Cost: two reads per file. A tensor that the index names and its file does not have is damage.
    """
    files, expected = _files_of(place)
    opened: list[Ranges] = []

    def close() -> None:
        for ranges in opened:
            ranges.close()

    try:
        found: dict[str, tuple[str, Tensor]] = {}
        unnamed, metadata = list[str](), dict[str, None]()
        for name in files:
            opened.append(open_ranges(f"{place.url}/{name}"))
            tensors, of_file = _tensors(opened[-1])
            metadata.update(dict.fromkeys(of_file))
            for tensor in tensors:
                unnamed += [tensor.name] if tensor.name not in (expected or {tensor.name}) else []
                if expected is None and tensor.name in found:
                    raise CorruptCheckpointError(f"{place.url} has tensor {tensor.name} in two files", path=place.url)
                if expected is None or expected.get(tensor.name) == name:
                    found[tensor.name] = (name, tensor)
        missing = sorted((expected or {}).keys() - found.keys())
        if missing:
            raise CorruptCheckpointError(
                f"{place.url}: the index names {len(missing)} tensors that their files do not have, {missing[0]} first",
                path=place.url,
            )
    except BaseException:
        close()
        raise
    used = {name for name, _ in found.values()}
    return Checkpoint(
        path=place.url,
        format="safetensors",
        tensors=[tensor for _, tensor in found.values()],
        layout=count_text(len(files), "file") + ", index" * (expected is not None),
        facts=FormatFacts(
            kind="directory",
            notes=(
                *left_out("tensors that the index does not name", unnamed),
                *left_out("files that the index does not name", _unlisted(place, files)),
                *left_out("metadata", list(metadata)),
            ),
            stored_bytes=sum(ranges.size for name, ranges in zip(files, opened, strict=True) if name in used),
        ),
        close=close,
    )


def is_sharded(names: list[str]) -> bool:
    """Whether a directory of these names is one of Hugging Face's."""
    return any(name.endswith((SUFFIX, INDEX)) for name in names)


def _files_of(place: Place) -> tuple[list[str], dict[str, str] | None]:
    indexes = [name for name in place.names() if name.endswith(INDEX)]
    if len(indexes) > 1:
        raise CorruptCheckpointError(f"{place.url} has {len(indexes)} indexes; name one of its files", path=place.url)
    if not indexes:
        names = [name for name in place.names() if name.endswith(SUFFIX)]
        _require_whole_sets(place, names, "missing, or not there yet")
        return names, None
    ranges = open_ranges(f"{place.url}/{indexes[0]}")
    with closing(ranges), readable(ranges.path):
        if ranges.size > METADATA_BYTES_MAX:
            raise ValueError(f"an index of {ranges.size} bytes")
        mapped = json.loads(ranges.read(0, ranges.size))["weight_map"]
        for file in set(mapped.values()):
            if not isinstance(file, str) or not file.endswith(SUFFIX) or "/" in file or "\\" in file:
                raise ValueError(f"{str(file)[:100]!r} is not a name of a file in the same directory")
    absent = sorted(set(mapped.values()) - set(place.names()))
    if absent:
        raise CorruptCheckpointError(f"{place.url}: {absent[0]} is missing, but in the index", path=place.url)
    _require_whole_sets(place, list(set(mapped.values())), "not in the index")
    return sorted(set(mapped.values())), mapped


def _unlisted(place: Place, files: Sequence[str]) -> list[str]:
    return [name for name in place.names() if name.endswith(SUFFIX) and name not in files]


def _require_whole_sets(place: Place, names: Sequence[str], lacking_are: str) -> None:
    """If a file's name declares it one of several, `names` must have all of them. The index is written last: without
    this check, a model that is uploaded or downloaded in part would look like a smaller model."""
    parts = [(match[1], int(match[2]), int(match[3])) for name in names if (match := _PART.fullmatch(name))]
    for stem, count in sorted({(stem, count) for stem, _, count in parts}):
        lacking = count - len({part for each, part, of in parts if (each, of) == (stem, count)})
        if lacking > 0:
            raise CorruptCheckpointError(
                f"{place.url}: {lacking} of the {count} files {stem}-*-of-* are {lacking_are}",
                path=place.url,
            )


def _tensors(ranges: Ranges) -> tuple[list[Tensor], list[str]]:
    """The tensors of a file, and the names of its writer's other entries."""
    length = int.from_bytes(ranges.read(0, 8), "little")
    if length > METADATA_BYTES_MAX or 8 + length > ranges.size:
        raise CorruptCheckpointError(
            f"{ranges.path} announces a header of {length} bytes and has {ranges.size} in all; it is truncated, "
            "damaged or no safetensors file",
            path=ranges.path,
        )
    with readable(ranges.path):
        header = json.loads(ranges.read(8, length), object_pairs_hook=_without_repeats)
        metadata = header.pop("__metadata__", None) or {}
        if len(header) > LEAVES_MAX:
            raise ValueError(f"more than {LEAVES_MAX} tensors")
        notes = json.loads(metadata.get(NOTES, "{}"))
        tensors = [_tensor(ranges, 8 + length, name, entry, notes.get(name)) for name, entry in header.items()]
        _check_offsets(ranges, 8 + length, header)
    return tensors, [name for name in metadata if name not in ("format", NOTES)]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _tensor(ranges: Ranges, base: int, name: str, entry: Any, note: Any) -> Tensor:
    if entry["dtype"] not in SAFETENSORS:
        raise ValueError(f"{name} has dtype {str(entry['dtype'])[:40]!r}, which is not known here")
    dtype, shape = SAFETENSORS[entry["dtype"]], checked_shape(entry["shape"])
    start, stop = entry["data_offsets"]
    if (
        type(start) is not int
        or type(stop) is not int
        or start < 0
        or stop - start != math.prod(shape) * dtype.itemsize
    ):
        raise ValueError(f"{name} is {dtype}{list(shape)} in bytes {start} to {stop}")
    dtype, shape, key_impl = noted(dtype, shape, note, SAFETENSORS_WORDS)
    return Tensor(
        item="tensors",
        leaf=LeafInfo(path=tuple(name.split(".")), kind="tensor", dtype=name_of(dtype), shape=shape, key_impl=key_impl),
        fetch=partial(fetch_strided, ranges, base + start, shape, c_strides(shape), dtype),
    )


def _check_offsets(ranges: Ranges, base: int, header: Mapping[str, Any]) -> None:
    """The tensors fill the file: nothing overlaps, nothing is left over, so no byte can hide another."""
    at = base
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if base + start != at:
            words = "overlaps another" if base + start < at else "leaves a hole before it"
            raise ValueError(f"{name} {words}")
        at = base + stop
    if at != ranges.size:
        raise ValueError(f"the tensors end at byte {at} of {ranges.size}; it is truncated, or something was added")
