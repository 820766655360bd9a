"""The plan of a reshard, made before a byte is read: specs, chunks, and the reads that follow from them. No I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ckptkit.conversion.leaf_patterns import matches, short_names
from ckptkit.conversion.mapping import read_rule_tables
from ckptkit.conversion.passes import block_shape, reads
from ckptkit.conversion.resharding.meshes import (
    Mesh,
    Spec,
    box_shape,
    default_spec,
    full_spec,
    sharding_json,
    spec_text,
)
from ckptkit.errors import CheckpointError, MemoryBudgetError, StepNotFoundError
from ckptkit.formats.tensors import CELL_SHARE, MEMORY_BYTES, block_bytes, check_chunk
from ckptkit.model.boxes import CELL_BYTES, cell_shape
from ckptkit.model.manifest import LeafRecord

_FLOOR_BYTES = 64 << 10  # smaller chunks cost more in requests and in the tree of keys than their bytes
_CHOICES_MAX = 4096


@lru_cache(maxsize=4096)
def chunk_shape(
    shape: tuple[int, ...], boxes: tuple[tuple[int, ...], ...], itemsize: int, chunk_bytes: int
) -> tuple[int, ...]:
    """The chunk of an array whose devices hold boxes of these shapes, one for each mesh: about `chunk_bytes` at most.

    For one mesh, the grid divides that mesh's box. For several, it divides the boxes of all. If that makes chunks below
    64 KiB that no mesh asks for, the grid is the one with the least amplification on the worst mesh.
    """
    if 0 in shape:
        return tuple(max(1, size) for size in shape)
    common = tuple(math.gcd(*sizes) for sizes in zip(*boxes, strict=True))
    floor = min(_FLOOR_BYTES, *(math.prod(box) * itemsize for box in boxes)) if shape else 0
    grid = common if math.prod(common) * itemsize >= floor else _compromise(shape, boxes, common, floor // itemsize)
    return cell_shape(shape, grid, itemsize, chunk_bytes)


def worst_amplification(shape: Sequence[int], boxes: Sequence[Sequence[int]], grid: Sequence[int]) -> float:
    """The mean amplification of the mesh that has the worst, when an array is stored in a grid of such chunks."""
    return max(reads(shape, grid, box) for box in boxes) / math.prod(shape)


def _compromise(
    shape: tuple[int, ...], boxes: tuple[tuple[int, ...], ...], common: tuple[int, ...], floor: int
) -> tuple[int, ...]:
    sizes = [
        sorted({*column, least, size})
        for column, least, size in zip(zip(*boxes, strict=True), common, shape, strict=True)
    ]
    if math.prod(map(len, sizes)) > _CHOICES_MAX:
        sizes = [sorted({least, min(each), size}) for each, least, size in zip(sizes, common, shape, strict=True)]
    grids = itertools.islice(itertools.product(*sizes), _CHOICES_MAX)
    wide = [grid for grid in (*grids, tuple(shape)) if math.prod(grid) >= floor]
    return min(wide, key=lambda grid: (worst_amplification(shape, boxes, grid), math.prod(grid), grid))


_NAMED = 5  # leaves in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
    """One leaf. `specs` are one for each mesh, chosen for `reasons`; `block` is what is read and written at a time."""

    item: str
    record: LeafRecord  # of the source
    cell: tuple[int, ...]
    block: tuple[int, ...]
    specs: tuple[Spec, ...]
    reasons: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in memory."""
        return math.prod(self.record.shape) * self.record.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes of the source chunks that the reshard reads; a chunk that is read twice counts twice."""
        return reads(self.record.shape, self.record.cell, self.block) * self.record.itemsize if self.nbytes else 0

    def target(self, mesh: Mesh) -> LeafRecord:
        """The record of the leaf as it will be written, without boxes. Host arrays and numbers have no sharding."""
        extra = dict(self.record.extra)
        if self.record.kind == "jax":
            extra["sharding"] = sharding_json(self.specs[0], mesh)
        return replace(self.record, cell=self.cell, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """The content of the printed plan, and of the work. `before` and `after` are one for each mesh."""

    source: str
    target: str
    meshes: tuple[Mesh, ...]
    leaves: tuple[LeafPlan, ...]
    before: tuple[Amplification, ...]
    after: tuple[Amplification, ...]
    notes: tuple[str, ...]

    @property
    def written_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def read_bytes(self) -> int:
        """Bytes that the reshard itself reads of the source."""
        return sum(leaf.read_bytes for leaf in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": 1,
            "source": self.source,
            "target": self.target,
            "bytes": self.written_bytes,
            "read_bytes": self.read_bytes,
            "meshes": [
                {"mesh": str(mesh), "devices": mesh.devices, "before": _words(before), "after": _words(after)}
                for mesh, before, after in zip(self.meshes, self.before, self.after, strict=True)
            ],
            "leaves": [
                {
                    "item": leaf.item,
                    "name": leaf.record.name,
                    "dtype": leaf.record.dtype,
                    "shape": list(leaf.record.shape),
                    "bytes": leaf.nbytes,
                    "chunks_before": list(leaf.record.cell),
                    "chunks": list(leaf.cell),
                    "specs": [spec_text(spec) for spec in leaf.specs],
                    "chosen_by": leaf.reasons[0],
                    "stays_whole": [reason == STAYS_WHOLE for reason in leaf.reasons],
                }
                for leaf in self.leaves
            ],
            "notes": list(self.notes),
        }


def plan_leaves(
    records: Mapping[str, Sequence[LeafRecord]],
    meshes: Sequence[Mesh],
    *,
    rules: Sequence[SpecRule] = (),
    like: Mapping[str, Spec] | None = None,
    chunk_bytes: int = CELL_BYTES,
    memory_bytes: int = MEMORY_BYTES,
) -> tuple[LeafPlan, ...]:
    """The plan of every leaf, from its record by item. Pure: every process of a job makes the same.

    Leaves of host memory and numbers are whole on every device. Raises `CheckpointError` for specs that do not fit,
    `MemoryBudgetError` for a chunk of the source above a quarter of the budget, `StepNotFoundError` for a
    rule that matches nothing.
    """
    chooser = Chooser(meshes, rules, like)
    limit = block_bytes(memory_bytes)
    plans = []
    for item, leaves in records.items():
        for record in leaves:
            check_chunk(record.name, math.prod(record.cell) * record.itemsize, memory_bytes)
            if record.kind == "jax":
                # The last dimension of a typed key's data is not a dimension of the key, and is in no spec.
                logical = record.shape[:-1] if "key_impl" in record.extra else record.shape
                chosen = [chooser.spec(record.name, logical, mesh) for mesh in meshes]
            else:
                chosen = [((), "host memory")] * len(meshes)
            specs, reasons = (tuple(each) for each in zip(*chosen, strict=True))
            boxes = tuple(box_shape(record.shape, spec, mesh) for spec, mesh in zip(specs, meshes, strict=True))
            cell = chunk_shape(record.shape, boxes, record.itemsize, min(chunk_bytes, memory_bytes // 8))
            budget = memory_bytes // CELL_SHARE // record.itemsize
            block = block_shape(record.shape, record.cell, cell, budget, limit // record.itemsize)
            if math.prod(block) * record.itemsize > memory_bytes // CELL_SHARE:
                raise MemoryBudgetError(
                    f"leaf {record.name} would get chunks of {math.prod(cell) * record.itemsize} bytes, and a quarter "
                    f"of the memory budget is {memory_bytes // CELL_SHARE}; give less --chunk-bytes or more --memory"
                )
            plans.append(LeafPlan(item=item, record=record, cell=cell, block=block, specs=specs, reasons=reasons))
    if unused := chooser.unused():
        raise StepNotFoundError(f"the rule for {unused[0]} matches no leaf of arrays on devices")
    return tuple(plans)


def make_plan(
    source: str, target: str, meshes: Sequence[Mesh], leaves: Sequence[LeafPlan], notes: Sequence[str] = ()
) -> ReshardPlan:
    """The plan of a checkpoint with its amplification before and after."""

    def of(after: bool) -> tuple[Amplification, ...]:
        return tuple(
            amplification(
                [
                    (leaf.record.shape, leaf.specs[at], leaf.cell if after else leaf.record.cell, leaf.record.itemsize)
                    for leaf in leaves
                ],
                mesh,
            )
            for at, mesh in enumerate(meshes)
        )

    return ReshardPlan(
        source=source,
        target=target,
        meshes=tuple(meshes),
        leaves=tuple(leaves),
        before=of(False),
        after=of(True),
        notes=(*notes, *_whole(meshes, leaves)),
    )


def _whole(meshes: Sequence[Mesh], leaves: Sequence[LeafPlan]) -> Iterator[str]:
    """Leaves that no rule splits: every device of a mesh reads them completely."""
    for at, mesh in enumerate(meshes):
        whole = [leaf for leaf in leaves if leaf.reasons[at] == STAYS_WHOLE]
        if whole:
            names = [leaf.record.name for leaf in whole[:_NAMED]] + ["..."] * (len(whole) > _NAMED)
            yield (
                f"warning: on {mesh} {len(whole)} of {len(leaves)} leaves, {sum(leaf.nbytes for leaf in whole)} bytes, "
                f"stay whole on every device, for no axis divides a dimension of theirs: {', '.join(names)}"
            )


def _words(found: Amplification) -> dict[str, Any]:
    return {
        "amplification": found.mean,
        "worst_process": found.worst,
        "read_bytes": found.read_bytes,
        "needed_bytes": found.needed_bytes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Amplification:
    """Over the processes of one mesh: all bytes read and needed, and the ratio of the process with the largest."""

    read_bytes: int
    needed_bytes: int
    worst: float

    @property
    def mean(self) -> float:
        """Bytes read over bytes needed of all processes together; 1 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


