"""Device to host: the state of one save, copied into one slot before the caller may donate it.

`describe_items` is a pure function of shapes and shardings; `copy_shards` moves bytes and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.model.boxes import Box, boxes_by_process, cell_shape
from ckptkit.model.manifest import BoxRecord, LeafKind, LeafRecord, cell_ranges, copy_digested, digest_of
from ckptkit.util.pages import PAGE_BYTES

COPY_THREADS = min(4, os.cpu_count() or 1)
_SHARED_BYTES = 16 << 20  # below it the copy is over before a second thread has started
SMALL_BYTES = 64 << 10  # below it a piece is bound by the interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSource:
    """What will be stored of a leaf, and who else holds it. Keeps no array alive."""

    sharding: jax.sharding.Sharding | None  # the leaf's own: for typed keys, without the dimensions of the key data
    record: LeafRecord
    holders: Mapping[Box, tuple[int, ...]]  # every box of the global array -> the processes that hold it
    devices: tuple[Any, ...]  # for each box of the record, the local device that it is read from; none: host memory
    local_replicas: tuple[tuple[Any, ...], ...] = ()  # for each box of the record, the other local devices that hold it


@dataclass(frozen=True, slots=True)
class SlotExtent:
    """Where box `number` of a save lies in a slot; `cells`: the byte ranges `[start, stop)` of its cells, in order."""

    number: int
    offset: int
    stop: int
    cells: tuple[tuple[int, int], ...]
    on_device: bool  # read from memory that is not the host's
    kept: bool = True  # False: only digested, to be compared with what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a save will hold: leaves by item, their trees, every box's place, and the bytes of slot they take."""

    items: Mapping[str, tuple[LeafSource, ...]]
    treedefs: Mapping[str, Any]
    extents: tuple[SlotExtent, ...]  # of every box, in the order of the leaves: ascending
    slot_bytes: int
    share_bytes: int  # what the largest share of any process takes of a slot: the same on every process

    @property
    def held_bytes(self) -> int:
        """Bytes of the boxes, without what alignment adds to them in a slot."""
        return sum(extent.stop - extent.offset for extent in self.extents)


def describe_items(trees: Mapping[str, Any]) -> Description:
    """Where each box of each leaf of the array items will lie in a slot.

    Cost: about 20 microseconds per leaf, no device work. Raises `TypeError` for a leaf that is no array or number,
    `ValueError` for one that lives on this process only in a job of several.
    """
    offset = 0
    items: dict[str, tuple[LeafSource, ...]] = {}
    treedefs = {}
    for item, tree in sorted(trees.items()):  # as manifests have them
        flat, treedefs[item] = jax.tree_util.tree_flatten_with_path(tree)
        sources = []
        for keypath, value in flat:
            source, offset = _describe_leaf(item, keypath, value, offset)
            sources.append(source)
        _refuse_equal_names(item, sources)
        items[item] = tuple(sources)
    boxes = [
        (source.record, box, bool(source.devices) and source.devices[at].platform != "cpu")
        for sources in items.values()
        for source in sources
        for at, box in enumerate(source.record.boxes)
    ]
    extents = tuple(_extent(number, *box) for number, box in enumerate(boxes))
    share_bytes = _share_bytes([source for sources in items.values() for source in sources])
    return Description(items=items, treedefs=treedefs, extents=extents, slot_bytes=offset, share_bytes=share_bytes)


class Describer:
    """`describe_items` that remembers its last answer: a training loop saves the same shapes again and again.

    Cost of a remembered answer: 2 microseconds per leaf, against 25.
    """

    def __init__(self, finish: Callable[[Description], Description]):
        self._finish = finish
        self._last: tuple[Any, Description] | None = None

    def __call__(self, trees: Mapping[str, Any]) -> Description:
        """What `finish(describe_items(trees))` gives, and raises what that raises."""
        signature = _signature(trees)
        if self._last is None or self._last[0] != signature:
            self._last = (signature, self._finish(describe_items(trees)))
        return self._last[1]


