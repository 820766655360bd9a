"""When a manager is made: look at the durable root, open this host's tiers, link its hosts, agree on what they hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial as partial_of
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.abandoned import left_behind
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.root_record import RootRecord
from ckptkit.durable.orbax.manager import make_root
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreError
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import Coordinator, Job, gather
from ckptkit.job.vote import act_together
from ckptkit.manager.settings import Settings
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId, new_id
from ckptkit.model.policies import PeerOptions
from ckptkit.model.tiers import DURABLE, MEMORY, PEER, RAM, SSD, Tier, kept_beside
from ckptkit.peers import PeerLink, open_link
from ckptkit.peers.client import PeerClient
from ckptkit.peers.receiver import CopyReceiver
from ckptkit.peers.ring import Seat, keepers, kept_for
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.inventory import Held, distinct_shares, hole_in, is_whole
from ckptkit.restore.local_tiers import LocalSave
from ckptkit.save.records import PeerCopies, SaveTargets
from ckptkit.slots.arena import Arena
from ckptkit.slots.host_memory import HostMemory
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.util.words import command_line, on_each_host, own_host_id

_log = logging.getLogger("ckptkit")
UNKNOWN_BYTES = 1 << 60  # of a state before the first save: slots that follow from bytes begin with the fewest
_LOOKED_INTO_MAX = 256  # manifests of one save, when all is looked at on one process
STORE_DEADLINE_S = 20.0  # for small reads and writes of the durable root: a restart should not hang on a dead bucket

_LOOKS = 16  # durable steps that are looked into at a time
_NAMES_MAX = 20  # of leftovers, in one event


def epoch_records(url: str, events: EventLog) -> EpochRecords:
    """The epoch records of a durable root; an event reports a record that had to be read from its copy."""

    def said(problem: str) -> None:
        events.emit(Kind.REJECTED, tier=DURABLE, reason=problem)

    return EpochRecords(open_store(url, deadline_s=STORE_DEADLINE_S), said)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """The records of the durable root, and the random id of this run, both from process 0."""

    ancestry: Ancestry
    root: RootRecord
    run: str


def first_look(
    epochs: EpochRecords, url: str, options: ocp.CheckpointManagerOptions, coordinator: Coordinator
) -> FirstLook:
    """The records of the root, read by process 0; a root without an id gets one from a run that may save. The first use
    of the durable root, so its errors come early.

    Raises `CheckpointError` if the processes have different roots: one part of each step would be in each of them.
    """

    def read(urls: list[Any]) -> dict[str, Any]:
        for process, other in enumerate(urls):
            if other != url:
                raise CheckpointError(
                    f"the processes of the job have different durable roots: process 0 has {url}, process {process} "
                    f"has {other}; give all of them one root that every process sees"
                )
        if options.create and not options.read_only:
            make_root(url, options)
        ancestry = epochs.read()
        if options.create and not options.read_only:
            epochs.probe()
        root = _root_of(epochs, ancestry, url, options)
        return {"ancestry": ancestry.to_json(), "root": [root.id, root.earlier], "run": new_id()}

    told = coordinator.agree("first-look", url, read)
    root = RootRecord(*told["root"])
    return FirstLook(
        ancestry=replace(Ancestry.from_json(told["ancestry"]), root=root.id), root=root, run=str(told["run"])
    )


def _root_of(epochs: EpochRecords, ancestry: Ancestry, url: str, options: ocp.CheckpointManagerOptions) -> RootRecord:
    """The record of the root. A root without an id gets one, except by a manager that only reads. If the options do
    not ask for a root, it has to exist, and it may be read-only."""
    if options.create and not options.read_only:
        return epochs.root_record(ancestry, create=True)
    is_there = not properties_of(url).file_system or os.path.isdir(url.removeprefix("file://"))
    if is_there and not options.read_only:
        with suppress(StoreError):
            return epochs.root_record(ancestry, create=True)
    return epochs.root_record(ancestry, create=False)


def own_host_dirs(url: str, settings: Settings, root: RootRecord) -> dict[str, Path]:
    """This host's directory in each of the tiers with slots, by tier.

    Slots of an earlier format are in a directory whose name does not have the root's id: where this root had runs of
    that format, a run that may save renames it.
    """
    found = {}
    for tier in settings.tiers:
        if tier.medium != PEER:
            own, *earlier = [Path(tier.path) / name for name in root.job_names(url, tier.job)]
            for each in earlier if not settings.options.read_only else ():
                with suppress(OSError):  # not there, or another process of this host did it
                    each.rename(own)
            job = next((each for each in (own, *earlier) if each.is_dir()), own)
            found[tier.name] = job / settings.host_id
    return found


def warn_of_other_roots(host_dirs: Mapping[str, Path], url: str, root: RootRecord, settings: Settings) -> None:
    """One warning for each directory of a root that was at this place before: its slots hold no save of this root, and
    take room until somebody frees them."""
    own = tuple(name.removeprefix("job") for name in root.job_names(url))  # of all jobs that save to this root
    for tier, host_dir in host_dirs.items():
        path = host_dir.parents[1]
        with suppress(OSError):
            for other in sorted(path.iterdir()):
                if not paths.job_of_url(other.name, url) or other.name.endswith(own):
                    continue
                files = [each for each in (other / settings.host_id).glob("*/*") if each.is_file()]
                saves = {save for each in files if (save := paths.save_of_manifest(each.name)) is not None}
                stored_bytes = sum(each.stat().st_blocks * 512 for each in files)
                if not saves and not stored_bytes:
                    continue
                clean = ("tiers", "clean", path, "--job", other.name, *own_host_id(settings.host_id))
                newest = f", the newest step {max(step for step, _, _ in saves)}" if saves else ""
                _log.warning(
                    "tier %s: %s has %d saves (%d bytes%s) of another root that was at %s before: this run neither "
                    "uses nor overwrites them. To free the space: %s",
                    *(tier, other, len(saves), stored_bytes, newest, url, on_each_host(command_line(*clean))),
                )


def warn_of_unrecorded(unrecorded: Sequence[SaveId], url: str) -> None:
    """One warning about saves of a run whose record the root has lost."""
    if unrecorded:
        steps = sorted({save.step for save in unrecorded})
        _log.warning(
            "the fast tiers hold steps of a run that %s does not know: %s. An older copy of the root was put back, so "
            "this run continues from the root as it is, and overwrites those steps. To continue from them, end this "
            "run before its first save, and put back the files in %s/%s that the root had then",
            *(url, ", ".join(map(str, steps[-_NAMES_MAX:])), url, paths.EPOCHS_DIR),
        )


def say_what_was_left(durable: DurableSteps, job: Job) -> None:
    """Process 0 names what a run that died did not commit. It is removed once this run saves, which fences its writer
    off (`ckptkit.durable.abandoned`)."""
    if job.coordinator.process != 0:
        return
    names = left_behind(open_store(durable.url, deadline_s=STORE_DEADLINE_S), durable.steps())
    if names:
        say_left(Kind.LEFT_BEHIND, durable.url, names, job.events)


def say_left(kind: Kind, url: str, names: Sequence[str], events: EventLog) -> None:
    """An event about leftovers in a durable root, with the first of their names."""
    events.emit(kind, tier=DURABLE, path=url, names=list(names[:_NAMES_MAX]), count=len(names))


def warn_of_other_hosts(host_dirs: Mapping[str, Path], job_hosts: JobHosts) -> None:
    """One warning about directories of hosts that are not in this job: a host whose name has changed leaves its slots.

    The first process of a host looks, at names alone: what is in another host's directory is not this host's to open.
    """
    if job_hosts.rank[0] != 0:
        return
    for tier, host_dir in host_dirs.items():
        with suppress(OSError):
            names = sorted(each.name for each in host_dir.parent.iterdir() if each.name not in job_hosts.hosts)
            if names:
                clean = ("tiers", "clean", host_dir.parents[1], "--job", host_dir.parent.name, "--host-id")
                _log.warning(
                    "tier %s: %s has directories of hosts that are not in this job: %s. If those names are not used "
                    "any more, remove the slots of each: `%s`",
                    *(tier, host_dir.parent, ", ".join(names[:_NAMES_MAX]), command_line(*clean, names[0])),
                )


def warn_of_slots_alone(
    held: Mapping[SaveId, Sequence[str]], url: str, host_dirs: Mapping[str, Path], settings: Settings
) -> None:
    """One warning where fast tiers hold saves of an earlier run and the durable root has none: it may have been removed
    to start anew."""
    if not held or any(DURABLE in tiers for tiers in held.values()):
        return
    commands = [
        command_line(
            *("tiers", "clean", host_dir.parents[1], "--job", host_dir.parent.name),
            *own_host_id(settings.host_id),
        )
        for host_dir in host_dirs.values()
    ]
    _log.warning(
        "%s holds no step, and the fast tiers hold steps of an earlier run, which this run continues: %s. To start "
        "anew, end this run before it restores or saves, with close(remove_arenas=True), or run then %s",
        *(url, ", ".join(str(save.step) for save in sorted(held)[-_NAMES_MAX:])),
        "; ".join(map(on_each_host, commands)),
    )


def open_arenas(
    job_hosts: JobHosts, host_dirs: Mapping[str, Path], memory: HostMemory, in_flight_max: int, coordinator: Coordinator
) -> dict[str, Arena]:
    """Opens this process's slot directories; when one process cannot, all raise, so that none is left waiting."""
    tiers, (place, _) = job_hosts.tiers, job_hosts.rank
    arenas: dict[str, Arena] = {}

    def open_all() -> None:
        for tier in tiers:
            if tier.medium == PEER:
                for number in range(len(job_hosts.kept_for)):
                    arenas[peer_arena_name(number)] = Arena.open(
                        host_dirs[RAM],
                        f"{peer_arena_name(place)}-{number}",
                        slots=tier.slots_for(UNKNOWN_BYTES, in_flight_max),
                        synced=False,
                        memory=memory,
                        processes=coordinator.count,
                    )
                continue
            arenas[tier.name] = Arena.open(
                host_dirs[tier.name],
                place,
                slots=tier.slots_for(UNKNOWN_BYTES, in_flight_max, beside=kept_beside(tier, tiers)),
                synced=tier.medium == SSD,
                memory=memory if tier.medium == RAM else None,
                keeps_found=tier.keep is not None,
                processes=coordinator.count,
            )

    try:
        act_together(coordinator, "arenas", open_all, rejecting=())
    except BaseException:
        for arena in arenas.values():
            arena.close()
        raise
    if place == 0:  # of the host: every process of it holds its own directories now
        for tier in tiers:
            if tier.medium != PEER:
                arenas[tier.name].adopt()
    return arenas