@lru_cache(maxsize=4096)  # a model has many leaves of few kinds
def read_by_devices(shape: tuple[int, ...], spec: Spec, mesh: Mesh, cell: tuple[int, ...]) -> np.ndarray:
    """For each device, in the mesh's order, the elements that it reads of one array: int64[devices].

    A product over dimensions, for boxes and cells are both grids.
    """
    inner = box_shape(shape, spec, mesh)
    found = np.ones(mesh.devices, np.int64)
    if 0 in shape:
        return found * 0
    for names, rows, step in zip(full_spec(spec, len(shape)), inner, cell, strict=True):
        low = mesh.part_of_devices(names) * rows
        found *= ((low + rows - 1) // step - low // step + 1) * step
    return found


Laid = tuple[tuple[int, ...], Spec, tuple[int, ...], int]  # shape, spec, cell, bytes per element


def amplification(leaves: Sequence[Laid], mesh: Mesh) -> Amplification:
    """The amplification of a whole checkpoint on one mesh. Cost: one array of the mesh's size for each kind of leaf."""
    counts: dict[Laid, int] = {}
    for leaf in leaves:
        counts[leaf] = counts.get(leaf, 0) + 1
    read = np.zeros(mesh.devices, np.int64)
    needed = 0
    for (shape, spec, cell, itemsize), count in counts.items():
        read += read_by_devices(shape, spec, mesh, cell) * (itemsize * count)
        needed += math.prod(box_shape(shape, spec, mesh)) * itemsize * count
    worst = float(read.max()) / needed if needed else 1.0
    return Amplification(read_bytes=int(read.sum()), needed_bytes=needed * mesh.devices, worst=worst)


STAYS_WHOLE = "no axis divides it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRule:
    """Leaves whose names match `pattern` are split by `spec`."""

    pattern: str
    spec: Spec


def read_spec_rules(path: str) -> list[SpecRule]:
    """The rules of a TOML file: `[[rule]]` with `leaf` and `spec`. Raises `CheckpointError` for other content."""
    return read_rule_tables(path, _rule)


def _rule(table: dict[str, Any]) -> SpecRule:
    if set(table) != {"leaf", "spec"} or not isinstance(table["leaf"], str) or not isinstance(table["spec"], list):
        raise ValueError('a rule has leaf = "PATTERN" and spec = [an axis, a list of axes or "" for each dimension]')
    return SpecRule(pattern=table["leaf"], spec=tuple(map(_part, table["spec"])))


def _part(part: Any) -> tuple[str, ...]:
    names = [part] if isinstance(part, str) else part
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{part!r} in a spec is neither an axis nor a list of axes")
    return tuple(name for name in names if name)


class Chooser:
    """The spec of a leaf on a mesh, and how it was chosen. Raises `CheckpointError` for what does not fit."""

    def __init__(self, meshes: Sequence[Mesh], rules: Sequence[SpecRule], like: Mapping[str, Spec] | None):
        known = {name for mesh in meshes for name, _ in mesh.axes}
        for rule in rules:
            strange = sorted({name for part in rule.spec for name in part} - known)
            if strange:
                raise CheckpointError(
                    f"the rule for {rule.pattern} names axis {strange[0]}, which no mesh has; the axes are "
                    f"{', '.join(sorted(known))}"
                )
        self._rules = tuple(rules)
        self._like = like
        self.used: set[str] = set()

    def spec(self, name: str, shape: Sequence[int], mesh: Mesh) -> tuple[Spec, str]:
        """Spec and the reason: `rule PATTERN`, `as in the other checkpoint`, `largest dimension`, `STAYS_WHOLE`
        where that is divided by no axis, or `nothing to split`."""
        for rule in self._rules:
            if any(matches(rule.pattern, form) for form in (name, *short_names([name]))):
                self.used.add(rule.pattern)
                return self._fitting(name, rule.spec, shape, mesh), f"rule {rule.pattern}"
        if self._like is not None:
            if name not in self._like:
                raise CheckpointError(f"leaf {name} has no sharding in the checkpoint that --like names")
            return self._fitting(name, self._like[name], shape, mesh), "as in the other checkpoint"
        spec = default_spec(shape, mesh)
        if spec or mesh.devices == 1:
            return spec, "largest dimension"
        return spec, STAYS_WHOLE if math.prod(shape) > 1 else "nothing to split"

    def unused(self) -> list[str]:
        """The patterns that matched no leaf."""
        return [rule.pattern for rule in self._rules if rule.pattern not in self.used]

    def _fitting(self, name: str, spec: Spec, shape: Sequence[int], mesh: Mesh) -> Spec:
        try:
            box_shape(shape, spec, mesh)
        except ValueError as error:
            raise CheckpointError(f"leaf {name} of shape {list(shape)}: {error}") from error
        return spec
