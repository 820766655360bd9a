"""The content of a save, and the place of each box in a slot: a pure function of shapes and shardings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.model.boxes import CELL_BYTES, Box, boxes_by_process, cell_shape, local_devices_by_box
from ckptkit.model.cells import cell_ranges
from ckptkit.model.digests import DIGEST_BYTES
from ckptkit.model.manifest import BoxRecord, LeafKind, LeafRecord, ManifestText, refuse_unreadable
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.pages import whole_pages
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
    text: ManifestText = field(compare=False, repr=False)  # the common part of its manifests

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
    Leaves may be `jax.ShapeDtypeStruct` with a sharding: their description is that of such arrays.

    Cost: about 15 microseconds per leaf, no device work. Raises `TypeError` for a leaf that is not an array or a
    number. Raises `ValueError` for a leaf that lives on this process only in a job of several, and for more leaves than
    a manifest may have.
    """
    items: dict[str, tuple[LeafSource, ...]] = {}
    treedefs = {}
    describer = _Leaves()
    for item, tree in sorted(trees.items()):  # as manifests have them
        flat, treedefs[item] = jax.tree_util.tree_flatten_with_path(tree)
        limits = (chunk_bytes or {}).get(item) or [None] * len(flat)
        items[item] = tuple(
            [
                describer.source(item, keypath, value, limit)
                for (keypath, value), limit in zip(flat, limits, strict=True)
            ]
        )
        _refuse_equal_names(item, items[item])
    text = ManifestText({item: tuple([source.record for source in sources]) for item, sources in items.items()})
    refuse_unreadable(text.size_bytes + sum([len(extent.cells) for extent in describer.extents]) * DIGEST_BYTES)
    alike = items if jax.process_count() == 1 else {item: each for item, each in items.items() if item not in own}
    return Description(
        items=items,
        treedefs=treedefs,
        extents=tuple(describer.extents),
        slot_bytes=describer.slot_bytes,
        share_bytes=_share_bytes([source for sources in alike.values() for source in sources]),
        text=text,
    )


class Describer:
    """`describe_items` that remembers its last answer: a training loop saves the same shapes again and again.

    Cost of a remembered answer: 1 microsecond per leaf, against 20.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Description] | None = None

    def __call__(
        self,
        trees: Mapping[str, Any],
        own: Collection[str] = (),
        chunk_bytes: Mapping[str, Sequence[int | None]] | None = None,
    ) -> Description:
        """The same as `describe_items(...)`, with the same errors. A tree of abstract leaves prepares the answer for
        arrays like them."""
        with collection_paused():  # for thousands of records that all stay: a third of the time
            signature = [_signature(trees), dict(chunk_bytes or {})]
            if self._last is None or self._last[0] != signature:
                self._last = (signature, describe_items(trees, own, chunk_bytes))
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


def _transferred_from(sharding: jax.sharding.Sharding | None, device: Any) -> Any:
    """The device if it has the memory that a box of it is transferred from; None where the box is in host memory."""
    if not is_accelerator(device):
        return None
    kind = None if sharding is None else sharding.memory_kind
    return device if kind in (None, device.default_memory().kind) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The common part of leaves of one shape, dtype and sharding. A state of thousands has few of them."""

    record: LeafRecord  # without a name and boxes
    boxes: tuple[tuple[Box, int, int], ...]  # that this process holds, each with its bytes and those of its slot
    cells: tuple[tuple[tuple[int, int], ...], ...]  # the byte ranges of each box's cells, from its beginning
    holders: Mapping[Box, tuple[int, ...]]
    holding: tuple[tuple[Any, ...], ...]  # for each box, the local devices that hold it; none: host memory
    sharding: jax.sharding.Sharding | None


