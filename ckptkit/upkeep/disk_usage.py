"""`du`: where the bytes of a root are, by step, item and kind, and in this host's tiers; and which are dead weight."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ckptkit.durable.cells.tensorstore_wait import base_of
from ckptkit.durable.lifecycle.leases import PruneGuard, pinned_steps
from ckptkit.durable.lifecycle.listing import DurableStep, RootSteps, StepState, read_root
from ckptkit.durable.lifecycle.places import Place, item_kind, local_kind
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import are_deleted, read_ancestry, require_root
from ckptkit.inspection.sizes import linked_bytes, sizes_below, stored_bytes
from ckptkit.inspection.steps import no_slots, no_tier
from ckptkit.model import paths
from ckptkit.model.paths import ARRAY_METADATAS, OCDBT_MANIFEST, SHARDINGS, STEP_METADATA, TREE_METADATA
from ckptkit.store.quarantine import QUARANTINE_DIR
from ckptkit.store.roots import root_url
from ckptkit.upkeep.arenas import ArenaEntry, list_arenas
from ckptkit.upkeep.pinning import pin_reason
from ckptkit.util.words import command_line

UsageKind = Literal["arrays", "digests", "small", "metadata"]
DeadKind = Literal["leftover", "abandoned", "quarantine", "stray", "unreferenced", "other"]

_LOOKS = 5  # at a root whose steps are deleted meanwhile
_METADATA = frozenset(
    {TREE_METADATA, OCDBT_MANIFEST, SHARDINGS, STEP_METADATA, paths.COMMIT_MARK, ".zarray", ".zattrs", "zarr.json"}
)
_INSPECTED = "delete it when no person needs it for inspection"
_STRAY = "neither a step nor a record: inspect it"
_UNFINISHED = "a save in flight, or interrupted: the next save of its number replaces it; delete it when no job saves"
_LEAVING = paths.LEAVING_DIR.rpartition("/")[2]
_ROOT_FILES = frozenset({"metadata", "array_metadatas", "descriptor"})  # what Orbax's manager keeps next to steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """The bytes of one durable step. `items`: bytes by item (the step's own files under ""); `kinds`: by `UsageKind`;
    `pin_reason`: the reason given when it was pinned. `shared_bytes`: of files that another step has too."""

    step: int
    path: str
    state: StepState
    pinned: bool
    in_use: bool
    stored_bytes: int
    items: Mapping[str, int]
    kinds: Mapping[str, int]
    pin_reason: str = ""
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadWeight:
    """Bytes that no restart reads, and how to remove them; those of an `other` may be a checkpoint of their own."""

    kind: DeadKind
    path: str
    stored_bytes: int
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A root, and what the given tiers of this host hold of it. `unread`: everything that no restart of the run reads;
    `record_bytes`: of records (epochs, leases, pins); `repeated_bytes`: what the sum over steps counts more than
    once."""

    root: str
    steps: tuple[StepUsage, ...]
    arenas: tuple[ArenaEntry, ...]
    unread: tuple[DeadWeight, ...]
    record_bytes: int
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    repeated_bytes: int = 0

    @property
    def dead(self) -> tuple[DeadWeight, ...]:
        """The unread data that can be deleted. An `other` is left out: it may be a checkpoint."""
        return tuple(each for each in self.unread if each.kind != "other")

    @property
    def others(self) -> dict[str, int]:
        """Bytes of the directories that are not of the run, by path. They may be checkpoints."""
        return {each.path: each.stored_bytes for each in self.unread if each.kind == "other"}

    @property
    def stored_bytes(self) -> int:
        """Everything below the durable root, dead weight too. A file that several steps have counts once."""
        inside = [each.stored_bytes for each in self.unread if each.kind in ("leftover", "stray", "other")]
        own = f"{self.root}/{paths.SIDECAR_DIR}/"
        aside = [each.stored_bytes for each in self.dead if each.kind == "quarantine" and each.path.startswith(own)]
        own_bytes = sum(each.stored_bytes for each in self.steps) - self.repeated_bytes
        return own_bytes + sum(inside) + sum(aside) + self.record_bytes

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": FORMAT,
            "root": self.root,
            "bytes": self.stored_bytes,
            "record_bytes": self.record_bytes,
            "steps": [_renamed(asdict(each)) for each in self.steps],
            "tiers": [each.to_json() for each in self.arenas],
            "dead": [_renamed(asdict(each)) for each in self.dead],
            "others": [{"path": path, "bytes": size} for path, size in self.others.items()],
            "notes": self.notes,
            "problems": self.problems,
        }


