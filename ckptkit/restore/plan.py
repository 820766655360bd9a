"""Plans a restore: the save and the sources, by pure decisions over the processes' reports.

Two steps. `rank_candidates` (process 0, for all) orders the saves that every process can have; `plan_restore`
(each process, for itself) chooses the source of every box of the chosen save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ckptkit.errors import CorruptCheckpointError, Reason
from ckptkit.model.boxes import Box, missing_elements
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, itemsize_of

_BRIEF_BYTES = 1 << 30  # takes seconds from any store

_SHOWN_MAX = 4  # processes, in one message
_NOT_HELD = Reason("its host does not hold it")
Key = tuple[str, tuple[str, ...]]  # item, path of the leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A save that might be restored: in a durable step, in fast tiers, or both. `refusal` is the reason against it."""

    save_id: SaveId
    durable: bool
    fast: bool
    refusal: Reason | None = None
    uncommitted: Reason | None = None  # who had not committed it when the job ended: the reason where it is not covered

    @property
    def where(self) -> str:
        """The tiers, for messages. A refused save is one that fast tiers hold."""
        return "+".join(["fast"] * (self.fast or not self.durable) + ["durable"] * self.durable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The part of one save that one tier holds, readable by this process. Sources are in order of cost."""

    tier: str
    manifests: tuple[Manifest, ...]
    remote: bool = False  # reads wait for an answer: many at a time


_Records = tuple[tuple[LeafRecord, BoxRecord], ...]
Covering = tuple[tuple[int, _Records], ...]  # the index of each source, and the records to read


class BoxRead(NamedTuple):  # thousands are made: a dataclass takes four times as long
    """One wanted box and the sources that cover it, cheapest first."""

    key: Key
    wanted: Box
    nbytes: int  # of the wanted box
    sources: Covering

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        return np.dtype(self.sources[0][1][0][0].dtype)


def in_reading_order(reads: Iterable[BoxRead]) -> list[BoxRead]:
    """The largest first: what is still being read at the end is small."""
    return sorted(reads, key=lambda read: -read.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Where each wanted box of one save comes from. No box is read twice; no two saves are mixed."""

    save_id: SaveId
    tiers: tuple[str, ...]
    remote: tuple[bool, ...]  # of the sources, as `tiers`
    reads: tuple[BoxRead, ...]

    def first_reads(self, source: int) -> list[tuple[str, LeafRecord, BoxRecord, Box]]:
        """The reads from a source if every first choice verifies, in this order: item, leaf, record, box."""
        asked = [read for read in in_reading_order(self.reads) if read.sources[0][0] == source]
        return [(read.key[0], *record, read.wanted) for read in asked for record in read.sources[0][1]]

    @property
    def waits(self) -> bool:
        """Whether a first choice is a source that answers later."""
        return any(self.remote) and any(self.remote[read.sources[0][0]] for read in self.reads)

    @property
    def is_brief(self) -> bool:
        """Whether it is read in seconds."""
        return not self.waits or sum([read.nbytes for read in self.reads]) <= _BRIEF_BYTES

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that the plan reads from each tier if every first choice verifies."""
        by_source: dict[int, int] = {}
        for read in self.reads:
            source = read.sources[0][0]
            by_source[source] = by_source.get(source, 0) + read.nbytes
        read_bytes: dict[str, int] = {}
        for source, nbytes in by_source.items():
            read_bytes[self.tiers[source]] = read_bytes.get(self.tiers[source], 0) + nbytes
        return read_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{nbytes} bytes from {tier}" for tier, nbytes in self.bytes_by_tier().items())
        return f"save {self.save_id}: {len(self.reads)} boxes, {parts or 'nothing to read'}"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "save_id": self.save_id.to_list(),
            "boxes": [
                {
                    "item": read.key[0],
                    "leaf": ".".join(read.key[1]),
                    "start": list(read.wanted.start),
                    "stop": list(read.wanted.stop),
                    "tier": self.tiers[read.sources[0][0]],
                }
                for read in self.reads
            ],
            "bytes_by_tier": self.bytes_by_tier(),
        }


def rank_candidates(
    fast: Sequence[Mapping[SaveId, Reason | None]],
    durable: Sequence[SaveId],
    superseded: Callable[[SaveId], bool],
    step: int | None = None,
    *,
    disowned: Callable[[SaveId], bool] = lambda save: False,
    linked: bool = False,
) -> list[Candidate]:
    """The saves in the order in which they are to be tried: newest first. Abandoned branches are left out, and what
    fast tiers alone hold of runs that are not of this branch (`disowned`).

    `fast[p]` has, for each save that process `p` finds on its host, the reason why it cannot be restored from there
    (None: it can). A save is a candidate without refusal if it is durable, or if every process can read it from its own
    fast tiers. If processes are `linked`, so that each reads the others' tiers too, it is enough that any process holds
    a part: each finds out before reading whether the parts are complete. With `step`, only saves of that step are
    candidates.
    """
    saves = {save for report in fast for save in report} | set(durable)
    ranked = []
    for save in sorted(saves, reverse=True):
        in_durable = save in durable
        if superseded(save) or (step is not None and save.step != step) or (not in_durable and disowned(save)):
            continue
        refusals = {
            process: reason
            for process, report in enumerate(fast)
            if (reason := report.get(save, _NOT_HELD)) is not None
        }
        ranked.append(
            Candidate(
                save_id=save,
                durable=in_durable,
                fast=any(save in report for report in fast) if linked else len(refusals) < len(fast),
                refusal=None if in_durable or linked or not refusals else Reason.of_processes(refusals, _SHOWN_MAX),
            )
        )
    return ranked


def plan_restore(save_id: SaveId, wanted: Mapping[Key, Sequence[Box]], sources: Sequence[Source]) -> RestorePlan:
    """The sources of every wanted box, in the given order of cost; where they differ, as only what was saved from host
    memory may, those of the lowest process first.

    Raises `CorruptCheckpointError` naming the first box that nothing covers.
    """
    held = list(enumerate([_records_by_leaf(source, save_id) for source in sources]))
    writers = [min((manifest.writer.process for manifest in source.manifests), default=0) for source in sources]
    reads: list[BoxRead] = []
    sizes: dict[int, list[int]] = {}  # by the `id` of the boxes, which leaves of one form share
    for key, boxes in wanted.items():
        if (found := sizes.get(id(boxes))) is None:
            sizes[id(boxes)] = found = [box.size for box in boxes]
        for box, size in zip(boxes, found, strict=True):
            covering: Covering = ()
            for index, leaves in held:
                there = leaves.get(key, ())
                exact = len(there) == 1 and there[0][1].box == box  # most boxes
                if (records := there if exact else _covering(there, box)) is not None:
                    covering += ((index, records),)
            if not covering:
                raise CorruptCheckpointError(
                    f"save {save_id}: no source that this process can reach covers leaf {key[0]}:{'.'.join(key[1])}, "
                    f"box {box.start} to {box.stop}",
                    step=save_id.step,
                )
            records = covering[0][1]
            if len(covering) > 1 and _differ(covering):
                covering = tuple(sorted(covering, key=lambda each: writers[each[0]]))
            reads.append(BoxRead(key, box, size * itemsize_of(records[0][0].dtype) if records else 0, covering))
    return RestorePlan(
        save_id=save_id,
        tiers=tuple(source.tier for source in sources),
        remote=tuple(source.remote for source in sources),
        reads=tuple(reads),
    )


def _differ(covering: Covering) -> bool:
    """Whether sources have different values, as only those from host memory may."""
    first = covering[0][1]
    if not first or first[0][0].kind == "jax":
        return False
    return len({tuple(record.digests for _, record in records) for _, records in covering}) > 1


def _records_by_leaf(source: Source, save_id: SaveId) -> dict[Key, _Records]:
    """The boxes of a source by leaf, each distinct box once."""
    if len(source.manifests) == 1:  # a manifest names no box twice
        (manifest,) = source.manifests
        assert manifest.save_id == save_id, "two saves are never mixed"
        return {
            (item, leaf.path): ((leaf, leaf.boxes[0]),)
            if len(leaf.boxes) == 1
            else tuple([(leaf, record) for record in leaf.boxes])
            for item, records in manifest.arrays.items()
            for leaf in records
        }
    leaves: dict[Key, dict[Box, tuple[LeafRecord, BoxRecord]]] = {}
    for manifest in sorted(source.manifests, key=lambda each: each.writer.process):
        assert manifest.save_id == save_id, "two saves are never mixed"
        for item, records in manifest.arrays.items():
            for leaf in records:
                boxes = leaves.setdefault((item, leaf.path), {})
                for record in leaf.boxes:
                    boxes.setdefault(record.box, (leaf, record))
    return {key: tuple(boxes.values()) for key, boxes in leaves.items()}


def _covering(records: _Records, wanted: Box) -> _Records | None:
    """The records that `wanted` needs if together they cover it, else None."""
    for each in records:
        if each[1].box == wanted:
            return (each,)
    if wanted.size == 0:
        return records[:1] or None
    if missing_elements(wanted, [record.box for _, record in records]):
        return None
    return tuple((leaf, record) for leaf, record in records if record.box.intersect(wanted))


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit of reading: the part of a wanted box that lies in one cell."""

    key: Key
    wanted: Box
    box: Box
    nbytes: int


def pieces_of(box: Box, cell: Sequence[int]) -> list[Box]:
    """A box cut at the borders of cells, in C order; a box without elements has no pieces.

    Every cell that intersects the box gives one piece, so that each is read and verified once.
    """
    if box.size == 0:
        return []
    cuts = [
        [(max(a, at), min(b, at + rows)) for at in range(a // rows * rows, b, rows)]
        for a, b, rows in zip(box.start, box.stop, cell, strict=True)
    ]
    return [Box(tuple(a for a, _ in part), tuple(b for _, b in part)) for part in product(*cuts)]
