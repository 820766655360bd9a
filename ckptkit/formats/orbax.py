"""Orbax's steps and items, ours and stock, and the slots of the fast tiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from ckptkit.durable.lifecycle.places import Place, nothing_at
from ckptkit.durable.lifecycle.step_records import own_sidecars
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.tensors import Checkpoint, FormatFacts, Tensor
from ckptkit.inspection import Inspection, Item
from ckptkit.inspection.aggregate import read_aggregate
from ckptkit.inspection.shares import leaf_of_record, read_share, read_shares
from ckptkit.inspection.stored_arrays import StoredArray, stores_all
from ckptkit.model.boxes import Box, missing_elements
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.slots.reader import SlotReader, slot_directories
from ckptkit.util.pages import empty_block
from ckptkit.util.words import command_line

_READ_TIMEOUT_S = 600.0  # of one block
_CACHE_BYTES = 32 << 20  # of OCDBT's nodes; chunks are read once


def open_orbax(found: Inspection, *, timeout_s: float) -> Checkpoint:
    """The result of `inspect` for a path, with the array items' bytes.

    A step of ours is read cell by cell, each proven by its digest; stock Orbax's has none. Raises what `inspect` does,
    and `CorruptCheckpointError` for a save of ours whose sidecars are lost or damaged.
    """
    if found.kind == "slot":
        return _open_slot(found)
    if found.origin.writer == "ckptkit" and not found.origin.proven:
        why = "; ".join(found.problems)
        root = found.path.rpartition("/")[0]
        repair = f"repair it with `{command_line('scrub', root, '--tier', 'TIER', '--repair')}` and every fast tier of "
        raise CorruptCheckpointError(
            f"{why}. Its bytes cannot be proven and are not read: "
            + (f"{repair}the run, or choose another step" if found.kind == "step" else "choose another copy of it"),
            path=found.path,
        )
    place = Place.open(found.path, timeout_s=timeout_s)
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    tensors: list[Tensor] = []
    others: list[tuple[str, LeafInfo]] = []
    for item in found.items:
        if item.kind != "arrays":
            continue
        if item.layout == "sidecar":
            raise nothing_at(found.path, "a record of one process; name the step or the item that it belongs to")
        here = place if found.kind == "item" else place.below(item.name)
        tensors += _item_tensors(found, item, here, context, timeout_s)
        others += [(item.name, leaf) for leaf in item.leaves if leaf.dtype is None]
    return Checkpoint(
        path=found.path,
        format="orbax",
        tensors=tensors,
        layout="; ".join(item.layout for item in found.items if item.kind == "arrays"),
        others=others,
        facts=_facts(found),
    )


def _facts(found: Inspection) -> FormatFacts:
    return FormatFacts(
        kind=found.kind,
        step=found.step,
        origin=found.origin,
        values={item.name: item.value for item in found.items if item.kind != "arrays"},
        unread=tuple(item.name for item in found.items if item.kind == "other" and item.stored_bytes != 0),
        notes=found.notes,
        problems=found.problems,
    )


def _item_tensors(found: Inspection, item: Item, here: Place, context: Any, timeout_s: float) -> list[Tensor]:
    leaves = [leaf for leaf in item.leaves if leaf.dtype is not None]
    if found.origin.proven and (manifests := list(own_sidecars(here).values())):
        reader = DurableReader(here.url.rpartition("/")[0], step=manifests[0].save_id.step)
        records: dict[tuple[str, ...], list[tuple[LeafRecord, BoxRecord]]] = {}
        for manifest in manifests:
            for leaf in manifest.arrays.get(item.name, ()):
                records.setdefault(leaf.path, []).extend((leaf, record) for record in leaf.boxes)
        read = partial(reader.read, item.name)
        return [
            Tensor(item=item.name, leaf=leaf, fetch=partial(_proven, leaf, records.get(leaf.path, ()), read, here.url))
            for leaf in leaves
        ]
    fill_missing = not stores_all(here)
    in_file = read_aggregate(here, timeout_s=timeout_s) or {}
    held = {path: value for path, value in in_file.items() if isinstance(value, np.ndarray)}

    def stored(leaf: LeafInfo) -> StoredArray:
        limits_s = {"open_timeout_s": timeout_s, "read_timeout_s": _READ_TIMEOUT_S}
        return StoredArray(here, leaf, item.layout, context, fill_missing=fill_missing, **limits_s)

    arrays = [(leaf, stored(leaf)) for leaf in leaves if leaf.path not in held]
    return [
        *(
            Tensor(item=item.name, leaf=leaf, fetch=array.read, stored=array.stored if fill_missing else None)
            for leaf, array in arrays
        ),
        *(
            Tensor(item=item.name, leaf=leaf, fetch=partial(_part, held[leaf.path]))
            for leaf in leaves
            if leaf.path in held
        ),
    ]


def _part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[box.slices()]


def _proven(
    leaf: LeafInfo, records: Sequence[tuple[LeafRecord, BoxRecord]], read: Any, where: str, wanted: Box
) -> np.ndarray:
    """The box from the records that hold it: their cells are checked while they are copied."""
    into = empty_block(wanted.shape, np.dtype(leaf.dtype))  # by pages, as disks read and write
    if missing_elements(wanted, [record.box for _, record in records]):
        raise CorruptCheckpointError(
            f"{where}: nothing there holds all of leaf {leaf.name}, box {wanted.start} to {wanted.stop}", path=where
        )
    for record_leaf, record in records:
        common = record.box.intersect(wanted)
        if common == wanted:
            read(record_leaf, record, wanted, into)
            break
        if common is not None:
            place = into[common.slices(wanted.start)]
            part = place if place.flags.c_contiguous else np.empty(common.shape, into.dtype)
            read(record_leaf, record, common, part)
            if part is not place:
                place[...] = part
    return into


def _open_slot(found: Inspection) -> Checkpoint:
    """One save in the slots of a host: the shares of all its processes, next to each other."""
    path = Path(found.path)
    first = read_share(path)
    shares = [first]
    for directory in slot_directories(path.parent.parent):
        if directory != path.parent:
            shares += [each for each in read_shares(directory)[0] if each.manifest.save_id == first.manifest.save_id]
    readers = [SlotReader(share.directory, share.manifest) for share in shares]
    records: dict[tuple[str, tuple[str, ...]], list[tuple[LeafRecord, BoxRecord]]] = {}
    owner: dict[int, SlotReader] = {}
    for share, reader in zip(shares, readers, strict=True):
        for item, leaves in share.manifest.trees.items():
            for leaf in leaves:
                records.setdefault((item, leaf.path), []).extend((leaf, record) for record in leaf.boxes)
                owner.update({id(record): reader for record in leaf.boxes})

    def read(leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        try:
            owner[id(record)].read(leaf, record, wanted, into)
        except CorruptCheckpointError:
            if owner[id(record)].gone():
                raise nothing_at(found.path, "a running job replaced this save while it was read; try again") from None
            raise

    tensors = [
        Tensor(
            item=item,
            leaf=leaf_of_record(held[0][0], held=True),
            fetch=partial(_proven, leaf_of_record(held[0][0], held=True), held, read, found.path),
        )
        for (item, _), held in records.items()
        if held
    ]
    return Checkpoint(
        path=found.path,
        format="slot",
        tensors=tensors,
        layout=f"{len(shares)} of {first.manifest.writer.count} processes' slots",
        facts=_facts(found),
    )
