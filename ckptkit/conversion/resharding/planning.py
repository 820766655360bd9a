"""The plan of a reshard, made before a byte is read: specs, chunks, and the reads that follow from them. No I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ckptkit.conversion.passes import block_shape, reads
from ckptkit.conversion.resharding.amplification import Amplification, amplification
from ckptkit.conversion.resharding.choosing import STAYS_WHOLE, Chooser, SpecRule
from ckptkit.conversion.resharding.meshes import Mesh, Spec, box_shape, sharding_json, spec_text
from ckptkit.errors import CheckpointError, StepNotFoundError
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
    return max(math.prod(_along(*sizes) for sizes in zip(shape, box, grid, strict=True)) for box in boxes)


@lru_cache(maxsize=4096)
def _along(size: int, rows: int, step: int) -> float:
    """Amplification along one dimension: the mean over its boxes."""
    if step % rows == 0 or rows % step == 0:
        return max(1.0, -(-rows // step) * step / rows)
    touched = sum((low + rows - 1) // step - low // step + 1 for low in range(0, size, rows))
    return touched * step / size


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
        """Of the whole array in memory."""
        return math.prod(self.record.shape) * self.record.itemsize

    @property
    def read_bytes(self) -> int:
        """Of the source chunks that the reshard reads, those twice that it has to read twice."""
        return reads(self.record.shape, self.record.cell, self.block) * self.record.itemsize if self.nbytes else 0

    def target(self, mesh: Mesh) -> LeafRecord:
        """The record of the leaf as it will be written, without boxes. Host arrays and numbers have no sharding."""
        extra = dict(self.record.extra)
        if self.record.kind == "jax":
            extra["sharding"] = sharding_json(self.specs[0], mesh)
        return replace(self.record, cell=self.cell, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """All that is printed, and all that is done. `before` and `after` are one for each mesh."""

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

    Leaves of host memory and numbers are whole on every device. Raises `CheckpointError` for specs that do not fit and
    for a chunk of the source above a quarter of the budget, `StepNotFoundError` for a rule that matches nothing.
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
                raise CheckpointError(
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
