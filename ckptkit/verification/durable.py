"""Verifies durable steps: every cell of a step of ckptkit against its digest, and steps of stock Orbax as far as
possible."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.durable.cells.placed import Places
from ckptkit.durable.lifecycle.classify import grain_names_in, json_name_in
from ckptkit.durable.lifecycle.places import (
    Place,
    committed_at_s,
    is_committed,
    item_handlers,
    item_kind,
    json_value,
    readable,
    step_items,
)
from ckptkit.durable.lifecycle.step_records import items_missing, own_sidecars, sidecar_processes, sidecars_lost
from ckptkit.durable.orbax.host_shards import STRINGS_FILE, is_text_leaf
from ckptkit.durable.read_step import DurableReader, without_identity
from ckptkit.durable.sidecars import incomplete, require_custom, several_saves, wrong_step
from ckptkit.errors import BeyondLimitError, CorruptCheckpointError, NewerFormatError, StoreError, internal_error
from ckptkit.inspection.shares import joined_problems, leaf_of_record
from ckptkit.inspection.sharing import shared_files, steps_words
from ckptkit.inspection.stored_arrays import read_arrays
from ckptkit.model.boxes import Box
from ckptkit.model.cells import digested_cells
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.handler_files import with_file_leaves
from ckptkit.model.manifest import FILES, LeafRecord, Manifest, SaveId
from ckptkit.model.paths import STEP_METADATA
from ckptkit.restore.inventory import hole_in
from ckptkit.snapshot.empty_nodes import empties_of
from ckptkit.snapshot.small_items import files_in
from ckptkit.verification.pool import CellCheck, Limits, check_cells
from ckptkit.verification.records import Finding, StepProof
from ckptkit.verification.stock import StockLeaf, StockReads, Undigested

_WHY = {
    "arrays": "every chunk of {} decodes, and stock Orbax keeps no digests that would show a changed bit",
    "small": "stock Orbax keeps no digests of {}",
    "unknown": "{} is not understood, and was not read",
    "gone": "the step names {}, which does not exist",
    "bare": "nothing keeps digests of {}; everything else is proven",
}
_log = logging.getLogger("ckptkit")
_SETTLE_S = 0.2  # that a deletion which is under way gets, before a step counts as damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """The facts in a step's metadata: its writer, the reads to do, and the damage found so far."""

    save_id: SaveId | None
    checks: Sequence[CellCheck]
    leaves: Sequence[StockLeaf]
    findings: Sequence[Finding]
    notes: Sequence[str]
    undigested: Mapping[str, Sequence[str]]  # items of which no digests were kept, by the words of `_WHY`
    records: Mapping[tuple[str | None, str | None], LeafRecord]  # of leaves with digests, by item and leaf


def prove_step(place: Place, step: int, limits: Limits, notes: list[str], *, timeout_s: float) -> list[StepProof]:
    """A durable step directory, or an item in one; nothing, and a note, where it was pruned or replaced meanwhile.

    Raises `StoreError` where it cannot be reached.
    """
    if not is_committed(place):
        reason = "it was never committed: a save in flight, or an interrupted one"
        return [StepProof(step=step, state="incomplete", kind="durable", path=place.url, reason=reason)]
    return prove_written(place, step, limits, notes, timeout_s=timeout_s)


def judged_step(place: Place, step: int, limits: Limits, notes: list[str], *, timeout_s: float) -> list[StepProof]:
    """The result of `prove_step`, for a look at all steps of a root: one that ends in an error costs one line.

    Raises `StoreError` or OSError where it cannot be reached: unreachable is not corrupt.
    """
    try:
        return prove_step(place, step, limits, notes, timeout_s=timeout_s)
    except CorruptCheckpointError as error:
        finding = Finding(path=place.url, problem=str(error))
        words = _damage_words([finding])
        return [
            StepProof(step=step, state="corrupt", kind="durable", path=place.url, reason=words, findings=(finding,))
        ]
    except (StoreError, OSError):
        raise
    except Exception as error:  # noqa: BLE001  it becomes the verdict of this step
        _log.debug("%s", place.url, exc_info=error)
        reason = internal_error(error)
        return [StepProof(step=step, state="failed", kind="durable", path=place.url, reason=reason)]


