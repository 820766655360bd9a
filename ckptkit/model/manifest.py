"""The share of one committed step that one process holds: leaves, boxes, digests, small items. See `docs/FORMAT.md`.

The same record describes a slot of a fast tier (a manifest file next to the slots) and one process's share of a durable
step (a sidecar that stock Orbax ignores). Only the place of a box's bytes differs.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, total_ordering
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np

from ckptkit.errors import CorruptCheckpointError, NewerFormatError
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest_checks import FILES as FILES
from ckptkit.model.manifest_checks import STRUCTURE as STRUCTURE
from ckptkit.model.manifest_checks import LeafKind as LeafKind
from ckptkit.model.manifest_checks import boxes_within, check_held, check_leaf, check_small_item
from ckptkit.model.paths import METRICS, is_part

FORMAT = 3
_READ_FORMATS = (1, 2, 3)  # 1: each leaf has the text of its sharding; 1 and 2: saves name neither root nor run
MANIFEST_BYTES_MAX = 1 << 30  # a bound for what is written and parsed; 100,000 leaves of 8 boxes are about 150 MB
ManifestDepth = Literal["all", "leaves", "head"]  # of what is read of a manifest
_NUMBER_MAX = 10**18  # Orbax's names of steps have 18 digits at most


@total_ordering
@dataclass(frozen=True, slots=True)
class SaveId:
    """Names one save: no other save of any run has this name.

    `epoch` grows at every start and rollback, `number` with every save of a run. Two runs may count the same numbers:
    `run` is random, drawn by process 0 when the run begins, and `root` the random id of the durable root. Both are
    empty in saves of earlier formats, which named neither, and in trees that no run wrote. `after` is empty if the
    root had the record of this epoch when the save was made; otherwise it names the newest record that the run knew
    (`Ancestry.head`).

    Order is the order of saving, not of the step numbers. Steps of stock Orbax, and saves outside of runs (epoch 0),
    have no number: they are ordered by step, after what ckptkit saved in the same epoch.
    """

    epoch: int
    step: int
    number: int
    run: str = ""
    root: str = field(default="", compare=False)
    after: str = field(default="", compare=False)

    @property
    def ours(self) -> bool:
        """Whether a manifest names it; False for a step of stock Orbax, which gets an identity when it is listed."""
        return self.number >= 0

    @property
    def of_another_root(self) -> bool:
        """Whether it is of a step that a run of another root saved, and somebody put here."""
        return self.root != "" and not self.ours

    @property
    def made(self) -> tuple[int, float, int]:
        """When it was made, as far as its numbers show it: the key by which saves are ordered."""
        return self.epoch, self.number if self.epoch > 0 and self.ours else math.inf, self.step

    def __lt__(self, other: SaveId) -> bool:
        return (self.made, self.run) < (other.made, other.run)

    def to_list(self) -> list[Any]:
        """The identity as plain values; three numbers if it names no run."""
        numbers = [self.epoch, self.step, self.number]
        return [*numbers, self.run, self.root, self.after] if self.run else numbers

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> SaveId:
        """The result of `to_list`, checked; raises ValueError or TypeError for values that no run writes."""
        epoch, step, number, *names = values
        save_id = cls(int(epoch), int(step), int(number), *names)
        check_names(save_id)
        return save_id

    def __str__(self) -> str:
        if self.ours:
            return f"{self.step}@{self.epoch}.{self.number}"
        return f"{self.step} (of another root)" if self.of_another_root else f"{self.step} (Orbax's)"


ID_CHARS = 16  # hexadecimal digits of a run or a root: 64 random bits
_ID = re.compile(r"(?:[0-9a-f]{16})?")
_AFTER = re.compile(r"(?:[0-9]{1,18}-(?:[0-9a-f]{16})?)?")


def new_id() -> str:
    """A random id for a root or a run."""
    return secrets.token_hex(ID_CHARS // 2)


def check_names(save_id: SaveId) -> None:
    """Raises ValueError or TypeError for a run, a root or a record that no run writes."""
    if not (_ID.fullmatch(save_id.run) and _ID.fullmatch(save_id.root) and _AFTER.fullmatch(save_id.after)):
        raise ValueError(f"save of run {save_id.run!r:.40}, root {save_id.root!r:.40}, after {save_id.after!r:.40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRecord:
    """One box: where it lies in the global array and in the slot (-1: in the zarr array), and its cells' digests."""

    box: Box
    offset: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecord:
    """One leaf of an array item. `path` and `keys` (d: mapping, s: sequence, a: attribute) name it in its tree."""

    path: tuple[str, ...]
    keys: str
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    cell: tuple[int, ...]
    extra: Mapping[str, str] = field(default_factory=dict)  # key_impl: PRNG keys; sharding: Orbax's JSON of it
    boxes: tuple[BoxRecord, ...] = ()

    @property
    def name(self) -> str:
        """The path as people and Orbax write it."""
        return ".".join(self.path)

    @property
    def itemsize(self) -> int:
        """Bytes per element in host memory."""
        return itemsize_of(self.dtype)

    @property
    def cell_bytes(self) -> int:
        """Bytes of a whole cell in host memory."""
        return math.prod(self.cell) * self.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of the boxes that are held."""
        return sum(record.box.size for record in self.boxes) * self.itemsize

    def describe(self) -> str:
        """Shape and dtype as error messages write them: `float32[8,4]`."""
        return describe(self.extra.get("key_impl") or self.dtype, self.shape)


@lru_cache
def itemsize_of(dtype: str) -> int:
    """Bytes per element of a dtype by its name. Remembered: NumPy reads the name each time."""
    return np.dtype(dtype).itemsize


def describe(dtype: str, shape: Sequence[int]) -> str:
    """Shape and dtype as error messages write them: `float32[8,4]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The writer of a manifest: process index out of `count`, on `host`. `provenance` are the versions, flags and
    command that it ran with, by name; empty where earlier versions wrote it."""

    process: int
    count: int
    host: str
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One process's share of one committed step. `arrays` and `inline` are keyed by item name."""

    save_id: SaveId
    writer: Writer
    slot: str
    arrays: Mapping[str, tuple[LeafRecord, ...]]
    inline: Mapping[str, Mapping[str, Any]]  # item -> {"kind": "json" | "grain", "value": ...}
    custom: str | None = None  # `custom_digest` of the step's custom metadata; None where earlier versions wrote it

    @property
    def trees(self) -> Mapping[str, tuple[LeafRecord, ...]]:
        """The items of `arrays` that are trees, and not files of a handler."""
        if not any(name in self.arrays and each["kind"] == FILES for name, each in self.inline.items()):
            return self.arrays
        return {name: leaves for name, leaves in self.arrays.items() if self.inline.get(name, {}).get("kind") != FILES}

    @property
    def held_bytes(self) -> int:
        """Bytes of array data that this manifest covers."""
        return sum(leaf.held_bytes for leaves in self.arrays.values() for leaf in leaves)

    def to_bytes(self) -> bytes:
        """The manifest as JSON with a digest of itself."""
        digests = [box.digests for item in sorted(self.arrays) for leaf in self.arrays[item] for box in leaf.boxes]
        text = ManifestText(self.arrays)
        return text.to_bytes(self.save_id, self.writer, self.slot, digests, self.inline, custom=self.custom)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str, extent: ManifestDepth = "all") -> Manifest:
        """The manifest of `data`; raises `CorruptCheckpointError` unless every field is what a writer writes, and
        `NewerFormatError` for a format that this version does not know.

        Its digest always covers all of it. Parts that `extent` leaves out are not checked and not returned: `leaves`
        has no boxes, `head` no leaves. Cost: 9 microseconds per leaf, 7, 3.
        """
        try:
            envelope = json.loads(data)
            body = envelope["manifest"]
            start, stop = len(_ENVELOPE[0]) + len(envelope["digest"]) + len(_ENVELOPE[1]), -len(_ENVELOPE[2])
            if digest_of(data[start:stop]) != envelope["digest"]:
                raise CorruptCheckpointError(f"manifest {path} does not match its own digest", path=path)
            if body["format"] not in _READ_FORMATS:
                refuse_format(body["format"], path)
            shardings = _shardings_from_json(body)
            manifest = cls(
                save_id=SaveId(**body["save_id"]),
                writer=Writer(**body["writer"], provenance=body.get("provenance", {})),
                slot=body["slot"],
                arrays={item: _leaves_from_json(leaves, extent, shardings) for item, leaves in body["arrays"].items()},
                inline=body["inline"],
                custom=body.get("custom"),
            )
            _check_manifest(manifest)
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(f"manifest {path} cannot be read: {error}", path=path) from error


_ENVELOPE = ('{"digest":"', '","manifest":', "}")
_MARK = "\x00digests"  # placeholder for a box's digests in the cached text


@final
class ManifestText:
    """The text of manifests of the same leaves: what stays from save to save is put into words once.

    Cost: 5 microseconds per leaf once, then 0.3 per save.
    """

    def __init__(self, arrays: Mapping[str, tuple[LeafRecord, ...]]):
        self._shardings = _ShardingTable()
        table = self._shardings
        # Leaf by leaf: the encoder holds thrice the text in pieces until it has all of it.
        leaves = {
            item: ",".join([_dumps(_leaf_to_json(leaf, table)) for leaf in arrays[item]]) for item in sorted(arrays)
        }
        text = ",".join([f"{_dumps(item)}:[{records}]" for item, records in leaves.items()])
        self._between = f"{{{text}}}".split(_dumps([_MARK]))
        boxes = sum(len(leaf.boxes) for records in arrays.values() for leaf in records)
        if len(self._between) != boxes + 1:
            raise ValueError(f"a leaf is named like the mark {_MARK!r}")

    @property
    def size_bytes(self) -> int:
        """Bytes of the manifest without digests and small items."""
        tables = (*self._shardings.meshes, *(words for words, _ in self._shardings.shardings))
        return sum(map(len, self._between)) + sum(map(len, tables))

    def to_bytes(
        self,
        save_id: SaveId,
        writer: Writer,
        slot: str,
        digests: Iterable[Sequence[str]],
        inline: Mapping[str, Mapping[str, Any]],
        *,
        custom: str | None = None,
    ) -> bytes:
        """The manifest with `digests` of each box, in the order of the leaves, items by name; ends with its digest."""
        arrays = [self._between[0]]
        for found, text in zip(digests, self._between[1:], strict=True):
            arrays += ['["', '","'.join(found), '"]', text] if found else ["[]", text]
        rest = {
            "format": FORMAT,
            "inline": inline,
            "meshes": self._shardings.meshes,
            "save_id": _named_fields(save_id),
            "shardings": self._shardings.shardings,
            "slot": slot,
            "writer": {"count": writer.count, "host": writer.host, "process": writer.process},
        }
        rest |= {} if custom is None else {"custom": custom}
        rest |= {"provenance": dict(writer.provenance)} if writer.provenance else {}
        body = f'{{"arrays":{"".join(arrays)},{_dumps(rest)[1:]}'.encode()
        before, between, after = (part.encode() for part in _ENVELOPE)
        return b"".join((before, digest_of(body).encode(), between, body, after))


def _named_fields(save_id: SaveId) -> dict[str, Any]:
    numbers = {"epoch": save_id.epoch, "number": save_id.number, "step": save_id.step}
    names = {"run": save_id.run, "root": save_id.root, "after": save_id.after}
    return numbers | {name: value for name, value in names.items() if value}


def merged_leaves(manifests: Iterable[Manifest], item: str) -> list[LeafRecord]:
    """Every leaf of an item once, in the order of the save; its boxes are those of the first manifest that has it."""
    leaves: dict[tuple[str, ...], LeafRecord] = {}
    for manifest in manifests:
        for leaf in manifest.arrays.get(item, ()):
            leaves.setdefault(leaf.path, leaf)
    return list(leaves.values())


def metrics_of(manifests: Iterable[Manifest]) -> Any:
    """The metrics that a save was made with; None where it keeps none."""
    stored = next((each.inline[METRICS] for each in manifests if METRICS in each.inline), None)
    return stored["value"] if stored is not None and stored["kind"] == METRICS else None


def refuse_format(found: Any, path: str) -> None:
    """Raises the error of a manifest of another format than those that this version reads."""
    known = f"this version reads formats 1 to {FORMAT}"
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormatError(f"{path} has format {found}, of a newer ckptkit, and {known}: install it", path=path)
    raise CorruptCheckpointError(f"manifest {path} has format {found}, {known}", path=path)


def refuse_unreadable(size_bytes: int) -> None:
    """Raises ValueError for a manifest that no restore would read."""
    if size_bytes > MANIFEST_BYTES_MAX:
        raise ValueError(
            f"the manifest of this process's share needs {size_bytes} bytes, and {MANIFEST_BYTES_MAX} are the most "
            "that a restore reads; save fewer leaves, or fewer and larger boxes"
        )


_DEVICES = ', "device_mesh": '  # what Orbax writes last of a sharding: 13 bytes for each device


class _ShardingTable:
    """The distinct texts of shardings: leaves refer to them by number, and they refer to lists of devices."""

    def __init__(self) -> None:
        self.meshes: list[str] = []
        self.shardings: list[tuple[str, int | None]] = []  # text without devices, number of the list of devices
        self._numbers: dict[str, int] = {}
        self._mesh_numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The place of a text in the table."""
        if text not in self._numbers:
            words, found, devices = text.partition(_DEVICES)
            mesh = None
            if found:
                mesh = self._mesh_numbers.setdefault(devices, len(self.meshes))
                self.meshes += [devices] * (mesh == len(self.meshes))
            self._numbers[text] = len(self.shardings)
            self.shardings.append((words, mesh))
        return self._numbers[text]


def _shardings_from_json(body: Mapping[str, Any]) -> list[str]:
    """The texts of `_ShardingTable`, each made once; none in format 1."""
    meshes, texts, size_bytes = body.get("meshes", []), [], 0
    for words, mesh in body.get("shardings", []):
        if mesh is not None and not 0 <= mesh < len(meshes):
            raise ValueError(f"sharding {len(texts)} is on mesh {mesh} of {len(meshes)}")
        texts.append(words if mesh is None else f"{words}{_DEVICES}{meshes[mesh]}")
        size_bytes += len(texts[-1])
        if size_bytes > MANIFEST_BYTES_MAX:  # each may name the same list of devices
            raise ValueError(f"has shardings of more than {MANIFEST_BYTES_MAX} bytes")
    return texts


_dumps = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def custom_digest(metadata: Any) -> str | None:
    """The digest of a step's custom metadata as JSON, with sorted keys; None for what JSON cannot hold."""
    try:
        plain = json.loads(json.dumps(metadata or {}))  # keys are text then, and can be sorted
    except (TypeError, ValueError):
        return None
    return digest_of(_dumps(plain).encode())


def _leaf_to_json(leaf: LeafRecord, shardings: _ShardingTable) -> dict[str, Any]:
    extra = dict(leaf.extra)
    text = extra.pop("sharding", None)
    return {  # by hand: dataclasses.asdict copies deeply, 5 ms more for 600 leaves
        "path": leaf.path,
        "keys": leaf.keys,
        "kind": leaf.kind,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "cell": leaf.cell,
        "extra": extra,
        "boxes": [(box.box.start, box.box.stop, box.offset, [_MARK]) for box in leaf.boxes],
        **({} if text is None else {"sharding": shardings.number(text)}),
    }


def _leaves_from_json(
    records: list[dict[str, Any]], extent: ManifestDepth, shardings: Sequence[str]
) -> tuple[LeafRecord, ...]:
    boxes = extent == "all"
    return () if extent == "head" else tuple([_leaf_from_json(record, boxes, shardings) for record in records])


def _leaf_from_json(record: dict[str, Any], with_boxes: bool, shardings: Sequence[str]) -> LeafRecord:
    path, shape, cell = tuple(record["path"]), tuple(record["shape"]), tuple(record["cell"])
    keys, kind, dtype, extra = record["keys"], record["kind"], record["dtype"], record["extra"]
    try:
        if (number := record.get("sharding")) is not None:
            if not 0 <= number < len(shardings):
                raise ValueError(f"has sharding {number} of {len(shardings)}")
            if "sharding" in extra:
                raise ValueError("has two shardings for one leaf")
            extra = {**extra, "sharding": shardings[number]}
        check_leaf(path, keys, kind, dtype, (shape, cell), extra)
        boxes = _boxes_from_json(shape, cell, record["boxes"]) if with_boxes else ()
    except (ValueError, TypeError) as error:
        raise ValueError(f"leaf {'.'.join(map(str, path))} {error}") from error
    return LeafRecord(path=path, keys=keys, kind=kind, shape=shape, dtype=dtype, cell=cell, extra=extra, boxes=boxes)


def _boxes_from_json(shape: tuple[int, ...], cell: tuple[int, ...], records: list[Any]) -> tuple[BoxRecord, ...]:
    bounds = tuple([(tuple(start), tuple(stop)) for start, stop, _, _ in records])
    made = []
    for (box, cells), (_, _, offset, digests) in zip(boxes_within(shape, cell, bounds), records, strict=True):
        check_held(cells, offset, digests)
        made.append(BoxRecord(box=box, offset=offset, digests=tuple(digests)))
    return tuple(made)


def _check_manifest(manifest: Manifest) -> None:
    """Refuses manifests that no writer writes, so that what is made of one cannot fail."""
    save, writer = manifest.save_id, manifest.writer
    numbers = (save.epoch, save.step, save.number, writer.process, writer.count)
    plain = all(type(number) is int and 0 <= number < _NUMBER_MAX for number in numbers)
    check_names(save)
    if not plain or writer.process >= writer.count:
        raise ValueError(f"save {save} by process {writer.process} of {writer.count}")
    if not isinstance(writer.host, str) or not isinstance(manifest.slot, str):
        raise ValueError(f"host {writer.host!r}, slot {manifest.slot!r}")
    told = writer.provenance
    if not isinstance(told, dict) or not all(isinstance(text, str) for text in (*told, *told.values())):
        raise ValueError(f"provenance {told!r:.100} is not text by name")
    if not isinstance(manifest.custom, str | None):
        raise ValueError(f"custom {manifest.custom!r} is not a digest")
    for item in (*manifest.arrays, *manifest.inline):
        if not is_part(item):  # an item is a directory of that name
            raise ValueError(f"item {item!r} cannot be a directory")
    for item, stored in manifest.inline.items():
        try:
            check_small_item(stored, [leaf.path for leaf in manifest.arrays.get(item, ())])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"item {item!r}: {error}") from error
    for item, leaves in manifest.arrays.items():
        if len({leaf.path for leaf in leaves}) != len(leaves):
            raise ValueError(f"item {item!r} has a leaf twice")
    _check_places(manifest)


def _check_places(manifest: Manifest) -> None:
    """Boxes share no byte of a slot: so what is read of it is never more than it has."""
    places = sorted(
        (record.offset, record.offset + record.box.size * leaf.itemsize)
        for leaves in manifest.arrays.values()
        for leaf in leaves
        for record in leaf.boxes
        if record.offset >= 0 and record.box.size
    )
    for (_, stop), (start, _) in pairwise(places):
        if start < stop:
            raise ValueError(f"two boxes lie at byte {start} of the slot")


def described_items(manifests: Iterable[Manifest]) -> set[str]:
    """The items that manifests describe. The empty nodes of a tree alone do not describe it: the sidecars of an item
    have those of all items of the step."""
    return {
        name
        for manifest in manifests
        for name in (*manifest.arrays, *(n for n, stored in manifest.inline.items() if stored["kind"] != STRUCTURE))
    }
