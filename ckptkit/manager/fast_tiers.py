"""The fast tiers of this process: its place among the hosts of the job, its directories, slots and link to others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.durable.lifecycle.root_record import RootRecord
from ckptkit.events import Kind
from ckptkit.job.coordination import Coordinator, Job, gather
from ckptkit.job.vote import voted
from ckptkit.manager.settings import Settings
from ckptkit.model.policies import PeerOptions
from ckptkit.model.tiers import MEMORY, PEER, RAM, SSD, Tier, kept_beside
from ckptkit.peers.link import PeerLink, open_link
from ckptkit.peers.receiver import CopyReceiver
from ckptkit.peers.ring import Seat, keepers, kept_for
from ckptkit.restore.candidates import Inventory
from ckptkit.save.records import PeerCopies, SaveTargets
from ckptkit.slots.arena import Arena
from ckptkit.slots.host_memory import HostMemory

_UNKNOWN_BYTES = 1 << 60  # of a state before the first save: slots that follow from bytes begin with the fewest


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
        rank=(hosts[:process].count(hosts[process]), hosts.count(hosts[process])),
        tiers=tiers,
        keepers=keepers(seats, copies)[process] if copies else (),
        kept_for=kept_for(seats, copies, process) if copies else (),
    )


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


def open_arenas(
    job_hosts: JobHosts, host_dirs: Mapping[str, Path], memory: HostMemory, in_flight_max: int, coordinator: Coordinator
) -> dict[str, Arena]:
    """Opens this process's slot directories; when one process cannot, all raise, so that none is left waiting."""
    tiers, (place, _) = job_hosts.tiers, job_hosts.rank
    arenas: dict[str, Arena] = {}

    try:
        with voted(coordinator, "arenas", rejecting=()):
            for tier in tiers:
                if tier.medium == PEER:
                    for number in range(len(job_hosts.kept_for)):
                        arenas[_peer_arena_name(number)] = Arena.open(
                            host_dirs[RAM],
                            f"{_peer_arena_name(place)}-{number}",
                            slots=tier.slots_for(_UNKNOWN_BYTES, in_flight_max),
                            synced=False,
                            memory=memory,
                            processes=coordinator.count,
                        )
                    continue
                arenas[tier.name] = Arena.open(
                    host_dirs[tier.name],
                    place,
                    slots=tier.slots_for(_UNKNOWN_BYTES, in_flight_max, beside=kept_beside(tier, tiers)),
                    synced=tier.medium == SSD,
                    memory=memory if tier.medium == RAM else None,
                    keeps_found=tier.keep is not None,
                    processes=coordinator.count,
                )
    except BaseException:
        for arena in arenas.values():
            arena.close()
        raise
    if place == 0:  # of the host: every process of it holds its own directories now
        for tier in tiers:
            if tier.medium != PEER:
                arenas[tier.name].adopt()
    return arenas


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
        sender: arenas[_peer_arena_name(number)] for number, sender in enumerate(job_hosts.kept_for) if arenas
    }
    receiver = CopyReceiver(peer_arenas) if has_copies else None
    link = open_link(host_dirs, job_hosts.hosts, options, job, also=receiver)
    if receiver is None:
        return link, None
    return link, PeerCopies(
        keepers=job_hosts.keepers,
        peer_arenas=tuple(peer_arenas.values()),
        receiver=receiver,
        client=link.client,
        timeout_s=job.coordinator.timeout_s,
    )


def make_tiers(
    arenas: Mapping[str, Arena],
    memory: HostMemory,
    in_flight_max: int,
    inventory: Inventory,
    peer_copies: PeerCopies | None = None,
) -> SaveTargets:
    """Where saves go: staged in the ramdisk's slots, or without one in host memory for as many as may be in flight."""
    staging = arenas.get(RAM) or Arena(None, slots=in_flight_max, synced=False, memory=memory)
    return SaveTargets(
        staging=staging,
        staging_name=RAM if RAM in arenas else MEMORY,
        disk=arenas.get(SSD),
        durable=inventory.durable,
        epochs=inventory.epochs,
        peer_copies=peer_copies,
        repair=inventory.repair_command,
    )


def _peer_arena_name(number: int) -> str:
    """The name of an arena that holds another process's copies; its directory's name begins with it."""
    return f"buddy-{number}"