def prove_written(place: Place, step: int, limits: Limits, notes: list[str], *, timeout_s: float) -> list[StepProof]:
    """The result of `prove_step` for an existing step, committed or about to be."""
    try:
        return _proven(place, step, limits, notes, timeout_s)
    except (BeyondLimitError, NewerFormatError) as error:
        why = str(error)
        return [StepProof(step=step, state="unproven", kind="durable", path=place.url, reason=why, unread=(why,))]


def _proven(place: Place, step: int, limits: Limits, notes: list[str], timeout_s: float) -> list[StepProof]:
    before = identity_of(place)
    looked = _look(place, step, timeout_s)
    own = [check for check in looked.checks if check.memory_bytes <= limits.memory_bytes_max]
    stock = [leaf for leaf in looked.leaves if leaf.memory_bytes <= limits.memory_bytes_max]
    total_bytes = sum(check.size_bytes for check in own) + sum(leaf.size_bytes for leaf in stock)
    checks = itertools.chain(own, *(leaf.checks() for leaf in stock))
    checked, damaged = check_cells(checks, total_bytes, limits, path=place.url, step=step)
    findings = (*looked.findings, *_with_sharers(place, looked, damaged))
    unread = _unread(looked, limits)
    unproven = _unproven(looked, unread)
    if (findings and _changes(place, before)) or (unread and identity_of(place.again()) != before):
        notes.append(f"{place.url}: the step was pruned or replaced while it was read")
        return []
    notes += looked.notes
    proof = StepProof(
        step=step,
        state="corrupt" if findings else "unproven" if unproven else "proven",
        kind="durable",
        path=place.url,
        save_id=looked.save_id,
        checked=checked,
        reason=_damage_words(findings) if findings else unproven,
        findings=findings,
        unread=tuple(unread),
    )
    return [proof]


def _with_sharers(place: Place, looked: _Looked, damaged: Sequence[Finding]) -> Iterator[Finding]:
    """The findings about cells, each with the other steps that have the damaged file too."""
    shared = shared_files(place.url) if damaged and looked.records else {}
    if not shared:
        yield from damaged
        return
    step_url = step_url_of(place, items_of(place)[0])
    places = Places(step_url, DurableProfile())
    for each in damaged:
        leaf, steps = looked.records.get((each.item, each.leaf)), ()
        if leaf is not None and each.item is not None and each.box is not None:
            path = f"{step_url}/{places.file_of(each.item, leaf, each.box)}".removeprefix(f"{place.url}/")
            steps = shared[path].steps if path in shared else ()
        yield replace(each, shared_with=steps)


def _damage_words(findings: Sequence[Finding]) -> str:
    steps = sorted({step for finding in findings for step in finding.shared_with})
    also = f", in files that {steps_words(steps)} {'have' if len(steps) > 1 else 'has'} too" if steps else ""
    return f"{len(findings)} damaged{also}"


def _changes(place: Place, before: object) -> bool:
    """Whether a running job deletes or replaces a step that looks damaged. A deletion takes a moment: a little later
    the step no longer exists, or has lost another file."""
    if identity_of(place.again()) != before:
        return True
    time.sleep(_SETTLE_S)
    gone = place.store.properties.file_system and not os.path.isdir(place.url.removeprefix("file://"))
    return gone or identity_of(place.again()) != before


def items_of(place: Place) -> list[Place]:
    """The items of a step directory; the directory itself where it is one (saved without a manager)."""
    if item_kind(place) is not None:
        return [place]
    below = [place.below(name) for name in step_items(place)]
    return below or ([place] if "" in item_handlers(place) else [])


def step_url_of(place: Place, item: Place) -> str:
    """The directory above an item, which is the step; the one above that, if the step is the item."""
    return place.url if item is not place else place.url.rpartition("/")[0]


