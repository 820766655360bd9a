"""The content of a save, and the place of each box in a slot: a pure function of shapes and shardings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.model.boxes import CELL_BYTES, Box, boxes_by_process, cell_shape
from ckptkit.model.manifest import BoxRecord, LeafKind, LeafRecord, cell_ranges
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.pages import PAGE_BYTES
from ckptkit.util.sharing import SMALL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSource:
    """The record of a leaf, and the processes that hold its boxes. Keeps no array alive."""

    sharding: jax.sharding.Sharding | None  # the leaf's own: for typed keys, without the dimensions of the key data
    record: LeafRecord
    holders: Mapping[Box, tuple[int, ...]]  # every box of the global array -> the processes that hold it
    devices: tuple[Any, ...]  # for each box of the record, the local device that it is read from; none: host memory
    local_replicas: tuple[tuple[Any, ...], ...] = ()  # for each box of the record, the other local devices that hold it
    first: bool = False  # one box, which is read from the first of its local devices


@dataclass(frozen=True, slots=True)
class SlotExtent:
    """Where box `number` of a save lies in a slot; `cells`: the byte ranges `[start, stop)` of its cells, in order."""

    number: int
    offset: int
    stop: int
    cells: tuple[tuple[int, int], ...]
    device: Any  # whose memory it is transferred from; None: it is in host memory
    kept: bool = True  # False: only digested, to be compared with what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The content of a save: leaves by item, their trees, every box's place, and the bytes of slot they take."""

    items: Mapping[str, tuple[LeafSource, ...]]
    treedefs: Mapping[str, Any]
    extents: tuple[SlotExtent, ...]  # of every box, in the order of the leaves: ascending
    slot_bytes: int
    share_bytes: int  # what the largest share of any process takes of a slot, without leaves that differ: alike on all

    @property
    def held_bytes(self) -> int:
        """Bytes of the boxes, without what alignment adds to them in a slot."""
        return sum(extent.stop - extent.offset for extent in self.extents)

    @property
    def tree_bytes(self) -> int:
        """Bytes of all leaves, whichever process holds them."""
        records = (source.record for sources in self.items.values() for source in sources)
        return sum(math.prod(record.shape) * record.itemsize for record in records)


def describe_items(
    trees: Mapping[str, Any], own: Collection[str] = (), chunk_bytes: Mapping[str, Sequence[int | None]] | None = None
) -> Description:
    """Where each box of each leaf of the array items will lie in a slot. In `own` items each process has other leaves.
    `chunk_bytes` are, by item and leaf, the most bytes that a cell is to have, where that is less than usual.

    Cost: about 20 microseconds per leaf, no device work. Raises `TypeError` for a leaf that is not an array or a
    number, `ValueError` for one that lives on this process only in a job of several.
    """
    offset = 0
    items: dict[str, tuple[LeafSource, ...]] = {}
    treedefs = {}
    load: dict[Any, int] = {}
    for item, tree in sorted(trees.items()):  # as manifests have them
        flat, treedefs[item] = jax.tree_util.tree_flatten_with_path(tree)
        sources = []
        limits = (chunk_bytes or {}).get(item) or [None] * len(flat)
        for (keypath, value), limit in zip(flat, limits, strict=True):
            source, offset = _describe_leaf(item, keypath, value, offset, load, limit)
            sources.append(source)
        _refuse_equal_names(item, sources)
        items[item] = tuple(sources)
    boxes = [
        (source.record, box, transferred_from(source, at))
        for sources in items.values()
        for source in sources
        for at, box in enumerate(source.record.boxes)
    ]
    extents = tuple(_extent(number, *box) for number, box in enumerate(boxes))
    alike = items if jax.process_count() == 1 else {item: each for item, each in items.items() if item not in own}
    share_bytes = _share_bytes([source for sources in alike.values() for source in sources])
    return Description(items=items, treedefs=treedefs, extents=extents, slot_bytes=offset, share_bytes=share_bytes)


class Describer:
    """`describe_items` that remembers its last answer: a training loop saves the same shapes again and again.

    Cost of a remembered answer: 2 microseconds per leaf, against 25.
    """

    def __init__(self, finish: Callable[[Description], Description]):
        self._finish = finish
        self._last: tuple[Any, Description] | None = None

    def __call__(
        self,
        trees: Mapping[str, Any],
        own: Collection[str] = (),
        chunk_bytes: Mapping[str, Sequence[int | None]] | None = None,
    ) -> Description:
        """The same as `finish(describe_items(...))`, with the same errors."""
        signature = [_signature(trees), chunk_bytes]
        if self._last is None or self._last[0] != signature:
            with collection_paused():  # for thousands of records that all stay: a third of the time
                self._last = (signature, self._finish(describe_items(trees, own, chunk_bytes)))
        return self._last[1]


