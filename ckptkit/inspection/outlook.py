"""The forecast of a restore on one host: the restore's own decisions over the existing saves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.durable.lifecycle.classify import shown_by
from ckptkit.durable.lifecycle.listing import read_root
from ckptkit.durable.lifecycle.places import Place, nothing_at
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoRestorableStepError,
    StepNotFoundError,
    TreeMismatchError,
    with_damage,
)
from ckptkit.events import EventLog
from ckptkit.inspection.roots import read_ancestry
from ckptkit.inspection.shares import read_share, read_shares
from ckptkit.inspection.steps import places_in, recorded_tiers, shares_by_tier
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import LeafRecord, Manifest, SaveId
from ckptkit.model.paths import step_of_name
from ckptkit.restore.local_tiers import Holdings, LocalSave, LocalTiers
from ckptkit.restore.plan import Candidate, Key, RestorePlan, plan_restore, rank_candidates
from ckptkit.restore.sources import SourceSearch
from ckptkit.store.mounts import file_system_of
from ckptkit.store.roots import root_url
from ckptkit.util.plain import plain, plain_fields
from ckptkit.util.words import on_each_host, repair_command

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The plan for the newest save that this host can have. `plan` None: a step that stock Orbax wrote and restores."""

    root: str
    host_id: str
    chosen: Candidate
    plan: RestorePlan | None
    rejected: tuple[tuple[str, int, str], ...] = ()  # tier, step, reason: newer ones
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # of tiers, by their directories, as in `Listing`

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        save = self.chosen.save_id
        chosen = {"step": save.step, "save_id": plain(save) if save.ours else None, "where": self.chosen.where}
        rejected = [{"tier": tier, "step": step, "reason": reason} for tier, step, reason in self.rejected]
        found = plain_fields(self, without=("chosen", "rejected"))
        return {"format": FORMAT, **chosen, **found, "rejected": rejected}


def outlook(
    root: str,
    *,
    tiers: Sequence[str] | None = (),
    host_id: str,
    like: str | None = None,
    step: int | None = None,
    timeout_s: float = 20.0,
) -> Outlook:
    """Which save of `root` a restart on this host alone would take, and the source of each box.

    `tiers` None: those that the newest durable step was saved with, as in `list_steps`.

    The wanted part is every complete leaf, or with `like` (a slot directory, a manifest, or a step of the run's own)
    the leaves and boxes that are recorded there. Reads only metadata, and asks no other host: a job reads what this one
    lacks from its other processes before it asks the durable tier. Raises `StepNotFoundError`, `NoRestorableStepError`,
    `TreeMismatchError` where `like` has other leaves, `StoreError` for what cannot be reached.
    """
    url = root_url(root)
    place = Place.open(url, timeout_s=timeout_s)
    names = place.names()
    ancestry, problems = read_ancestry(place)
    found_in_root = read_root(place, ancestry)
    durable = {each.identity: each.place for each in found_in_root.steps if each.state == "committed"}
    notes = found_in_root.notes
    tier_names = (recorded_tiers(found_in_root) or {}) if tiers is None else {}
    given, tiers = tiers is not None, [*tier_names] if tiers is None else tiers
    unreadable: list[CorruptCheckpointError] = []  # saves of which it is not known what they hold
    unreadable += [
        CorruptCheckpointError(each.problem, step=each.step, path=each.place.url)
        for each in found_in_root.steps
        if each.problem is not None
    ]
    fast: dict[SaveId, dict[str, list[tuple[Path, Manifest]]]] = {}
    for tier, found, damaged in shares_by_tier(in_order_of_cost(tiers), url, host_id, notes, are_given=given):
        unreadable += damaged
        for share in found:
            tier_names |= places_in(share.manifest)
            fast.setdefault(share.manifest.save_id, {}).setdefault(tier, []).append((share.directory, share.manifest))
    problems += map(str, unreadable)
    wanted = None if like is None else _wanted_like(like, timeout_s)
    events = EventLog()
    events.observe(lambda event: problems.append(str(event.fields["reason"])))
    rejected: list[tuple[str, int, str]] = []
    elsewhere = 0  # rejected saves of which other hosts may have the rest
    ranked = rank_candidates(
        [dict.fromkeys(fast)], list(durable), ancestry.superseded, step, disowned=ancestry.disowned, linked=True
    )
    for candidate in ranked:
        save = candidate.save_id
        local = LocalSave(save_id=save, held=fast.get(save, {}))
        search = _search(candidate, local, durable, events)
        try:
            plan = search.planned(partial(_plan, candidate, wanted))
        except CorruptCheckpointError as error:
            other_hosts = "" if candidate.durable else _on_other_hosts(local)
            elsewhere += bool(other_hosts)
            rejected.append((candidate.where, save.step, f"{error}{other_hosts}"))
            continue
        return Outlook(
            root=url,
            host_id=host_id,
            chosen=candidate,
            plan=plan,
            rejected=tuple(rejected),
            notes=tuple(notes),
            problems=tuple(problems),
            names={tier: tier_names[tier] for tier in map(os.path.abspath, tiers) if tier in tier_names},
        )
    error: CheckpointError = nothing_at(url, "no step can be restored, here or in a given tier")
    asked = [each for each in unreadable if step in (None, each.step, _step_of_manifest(each))]
    if rejected:
        intact = elsewhere == len(rejected) and not problems
        repair = None if intact else on_each_host(repair_command(url, tiers, [host_id] if tiers else []))
        error = NoRestorableStepError(rejected, path=url, repair=repair)
    elif asked:
        why = "no step can be restored: what is there is damaged"
        why = why if step is None else f"step {step} cannot be restored: it is damaged"
        error = CorruptCheckpointError(f"{url}: {why}", step=step, path=url)
    elif names and step is not None:
        error = StepNotFoundError(f"step {step} is not in {url} or in this host's tiers", step=step, path=url)
    with with_damage(problems):  # one of them may be the step that is missing
        raise error


