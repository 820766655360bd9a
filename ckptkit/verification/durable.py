"""Proves durable steps: every cell of a step of ours against its digest, and what can be said of stock Orbax's."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts

from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.sidecars import has_sidecar_sign, incomplete, lost_sidecars, several_saves, wrong_step
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.arrays import finished, open_array, open_kvstore, read_arrays, stores_all
from ckptkit.inspection.directories import (
    committed_at_s,
    grain_names,
    is_committed,
    item_kind,
    json_name,
    json_value,
    step_items,
)
from ckptkit.inspection.places import Place, readable
from ckptkit.inspection.records import LeafInfo
from ckptkit.inspection.shares import leaf_of_record, own_sidecars, sidecar_processes
from ckptkit.model import paths
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.manifest import LeafRecord, Manifest, SaveId, cell_ranges, digest_of
from ckptkit.model.paths import ARRAY_METADATAS, STEP_METADATA
from ckptkit.verification.pool import CellCheck, Limits, check_cells
from ckptkit.verification.records import Finding, StepProof
from ckptkit.verification.slots import not_covered


def stock_checks(item: Place, timeout_s: float, findings: list[Finding]) -> list[CellCheck]:
    """A read of every chunk of an item. What its metadata has wrong goes to `findings`.

    Raises `CorruptCheckpointError` where its leaves are not known, `StoreError` where it cannot be reached.
    """
    words, leaves, problems = read_arrays(item, timeout_s=timeout_s)
    findings += [Finding(path=item.url, problem=problem) for problem in problems]
    version = 3 if words.endswith("zarr3") else 2
    ocdbt = paths.OCDBT_MANIFEST in item.names()
    if version == 2 and stores_all(item):
        findings += _missing_chunks(item, leaves, ocdbt, timeout_s)
    # Without a cache: every chunk is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    return [
        check
        for leaf in leaves
        if leaf.shape is not None
        for check in _leaf_checks(item, leaf, words, context, timeout_s)
    ]


def _missing_chunks(item: Place, leaves: tuple[LeafInfo, ...], ocdbt: bool, timeout_s: float) -> Iterator[Finding]:
    keys = set(_keys(item, ocdbt, timeout_s))
    for leaf in leaves:
        for name, box in _chunk_names(leaf):
            if not {f"{leaf.name}/{name}", f"{leaf.name}/{name.replace('.', '/')}"} & keys:
                yield Finding(path=item.url, problem="the chunk is not there", item=item.name, leaf=leaf.name, box=box)


def _keys(item: Place, ocdbt: bool, timeout_s: float) -> Iterator[str]:
    listed = finished(open_kvstore(item, ocdbt, timeout_s).list(), item.url, timeout_s)
    return (key.decode(errors="replace") for key in listed)


def _chunk_names(leaf: LeafInfo) -> Iterator[tuple[str, Box]]:
    if leaf.shape is None or leaf.cell is None or 0 in leaf.shape:
        return
    counts = [-(-size // rows) for size, rows in zip(leaf.shape, leaf.cell, strict=True)]
    for index in itertools.product(*map(range, counts)):
        start = tuple(i * rows for i, rows in zip(index, leaf.cell, strict=True))
        stop = tuple(min(a + rows, size) for a, rows, size in zip(start, leaf.cell, leaf.shape, strict=True))
        yield ".".join(map(str, index)) or "0", Box(start, stop)


def _leaf_checks(item: Place, leaf: LeafInfo, words: str, context: Any, timeout_s: float) -> Iterator[CellCheck]:
    assert leaf.shape is not None
    assert leaf.cell is not None
    assert leaf.dtype is not None
    itemsize, opened = np.dtype(leaf.dtype).itemsize, []

    def read(box: Box) -> None:
        if not opened:
            opened.append(open_array(item, leaf, words, context, timeout_s))
        finished(opened[0][box.slices()].read(), f"{item.url}: leaf {leaf.name}", timeout_s)

    for box in cells_of(Box.whole(leaf.shape), leaf.cell):
        yield CellCheck(
            path=item.url,
            item=item.name,
            leaf=leaf.name,
            box=box,
            size_bytes=box.size * itemsize,
            memory_bytes=3 * math.prod(leaf.cell) * itemsize,  # as stored, decoded, and the part that was asked for
            expected=None,
            read=lambda box=box: read(box),
        )


_SETTLE_S = 0.2  # that a deletion which is under way gets, before a step counts as damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What the metadata of a step says: who wrote it, what is to be read, what is wrong already."""

    sidecars: Mapping[str, tuple[Manifest, ...]]
    save_id: SaveId | None
    checks: tuple[CellCheck, ...]
    findings: tuple[Finding, ...]
    stock_items: tuple[str, ...]
    bare_items: tuple[str, ...]  # beside items of ours, and nobody kept digests of them