Shard = tuple[Any, SlotExtent]  # a single-device array or a NumPy one, and where it goes
Digests = tuple[str, ...]  # of the cells of one box


def local_shards(description: Description, trees: Mapping[str, Any]) -> list[Shard]:
    """One local shard for every box that this process stores, in the order of their offsets. Moves no bytes."""
    arrays = [
        array
        for item, sources in description.items.items()
        for source, value in zip(sources, jax.tree.leaves(trees[item]), strict=True)
        for array in _held(source, value)
    ]
    return list(zip(arrays, description.extents, strict=True))


def copy_shards(
    shards: Sequence[Shard], memory: np.ndarray, copied: Callable[[int, int], None] = lambda start, stop: None
) -> dict[int, Digests]:
    """Copies shards into a slot and returns the digests of their cells, by the number of the box.

    Waits for the arrays to be ready, then runs at memory speed on several threads: each byte is read from memory
    once, digested, and copied from the cache. `copied(start, stop)` is called from these threads as soon as the bytes
    of a cell are in the slot. When it returns, nothing refers to the arrays any more; no view of an array is kept: on
    the CPU backend a held view would make the next donating step allocate afresh.
    """
    small = [shard for shard in shards if shard[1].stop - shard[1].offset < SMALL_BYTES]
    # Large ones first: what is left for the end is short, so no thread waits long for another.
    large = [shard for shard in shards if shard[1].stop - shard[1].offset >= SMALL_BYTES]
    waiting = deque(sorted(large, key=lambda shard: shard[1].offset - shard[1].stop))
    for array, extent in (*waiting, *small):
        if extent.on_device:
            array.copy_to_host_async()
    digests: dict[int, list[str]] = {extent.number: [""] * len(extent.cells) for _, extent in shards}
    cells: deque[tuple[np.ndarray, int, int, list[str], int, bool]] = deque()
    opening = threading.Lock()

    def take(piece: np.ndarray, start: int, stop: int, kept: bool) -> str:
        if not kept:
            return digest_of(piece)
        digest = copy_digested(piece, memory[start:stop])
        copied(start, stop)
        return digest

    def open_next() -> bool:
        if not waiting:
            return False
        array, extent = waiting.popleft()
        data, found = _bytes_of(array), digests[extent.number]
        for index, (start, stop) in enumerate(extent.cells):
            piece = data[start - extent.offset : stop - extent.offset]
            cells.append((piece, start, stop, found, index, extent.kept))
        return True

    def copy_large() -> None:
        while True:
            with opening:  # in the order of the transfers, which are waited for here
                while not cells:
                    if not open_next():
                        return
                piece, start, stop, found, index, kept = cells.popleft()
            found[index] = take(piece, start, stop, kept)

    def copy_small() -> None:
        for array, extent in small:
            data, found = _bytes_of(array), digests[extent.number]
            for index, (start, stop) in enumerate(extent.cells):
                found[index] = take(data[start - extent.offset : stop - extent.offset], start, stop, extent.kept)

    threads = copy_threads(sum(extent.stop - extent.offset for _, extent in large))
    share_work(copy_large, threads, meanwhile=copy_small)
    return {number: tuple(found) for number, found in digests.items()}


