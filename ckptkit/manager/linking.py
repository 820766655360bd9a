"""Which processes there are, on which hosts, and how they reach each other's tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.arena import Arena
from ckptkit.coordination import Coordinator, gather
from ckptkit.events import Kind
from ckptkit.manager.opening import lane_name, rank_on_host
from ckptkit.manager.settings import Settings
from ckptkit.manager.taken import PEER, Buddies
from ckptkit.peers import PeerLink, open_link
from ckptkit.peers.intake import Intake
from ckptkit.peers.ring import Seat, keepers, kept_for
from ckptkit.policy import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The processes of the job as one of them sees them."""

    hosts: tuple[str, ...]  # by process
    rank: tuple[int, int]  # of this one on its host, of how many
    tiers: tuple[Tier, ...]  # those that can be had among these hosts
    keepers: tuple[int, ...]  # of this one's copies
    kept_for: tuple[int, ...]  # whose copies it keeps


def gather_crew(settings: Settings, coordinator: Coordinator) -> Crew:
    """Who is there, and where; called by all processes together. A peer tier that no other host can hold is left out,
    with an event."""
    mine = next((tier for tier in settings.tiers if tier.medium == PEER), None)
    said = gather(
        coordinator, "hosts", [settings.host_id, mine.rack if mine is not None else None], timeout_s=settings.timeout_s
    )
    seats = [Seat(*each) for each in said]
    hosts, process, tiers = tuple(seat.host for seat in seats), coordinator.process, settings.tiers
    copies = mine.copies if mine is not None else 0
    if mine is not None and (len(set(hosts)) < 2 or settings.peers is None):
        why = "peers=None" if settings.peers is None else f"every process is on host {hosts[0]}"
        settings.events.emit(Kind.DEGRADED, tier=PEER, reason=f"no copies are kept on other hosts: {why}")
        tiers, copies = tuple(tier for tier in tiers if tier is not mine), 0
    return Crew(
        hosts=hosts,
        rank=rank_on_host(hosts, process),
        tiers=tiers,
        keepers=keepers(seats, copies)[process] if copies else (),
        kept_for=kept_for(seats, copies, process) if copies else (),
    )


def open_peers(
    crew: Crew, host_dirs: Mapping[str, Path], arenas: Mapping[str, Arena], settings: Settings, coordinator: Coordinator
) -> tuple[PeerLink | None, Buddies | None]:
    """The link to the other processes, where there are any with fast tiers; and the copies, where there is such a tier.

    Called by all processes together.
    """
    if settings.peers is None or not host_dirs or coordinator.count == 1:
        return None, None
    has_copies = bool(arenas) and any(tier.medium == PEER for tier in crew.tiers)  # none for who only reads
    lanes = {sender: arenas[lane_name(lane)] for lane, sender in enumerate(crew.kept_for) if arenas}
    intake = Intake(lanes) if has_copies else None
    link = open_link(
        host_dirs,
        list(arenas.values()),
        crew.hosts,
        settings.peers,
        coordinator,
        settings.events,
        timeout_s=settings.timeout_s,
        also=intake,
    )
    if intake is None:
        return link, None
    return link, Buddies(keepers=crew.keepers, lanes=tuple(lanes.values()), intake=intake, client=link.client)