def prove_step(place: Place, step: int, limits: Limits, notes: list[str], *, timeout_s: float) -> list[StepProof]:
    """A durable step directory, or an item in one; nothing, and a note, where it was pruned or replaced meanwhile.

    Raises `StoreError` where it cannot be reached.
    """
    if not is_committed(place):
        reason = "it was never committed: a save that is under way, or was cut off"
        return [StepProof(step=step, state="incomplete", kind="durable", path=place.url, reason=reason)]
    return prove_written(place, step, limits, notes, timeout_s=timeout_s)


def prove_written(place: Place, step: int, limits: Limits, notes: list[str], *, timeout_s: float) -> list[StepProof]:
    """What `prove_step` gives of a step that is there, whether it is committed or is about to be."""
    before = identity_of(place)
    looked = _look(place, step, timeout_s)
    small_enough = [check for check in looked.checks if check.memory_bytes <= limits.memory_bytes_max]
    total_bytes = sum(check.size_bytes for check in small_enough)
    checked, damaged = check_cells(small_enough, total_bytes, limits, path=place.url, step=step)
    findings = (*looked.findings, *damaged)
    unproven = _unproven(looked, limits)
    if findings and _changes(place, before):
        notes.append(f"{place.url}: the step was pruned or replaced while it was read")
        return []
    proof = StepProof(
        step=step,
        state="corrupt" if findings else "unproven" if unproven else "proven",
        kind="durable",
        path=place.url,
        save_id=looked.save_id,
        checked=checked,
        reason=f"{len(findings)} damaged" if findings else unproven,
        findings=findings,
    )
    return [proof]


def _changes(place: Place, before: object) -> bool:
    """Whether a running job deletes or replaces a step that looks damaged. A deletion takes a moment: a little
    later the step is gone, or has lost another file."""
    if identity_of(place.again()) != before:
        return True
    time.sleep(_SETTLE_S)
    gone = place.store.properties.file_system and not os.path.isdir(place.url.removeprefix("file://"))
    return gone or identity_of(place.again()) != before


def items_of(place: Place) -> list[Place]:
    """The items of a step directory; the directory itself where it is one (saved without a manager)."""
    whole = [place] if item_kind(place) is not None else []
    return whole or [place.below(name) for name in step_items(place)]


def step_url_of(place: Place, item: Place) -> str:
    """The directory above an item, which is the step, or what stands above it where the step is the item."""
    return place.url if item is not place else place.url.rpartition("/")[0]


def _unproven(looked: _Looked, limits: Limits) -> str | None:
    """Why a step without damage is not proven; None for one that is."""
    large = [check for check in looked.checks if check.memory_bytes > limits.memory_bytes_max]
    if large:  # not damage: nobody has looked
        most = max(check.memory_bytes for check in large)
        return (
            f"unproven: {len(large)} chunks were not read, leaf {large[0].item}:{large[0].leaf} first: they take up to "
            f"{most} bytes of memory, and {limits.memory_bytes_max} are allowed"
        )
    if looked.stock_items:
        names = ", ".join(looked.stock_items)
        return (
            f"unproven: every chunk of {names} decodes, and stock Orbax keeps no digests that would show a changed bit"
        )
    if looked.bare_items:
        return f"unproven: nobody kept digests of {', '.join(looked.bare_items)}; all else is proven"
    return None


