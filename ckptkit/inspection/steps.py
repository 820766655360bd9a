"""Every step of a root: its durable directories, and what this host's fast tiers hold of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.sidecars import incomplete, of_one_save, wrong_step
from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.inspection.directories import (
    committed_at_s,
    is_committed,
    is_slot_directory,
    item_kind,
    json_value,
    step_items,
)
from ckptkit.inspection.places import Place, no_directory, readable
from ckptkit.inspection.records import Holding, Listing, StepEntry, StepState
from ckptkit.inspection.shares import Share, marked_above, read_shares, read_sidecars, sidecar_processes
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.model.paths import METRICS, STEP_METADATA
from ckptkit.model.tiers import DURABLE
from ckptkit.slots.reader import slot_directories
from ckptkit.store.roots import root_url


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableStep:
    """One step directory. `identity` orders it among the saves; stock Orbax's steps get one, and have no save id."""

    place: Place
    step: int
    state: StepState
    identity: SaveId
    at_s: float | None = None
    processes: tuple[int, ...] | None = None
    expected: int | None = None
    problem: str | None = None

    @property
    def save_id(self) -> SaveId | None:
        """Which save it is; None for one that stock Orbax wrote."""
        return self.identity if self.identity.ours else None


def list_steps(root: str, *, tiers: Sequence[str] = (), host_id: str, timeout_s: float = 20.0) -> Listing:
    """Every step of `root` over its durable directory and this host's slots below `tiers`, ascending.

    Opens only slot directories of `host_id`; takes no lock, makes no directory, writes nothing. What is damaged is
    listed as such, and named in `problems`. Cost: a listing per directory, a small read per step and manifest.

    Raises `StepNotFoundError` where neither the root nor a tier has anything, `StoreError` for what cannot be
    reached: unreachable is not absent.
    """
    url = root_url(root)
    place = Place.open(url, timeout_s=timeout_s)
    names = place.names()  # first: its error names the root itself
    ancestry, problems = read_ancestry(place)
    durable = durable_steps(place, ancestry)
    notes: list[str] = []
    shares: list[tuple[str, Share]] = []
    entries = [_durable_entry(step) for step in durable]
    for tier in tiers:
        found, damaged = tier_shares(tier, url, host_id, notes)
        shares += [(tier, share) for share in found]
        entries += [_damaged_entry(tier, error) for error in damaged]
    if not entries and not shares and not names and not os.path.isdir(url):
        why = "there is no such root, and no fast tier that was given has a step of it; check the path"
        raise no_directory(url, why)
    entries = _merged(entries, shares, ancestry)
    problems += [entry.problem for entry in entries if entry.problem is not None]
    entries.sort(key=lambda entry: (entry.step, entry.save_id or ancestry.of_stock(entry.step)))
    return Listing(root=url, host_id=host_id, steps=tuple(entries), notes=tuple(notes), problems=tuple(problems))


def read_ancestry(place: Place) -> tuple[Ancestry, list[str]]:
    """The rollbacks that a root records; where the record is damaged, none and the reason."""
    try:
        with readable(f"{place.url}/{paths.EPOCHS_DIR}"):
            ancestry, problems = EpochRecords(place.store).check()
            return ancestry, [f"{problem}; the other copy was read" for problem in problems]
    except CorruptCheckpointError as error:
        return Ancestry(), [f"{error}; which steps a rollback superseded is not known"]


def durable_steps(place: Place, ancestry: Ancestry) -> list[DurableStep]:
    """The step directories of a root with their states, ascending by step."""
    found = []
    for name in place.directories():
        step = paths.step_of_name(name)
        if step is not None and name != paths.SIDECAR_DIR:
            found += _durable_step(place.below(name), step, ancestry)
    return sorted(found, key=lambda each: (each.step, each.place.name))


def newest_committed(steps: Iterable[DurableStep]) -> DurableStep | None:
    """The committed step of the newest save, which is not the highest number where a later epoch began lower."""
    committed = [step for step in steps if step.state == "committed"]
    return max(committed, key=lambda step: step.identity, default=None)


def _durable_step(place: Place, step: int, ancestry: Ancestry) -> list[DurableStep]:
    """The directory as a step; nothing where it is none, or was deleted meanwhile."""
    names = place.names()
    items = [name for name in step_items(place) if item_kind(place.below(name))]
    whole = item_kind(place) is not None  # saved without a manager: the step is the item
    if is_slot_directory(names) or paths.LOCK_NAME in names or (not names and not os.path.isdir(place.url)):
        return []
    if not is_committed(place):
        return [DurableStep(place=place, step=step, state="unfinished", identity=ancestry.of_stock(step))]
    if not place.name.isdecimal() and STEP_METADATA not in names and not items and not whole:
        return []
    if not items and not whole:
        return [_damaged_step(place, step, "it holds no item that Orbax writes")]
    try:
        return [_sidecar_facts(place, step, ["", *items] if whole else items, ancestry)]
    except CorruptCheckpointError as error:
        # Looked at again, because a step that is pruned meanwhile is not damaged.
        return [_damaged_step(place, step, str(error))] if place.again().names() else []