Digests = tuple[str, ...]  # of the cells of one box


def with_digests(description: Description, digests: Mapping[int, Digests]) -> dict[str, tuple[LeafRecord, ...]]:
    """The leaf records of a save by item, each box with the digests of its cells: what a manifest commits to."""
    numbers = iter(range(len(description.extents)))

    def added(leaf: LeafRecord) -> LeafRecord:
        boxes = tuple(BoxRecord(box=b.box, offset=b.offset, digests=digests[next(numbers)]) for b in leaf.boxes)
        return replace(leaf, boxes=boxes)

    return {item: tuple(added(source.record) for source in sources) for item, sources in description.items.items()}


def box_array(record: BoxRecord, leaf: LeafRecord, memory: np.ndarray) -> np.ndarray:
    """A view of one box in a slot, with its own shape and dtype."""
    stop = record.offset + record.box.size * leaf.itemsize
    return memory[record.offset : stop].view(np.dtype(leaf.dtype)).reshape(record.box.shape)


def is_accelerator(device: Any) -> bool:
    """Whether a device has memory of its own, so that its arrays are transferred."""
    return device.platform != "cpu"


def transferred_from(source: LeafSource, at: int) -> Any:
    """The device from whose own memory box `at` of a leaf is transferred; None where the box is in host memory."""
    if not source.devices or not is_accelerator(source.devices[at]):
        return None
    device = source.devices[at]
    kind = None if source.sharding is None else source.sharding.memory_kind
    return device if kind in (None, device.default_memory().kind) else None


def _describe_leaf(
    item: str, keypath: Any, value: Any, offset: int, load: dict[Any, int], limit: int | None
) -> tuple[LeafSource, int]:
    path, keys = leaf_path(keypath)
    name = f"{item}:{'.'.join(path)}"
    sharding = value.sharding if isinstance(value, jax.Array) else None
    kind, value, extra = _unwrap(name, value)
    itemsize = value.dtype.itemsize
    if kind == "jax":
        holders = boxes_by_process(value.sharding, value.shape)
        mine = [box for box, processes in holders.items() if jax.process_index() in processes]
        box_shape = next(iter(holders)).shape
        if any(box.shape != box_shape for box in holders):
            raise ValueError(f"{name} is split unevenly over its devices ({value.sharding}); pad it or replicate it")
    else:
        mine = [Box.whole(value.shape)]
        holders = {mine[0]: (0,)}
        box_shape = value.shape
    limits = () if limit is None or kind != "jax" else (min(limit, CELL_BYTES),)
    boxes, holding = [], _devices_of(value.sharding, value.shape, tuple(mine)) if kind == "jax" else ()
    for box in mine:
        boxes.append(BoxRecord(box=box, offset=offset, digests=()))
        offset += _slot_bytes(box, itemsize)
    record = LeafRecord(
        path=path,
        keys=keys,
        kind=kind,
        shape=tuple(value.shape),
        dtype=value.dtype.name,
        cell=cell_shape(value.shape, box_shape, itemsize, *limits),
        extra=extra,
        boxes=tuple(boxes),
    )
    devices = tuple(_least_loaded(all_, box.size * itemsize, load) for all_, box in zip(holding, mine, strict=False))
    local_replicas = tuple(
        tuple(each for each in all_ if each != device) for all_, device in zip(holding, devices, strict=True)
    )
    source = LeafSource(
        sharding=sharding,
        record=record,
        holders=holders,
        devices=devices,
        local_replicas=local_replicas,
        first=len(holding) == 1 and holding[0][0] == devices[0],
    )
    return source, offset


def _least_loaded(holding: Sequence[Any], nbytes: int, load: dict[Any, int]) -> Any:
    """The device from which a box is read: of those that hold it, the one from which the fewest bytes are read so far.

    Small boxes are read from the first, which JAX gives without making an object for each of the others.
    """
    device = holding[0] if nbytes < SMALL_BYTES else min(holding, key=lambda each: load.get(each, 0))
    load[device] = load.get(device, 0) + nbytes
    return device


def _share_bytes(sources: Sequence[LeafSource]) -> int:
    everywhere_bytes, by_process = 0, Counter[int]()
    for source in sources:
        for box, processes in source.holders.items():
            taken_bytes = _slot_bytes(box, source.record.itemsize)
            if source.sharding is None:  # every process stores it
                everywhere_bytes += taken_bytes
            else:
                by_process.update(dict.fromkeys(processes, taken_bytes))
    return everywhere_bytes + max(by_process.values(), default=0)