def _unread(looked: _Looked, limits: Limits) -> list[str]:
    """The parts of a step that were not read: items that are not understood, chunks that take too much memory."""
    large = [(f"{check.item}:{check.leaf}", check.memory_bytes, 1) for check in looked.checks]
    large += [(leaf.name, leaf.memory_bytes, leaf.count) for leaf in looked.leaves]
    large = [each for each in large if each[1] > limits.memory_bytes_max]
    found = [_WHY["unknown"].format(name) for name in looked.undigested["unknown"]]
    if large:  # not damage: nobody has looked
        needed = max(size for _, size, _ in large)
        why = f"they take up to {needed} bytes of memory, and {limits.memory_bytes_max} are allowed"
        chunks = f"{sum(count for _, _, count in large)} chunks were not read, leaf {large[0][0]} first"
        found.insert(0, f"{chunks}: {why}")
    return found


def _unproven(looked: _Looked, unread: Sequence[str]) -> str | None:
    """Why a step without damage is not proven; None for one that is."""
    why = [
        words.format(", ".join(names))
        for kind, words in _WHY.items()
        if kind != "unknown" and (names := looked.undigested[kind])
    ]
    why = [*unread, *why]
    return f"unproven: {'; '.join(why)}" if why else None


def _look(place: Place, step: int, timeout_s: float) -> _Looked:
    stock = StockReads(timeout_s=timeout_s)
    findings = stock.findings
    sidecars: dict[str, tuple[Manifest, ...]] = {}
    checks: list[CellCheck] = []
    kinds: dict[str, Undigested] = {}
    items, handlers = items_of(place), item_handlers(place)
    if not items:
        findings.append(Finding(path=place.url, problem=f"{place.url} is a step without any item"))
    readable_items = []
    for item in items:
        with _reported(findings, item.url):
            _sidecars_into(sidecars, item, step)
            readable_items.append(item)
    first = next((manifests[0] for manifests in sidecars.values()), None)
    as_files = set() if first is None else {name for name, each in first.inline.items() if each["kind"] == FILES}
    for item in readable_items:
        if (manifests := sidecars.get(item.name)) is not None:
            reader = DurableReader(step_url_of(place, item), step=step)
            checks += _our_checks(reader, item, manifests)
            stock.notes.extend(joined_problems(item, manifests))
            with _reported(findings, item.url):
                _check_structure(reader, item, manifests, timeout_s, findings)
        elif item.name in as_files and first is not None:
            with _reported(findings, item.url):
                for manifest in with_file_leaves(next(iter(sidecars.values()))):
                    if item.name in manifest.arrays:  # large ones; small ones are compared file by file
                        checks += _our_checks(DurableReader(step_url_of(place, item), step=step), item, [manifest])
        else:
            handler = handlers.get("" if item is place else item.name, "")
            with _reported(findings, item.url):
                kinds[item.name] = stock.add(item, item.name, handler)
    if mixed := several_saves(place.url, (manifests[0].save_id for manifests in sidecars.values())):
        findings.append(Finding(path=place.url, problem=mixed))
    with _reported(findings, place.url):
        _check_step_metadata(place, items, stock.notes)
    if place not in items and (missing := items_missing(place, ours=first is not None)) is not None:
        findings.append(Finding(path=place.url, problem=missing))
    small = _small_items(items, findings)
    if first is not None and place not in items:
        _check_inline(place, next(iter(sidecars.values())), small, findings)
        with _reported(findings, place.url):
            _check_custom(place, first.custom)
    return _Looked(
        save_id=None if first is None else first.save_id,
        checks=[*checks, *stock.checks],
        leaves=stock.leaves,
        findings=tuple(dict.fromkeys(findings)),
        notes=stock.notes,
        undigested=_undigested(place, items, handlers, kinds, first),
        records={(item, leaf.name): leaf for item, manifests in sidecars.items() for leaf in manifests[0].arrays[item]},
    )


