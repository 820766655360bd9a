"""Results of looking at a checkpoint. `to_json` of each record is the documented shape of `--json` (docs/CLI.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.durable.lifecycle.listing import StepState
from ckptkit.inspection.sharing import SharedFile
from ckptkit.model.leaf_info import LeafInfo as LeafInfo
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import TIERS_ENTRY
from ckptkit.util.plain import plain_fields

FORMAT = 1  # of the JSON shapes: grows when a field goes or changes its meaning, not when one is added


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a step. `kind` is its type, `layout` the arrangement of its bytes, `value` a small item's content.

    `stored_bytes` are those of its files, with their metadata; None for a share in a slot, and for some of its leaves.
    """

    name: str
    kind: Literal["arrays", "json", "grain", "other"]
    layout: str
    stored_bytes: int | None = None
    value: Any = None
    leaves: tuple[LeafInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrigin:
    """The writer. `proven`: the record of every process, with the digests of its cells, exists and is complete.

    `provenance` are versions, flags and command of its first process, by name, and `mesh`; empty where none is known.
    `certified`: a replay came to the save; None if it is not one of ours, or the records of its root cannot be read.
    """

    writer: Literal["ckptkit", "orbax", "unknown"]
    proven: bool = False
    save_id: SaveId | None = None
    processes: int | None = None
    hosts: tuple[str, ...] = ()
    committed_at_s: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    certified: bool | None = None

    def differences(self, other: SaveOrigin) -> tuple[tuple[str, str | None, str | None], ...]:
        """How the provenance of another save differs: name, value here, value there (None: unknown). Its tiers are not
        compared. Empty if one of both has none."""
        if not self.provenance or not other.provenance:
            return ()
        names = [name for name in dict.fromkeys([*self.provenance, *other.provenance]) if name != TIERS_ENTRY]
        pairs = ((name, self.provenance.get(name), other.provenance.get(name)) for name in names)
        return tuple((name, here, there) for name, here, there in pairs if here != there)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The checkpoint at `path`. `notes` name choices that were made, `problems` name damage; the rest is still
    shown. `shared`: the files of a durable step that have other names too, by path below `path`."""

    path: str
    kind: Literal["step", "item", "slot", "file", "directory"]
    step: int | None
    origin: SaveOrigin
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    shared: Mapping[str, SharedFile] = field(default_factory=dict)

    def to_json(self, *, depth: int = 1) -> dict[str, Any]:
        """As `--json` prints it; groups are the first `depth` parts of the leaves' paths."""
        shared = [
            {"path": path, "bytes": file.size_bytes, "steps": file.steps, "elsewhere": file.elsewhere}
            for path, file in sorted(self.shared.items())
        ]
        sums = {"totals": totals(self.items, depth=depth), "shared": shared}
        last = {"notes": self.notes, "problems": self.problems}
        return {"format": FORMAT, **plain_fields(self, without=("shared", *last)), **sums, **last}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The part of a save that one tier has: the shares of `processes`, of `expected` ones. None: unknown."""

    tier: str
    path: str
    held_bytes: int
    committed_at_s: float | None = None
    processes: tuple[int, ...] | None = None
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """One save over all inspected tiers; `problem` names the damage.

    `metrics` is what was given to `save` as such, where Orbax's `best_fn` made it keep them. `certified`: a replay came
    to it.
    """

    step: int
    state: StepState
    save_id: SaveId | None
    items: tuple[str, ...]
    holdings: tuple[Holding, ...]
    metrics: Any = None
    problem: str | None = None
    certified: bool = False

    @property
    def processes(self) -> tuple[int, ...] | None:
        """The processes whose share some tier has; None if unknown."""
        known = [holding.processes for holding in self.holdings if holding.processes is not None]
        return tuple(sorted({process for processes in known for process in processes})) if known else None

    @property
    def expected(self) -> int | None:
        """The number of processes that saved it; None if unknown."""
        return max((holding.expected for holding in self.holdings if holding.expected is not None), default=None)

    @property
    def committed_at_s(self) -> float | None:
        """When the first tier had it, in seconds of the wall clock."""
        known = [holding.committed_at_s for holding in self.holdings if holding.committed_at_s is not None]
        return min(known, default=None)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        processes = {"processes": self.processes, "expected_processes": self.expected}
        tiers = [
            {**plain_fields(holding, without=("held_bytes", "expected")), "bytes": holding.held_bytes}
            for holding in self.holdings
        ]
        found = plain_fields(self, without=("holdings",))
        return {**found, "committed_at_s": self.committed_at_s, **processes, "tiers": tiers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every step of a root over the tiers that were looked at, ascending. `names` are the runs' own names of tiers
    (`ram`, `ssd`), by their directories, where a save records them."""

    root: str
    host_id: str
    steps: tuple[StepEntry, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": FORMAT, **plain_fields(self)}


def totals(items: Iterable[Item], *, depth: int = 1) -> dict[str, Any]:
    """Leaves and bytes: over all, by dtype, and by group (the first `depth` parts of the path)."""
    by_dtype: dict[str, dict[str, int]] = {}
    by_group: dict[str, dict[str, int]] = {}
    for item in items:
        for leaf in item.leaves:
            group, leaf_bytes = f"{item.name}:{'.'.join(leaf.path[:depth])}", leaf.array_bytes
            for sums, key in ((by_dtype, leaf.dtype or leaf.kind), (by_group, group)):
                entry = sums.setdefault(key, {"leaves": 0, "bytes": 0})
                entry["leaves"] += 1
                entry["bytes"] += leaf_bytes
    return {
        "leaves": sum(entry["leaves"] for entry in by_dtype.values()),
        "bytes": sum(entry["bytes"] for entry in by_dtype.values()),
        "by_dtype": by_dtype,
        "by_group": by_group,
    }
