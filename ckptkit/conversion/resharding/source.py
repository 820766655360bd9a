"""The source of a reshard: the items of an Orbax step, with everything to copy besides the arrays' bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.conversion.resharding.meshes import Spec
from ckptkit.durable.lifecycle.places import Place, readable
from ckptkit.durable.lifecycle.step_records import own_sidecars, read_sidecars, sidecar_processes
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Checkpoint, Tensor
from ckptkit.inspection.stored_arrays import read_shardings
from ckptkit.model import paths
from ckptkit.model.leaf_info import parsed_sharding
from ckptkit.model.manifest import STRUCTURE, LeafKind, LeafRecord, SaveId
from ckptkit.util.words import command_line

_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple"}  # Orbax's words for containers without leaves
_ITERATOR = "grain"  # the small item that is another one for each process
_KINDS: Mapping[str, LeafKind] = {"i": "int", "u": "int", "f": "float", "b": "bool"}

Small = Mapping[str, Mapping[str, Any]]  # small items by name, as manifests keep them


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """One item of arrays. `records` have no boxes and the source's cells; `structure` are its nodes without leaves.

    `described` is Orbax's `_METADATA`. `provable`: a record of ours has words for every leaf of it.
    """

    name: str
    place: Place
    tensors: tuple[Tensor, ...]
    records: tuple[LeafRecord, ...]
    described: Any
    structure: Mapping[str, Any] | None
    provable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSource:
    """An open Orbax checkpoint: a whole step, or one item of arrays (then `others` is empty).

    `small` is what the sidecars of a step of ours keep of its small items, one for each process that wrote it.
    """

    opened: Checkpoint
    place: Place
    items: tuple[SourceItem, ...]
    others: tuple[Place, ...]  # items that are copied as they are
    save_id: SaveId
    small: tuple[Small, ...] = ()

    @property
    def iterators(self) -> list[str]:
        """The small items that are another one for each process."""
        return [name for name, stored in (*self.small, {})[0].items() if stored["kind"] == _ITERATOR]

    def small_of(self, process: int, count: int) -> Small:
        """The small items for one process's sidecars, when `count` processes write the step again.

        The state of a data iterator belongs to one process. It is left out if `count` differs from the number of
        processes that saved it.
        """
        if not self.small:
            return {}
        whole = {name: stored for name, stored in self.small[0].items() if stored["kind"] != _ITERATOR}
        if count != len(self.small):
            return whole
        return {**whole, **{name: each for name, each in self.small[process].items() if each["kind"] == _ITERATOR}}


def open_source(path: str, *, timeout_s: float) -> ReshardSource:
    """The checkpoint at `path`; close `opened`. Raises `CheckpointError` if it is not one of Orbax's, or is damaged."""
    opened = open_checkpoint(path, timeout_s=timeout_s)
    if opened.format != "orbax" or opened.facts.kind not in ("step", "item"):
        raise CheckpointError(
            f"{opened.path} is {opened.format}, and only Orbax's checkpoints have chunks to be laid anew; "
            "`ckptkit convert --to orbax` makes one",
            path=opened.path,
        )
    if opened.facts.problems:
        raise CorruptCheckpointError("; ".join(opened.facts.problems), path=opened.path)
    if any(note.startswith("unfinished:") for note in opened.facts.notes):
        raise CheckpointError(f"{opened.path} was never committed, and is not resharded", path=opened.path)
    place = Place.open(opened.path, timeout_s=timeout_s)
    is_step = opened.facts.kind == "step"
    by_item: dict[str, list[Tensor]] = {}
    for tensor in opened.tensors:
        by_item.setdefault(tensor.item, []).append(tensor)
    if not by_item:
        raise CheckpointError(f"{opened.path} has no array that could be resharded", path=opened.path)
    items = tuple(_item(place.below(n) if is_step else place, n, tensors) for n, tensors in by_item.items())
    others = tuple(place.below(name) for name in place.directories() if is_step and name not in by_item)
    origin = opened.facts.origin
    return ReshardSource(
        opened=opened,
        place=place,
        items=items,
        others=others,
        save_id=origin.save_id or SaveId(0, opened.facts.step or 0, 0),
        small=_small(items) if is_step else (),
    )


