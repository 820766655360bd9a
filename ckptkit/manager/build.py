"""What a manager is made of, made in order: the durable root first, whose errors come before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptkit.durable.orbax.manager import Setup
from ckptkit.durable.steps import DurableSteps
from ckptkit.events import Kind
from ckptkit.job.coordination import Coordinator
from ckptkit.manager.metadata import KnownSteps, durable_infos
from ckptkit.manager.opening import (
    epoch_records,
    first_look,
    gather_crew,
    make_tiers,
    open_arenas,
    open_peers,
    say_left,
    say_what_was_left,
    take_stock,
)
from ckptkit.manager.settings import Settings as Settings
from ckptkit.model import paths
from ckptkit.model.manifest import Writer
from ckptkit.model.tiers import DURABLE, PEER, Tier
from ckptkit.peers import PeerLink
from ckptkit.restore.restorer import Restorer
from ckptkit.save.ledger import Book, Branch
from ckptkit.save.pipeline import SavePipeline
from ckptkit.save.retention import Keeper
from ckptkit.schedule.decider import Decider
from ckptkit.slots.arena import Arena
from ckptkit.slots.host_memory import HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One of each, for one run. `arenas` by tier, `pipeline` with its threads running."""

    durable: DurableSteps
    tiers: tuple[Tier, ...]  # those that can be had among these hosts, fastest first
    arenas: Mapping[str, Arena]
    restorer: Restorer
    book: Book
    branch: Branch
    known: KnownSteps
    decider: Decider
    pipeline: SavePipeline
    keeper: Keeper
    link: PeerLink | None  # None: processes do not read each other's tiers


def make_parts(url: str, settings: Settings, setup: Setup, coordinator: Coordinator) -> Parts:
    """Makes the parts over the durable root at `url`; called by all processes together.

    Raises what `CheckpointManager` raises. Cost: five meetings, and a look at every tier.
    """
    options, events, timeout_s = settings.options, settings.events, settings.timeout_s
    # Asked first: its errors say what is wrong with the root, and nothing has been opened yet.
    epochs = epoch_records(url, events)
    book = Book(first_look(epochs, url, options, coordinator, timeout_s))
    durable = DurableSteps(
        url,
        options,
        coordinator,
        timeout_s=timeout_s,
        setup=setup,
        profile=settings.durable,
        said=lambda step, reason: events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=reason),
        cleaned=lambda names: say_left(Kind.CLEANED, url, names, events),
    )
    say_what_was_left(durable, events, coordinator)
    host_dirs = {
        tier.name: Path(tier.path) / paths.job_name(durable.url, tier.job) / settings.host_id
        for tier in settings.tiers
        if tier.medium != PEER
    }
    memory = HostMemory(settings.backpressure.host_bytes_max)
    in_flight_max = settings.backpressure.in_flight_max
    crew = gather_crew(settings, coordinator)
    rank, tiers = crew.rank, crew.tiers
    arenas: Mapping[str, Arena] = {}
    if not options.read_only:  # which looks at what stands there: the slots are for those who write
        arenas = open_arenas(tiers, host_dirs, rank, memory, in_flight_max, coordinator, timeout_s, len(crew.kept_for))
    with ExitStack() as opened:  # whoever tries again after an error makes others, and these would hold their places
        for arena in arenas.values():
            opened.callback(arena.close)
        link, buddies = open_peers(crew, host_dirs, arenas, settings, coordinator)
        if link is not None:
            opened.callback(link.close)
        restorer = Restorer(
            host_dirs,
            durable,
            epochs,
            coordinator,
            events,
            timeout_s,
            settings.verify,
            client=link.client if link is not None else None,
            rank=rank if link is not None else (0, 1),
            broadcast=settings.broadcast,
        )
        held, epoch = take_stock(restorer, durable, book.ancestry, coordinator, timeout_s)
        book.refill(held)
        keeper = Keeper(tiers, arenas, book, in_flight_max)
        keeper.opened()
        known = KnownSteps(options, durable, restorer)
        known.refill(book.steps())
        pipeline = SavePipeline(
            make_tiers(arenas, memory, in_flight_max, durable, epochs, buddies),
            coordinator,
            Writer(process=coordinator.process, count=coordinator.count, host=settings.host_id),
            book,
            keeper,
            events,
            timeout_s,
            settings.staging,
            settings.backpressure,
            settings.on_failure,
            settings.replicas,
        )
        decider = Decider(options, tiers, durable_infos(book, durable), coordinator, timeout_s)
        opened.pop_all()
    return Parts(
        durable=durable,
        tiers=tiers,
        arenas=arenas,
        restorer=restorer,
        book=book,
        branch=Branch(book, epoch + 1),
        known=known,
        decider=decider,
        pipeline=pipeline,
        keeper=keeper,
        link=link,
    )