def _look(place: Place, step: int, timeout_s: float) -> _Looked:
    findings: list[Finding] = []
    sidecars: dict[str, tuple[Manifest, ...]] = {}
    checks: list[CellCheck] = []
    stock: list[str] = []
    bare: list[str] = []
    items = items_of(place)
    if not items:
        findings.append(Finding(path=place.url, problem=f"{place.url} is a step without any item"))
    _said(findings, place.url, lambda: _check_step_metadata(place, items))
    for item in items:
        if _said(findings, item.url, partial(_sidecars_into, sidecars, item, step)) is False:
            continue
        if item.name in sidecars:
            manifests = sidecars[item.name]
            checks += _our_checks(DurableReader(step_url_of(place, item), step=step), item, manifests)
            _said(findings, item.url, partial(_check_structure, item, manifests, timeout_s, findings))
        elif item_kind(item) == "arrays":
            stock.append(item.name)
            _said(findings, item.url, partial(_stock_into, checks, item, timeout_s, findings))
    first = next((manifests[0] for manifests in sidecars.values()), None)
    if mixed := several_saves(place.url, (manifests[0].save_id for manifests in sidecars.values())):
        findings.append(Finding(path=place.url, problem=mixed))
    small = _small_items(items, first, findings)
    if first is not None and place not in items:
        own = next(iter(sidecars.values()))
        _check_inline(place, own, small, findings)
        bare += [item.name for item in items if item.name not in {*sidecars, *first.inline, *stock}]
    return _Looked(
        sidecars=sidecars,
        save_id=None if first is None else first.save_id,
        checks=tuple(checks),
        findings=tuple(dict.fromkeys(findings)),
        stock_items=tuple(stock) or (() if first is not None or findings else tuple(sorted(small))),
        bare_items=tuple(bare),
    )


def _said(findings: list[Finding], path: str, act: Callable[[], object]) -> bool:
    """Does `act`; what it finds damaged becomes a finding, and False is given."""
    try:
        with readable(path):
            act()
        return True
    except CorruptCheckpointError as error:
        findings.append(Finding(path=path, problem=str(error)))
        return False


def _stock_into(checks: list[CellCheck], item: Place, timeout_s: float, findings: list[Finding]) -> None:
    checks += stock_checks(item, timeout_s, findings)


def _check_step_metadata(place: Place, items: Sequence[Place]) -> None:
    committed_at_s(place)
    ours = any(sidecar_processes(item) for item in items)
    if ours and place not in items and STEP_METADATA not in place.names():
        raise CorruptCheckpointError(f"{place.url} has no {STEP_METADATA}, which every step of ours has")


def _sidecars_into(sidecars: dict[str, tuple[Manifest, ...]], item: Place, step: int) -> None:
    """Reads the sidecars of an item, which must be those of every process of one save, and cover every leaf."""
    found = own_sidecars(item)
    if not found:
        signs = item.below(ARRAY_METADATAS).read("process_0") if f"{ARRAY_METADATAS}/" in item.names() else None
        if f"{paths.SIDECAR_DIR}/" in item.names() or (signs is not None and has_sidecar_sign(signs)):
            raise CorruptCheckpointError(lost_sidecars(item.url), path=item.url)
        return
    manifests = tuple(found.values())
    why = incomplete(item.url, found, found, item=item.name) or wrong_step(item.url, manifests[0].save_id, step)
    if why is None and (missing := not_covered(manifests)) is not None:
        why = f"{item.url}: {missing}"
    if why is not None:
        raise CorruptCheckpointError(why, path=item.url)
    sidecars[item.name] = manifests


def _our_checks(reader: DurableReader, item: Place, manifests: Sequence[Manifest]) -> Iterator[CellCheck]:
    for manifest in manifests:
        for leaf in manifest.arrays[item.name]:
            for record in leaf.boxes:
                for (cell, start, stop), digest in zip(cell_ranges(record, leaf), record.digests, strict=True):
                    yield _cell_check(reader, item, leaf, cell, stop - start, digest)


def _cell_check(
    reader: DurableReader, item: Place, leaf: LeafRecord, cell: Box, size_bytes: int, digest: str
) -> CellCheck:
    def read() -> str:
        found = np.ascontiguousarray(reader.read_cell(item.name, leaf, cell))
        return digest_of(found.reshape(-1).view(np.uint8))

    return CellCheck(
        path=item.url,
        item=item.name,
        leaf=leaf.name,
        box=cell,
        size_bytes=size_bytes,
        memory_bytes=2 * size_bytes,  # as it was stored, and decoded
        expected=digest,
        read=read,
    )