def _small(items: Sequence[SourceItem]) -> tuple[Small, ...]:
    """The entries of every process's sidecar for the items without sidecars. Each item's sidecars repeat all of
    them."""
    arrays = {item.name for item in items}
    for item in items:
        if own := own_sidecars(item.place, extent="head").values():
            return tuple({n: each for n, each in manifest.inline.items() if n not in arrays} for manifest in own)
    return ()


def specs_like(path: str, *, timeout_s: float) -> dict[str, Spec]:
    """How every leaf of a checkpoint is split, by its name; what lay on one device is split over nothing.

    Raises `CheckpointError` if the checkpoint does not record it, `CorruptCheckpointError` if the record is damaged.
    """
    with open_checkpoint(path, timeout_s=timeout_s) as opened:
        found: dict[str, Spec] = {}
        for tensor in opened.tensors:
            if tensor.leaf.sharding is not None:
                named = parsed_sharding(tensor.leaf.sharding)
                found[tensor.name] = () if named is None else named[0]
        if not found:
            place = Place.open(opened.path, timeout_s=timeout_s)
            for name in {tensor.item for tensor in opened.tensors}:  # a damaged record raises
                read_shardings(place.below(name) if opened.facts.kind == "step" else place)
            raise CheckpointError(f"{path} has no {paths.SHARDINGS}, so the layout of its leaves is unknown", path=path)
    return found


def _item(place: Place, name: str, tensors: Sequence[Tensor]) -> SourceItem:
    described = place.json(paths.TREE_METADATA)
    if not sidecar_processes(place) and (described is None or paths.AGGREGATE in place.signs()):
        raise CheckpointError(
            f"{place.url} has a layout of old versions of Orbax, which is not resharded; "
            f"`{command_line('convert', place.url, 'NEW', '--to', 'orbax')}` writes it in the present one",
            path=place.url,
        )
    if described is None:
        raise CorruptCheckpointError(
            f"{place.url} has no {paths.TREE_METADATA}, without which Orbax does not read it", path=place.url
        )
    with readable(f"{place.url}/{paths.TREE_METADATA}"):
        nodes = list(described["tree_metadata"].values())
        letters = {_path(node): _letters(node) for node in nodes}
        empty = [_empty(node) for node in nodes if node["value_metadata"].get("skip_deserialize")]
    processes = sidecar_processes(place)
    known: dict[tuple[str, ...], LeafRecord] = {}
    structure: Mapping[str, Any] | None = {"kind": STRUCTURE, "value": empty} if empty else None
    if processes:
        manifest = read_sidecars(place, processes[:1])[processes[0]]
        known = {leaf.path: leaf for leaf in manifest.arrays.get(name, ())}
        structure = manifest.inline.get(name, structure)
    records = tuple(_record(tensor, known.get(tensor.leaf.path), letters) for tensor in tensors)
    return SourceItem(
        name=name,
        place=place,
        tensors=tuple(tensors),
        records=records,
        described=described,
        structure=structure,
        provable=len(nodes) == len(records) + (0 if structure is None else len(structure["value"])),
    )


def _record(tensor: Tensor, known: LeafRecord | None, letters: Mapping[tuple[str, ...], str]) -> LeafRecord:
    leaf = tensor.leaf
    assert leaf.shape is not None
    assert leaf.dtype is not None
    cell = tuple(max(1, rows) for rows in leaf.cell or leaf.shape)
    kind: LeafKind = "jax" if leaf.kind not in ("numpy", "scalar") else "numpy"
    if leaf.kind == "scalar":
        kind = _KINDS.get(tensor.dtype.kind, "numpy")
    return LeafRecord(
        path=leaf.path,
        keys=letters[leaf.path] if known is None else known.keys,
        kind=kind if known is None else known.kind,
        shape=leaf.shape,
        dtype=leaf.dtype,
        cell=cell,
        extra={} if leaf.key_impl is None else {"key_impl": leaf.key_impl},
    )


def _path(node: Any) -> tuple[str, ...]:
    return tuple(str(part["key"]) for part in node["key_metadata"])


def _letters(node: Any) -> str:
    return "".join("s" if part["key_type"] == 1 else "d" for part in node["key_metadata"])


def _empty(node: Any) -> list[Any]:
    return [list(_path(node)), _letters(node), _EMPTY.get(node["value_metadata"]["value_type"], "none")]