@final
class _Leaves:
    """Describes leaves one after the other, each behind the others in the slot."""

    def __init__(self) -> None:
        self.extents: list[SlotExtent] = []
        self.slot_bytes = 0
        self._load: dict[Any, int] = {}  # bytes that are read from each device
        self._forms: dict[Any, _Form] = {}

    def source(self, item: str, keypath: Any, value: Any, limit: int | None) -> LeafSource:
        """The description of one leaf; raises as `describe_items`."""
        path, keys = leaf_path(keypath)
        form = self._form_of(item, path, value, limit)
        offset, boxes = self.slot_bytes, []
        devices = tuple(
            [
                _least_loaded(all_, nbytes, self._load)
                for all_, (_, nbytes, _) in zip(form.holding, form.boxes, strict=False)
            ]
        )
        for at, (box, nbytes, slot_bytes) in enumerate(form.boxes):
            boxes.append(BoxRecord(box=box, offset=offset, digests=()))
            cells = tuple([(offset + start, offset + stop) for start, stop in form.cells[at]])
            device = _transferred_from(form.sharding, devices[at]) if devices else None
            self.extents.append(SlotExtent(len(self.extents), offset, offset + nbytes, cells, device))
            offset += slot_bytes
        self.slot_bytes = offset
        return LeafSource(
            sharding=form.sharding,
            record=LeafRecord(  # by hand: dataclasses.replace takes twice as long
                path=path,
                keys=keys,
                kind=form.record.kind,
                shape=form.record.shape,
                dtype=form.record.dtype,
                cell=form.record.cell,
                extra=form.record.extra,
                boxes=tuple(boxes),
            ),
            holders=form.holders,
            devices=devices,
            local_replicas=_others(form.holding, devices),
            first=len(devices) == 1 and form.holding[0][0] == devices[0],
        )

    def _form_of(self, item: str, path: LeafPath, value: Any, limit: int | None) -> _Form:
        if not hasattr(value, "sharding"):
            return _form(f"{item}:{'.'.join(path)}", value, limit)
        key = (value.shape, value.dtype, value.sharding, limit)
        if (known := self._forms.get(key)) is None:
            self._forms[key] = known = _form(f"{item}:{'.'.join(path)}", value, limit)
        return known


def _form(name: str, value: Any, limit: int | None) -> _Form:
    sharding = getattr(value, "sharding", None)
    kind, value, extra = _unwrap(name, value)
    itemsize, shape = value.dtype.itemsize, tuple(value.shape)
    holding: tuple[tuple[Any, ...], ...] = ()
    limits = ()
    if kind == "jax":
        holders = boxes_by_process(value.sharding, shape)
        mine = tuple(box for box, processes in holders.items() if jax.process_index() in processes)
        box_shape = next(iter(holders)).shape
        if any(box.shape != box_shape for box in holders):
            raise ValueError(f"{name} is split unevenly over its devices ({value.sharding}); pad it or replicate it")
        holding = _devices_of(value.sharding, shape, mine)
        limits = () if limit is None else (min(limit, CELL_BYTES),)
        text = sharding_text(sharding or value.sharding)
        extra |= {} if text is None else {"sharding": text}
    else:
        sharding = None
        mine = (Box.whole(shape),)
        holders = {mine[0]: (0,)}
        box_shape = shape
    cell = cell_shape(shape, box_shape, itemsize, *limits)
    record = LeafRecord(path=(), keys="", kind=kind, shape=shape, dtype=value.dtype.name, cell=cell, extra=extra)
    placed = [BoxRecord(box=box, offset=0, digests=()) for box in mine]
    return _Form(
        record=record,
        boxes=tuple((box, box.size * itemsize, whole_pages(box.size * itemsize)) for box in mine),
        cells=tuple(tuple((start, stop) for _, start, stop in cell_ranges(box, record)) for box in placed),
        holders=holders,
        holding=holding,
        sharding=sharding,
    )


def _least_loaded(holding: Sequence[Any], nbytes: int, load: dict[Any, int]) -> Any:
    """The device from which a box is read: of those that hold it, the one from which the fewest bytes are read so far.

    Small boxes are read from the first, which JAX gives without making an object for each of the others.
    """
    device = holding[0] if nbytes < SMALL_BYTES else min(holding, key=lambda each: load.get(each, 0))
    load[device] = load.get(device, 0) + nbytes
    return device