def usage(
    root: str, *, tiers: Sequence[str] = (), host_id: str | None = None, deep: bool = False, timeout_s: float = 20.0
) -> Usage:
    """Where the bytes are. Reads no array, takes no lock, writes nothing. If a step is deleted meanwhile, which
    would seem damaged or empty, the root is looked at again.

    `deep` looks for files of OCDBT databases that nothing refers to (one read per node of each database).
    Cost: one listing per directory, a small read per step. Raises `StepNotFoundError` if the root does not exist,
    `StoreError` if it cannot be reached.
    """
    for _ in range(_LOOKS - 1):
        found = _usage(root, tiers, host_id, deep, timeout_s)
        strange = found.problems or not all(each.stored_bytes for each in found.steps)
        if not strange or not are_deleted(root, [(each.step, each.path) for each in found.steps]):
            return found
    return _usage(root, tiers, host_id, deep, timeout_s)


def _usage(root: str, tiers: Sequence[str], host_id: str | None, deep: bool, timeout_s: float) -> Usage:
    place = Place.open(root_url(root), timeout_s=timeout_s)
    place.names()  # first: its error names the root itself
    ancestry, problems = read_ancestry(place)
    in_root = read_root(place, ancestry)
    require_root(place, in_root)
    found = in_root.steps
    steps = [each for each in found if each.state != "unfinished"]
    pinned = pinned_steps(place.store)
    used = PruneGuard(place.store).leased([each.step for each in found]) - pinned
    dead = _others(place, in_root)
    dead += _root_dead(place, found, {name for names in in_root.left_out.values() for name in names})
    dead += [
        _dead("abandoned", each.place, _abandoned(place.url, each, pinned))
        for each in steps
        if each.state == "abandoned"
    ]
    arenas = list_arenas(tiers, root=place.url, host_id=host_id)
    dead += [
        DeadWeight(
            kind="quarantine",
            path=f"{each.path}/{QUARANTINE_DIR}",
            stored_bytes=each.quarantine_bytes,
            remedy=_INSPECTED,
        )
        for each in arenas
        if each.quarantine_bytes
    ]
    shared = {each.place.url: linked_bytes(each.place) for each in steps}
    for each in steps if deep else ():
        dead += _unreferenced(each.place, problems)
    problems += [each.problem for each in found if each.problem is not None]
    return Usage(
        root=place.url,
        steps=tuple(
            replace(_step_usage(each, pinned, used, place), shared_bytes=sum(shared[each.place.url].values()))
            for each in steps
        ),
        arenas=tuple(arenas),
        unread=tuple(dead),
        record_bytes=_record_bytes(place),
        notes=(*in_root.notes, *_notes(tiers, arenas, host_id)),
        problems=tuple(problems),
        repeated_bytes=_repeated_bytes(list(shared.values())),
    )


def _repeated_bytes(shared: Sequence[Mapping[str, int]]) -> int:
    """Bytes that the sum over steps counts more than once; `shared`: the files of each step that have several names."""
    names = Counter(file for own in shared for file in own)
    sizes = {file: size for own in shared for file, size in own.items()}
    return sum((count - 1) * sizes[file] for file, count in names.items())


def _notes(tiers: Sequence[str], arenas: Sequence[ArenaEntry], host_id: str | None) -> Iterator[str]:
    """Notes on the given tiers that do not belong to the root, or do not exist."""
    for tier in tiers:
        if local_kind(tier) != stat.S_IFDIR:
            yield no_tier(tier)
        elif not any(each.tier == tier for each in arenas):
            yield no_slots(tier, host_id)


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"bytes" if name == "stored_bytes" else name: value for name, value in record.items()}


def _step_usage(each: DurableStep, pinned: set[int], used: set[int], root: Place) -> StepUsage:
    items, kinds = Counter[str](), Counter[str]()
    whole = item_kind(each.place) is not None  # saved without a manager: the step is the item
    for key, size in sizes_below(each.place).items():
        head, slash, rest = key.partition("/")
        item = "" if whole or not slash else head
        items[item] += size
        place, inner = (each.place, key) if whole else (each.place.below(head), rest or head)
        kinds[_kind(place, inner, inside=whole or bool(slash))] += size
    return StepUsage(
        step=each.step,
        path=each.place.url,
        state=each.state,
        pinned=each.step in pinned,
        in_use=each.step in used,
        stored_bytes=sum(items.values()),
        items=dict(sorted(items.items())),
        kinds=dict(sorted(kinds.items())),
        pin_reason=pin_reason(root.store, each.step) if each.step in pinned else "",
    )


