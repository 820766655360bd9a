"""Every step of a root: its durable directories, and what this host's fast tiers hold of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.lifecycle.listing import DurableStep, RootSteps, read_root
from ckptkit.durable.lifecycle.places import Place, json_value, step_items
from ckptkit.durable.lifecycle.step_records import read_sidecar, sidecar_processes
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreError
from ckptkit.inspection.records import Holding, Listing, StepEntry
from ckptkit.inspection.roots import certified_in, read_ancestry, require_root, root_record_of
from ckptkit.inspection.shares import Share, read_shares
from ckptkit.inspection.sizes import stored_bytes
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId, metrics_of
from ckptkit.model.paths import METRICS
from ckptkit.model.tiers import DURABLE, TIERS_ENTRY, places_of_text
from ckptkit.slots.reader import slot_directories
from ckptkit.store import open_store
from ckptkit.store.roots import root_url


def list_steps(
    root: str,
    *,
    tiers: Sequence[str] | None = (),
    host_id: str,
    step_prefix: str | None = None,
    timeout_s: float = 20.0,
) -> Listing:
    """Every step of `root` over its durable directory and this host's slots below `tiers`, in the order of their saves.

    `tiers` None: those that the newest durable step was saved with, as far as they are on this host. `step_prefix`: see
    `read_root`, which decides what is a step; the rest is named in `notes`.

    Opens only slot directories of `host_id`; takes no lock, makes no directory, writes nothing. Damaged saves are
    listed as such, and named in `problems`. Cost: a listing per directory, a small read per step and manifest.

    Raises `StepNotFoundError` where neither the root nor a tier has anything, `StoreError` for what cannot be
    reached: unreachable is not absent.
    """
    url = root_url(root)
    place = Place.open(url, timeout_s=timeout_s)
    place.names()  # first: its error names the root itself
    ancestry, problems = read_ancestry(place)
    found_in_root = read_root(place, ancestry, step_prefix=step_prefix)
    notes = found_in_root.notes
    names = (recorded_tiers(found_in_root) or {}) if tiers is None else {}
    given, tiers = tiers is not None, [*names] if tiers is None else tiers
    shares: list[tuple[str, Share]] = []
    entries = [_durable_entry(step) for step in found_in_root.steps]
    for tier, found, damaged in shares_by_tier(tiers, url, host_id, notes, are_given=given):
        shares += [(tier, share) for share in found]
        names |= {path: name for share in found for path, name in places_in(share.manifest).items()}
        entries += [_damaged_entry(tier, error) for error in damaged]
    if not entries and not shares:
        require_root(place, found_in_root)
    certified = certified_in(place)
    entries = [replace(each, certified=each.save_id in certified) for each in _merged(entries, shares, ancestry)]
    problems += [entry.problem for entry in entries if entry.problem is not None]
    entries.sort(key=lambda entry: entry.save_id or ancestry.of_stock(entry.step))
    return Listing(
        root=url,
        host_id=host_id,
        steps=tuple(entries),
        notes=tuple(notes),
        problems=tuple(problems),
        names={tier: names[tier] for tier in map(os.path.abspath, tiers) if tier in names},
    )


def recorded_tiers(found: RootSteps) -> dict[str, str] | None:
    """The fast tiers of the run that saved the newest durable step, by their directories, as far as they are here.

    Of the newest one whose record can be read: damaged steps are looked for too. None where there is none, as for steps
    of stock Orbax. Cost: a listing and a small read.
    """
    saved = [step for step in found.steps if step.state == "damaged" or (step.save_id and step.state == "committed")]
    for step in sorted(saved, key=lambda step: step.identity, reverse=True):
        for name in step.place.directories():
            item = step.place.below(name)
            for process in sidecar_processes(item):
                with suppress(CheckpointError):
                    record = read_sidecar(item, process, extent="head")
                    if record is not None:
                        return {path: name for path, name in places_in(record).items() if os.path.isdir(path)}
    return None


def places_in(manifest: Manifest) -> dict[str, str]:
    """The names of the fast tiers that a save records, by their directories."""
    return places_of_text(manifest.writer.provenance.get(TIERS_ENTRY, ""))


def _durable_entry(found: DurableStep) -> StepEntry:
    place = found.place
    processes, expected = found.shares or (None, None)
    holding = Holding(
        tier=DURABLE,
        path=place.url,
        held_bytes=stored_bytes(place),
        committed_at_s=found.at_s,
        processes=processes,
        expected=expected,
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


def shares_by_tier(
    tiers: Iterable[str], url: str, host_id: str, notes: list[str], *, are_given: bool
) -> Iterator[tuple[str, list[Share], list[CorruptCheckpointError]]]:
    """The saves that this host's processes hold in each tier for jobs with root `url`, of any name.

    A tier that was not given, and may not be read, is left out with a note: the slots of a job are private to its user.
    One that was not given, and has nothing of the root, gets no note: many hosts have a directory of that name.
    """
    for tier in tiers:
        shares: list[Share] = []
        damaged: list[CorruptCheckpointError] = []
        try:
            for directory in slots_of_root(tier, url, host_id, notes, are_given=are_given):
                found, bad = read_shares(directory)
                shares += found
                damaged += bad
        except StoreError as error:
            if are_given:
                raise
            notes.append(f"{tier} is left out: {error}")
            continue
        yield tier, shares, damaged


def slots_of_root(tier: str, url: str, host_id: str, notes: list[str], *, are_given: bool) -> list[Path]:
    """The slot directories of a host in a tier for jobs with root `url`; a note where there are none.

    Raises `StoreError` for directories that may not be read.
    """
    record = root_record_of(open_store(url))
    endings = tuple(name.removeprefix("job") for name in record.job_names(url))
    try:
        jobs = [name for name in sorted(os.listdir(tier)) if name.endswith(endings)]
        directories = [path for job in jobs for path in slot_directories(Path(tier) / job / host_id)]
    except (FileNotFoundError, NotADirectoryError):
        notes.append(no_tier(tier))
        return []
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}; look at its permissions", path=tier) from error
    if not directories:
        hosts = sorted({each.name for job in jobs for each in Path(tier, job).iterdir() if each.is_dir()})
        notes += [no_slots(tier, host_id, hosts)] if are_given or hosts else []
    return directories


def no_tier(tier: str) -> str:
    """The note about a tier that does not exist."""
    return f"{tier} is not a directory: a ramdisk that was wiped, or another host's tier"


def no_slots(tier: str, host_id: str | None, hosts: Sequence[str] = ()) -> str:
    """The note about a tier with nothing of the root; `hosts` are those that have slots there."""
    of = "" if host_id is None else f" of host {host_id}"
    there = f"; it has slots of {', '.join(hosts[:8])}{', ...' * (len(hosts) > 8)}" if hosts else ""
    return f"{tier} holds no slots{of} for this root{there} (name the host with --host-id)"


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
        joined = entry.save_id is not None and entry.state in ("committed", "abandoned")
        fast = by_save.pop(entry.save_id, []) if joined and entry.save_id is not None else []
        merged.append(replace(entry, holdings=(*_holdings(fast), *entry.holdings)))
    return merged + [_fast_entry(save_id, found, ancestry) for save_id, found in by_save.items()]


def _fast_entry(save_id: SaveId, shares: Sequence[tuple[str, Share]], ancestry: Ancestry) -> StepEntry:
    manifests = [share.manifest for _, share in shares]
    names = sorted({name for manifest in manifests for name in (*manifest.arrays, *manifest.inline)})
    entry = StepEntry(
        step=save_id.step,
        state="committed",
        save_id=save_id,
        items=tuple(names),
        holdings=_holdings(shares),
        metrics=metrics_of(manifests),
    )
    if ancestry.superseded(save_id) or ancestry.disowned(save_id):
        return replace(entry, state="abandoned")
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