def _check_structure(item: Place, manifests: Sequence[Manifest], timeout_s: float, findings: list[Finding]) -> None:
    """Orbax's own metadata must describe what the sidecars do: stock Orbax restores by it."""
    _, leaves, problems = read_arrays(item, timeout_s=timeout_s)
    findings += [Finding(path=item.url, problem=problem) for problem in problems]
    described = {leaf.path: leaf for leaf in leaves if leaf.dtype is not None}  # empty nodes have no bytes
    recorded = {leaf.path: leaf_of_record(leaf, held=False) for leaf in manifests[0].arrays[item.name]}
    for path in sorted(described.keys() ^ recorded.keys()):
        who = "Orbax's metadata" if path in described else "the sidecars"
        findings.append(Finding(path=item.url, problem=f"{item.url}: only {who} know of a leaf {'.'.join(path)}"))
    for path in sorted(described.keys() & recorded.keys()):
        ours, theirs = recorded[path], described[path]
        for what in ("shape", "dtype", "cell", "key_impl", "sharding"):
            a, b = getattr(ours, what), getattr(theirs, what)
            if a != b and not (what in ("sharding", "key_impl") and problems):  # said already
                words = f"{item.url}: leaf {ours.name} has {what} {b} in Orbax's metadata, {a} in the sidecar"
                findings.append(Finding(path=item.url, problem=words))


def _small_items(items: Sequence[Place], first: Manifest | None, findings: list[Finding]) -> dict[str, object]:
    """The items that are no arrays, with their values; one that cannot be read is a finding."""
    values: dict[str, object] = {}
    for item in items:
        kind = item_kind(item)
        if kind == "json":
            read: dict[str, object] = {}
            if _said(findings, item.url, partial(_take, read, item, json_name(item) or "")):
                values[item.name] = next(iter(read.values()))
        elif kind == "grain":
            states: dict[str, object] = {}
            for name in grain_names(item):
                _said(findings, item.url, partial(_take, states, item, name))
            values[item.name] = states
        elif kind is None and first is None:
            findings.append(Finding(path=item.url, problem=f"{item.url} holds nothing that Orbax writes"))
    return values


def _take(into: dict[str, object], item: Place, name: str) -> None:
    into[name] = json_value(item, name)


def _check_inline(
    place: Place, manifests: Sequence[Manifest], small: Mapping[str, object], findings: list[Finding]
) -> None:
    """The sidecars keep small items too, proven: Orbax's own file of each must say the same."""
    for name, stored in manifests[0].inline.items():
        item = place.below(name)
        said = f"{item.url} is not what was saved"
        if f"{name}/" not in place.names():
            findings.append(Finding(path=place.url, problem=f"{place.url}: item {name} is gone"))
        elif stored["kind"] == "grain":
            findings += _iterator_findings(item, manifests, small.get(name))
        elif stored["kind"] not in ("json", "metrics"):
            continue
        elif item_kind(item) != "json":
            findings.append(Finding(path=place.url, problem=f"{item.url}: its file is gone"))
        elif name in small and _text(small[name]) != _text(stored["value"]):
            findings.append(Finding(path=item.url, problem=said, item=name))


def _iterator_findings(item: Place, manifests: Sequence[Manifest], states: Any) -> Iterator[Finding]:
    """A data iterator has a state of its own for each process; `states` are those of its files that can be read."""
    for manifest in manifests:
        file = f"process_{manifest.writer.process}-of-{manifest.writer.count}.json"
        saved = None
        with suppress(KeyError, TypeError, ValueError):
            saved = _text(json.loads(manifest.inline[item.name]["value"]))
        if file not in item.names():
            yield Finding(path=item.url, problem=f"{item.url}/{file} is gone", item=item.name)
        elif file in (states or {}) and saved is not None and _text(states[file]) != saved:
            yield Finding(path=item.url, problem=f"{item.url} is not what was saved", item=item.name)


def _text(value: object) -> str:
    """A value of JSON so that equal ones are equal: NaN, which Python's JSON has, is not equal to itself."""
    return json.dumps(value, sort_keys=True)


def identity_of(place: Place) -> object:
    """What tells this save from one that takes its place: its names, and Orbax's metadata with its times."""
    with suppress(CorruptCheckpointError):
        return (place.names(), place.read(STEP_METADATA))
    return place.names()