def _undigested(
    place: Place,
    items: Sequence[Place],
    handlers: Mapping[str, str],
    kinds: Mapping[str, Undigested],
    first: Manifest | None,
) -> dict[str, list[str]]:
    """The items of which no digests were kept, by the words of `_WHY`."""
    found: dict[str, list[str]] = {why: [] for why in _WHY}
    for name, kind in kinds.items():
        if first is None or kind == "arrays":
            found[kind].append(name)
        elif name not in first.inline:
            found["bare"].append(name)
    if found["arrays"]:
        found["small"] = []
    if place not in items:
        found["gone"] += [name for name in handlers if name and f"{name}/" not in place.names()]
    return found


@contextmanager
def _reported(findings: list[Finding], path: str) -> Iterator[None]:
    """Damage that is found inside becomes a finding, and ends what is inside."""
    try:
        with readable(path):
            yield
    except CorruptCheckpointError as error:
        findings.append(Finding(path=path, problem=str(error)))


def _check_step_metadata(place: Place, items: Sequence[Place], notes: list[str]) -> None:
    """Damage in a step of ours. Of a stock step a restart needs nothing of it: a note."""
    ours = any(sidecar_processes(item) or sidecars_lost(item) for item in items)
    try:
        committed_at_s(place)
    except CorruptCheckpointError as error:
        if ours:
            raise
        notes.append(str(error))
    if ours and place not in items and STEP_METADATA not in place.names():
        raise CorruptCheckpointError(f"{place.url} has no {STEP_METADATA}, which every step of ours has")


def _check_custom(place: Place, expected: str | None) -> None:
    """Raises where the step's custom metadata is not what was saved. Steps of earlier versions have no digest of it."""
    metadata = place.json(STEP_METADATA)
    if expected is not None and metadata is not None:
        require_custom(without_identity(metadata.get("custom_metadata")), expected, where=place.url)


def _sidecars_into(sidecars: dict[str, tuple[Manifest, ...]], item: Place, step: int) -> None:
    """Reads the sidecars of an item, which must be those of every process of one save, and cover every leaf."""
    found = own_sidecars(item)
    if not found:
        if (lost := sidecars_lost(item)) is not None:
            raise CorruptCheckpointError(lost, path=item.url)
        return
    manifests = tuple(found.values())
    why = incomplete(item.url, found, found, item=item.name) or wrong_step(item.url, manifests[0].save_id, step)
    if why is None and (missing := hole_in(manifests)) is not None:
        why = f"{item.url}: {missing}"
    if why is not None:
        raise CorruptCheckpointError(why, path=item.url)
    sidecars[item.name] = manifests


def _our_checks(reader: DurableReader, item: Place, manifests: Sequence[Manifest]) -> Iterator[CellCheck]:
    for manifest in manifests:
        for name, leaf, _, cell, start, stop, digest in digested_cells(manifest):
            if name == item.name:
                yield CellCheck(
                    path=item.url,
                    item=name,
                    leaf=leaf.name,
                    box=cell,
                    size_bytes=stop - start,
                    memory_bytes=2 * (stop - start),  # as it was stored, and decoded
                    expected=digest,
                    read=partial(_digest, reader, name, leaf, cell),
                )


def _digest(reader: DurableReader, item: str, leaf: LeafRecord, cell: Box) -> str:
    return digest_of(np.ascontiguousarray(reader.read_cell(item, leaf, cell)).reshape(-1).view(np.uint8))