@lru_cache(maxsize=4096)
def _others(holding: tuple[tuple[Any, ...], ...], devices: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """For each box, the devices of `holding` that hold it besides the one in `devices`."""
    return tuple(tuple(each for each in all_ if each != device) for all_, device in zip(holding, devices, strict=True))


def _share_bytes(sources: Sequence[LeafSource]) -> int:
    everywhere_bytes, by_process = 0, Counter[int]()
    alike = Counter((id(source.holders), source.sharding is None, source.record.itemsize) for source in sources)
    of_id = {id(source.holders): source.holders for source in sources}
    for (holders, on_each, itemsize), count in alike.items():
        for box, processes in of_id[holders].items():
            taken_bytes = count * whole_pages(box.size * itemsize)
            if on_each:  # every process stores it
                everywhere_bytes += taken_bytes
            else:
                by_process.update(dict.fromkeys(processes, taken_bytes))
    return everywhere_bytes + max(by_process.values(), default=0)


def _refuse_equal_names(item: str, sources: Sequence[LeafSource]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.record.name in seen:
            raise ValueError(
                f"{item}:{source.record.name} names two leaves, which would share one array on disk; rename one"
            )
        seen.add(source.record.name)


_MAPPING = ("d", "key")
_KEYS = {
    jax.tree_util.SequenceKey: ("s", "idx"),
    jax.tree_util.FlattenedIndexKey: ("s", "key"),  # of a node without keys of its own, which Orbax stores as a list
    jax.tree_util.GetAttrKey: ("a", "name"),
}


LeafPath = tuple[str, ...]


def leaf_path(keypath: Sequence[Any]) -> tuple[LeafPath, str]:
    """A key path as names and as one letter per level (d: mapping, s: sequence, a: attribute)."""
    names, letters = [], []
    for key in keypath:
        letter, attribute = _KEYS.get(type(key), _MAPPING)
        names.append(str(getattr(key, attribute)))
        letters.append(letter)
    return tuple(names), "".join(letters)


def names_of(keypath: Sequence[Any]) -> LeafPath:
    """A key path as names alone."""
    return tuple([str(getattr(key, _KEYS.get(type(key), _MAPPING)[1])) for key in keypath])


def leaves_by_path(tree: Any) -> list[tuple[LeafPath, Any]]:
    """The leaves of a tree with their paths as names, in JAX's order."""
    return [(names_of(keypath), leaf) for keypath, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _unwrap(name: str, value: Any) -> tuple[LeafKind, Any, dict[str, str]]:
    """The kind of a leaf, its value as an array of plain dtype, and what is needed to wrap it again."""
    if isinstance(value, jax.Array) or getattr(value, "sharding", None) is not None:
        if _is_local(value.sharding):
            raise ValueError(
                f"{name} lives on process {jax.process_index()} only, in a job of {jax.process_count()} processes; "
                "make it a global array (jax.device_put with a sharding over the mesh), or a NumPy array"
            )
        if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return "jax", value, {}
        return "jax", *_key_data(value)
    if isinstance(value, bool | int | float) and _is_numeric(np.asarray(value).dtype):
        return kind_of_number(value), np.asarray(value), {}
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        return "numpy", np.asarray(value, value.dtype.newbyteorder("=")), {}
    raise TypeError(f"{name} is a {type(value).__name__}; a leaf to be saved is an array or a number")


def _is_local(sharding: jax.sharding.Sharding) -> bool:
    """Whether an array is this process's own in a job of several. One over a mesh of a single process's devices is a
    stage of a pipeline: every process has it, most of them without a shard."""
    return (
        jax.process_count() > 1
        and sharding.is_fully_addressable
        and not isinstance(sharding, jax.sharding.NamedSharding)
    )


def _key_data(keys: Any) -> tuple[Any, dict[str, str]]:
    """Shape, dtype and sharding of the data of typed keys, and the name of their implementation. Runs no program."""
    if isinstance(keys, jax.Array) and keys.sharding.addressable_devices:
        return jax.random.key_data(keys), {"key_impl": str(jax.random.key_impl(keys))}  # JAX has both at hand
    impls: list[str] = []

    def data_of(traced: Any) -> Any:
        impls.append(str(jax.random.key_impl(traced)))
        return jax.random.key_data(traced)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding), {"key_impl": impls[0]}


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
    holding = local_devices_by_box(sharding, shape)
    return tuple(tuple(holding[box]) for box in boxes)


_INT64_MAX = (1 << 63) - 1


def _signature(trees: Mapping[str, Any]) -> Any:
    """Shapes, dtypes and shardings: equal trees by these have equal descriptions."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf.shape, leaf.dtype, leaf.sharding
        if isinstance(leaf, int):  # NumPy takes int64, and uint64 for what is larger
            return type(leaf), leaf > _INT64_MAX
        return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)

    flat = {item: jax.tree.flatten(tree) for item, tree in trees.items()}
    return [(item, treedef, [of(leaf) for leaf in leaves]) for item, (leaves, treedef) in flat.items()]
