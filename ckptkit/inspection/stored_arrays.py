"""The leaves of an array item as stock Orbax describes them: its `_METADATA`, its shardings, zarr's own metadata.

Every number is checked before it is used: a hostile file may hold anything.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.ocdbt import places
from ckptkit.durable.cells.tensorstore_wait import base_of, finished
from ckptkit.durable.lifecycle.places import Place, readable
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.aggregate import read_aggregate
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo, dtype_name, name_of, sharding_words
from ckptkit.model.manifest_checks import BYTES_MAX
from ckptkit.model.paths import (
    AGGREGATE,
    ARRAY_METADATAS,
    OCDBT_MANIFEST,
    SHARDINGS,
    TREE_METADATA,
    ZARR_METADATA,
    array_prefix,
    is_utf8,
)
from ckptkit.util.words import first_of

_ZARR_NAMES: Mapping[int, str] = {2: ZARR_METADATA[0], 3: ZARR_METADATA[1]}
_KINDS = {"jax.Array": "jax", "np.ndarray": "numpy"}
_ARRAY_KINDS = frozenset({"jax", "numpy", "scalar"})
_NOT_IN_ZARR = frozenset({"string"})  # they are together in `_strings.json`
_READS_AT_ONCE = 1000
_INDEX = re.compile(rb"(?<![^/.])[0-9]{1,19}(?![^/.])")  # the numbers in the key of a chunk

TreeEntry = tuple[tuple[str, ...], str, bool]  # path, kind, whether zarr has it


class ChunkGrid(NamedTuple):
    """How the chunks of an array are stored: the elements of each, and what is before and between the numbers in its
    key."""

    chunk: tuple[int, ...]
    before: str
    between: str


class _Facts(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...]
    grid: ChunkGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArrays:
    """An array item as its metadata describes it. `grids` are by the names of the leaves.

    `held` are leaves that are in the item's one file (see `aggregate`), by path: they have no cell and no grid.
    `problems` are damages that prevent a restore. `notes` are damages that do not affect a restore with a template.
    """

    layout: str
    leaves: tuple[LeafInfo, ...]
    grids: Mapping[str, ChunkGrid]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    held: Mapping[tuple[str, ...], np.ndarray]


def read_arrays(place: Place, *, timeout_s: float, inline: Mapping[str, bytes] = MappingProxyType({})) -> StoredArrays:
    """The layout of an item, its leaves, and what of it is damaged. `inline` are the small values of its OCDBT tree,
    where the caller has read that already. Cost: one read per node of an OCDBT tree, else one small read per leaf.

    Raises `CorruptCheckpointError` where a leaf has no readable zarr metadata: then nothing is known of it.
    """
    notes: list[str] = []
    problems: list[str] = []
    ocdbt = OCDBT_MANIFEST in place.names()
    described = place.json(TREE_METADATA)
    kvstore = open_kvstore(place, ocdbt, timeout_s) if ocdbt or not place.store.properties.file_system else None
    with readable(f"{place.url}/{TREE_METADATA}"):
        version, entries = (2, []) if described is None else _entries(described)
    in_file = read_aggregate(place, timeout_s=timeout_s)
    if described is None:
        version, entries = _guessed(place, kvstore, timeout_s, may_be_empty=in_file is not None)
        if in_file is None:
            notes.append(
                f"{place.url} has no {TREE_METADATA}: the names and kinds of its leaves are guessed from its arrays, "
                "and a restore needs a template"
            )
    entries = [(path, kind, in_zarr and path not in (in_file or {})) for path, kind, in_zarr in entries]
    names = [".".join(path) for path, _, in_zarr in entries if in_zarr]
    keys = [f"{array_prefix(name)}{_ZARR_NAMES[version]}" for name in names]
    found = dict(zip(names, _documents(place, kvstore, keys, inline, ocdbt, timeout_s), strict=True))
    facts = _all_facts(place.url, version, found)
    shardings = _tolerated(lambda: read_shardings(place), notes)
    impls = _tolerated(lambda: _key_impls(place), problems)
    leaves = _with_file(_leaves(entries, facts, shardings, impls), in_file or {})
    lost = [leaf.name for leaf in leaves if leaf.dtype is None and leaf.kind in _ARRAY_KINDS]
    if lost:
        problems.append(f"{place.url}: leaf {first_of(lost, 5)} is in no array and in no file {AGGREGATE}")
    return StoredArrays(
        layout=f"{'ocdbt' if ocdbt else 'files'}, zarr{version}" + (f", {AGGREGATE}" if in_file else ""),
        leaves=leaves,
        grids={name: known.grid for name, known in facts.items()},
        notes=tuple(notes),
        problems=tuple(problems),
        held={path: value for path, value in (in_file or {}).items() if isinstance(value, np.ndarray)},
    )


def _with_file(
    leaves: Sequence[LeafInfo], in_file: Mapping[tuple[str, ...], np.ndarray | LeafInfo]
) -> tuple[LeafInfo, ...]:
    """The leaves, with the facts of those that are in the item's one file; and those that only that file names."""
    made = {leaf.path: leaf for leaf in leaves}
    for path, value in in_file.items():
        if isinstance(value, np.ndarray):
            kind = made[path].kind if path in made else "numpy"
            made[path] = LeafInfo(path=path, kind=kind, dtype=name_of(value.dtype), shape=value.shape)
        elif path not in made or made[path].kind in _ARRAY_KINDS:
            made[path] = value
    return tuple(made.values())