def _slot_bytes(box: Box, itemsize: int) -> int:
    """Of one box: it begins a page."""
    return -(-box.size * itemsize // PAGE_BYTES) * PAGE_BYTES


def _refuse_equal_names(item: str, sources: Sequence[LeafSource]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.record.name in seen:
            raise ValueError(
                f"{item}:{source.record.name} names two leaves, which would share one array on disk; rename one"
            )
        seen.add(source.record.name)


_MAPPING = ("d", "key")  # DictKey and FlattenedIndexKey both have `key`
_KEYS = {jax.tree_util.SequenceKey: ("s", "idx"), jax.tree_util.GetAttrKey: ("a", "name")}


LeafPath = tuple[str, ...]


def leaf_path(keypath: Sequence[Any]) -> tuple[LeafPath, str]:
    """A key path as names and as one letter per level (d: mapping, s: sequence, a: attribute)."""
    names, letters = [], []
    for key in keypath:
        letter, attribute = _KEYS.get(type(key), _MAPPING)
        names.append(str(getattr(key, attribute)))
        letters.append(letter)
    return tuple(names), "".join(letters)


def leaves_by_path(tree: Any) -> list[tuple[LeafPath, Any]]:
    """The leaves of a tree with their paths as names, in JAX's order."""
    return [(leaf_path(keypath)[0], leaf) for keypath, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _unwrap(name: str, value: Any) -> tuple[LeafKind, Any, dict[str, str]]:
    """The kind of a leaf, its value as an array of plain dtype, and what is needed to wrap it again."""
    if isinstance(value, jax.Array):
        if _is_local(value):
            raise ValueError(
                f"{name} lives on process {jax.process_index()} only, in a job of {jax.process_count()} processes; "
                "make it a global array (jax.device_put with a sharding over the mesh), or a NumPy array"
            )
        extra = {}
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            extra["key_impl"] = str(jax.random.key_impl(value))
            value = jax.random.key_data(value) if value.sharding.addressable_devices else _abstract_key_data(value)
        return "jax", value, extra
    if isinstance(value, bool | int | float) and _is_numeric(np.asarray(value).dtype):
        return kind_of_number(value), np.asarray(value), {}
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        return "numpy", np.asarray(value, value.dtype.newbyteorder("=")), {}
    raise TypeError(f"{name} is a {type(value).__name__}; a leaf to be saved is an array or a number")


def _is_local(value: jax.Array) -> bool:
    """Whether an array is this process's own in a job of several. One over a mesh of a single process's devices is a
    stage of a pipeline: every process has it, most of them without a shard."""
    return (
        jax.process_count() > 1
        and value.is_fully_addressable
        and not isinstance(value.sharding, jax.sharding.NamedSharding)
    )


def _abstract_key_data(keys: jax.Array) -> Any:
    """Shape, dtype and sharding of the data of keys that no device here holds: JAX runs no program for them here."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)


def kind_of_number(value: bool | int | float) -> LeafKind:
    """The kind of a Python number: a restore returns the same kind."""
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def _is_numeric(dtype: np.dtype) -> bool:
    """Whether elements are numbers of a fixed size: no objects, no text, no structures; bfloat16 and its kin are."""
    return dtype.kind in "biufcmM" or dtype.isbuiltin == 2


@lru_cache(maxsize=4096)
def _devices_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], boxes: tuple[Box, ...]
) -> tuple[tuple[Any, ...], ...]:
    """For each box, the local devices that hold it."""
    holding: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holding.setdefault(Box.of_index(index or (), shape), []).append(device)
    return tuple(tuple(holding[box]) for box in boxes)


def _extent(number: int, leaf: LeafRecord, box: BoxRecord, device: Any) -> SlotExtent:
    cells = tuple((box.offset + start, box.offset + stop) for _, start, stop in cell_ranges(box, leaf))
    return SlotExtent(number, box.offset, box.offset + box.box.size * leaf.itemsize, cells, device)


def _signature(trees: Mapping[str, Any]) -> Any:
    """Shapes, dtypes and shardings: equal trees by these have equal descriptions."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf.shape, leaf.dtype, leaf.sharding
        return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)

    flat = {item: jax.tree.flatten(tree) for item, tree in trees.items()}
    return [(item, treedef, [of(leaf) for leaf in leaves]) for item, (leaves, treedef) in flat.items()]