def share_work(work: Callable[[], None], threads: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Runs `work` on so many threads, of which this one is the last: it does `meanwhile` first.

    What is small belongs into `meanwhile`: it is bound by the interpreter, and threads would only get in each other's
    way. Raises what one of them raised, once all have ended.
    """
    with ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="ckptkit-copy") as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        meanwhile()
        work()
        for other in others:
            other.result()


def copy_threads(size_bytes: int) -> int:
    """How many threads copying so many bytes is worth."""
    return COPY_THREADS if size_bytes >= _SHARED_BYTES else 1


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


def _describe_leaf(item: str, keypath: Any, value: Any, offset: int) -> tuple[LeafSource, int]:
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
    boxes, holding = [], _devices_of(value, mine) if kind == "jax" else ()
    for box in mine:
        boxes.append(BoxRecord(box=box, offset=offset, digests=()))
        offset += _slot_bytes(box, itemsize)
    record = LeafRecord(
        path=path,
        keys=keys,
        kind=kind,
        shape=tuple(value.shape),
        dtype=value.dtype.name,
        cell=cell_shape(value.shape, box_shape, itemsize),
        extra=extra,
        boxes=tuple(boxes),
    )
    devices, local_replicas = tuple(all_[0] for all_ in holding), tuple(all_[1:] for all_ in holding)
    return LeafSource(
        sharding=sharding, record=record, holders=holders, devices=devices, local_replicas=local_replicas
    ), offset


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


def leaf_path(keypath: Sequence[Any]) -> tuple[tuple[str, ...], str]:
    """A key path as names and as one letter per level (d: mapping, s: sequence, a: attribute)."""
    names, letters = [], []
    for key in keypath:
        letter, attribute = _KEYS.get(type(key), _MAPPING)
        names.append(str(getattr(key, attribute)))
        letters.append(letter)
    return tuple(names), "".join(letters)


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
    """What describes the data of keys that no device here holds: JAX runs no program for them on this process."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)


def kind_of_number(value: bool | int | float) -> LeafKind:
    """What a Python number is stored as: it comes back as one."""
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def _is_numeric(dtype: np.dtype) -> bool:
    """Whether elements are numbers of a fixed size: no objects, no text, no structures; bfloat16 and its kin are."""
    return dtype.kind in "biufcmM" or dtype.isbuiltin == 2


def _devices_of(array: jax.Array, boxes: Sequence[Box]) -> tuple[tuple[Any, ...], ...]:
    """For each box, the local devices that hold it; it is stored from the first."""
    holding: dict[Box, list[Any]] = {}
    for device, index in array.sharding.addressable_devices_indices_map(array.shape).items():
        holding.setdefault(Box.of_index(index or (), array.shape), []).append(device)
    return tuple(tuple(holding[box]) for box in boxes)


def _extent(number: int, leaf: LeafRecord, box: BoxRecord, on_device: bool) -> SlotExtent:
    cells = tuple((box.offset + start, box.offset + stop) for _, start, stop in cell_ranges(box, leaf))
    return SlotExtent(number, box.offset, box.offset + box.box.size * leaf.itemsize, cells, on_device)


def _held(source: LeafSource, value: Any) -> list[Any]:
    """One local array for every box that this process stores of a leaf: none where it has no device of the leaf's."""
    if source.sharding is not None and not source.devices:
        return []
    if not source.devices:
        return [np.asarray(value, np.dtype(source.record.dtype))]
    if isinstance(value, jax.Array) and value.sharding.num_devices == 1 and "key_impl" not in source.record.extra:
        return [value]
    local = by_device(source, value)
    return [local[device] for device in source.devices]


def by_device(source: LeafSource, value: Any) -> dict[Any, Any]:
    """The local shards of a leaf that lives on devices, each as a single-device array of plain dtype."""
    if "key_impl" in source.record.extra:
        value = jax.random.key_data(value)
    return {shard.device: shard.data for shard in value.addressable_shards}


def _signature(trees: Mapping[str, Any]) -> Any:
    """What a description depends on."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf.shape, leaf.dtype, leaf.sharding
        return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)

    flat = {item: jax.tree.flatten(tree) for item, tree in trees.items()}
    return [(item, treedef, [of(leaf) for leaf in leaves]) for item, (leaves, treedef) in flat.items()]


def _bytes_of(array: Any) -> np.ndarray:
    with jax.transfer_guard_device_to_host("allow"):  # a guard is for the caller's transfers: this one is asked for
        data = np.asarray(array)
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return data.reshape(-1).view(np.uint8)