def _sidecar_facts(place: Place, step: int, items: Sequence[str], ancestry: Ancestry) -> DurableStep:
    """Which save a step is, from one sidecar of each item."""
    at_s = committed_at_s(place)
    identity, present, expected, problem = ancestry.of_stock(step), None, None, None
    for name in items:
        item = place.below(name) if name else place
        processes = sidecar_processes(item)
        if not processes:
            continue
        first = read_sidecars(item, processes[:1], extent="head")
        identity, expected = first[processes[0]].save_id, first[processes[0]].writer.count
        beyond = [process for process in processes if process >= expected]
        own = of_one_save(first | read_sidecars(item, beyond, extent="head"), partial(marked_above, item))
        present = tuple(process for process in processes if process < expected or process in own)
        problem = wrong_step(item.url, identity, step) or problem or incomplete(item.url, present, own)
    superseded = ancestry.superseded(identity)
    return DurableStep(
        place=place,
        step=step,
        state="damaged" if problem else "superseded" if superseded else "committed",
        identity=identity,
        at_s=at_s,
        processes=present,
        expected=expected,
        problem=problem,
    )


def _damaged_step(place: Place, step: int, why: str) -> DurableStep:
    why = f"step {step} in {place.url}: {why}"
    return DurableStep(place=place, step=step, state="damaged", identity=SaveId(0, step, -1), problem=why)


def _durable_entry(found: DurableStep) -> StepEntry:
    place = found.place
    holding = Holding(
        tier=DURABLE,
        path=place.url,
        held_bytes=place.stored_bytes(),
        committed_at_s=found.at_s,
        processes=found.processes,
        expected=found.expected,
    )
    items, metrics, problem = step_items(place), None, found.problem
    if METRICS in items and found.state != "unfinished":
        try:
            metrics = json_value(place.below(METRICS), METRICS)
        except CorruptCheckpointError as error:
            problem = problem or str(error)
    return StepEntry(
        step=found.step,
        state=found.state,
        save_id=found.save_id,
        items=tuple(items),
        holdings=(holding,),
        metrics=metrics,
        problem=problem,
    )


def tier_shares(
    tier: str, url: str, host_id: str, notes: list[str]
) -> tuple[list[Share], list[CorruptCheckpointError]]:
    """What this host's processes hold of the jobs that save to `url`, whatever name those jobs have."""
    ending = paths.job_name(url).removeprefix("job")
    try:
        jobs = [name for name in sorted(os.listdir(tier)) if name.endswith(ending)]
        directories = [path for job in jobs for path in slot_directories(Path(tier) / job / host_id)]
    except (FileNotFoundError, NotADirectoryError):
        notes.append(no_tier(tier))
        return [], []
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}; look at its permissions", path=tier) from error
    if not directories:
        notes.append(no_slots(tier, host_id))
    shares: list[Share] = []
    damaged: list[CorruptCheckpointError] = []
    for directory in directories:
        found, bad = read_shares(directory)
        shares += found
        damaged += bad
    return shares, damaged


def no_tier(tier: str) -> str:
    """What is said of a tier that is not there."""
    return f"{tier} is no directory: a ramdisk that was wiped, or another host's tier"


def no_slots(tier: str, host_id: str | None) -> str:
    """What is said of a tier with nothing of the root."""
    of = "" if host_id is None else f" of host {host_id}"
    return f"{tier} holds no slots{of} for this root (name the host with --host-id)"


def _damaged_entry(tier: str, error: CorruptCheckpointError) -> StepEntry:
    path = Path(error.path or "")
    step, epoch, number = paths.save_of_manifest(path.name) or (0, 0, 0)
    holding = Holding(tier=tier, path=str(path), held_bytes=0)
    return StepEntry(
        step=step,
        state="damaged",
        save_id=SaveId(epoch, step, number),
        items=(),
        holdings=(holding,),
        problem=str(error),
    )


def _merged(entries: list[StepEntry], shares: Sequence[tuple[str, Share]], ancestry: Ancestry) -> list[StepEntry]:
    """One entry per save: the shares of a save join its durable step, where it has one that is whole."""
    by_save: dict[SaveId, list[tuple[str, Share]]] = {}
    for tier, share in shares:
        by_save.setdefault(share.manifest.save_id, []).append((tier, share))
    merged = []
    for entry in entries:
        joined = entry.save_id is not None and entry.state in ("committed", "superseded")
        fast = by_save.pop(entry.save_id, []) if joined and entry.save_id is not None else []
        merged.append(replace(entry, holdings=(*_holdings(fast), *entry.holdings)))
    return merged + [_fast_entry(save_id, found, ancestry) for save_id, found in by_save.items()]


def _fast_entry(save_id: SaveId, shares: Sequence[tuple[str, Share]], ancestry: Ancestry) -> StepEntry:
    manifests = [share.manifest for _, share in shares]
    names = sorted({name for manifest in manifests for name in (*manifest.arrays, *manifest.inline)})
    entry = StepEntry(
        step=save_id.step, state="committed", save_id=save_id, items=tuple(names), holdings=_holdings(shares)
    )
    if ancestry.superseded(save_id):
        return replace(entry, state="superseded")
    return entry if len(entry.processes or ()) == entry.expected else replace(entry, state="partial")


def _holdings(shares: Sequence[tuple[str, Share]]) -> tuple[Holding, ...]:
    by_tier: dict[str, list[Share]] = {}
    for tier, share in shares:
        by_tier.setdefault(tier, []).append(share)
    return tuple(
        Holding(
            tier=tier,
            path=str(found[0].directory.parent),
            held_bytes=sum(share.manifest.held_bytes for share in found),
            committed_at_s=max(share.committed_at_s for share in found),
            processes=tuple(sorted({share.manifest.writer.process for share in found})),
            expected=found[0].manifest.writer.count,
        )
        for tier, found in by_tier.items()
    )