def _entries(described: Any) -> tuple[int, list[TreeEntry]]:
    entries = []
    for record in described["tree_metadata"].values():
        path = tuple(str(part["key"]) for part in record["key_metadata"])
        if not is_utf8(".".join(path)):
            raise ValueError(f"{path!r:.100} is the name of a leaf, and not UTF-8")
        value = record["value_metadata"]
        kind = str(value["value_type"])
        in_zarr = not value.get("skip_deserialize") and kind not in _NOT_IN_ZARR
        entries.append((path, _KINDS.get(kind, kind), in_zarr))
    return (3 if described.get("use_zarr3") else 2), entries


def _guessed(place: Place, kvstore: Any, timeout_s: float, *, may_be_empty: bool) -> tuple[int, list[TreeEntry]]:
    """The leaves by the arrays that are there, for an item that lost its `_METADATA`."""
    if kvstore is not None:
        keys = [key.decode(errors="replace") for key in finished(kvstore.list(), place.url, timeout_s)]
    else:
        keys = [f"{name}/{inner}" for name in place.directories() for inner in place.below(name).names()]
        keys += place.names()
    for version, zarr_name in _ZARR_NAMES.items():
        names = sorted(key.removesuffix(f"/{zarr_name}") for key in keys if key.endswith(f"/{zarr_name}"))
        names += [""] if zarr_name in keys else []
        if names:
            return version, [(tuple(name.split(".")), "array", True) for name in names]
    if may_be_empty:
        return 2, []
    raise CorruptCheckpointError(f"{place.url} has neither {TREE_METADATA} nor any zarr array", path=place.url)


def _documents(
    place: Place, kvstore: Any, keys: Sequence[str], inline: Mapping[str, bytes], ocdbt: bool, timeout_s: float
) -> list[bytes]:
    """zarr's own metadata of every leaf; raises `CorruptCheckpointError` naming those that have none."""
    known = {key: inline[key] for key in keys if key in inline}
    if ocdbt and not inline:
        known = _in_tree(place, timeout_s)
    rest = [key for key in keys if key not in known]
    for start in range(0, len(rest), _READS_AT_ONCE):
        some = rest[start : start + _READS_AT_ONCE]
        if kvstore is None:
            known.update((key, data) for key in some if (data := place.read(key)) is not None)
            continue
        batch = ts.Batch()  # neighbours of one file in one request
        reads = [kvstore.read(key, batch=batch) for key in some]
        batch.submit()
        for key, read in zip(some, reads, strict=True):
            result = finished(read, f"{place.url}/{key}", timeout_s)
            if result.state == "value":
                known[key] = result.value
    found = [known.get(key) for key in keys]
    missing = [key.rpartition("/")[0] for key, data in zip(keys, found, strict=True) if data is None]
    if missing:
        names = first_of([each or "(the tree itself)" for each in missing], 5)
        raise CorruptCheckpointError(
            f"{place.url}: no array of leaf {names} is there, though {TREE_METADATA} names it; "
            "the item is damaged or not whole",
            path=place.url,
        )
    return [data for data in found if data is not None]