def peer_arena_name(number: int) -> str:
    """The name of an arena that holds another process's copies; its directory's name begins with it."""
    return f"buddy-{number}"


def make_tiers(
    arenas: Mapping[str, Arena],
    memory: HostMemory,
    in_flight_max: int,
    durable: DurableSteps,
    epochs: EpochRecords,
    peer_copies: PeerCopies | None = None,
) -> SaveTargets:
    """Where saves go: staged in the ramdisk's slots, or without one in host memory for as many as may be in flight."""
    staging = arenas.get(RAM) or Arena(None, slots=in_flight_max, synced=False, memory=memory)
    return SaveTargets(
        staging=staging,
        staging_name=RAM if RAM in arenas else MEMORY,
        disk=arenas.get(SSD),
        durable=durable,
        epochs=epochs,
        peer_copies=peer_copies,
    )


def rank_on_host(hosts: Sequence[str], process: int) -> tuple[int, int]:
    """The place of a process among those of its host, and how many there are."""
    return hosts[:process].count(hosts[process]), hosts.count(hosts[process])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Every save that can be had, with the tiers that hold it; the highest epoch seen; and the saves of runs whose
    record the root has lost."""

    held: Mapping[SaveId, list[str]]
    epoch: int
    unrecorded: tuple[SaveId, ...]


def take_stock(inventory: Inventory, ancestry: Ancestry, coordinator: Coordinator) -> Stock:
    """Looks at what there is, agreed by all processes.

    If processes read each other's tiers, a save is available when their fast tiers hold it together; otherwise when
    each process holds its own part. Cost: a listing and a small read per durable step, on process 0, and a few KiB from
    each process. For a save newer than the newest complete one, also a manifest of each different set of boxes, if they
    are few.
    """

    def stock(said: list[list[list[Any]]]) -> dict[str, Any]:
        reports = [[Held.from_json(values) for values in report] for report in said]
        with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-look") as pool:  # a round trip each, in a bucket
            listed = list(pool.map(lambda step: inventory.identity(step, ancestry), inventory.durable.steps()))
        listed = [save for save in listed if save.step not in inventory.durable.struck]
        found = sorted({held.save_id for report in reports for held in report})
        seen = [save for save in found if save in listed or not ancestry.disowned(save)]
        if inventory.client is None and coordinator.count > 1:
            common = [save for save in seen if _each_has_its_own(reports, save)]
        else:
            common = [save for save in seen if is_whole(reports, save)]
            newest = max([*common, *listed], default=None)
            partial = [save for save in seen if save not in common and (newest is None or save > newest)]
            of_branch = [save for save in partial if not ancestry.superseded(save)]
            if of_branch and inventory.client is not None:
                common += _covered(partial_of(_shares_of_all, inventory.client, reports), of_branch)
            elif of_branch:
                common += _covered(partial_of(_shares_here, inventory.local.saves()), of_branch)
        tiers = {
            save: sorted({tier for report in reports for held in report if held.save_id == save for tier in held.tiers})
            for save in common
        }
        return {
            "fast": [[save.to_list(), tiers[save]] for save in sorted(common)],
            "struck": inventory.durable.struck,
            "durable": [save.to_list() for save in listed],
            "epoch": max([ancestry.epoch, *(save.epoch for save in (*found, *listed))]),
            "unrecorded": [each.to_list() for each in found if each not in seen and ancestry.is_unrecorded(each)],
        }

    agreed = coordinator.agree("stock", inventory.reports(), stock)
    inventory.durable.strike(agreed["struck"])
    held: dict[SaveId, list[str]] = {}
    for save, names in agreed["fast"]:
        held.setdefault(SaveId.from_list(save), []).extend(names)
    for save in agreed["durable"]:
        held.setdefault(SaveId.from_list(save), []).append(DURABLE)
    unrecorded = tuple(map(SaveId.from_list, agreed["unrecorded"]))
    return Stock(held=held, epoch=agreed["epoch"], unrecorded=unrecorded)


def _each_has_its_own(reports: Sequence[Sequence[Held]], save: SaveId) -> bool:
    """Whether as many processes as wrote a save each hold their own share."""
    own = [{held.save_id: held for held in report}.get(save) for report in reports]
    return all(
        held is not None and held.count == len(reports) and process in [writer for writer, _ in held.shares]
        for process, held in enumerate(own)
    )


def _covered(shares_of: Callable[[SaveId], Sequence[Manifest]], saves: Sequence[SaveId]) -> list[SaveId]:
    """The newest of the saves whose shares, though some are lost, hold every leaf: data replicas do. Or none."""
    for save in reversed(saves):
        with suppress(CorruptCheckpointError):
            shares = shares_of(save)
            if shares and hole_in(shares) is None:
                return [save]
    return []


def _shares_of_all(client: PeerClient, reports: Sequence[Sequence[Held]], save: SaveId) -> Sequence[Manifest]:
    """One share for each different set of boxes that a process serves, if these are few.

    Raises `PeerUnreachableError` if a process that serves such a share does not answer: unreachable is not absent.
    """
    served = [report if client.serves(process) else () for process, report in enumerate(reports)]
    distinct = distinct_shares(served, save)
    few = distinct if len(distinct) <= _LOOKED_INTO_MAX else []
    return [client.manifest(holder, save, share)[0] for holder, share in few]


def _shares_here(local: Mapping[SaveId, LocalSave], save: SaveId) -> Sequence[Manifest]:
    """The shares on this host: a job of one process has no other."""
    return local[save].manifests if save in local else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """The processes of the job as one of them sees them."""

    hosts: tuple[str, ...]  # by process
    rank: tuple[int, int]  # of this one on its host, of how many
    tiers: tuple[Tier, ...]  # those that can be had among these hosts
    keepers: tuple[int, ...]  # of this one's copies
    kept_for: tuple[int, ...]  # whose copies it keeps


def gather_job_hosts(settings: Settings, job: Job) -> JobHosts:
    """The processes and their hosts; called by all processes together. A peer tier that no other host can hold is left
    out, with an event."""
    mine = next((tier for tier in settings.tiers if tier.medium == PEER), None)
    said = gather(job.coordinator, "hosts", [settings.host_id, mine.rack if mine is not None else None])
    seats = [Seat(*each) for each in said]
    hosts, process, tiers = tuple(seat.host for seat in seats), job.coordinator.process, settings.tiers
    copies = mine.copies if mine is not None else 0
    if mine is not None and (len(set(hosts)) < 2 or settings.processes.peers is None):
        why = "peers=None" if settings.processes.peers is None else f"every process is on host {hosts[0]}"
        job.events.emit(Kind.DEGRADED, tier=PEER, reason=f"no copies are kept on other hosts: {why}")
        tiers, copies = tuple(tier for tier in tiers if tier is not mine), 0
    return JobHosts(
        hosts=hosts,
        rank=rank_on_host(hosts, process),
        tiers=tiers,
        keepers=keepers(seats, copies)[process] if copies else (),
        kept_for=kept_for(seats, copies, process) if copies else (),
    )


def open_peers(
    job_hosts: JobHosts,
    host_dirs: Mapping[str, Path],
    arenas: Mapping[str, Arena],
    options: PeerOptions | None,
    job: Job,
) -> tuple[PeerLink | None, PeerCopies | None]:
    """The link to the other processes, where there are any with fast tiers; and the copies, where there is such a tier.

    Called by all processes together.
    """
    if options is None or not host_dirs or job.coordinator.count == 1:
        return None, None
    has_copies = bool(arenas) and any(tier.medium == PEER for tier in job_hosts.tiers)  # none for who only reads
    peer_arenas = {
        sender: arenas[peer_arena_name(number)] for number, sender in enumerate(job_hosts.kept_for) if arenas
    }
    receiver = CopyReceiver(peer_arenas) if has_copies else None
    link = open_link(host_dirs, list(arenas.values()), job_hosts.hosts, options, job, also=receiver)
    if receiver is None:
        return link, None
    return link, PeerCopies(
        keepers=job_hosts.keepers,
        peer_arenas=tuple(peer_arenas.values()),
        receiver=receiver,
        client=link.client,
        timeout_s=job.coordinator.timeout_s,
    )