def in_order_of_cost(tiers: Sequence[str]) -> list[str]:
    """The tiers in the order in which a restart asks them: those in memory first."""
    return sorted(tiers, key=lambda tier: file_system_of(tier).medium != "memory")


def _search(candidate: Candidate, local: LocalSave, durable: Mapping[SaveId, Place], events: EventLog) -> SourceSearch:
    def open_durable() -> DurableReader:
        return DurableReader(durable[local.save_id].url, step=local.save_id.step)

    own = LocalTiers({}, events).holdings(local)
    return SourceSearch(candidate, own, None, open_durable, events)


def _step_of_manifest(damaged: CorruptCheckpointError) -> int | None:
    """The step of a damaged manifest, by its name."""
    named = paths.save_of_manifest(Path(damaged.path or "").name)
    return None if named is None else named[0]


def _on_other_hosts(local: LocalSave) -> str:
    """For the reason of a rejection: that other hosts may have the rest of the save. Empty where all of it was here."""
    count = max((manifest.writer.count for manifest in local.manifests), default=0)
    here = len({manifest.writer.process for manifest in local.manifests})
    if here >= count:
        return ""
    return f". This host has the shares of {here} of {count} processes; a job reads the others from its other hosts"


def _plan(
    candidate: Candidate, wanted: Mapping[Key, tuple[LeafRecord, list[Box]]] | None, holdings: Holdings
) -> RestorePlan:
    stored: dict[Key, LeafRecord] = {}
    for manifest in holdings.manifests:
        stored |= {(item, leaf.path): leaf for item, leaves in manifest.arrays.items() for leaf in leaves}
    if wanted is None:
        whole = {key: [Box.whole(leaf.shape)] for key, leaf in stored.items()}
        return plan_restore(candidate.save_id, whole, holdings.sources)
    _compare(candidate, stored, wanted)
    return plan_restore(candidate.save_id, {key: boxes for key, (_, boxes) in wanted.items()}, holdings.sources)


def _compare(
    candidate: Candidate, stored: Mapping[Key, LeafRecord], wanted: Mapping[Key, tuple[LeafRecord, list[Box]]]
) -> None:
    def named(key: Key) -> str:
        return f"{key[0]}:{'.'.join(key[1])}"

    differences = [
        f"{named(key)} is {stored[key].describe()} on disk, and not wanted" for key in stored.keys() - wanted
    ]
    for key, (leaf, _) in wanted.items():
        if key not in stored:
            differences.append(f"{named(key)} is wanted, but not on disk")
        elif stored[key].describe() != leaf.describe():
            differences.append(f"{named(key)} is {stored[key].describe()} on disk, {leaf.describe()} is wanted")
    if differences:
        raise TreeMismatchError(differences, step=candidate.save_id.step, where=candidate.where)


def _wanted_like(like: str, timeout_s: float) -> dict[Key, tuple[LeafRecord, list[Box]]]:
    wanted: dict[Key, tuple[LeafRecord, list[Box]]] = {}
    for manifest, whole in _manifests_at(like, timeout_s):
        for item, leaves in manifest.arrays.items():
            for leaf in leaves:
                boxes = [Box.whole(leaf.shape)] if whole else [record.box for record in leaf.boxes]
                wanted.setdefault((item, leaf.path), (leaf, boxes))
    return wanted


def _manifests_at(like: str, timeout_s: float) -> list[tuple[Manifest, bool]]:
    """The records there, and whether their leaves are wanted whole."""
    path = Path(like)
    if path.is_file():
        return [(read_share(path).manifest, False)]
    place = Place.open(root_url(like), timeout_s=timeout_s)
    if shown_by(place.names()) == "slots":
        shares, damaged = read_shares(path)
        if not shares:
            raise next(iter(damaged), nothing_at(like, "it has no committed save"))
        return [(shares[0].manifest, False)]
    step = step_of_name(place.name)
    if not place.names() or step is None:
        raise nothing_at(like, "it is not a slot directory, a manifest or a step")
    manifests = DurableReader(place.url, step=step).manifests()
    if not manifests:
        raise nothing_at(like, "stock Orbax wrote it, without records of its leaves")
    return [(manifest, True) for manifest in manifests]