def _in_tree(place: Place, timeout_s: float) -> dict[str, bytes]:
    """The values that are in an item's OCDBT tree itself, by key."""
    with readable(f"{place.url}/{OCDBT_MANIFEST}"):
        base = finished(ts.KvStore.open(base_of(place.url)), place.url, timeout_s)
        found = places(base, lambda future: finished(future, f"{place.url}/{OCDBT_MANIFEST}", timeout_s))
        return {key: value for key, value in found.items() if isinstance(value, bytes)}


def _all_facts(url: str, version: int, documents: Mapping[str, bytes]) -> dict[str, _Facts]:
    known: dict[bytes, _Facts] = {}  # many leaves, few different documents
    for name, document in documents.items():
        if document not in known:
            with readable(f"{url}/{array_prefix(name)}{_ZARR_NAMES[version]}"):
                known[document] = _zarr_facts(json.loads(document), version)
    return {name: known[document] for name, document in documents.items()}


def _leaves(
    entries: Sequence[TreeEntry],
    facts: Mapping[str, _Facts],
    shardings: Mapping[str, str],
    impls: Mapping[str, str],
) -> tuple[LeafInfo, ...]:
    made = []
    for path, kind, in_zarr in entries:
        if not in_zarr:
            made.append(LeafInfo(path=path, kind=kind))
            continue
        name = ".".join(path)
        leaf = LeafInfo(
            path=path,
            kind=kind,
            dtype=facts[name].dtype,
            shape=facts[name].shape,
            cell=facts[name].cell,
            sharding=shardings.get(name),
            key_impl=impls.get(name),
        )
        made.append(leaf)
    return tuple(made)


def _zarr_facts(document: Any, version: int) -> _Facts:
    if version == 2:
        dtype, cell = document["dtype"], document["chunks"]
        chunk, before, between = cell, "", document.get("dimension_separator") or "."
    else:
        dtype, chunk = document["data_type"], document["chunk_grid"]["configuration"]["chunk_shape"]
        cell, encoding = chunk, document["chunk_key_encoding"]
        default = encoding["name"] == "default"
        before = "c" if default else ""
        between = (encoding.get("configuration") or {}).get("separator") or ("/" if default else ".")
        for codec in document.get("codecs", ()):
            if codec["name"] == "sharding_indexed":  # what is read whole is a chunk inside the shard
                cell = codec["configuration"]["chunk_shape"]
    shape = _sizes(document["shape"], least=0)
    cell, chunk = (_sizes(sizes, least=0 if 0 in shape else 1) for sizes in (cell, chunk))
    if not len(chunk) == len(cell) == len(shape):
        raise ValueError(f"chunks {cell} of an array of shape {shape}")
    name = dtype_name(dtype)
    if math.prod(shape) * np.dtype(name).itemsize > BYTES_MAX:
        raise ValueError(f"shape {shape} cannot be")
    return _Facts(name, shape, cell, ChunkGrid(chunk, before, between))


def _sizes(values: Any, *, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(size) is not int or size < least for size in values):
        raise ValueError(f"{values!r} is no shape")
    return tuple(values)


def read_shardings(place: Place) -> dict[str, str]:
    """The sharding of each leaf of an item that was saved with one, in words, by the leaf's name. Cost: a small read.
    Raises `CorruptCheckpointError` where Orbax's record of them is damaged."""
    recorded = place.json(SHARDINGS) or {}
    with readable(f"{place.url}/{SHARDINGS}"):
        words = {text: sharding_words(str(text)) for text in set(recorded.values())}
        return {base64.urlsafe_b64decode(key).decode(): words[text] for key, text in recorded.items()}