def _check_structure(
    reader: DurableReader, item: Place, manifests: Sequence[Manifest], timeout_s: float, findings: list[Finding]
) -> None:
    """Orbax's own metadata must describe what the sidecars do: stock Orbax restores by it."""
    stored = read_arrays(item, timeout_s=timeout_s, inline=reader.inline(item.name))
    problems = (*stored.notes, *stored.problems)
    findings += [Finding(path=item.url, problem=problem) for problem in problems]
    described = {leaf.path: leaf for leaf in stored.leaves if leaf.dtype is not None}  # empty nodes have no bytes
    recorded = {leaf.path: leaf_of_record(leaf, held=False) for leaf in manifests[0].arrays[item.name]}
    for path in sorted(described.keys() ^ recorded.keys()):
        who = "Orbax's metadata" if path in described else "the sidecars"
        findings.append(Finding(path=item.url, problem=f"{item.url}: only {who} know of a leaf {'.'.join(path)}"))
    for path in sorted(described.keys() & recorded.keys()):
        ours, theirs = recorded[path], described[path]
        for what in ("shape", "dtype", "cell", "key_impl", "sharding"):
            a, b = getattr(ours, what), getattr(theirs, what)
            if a != b and not (what in ("sharding", "key_impl") and problems):  # reported already
                words = f"{item.url}: leaf {ours.name} has {what} {b} in Orbax's metadata, {a} in the sidecar"
                findings.append(Finding(path=item.url, problem=words))
    _check_texts(item, manifests[0], findings)


def _check_texts(item: Place, manifest: Manifest, findings: list[Finding]) -> None:
    """The sidecars keep the text of a tree, proven: stock Orbax restores what its own file has."""
    recorded = manifest.inline.get(item.name, {}).get("value", [])
    texts = {".".join(path): node.value for path, _, node in empties_of(recorded) if is_text_leaf(node)}
    if not texts:
        return
    path = f"{item.url}/{STRINGS_FILE}"
    with _reported(findings, path):
        stored = json_value(item, STRINGS_FILE)
        found = stored if isinstance(stored, dict) else {}
        if wrong := sorted(name for name, text in texts.items() if found.get(name) != text):
            problem = f"{path} has not the text that was saved: {', '.join(wrong)}"
            findings.append(Finding(path=item.url, problem=problem))


def _small_items(items: Sequence[Place], findings: list[Finding]) -> dict[str, object]:
    """The items that are not arrays, with their values; one that cannot be read is a finding."""
    values: dict[str, object] = {}
    for item in items:
        kind = item_kind(item)
        if kind == "json":
            with _reported(findings, item.url):
                values[item.name] = json_value(item, json_name_in(item.names()) or "")
        elif kind == "grain":
            states: dict[str, object] = {}
            for name in grain_names_in(item.names()):
                with _reported(findings, item.url):
                    states[name] = json_value(item, name)
            values[item.name] = states
    return values


def _check_inline(
    place: Place, manifests: Sequence[Manifest], small: Mapping[str, object], findings: list[Finding]
) -> None:
    """The sidecars keep small items too, with digests: Orbax's own file of each must have the same content."""
    for name, stored in manifests[0].inline.items():
        with _reported(findings, place.below(name).url):
            findings += _small_item_findings(place, place.below(name), stored, manifests, small)


def _small_item_findings(
    place: Place, item: Place, stored: Mapping[str, Any], manifests: Sequence[Manifest], small: Mapping[str, object]
) -> Iterator[Finding]:
    if f"{item.name}/" not in place.names():
        yield Finding(path=place.url, problem=f"{place.url}: item {item.name} is gone")
    elif stored["kind"] == "grain":
        yield from _iterator_findings(item, manifests, small.get(item.name))
    elif stored["kind"] == FILES:
        saved: dict[str, bytes] = {}
        for manifest in reversed(manifests):  # of a name that several processes have written: the first one's
            saved |= files_in(manifest.inline.get(item.name, {"value": {}}))
        for file, data in sorted(saved.items()):
            if item.read(file) != data:
                yield Finding(path=item.url, problem=f"{item.url}/{file} is not what was saved")
    elif stored["kind"] not in ("json", "metrics"):
        return
    elif item_kind(item) != "json":
        yield Finding(path=place.url, problem=f"{item.url}: its file is missing")
    elif item.name in small and _text(small[item.name]) != _text(stored["value"]):
        yield Finding(path=item.url, problem=f"{item.url} is not what was saved", item=item.name)


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
    """Distinguishes this save from one that replaces it: its names, and Orbax's metadata with its times."""
    with suppress(CorruptCheckpointError):
        return (place.names(), place.read(STEP_METADATA))
    return place.names()