def _kind(item: Place, key: str, *, inside: bool) -> UsageKind:
    """The kind of a file, by its path in an item."""
    parts = key.split("/")
    if paths.SIDECAR_DIR in parts or parts[-1] == paths.SIGNATURE:
        return "digests"
    if parts[-1] in _METADATA or parts[0] == ARRAY_METADATAS or (not inside and item_kind(item) is None):
        return "metadata"
    return "arrays" if item_kind(item) == "arrays" else "small"


def _abandoned(root: str, each: DurableStep, pinned: set[int]) -> str:
    prune = command_line("prune", root, "--keep", "every=1")  # every step of the branch stays
    if each.step in pinned:
        return f"it is pinned: `{command_line('unpin', root, each.step)}`, then `{prune}`"
    return f"the job's next pruning, or `{prune}`"


def _others(place: Place, in_root: RootSteps) -> list[DeadWeight]:
    """The directories with the name of a step that are not of the run: other runs, trees, links, data."""
    links = in_root.left_out.get("link", ())
    names = sorted(name for found in in_root.left_out.values() for name in found)
    sizes = {name: 0 if name in links else stored_bytes(place.below(name)) for name in names}
    return [
        DeadWeight(kind="other", path=f"{place.url}/{name}", stored_bytes=size, remedy="not of this run")
        for name, size in sizes.items()
    ]


def _root_dead(place: Place, found: Sequence[DurableStep], others: Collection[str]) -> list[DeadWeight]:
    """The entries of the root that are neither steps nor `others`: leftovers, quarantine, and unknown files."""
    known = {each.place.name: each for each in found}
    dead: list[DeadWeight] = []
    for name in place.directories():
        below = place.below(name)
        if name == paths.SIDECAR_DIR:
            aside = below.below(QUARANTINE_DIR)
            if aside.names():
                dead.append(_dead("quarantine", aside, _INSPECTED))
            leaving = below.below(_LEAVING)
            if leaving.names():
                dead.append(_dead("leftover", leaving, "steps that are being deleted, or were: the job's next start"))
        elif name in others or (name in known and known[name].state != "unfinished"):
            continue
        elif name in known:
            dead.append(_dead("leftover", below, _UNFINISHED))
        elif name not in _ROOT_FILES:
            dead.append(_dead("stray", below, _STRAY))
    files = [name for name in place.names() if not name.endswith("/") and name not in _METADATA]
    sizes = {name: place.store.stat(name) for name in files}
    return dead + [
        DeadWeight(kind="stray", path=f"{place.url}/{name}", stored_bytes=size.size_bytes, remedy=_STRAY)
        for name, size in sizes.items()
        if size is not None
    ]


def _dead(kind: DeadKind, place: Place, remedy: str) -> DeadWeight:
    return DeadWeight(kind=kind, path=place.url, stored_bytes=stored_bytes(place), remedy=remedy)


def _record_bytes(place: Place) -> int:
    sizes = sizes_below(place.below(paths.SIDECAR_DIR)) if f"{paths.SIDECAR_DIR}/" in place.names() else {}
    root = [stored_bytes(place.below(name)) for name in place.directories() if name in _ROOT_FILES]
    records = (size for key, size in sizes.items() if key.partition("/")[0] not in (QUARANTINE_DIR, _LEAVING))
    return sum(records) + sum(root)


def _unreferenced(step: Place, problems: list[str]) -> list[DeadWeight]:
    """The data files of a step's databases that the newest version of none refers to."""
    whole = item_kind(step) is not None
    found = []
    for item in [step] if whole else [step.below(name) for name in step.directories()]:
        if OCDBT_MANIFEST not in item.names():
            continue
        try:
            used = _referenced(item)
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        for key, size in sizes_below(item).items():
            if "d" in key.split("/")[:-1] and key not in used:
                remedy = "of an earlier version of the database, which no reader uses"
                found.append(
                    DeadWeight(kind="unreferenced", path=f"{item.url}/{key}", stored_bytes=size, remedy=remedy)
                )
    return found


def _referenced(item: Place) -> set[str]:
    """The data files, by their path in the item, that the newest version of its OCDBT database is made of."""
    import tensorstore as ts  # for `--deep` alone

    from ckptkit.durable.cells.ocdbt import files_of

    try:
        return files_of(ts.KvStore.open(base_of(item.url)).result(), lambda future: future.result())
    except (ValueError, KeyError, TypeError) as error:
        what = f"{item.url}: its database cannot be read: {str(error)[:200]}"
        raise CorruptCheckpointError(what, path=item.url) from error