def _key_impls(place: Place) -> dict[str, str]:
    """Which leaves are typed PRNG keys. Every process records all leaves that it holds; the first is enough."""
    if f"{ARRAY_METADATAS}/" not in place.names():
        return {}
    directory = place.below(ARRAY_METADATAS)
    names = directory.names()
    if not names:
        return {}
    recorded = directory.json("process_0" if "process_0" in names else names[0])
    with readable(f"{directory.url}/{names[0]}"):
        facts = [entry["array_metadata"] for entry in recorded["array_metadatas"]]
        return {
            fact["param_name"]: str(fact["ext_metadata"]["random_key_impl"])
            for fact in facts
            if (fact.get("ext_metadata") or {}).get("random_key_impl")
        }


def _tolerated(read: Any, problems: list[str]) -> dict[str, str]:
    """Optional information about the leaves: if it is damaged, that is reported, and the leaves are still shown."""
    try:
        return read()
    except CorruptCheckpointError as error:
        problems.append(str(error))
        return {}


def open_kvstore(place: Place, ocdbt: bool, timeout_s: float) -> Any:
    """TensorStore's view of an item's files, or of the keys in its OCDBT tree."""
    base = base_of(place.url)
    return finished(ts.KvStore.open({"driver": "ocdbt", "base": base} if ocdbt else base), place.url, timeout_s)


@final
class StoredArray:
    """One array of an item whose layout is `layout`, as `read_arrays` gives it. TensorStore opens it at the first read.

    Without `fill_missing` a chunk that is not there is damage, as where the writer stored every chunk.
    """

    def __init__(
        self,
        item: Place,
        leaf: LeafInfo,
        layout: str,
        context: Any,
        *,
        open_timeout_s: float,
        read_timeout_s: float,
        fill_missing: bool = True,
    ):
        self._item, self._leaf, self._layout, self._context = item, leaf, layout, context
        self._timeouts_s = open_timeout_s, read_timeout_s
        self._fill_missing = fill_missing
        self._opened: Any = None

    def read(self, box: Box) -> np.ndarray:
        """The elements of a box. Raises `CorruptCheckpointError` for damage, `StoreError` for what cannot be
        reached."""
        return self._finished(self._array()[box.slices()].read(), self._timeouts_s[1])

    def stored(self) -> tuple[tuple[int, ...], list[Box]]:
        """The shape of a chunk, and the boxes of those that exist. Cost: a listing of them; nothing of any is read.
        Raises as `read`."""
        array = self._array()
        shape, chunk = self._leaf.shape or (), array.chunk_layout.write_chunk.shape
        found = []
        for key in self._finished(array.kvstore.list(), self._timeouts_s[1]):
            index = [int(number) for number in _INDEX.findall(key)]
            start = tuple(at * rows for at, rows in zip(index, chunk, strict=False))
            if len(index) == len(shape) and all(at < rows for at, rows in zip(start, shape, strict=True)):
                stop = tuple(min(at + rows, size) for at, rows, size in zip(start, chunk, shape, strict=True))
                found.append(Box(start, stop))
        return tuple(chunk), found

    def _array(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @property
    def _where(self) -> str:
        return f"{self._item.url}: leaf {self._leaf.name}"

    def _finished(self, future: Any, timeout_s: float) -> Any:
        return finished(future, self._where, timeout_s, path=self._item.url)

    def _open(self) -> Any:
        item, leaf = self._item, self._leaf
        kvstore: Any = base_of(f"{item.url}/{leaf.name}" if leaf.name else item.url)
        if self._layout.startswith("ocdbt"):
            kvstore = {"driver": "ocdbt", "base": base_of(item.url), "path": array_prefix(leaf.name)}
        spec = {"driver": "zarr3" if self._layout.endswith("zarr3") else "zarr", "kvstore": kvstore, "open": True}
        if not self._fill_missing:
            spec["fill_missing_data_reads"] = False
        array = self._finished(ts.open(spec, context=self._context), self._timeouts_s[0])
        if tuple(array.shape) != leaf.shape:
            raise CorruptCheckpointError(f"{self._where} changed while it was read", path=item.url)
        return array


def stores_all(item: Place) -> bool:
    """Whether the writer stored also chunks that hold only the fill value: then a chunk that is not there is lost."""
    with readable(f"{item.url}/{TREE_METADATA}"):
        return (item.json(TREE_METADATA) or {}).get("store_array_data_equal_to_fill_value") is True
