"""What a manager is made of, made in order: the durable root first, whose errors come before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orbax.checkpoint as ocp

from ckptkit import layout
from ckptkit.arena import Arena
from ckptkit.coordination import Coordinator
from ckptkit.durable import DurableSteps
from ckptkit.durable.stock import Setup
from ckptkit.events import EventLog, Kind
from ckptkit.host_memory import HostMemory
from ckptkit.manager.book import Book
from ckptkit.manager.branch import Branch
from ckptkit.manager.deciding import Decider
from ckptkit.manager.keeping import Keeper
from ckptkit.manager.known import KnownSteps, durable_infos
from ckptkit.manager.opening import epoch_records, first_look, make_tiers, open_arenas, say_what_was_left, take_stock
from ckptkit.manager.restoring import Restorer
from ckptkit.manager.saving import SavePipeline
from ckptkit.manager.taken import DURABLE
from ckptkit.manifest import Writer
from ckptkit.policy import Backpressure, FailurePolicy, ReplicaPolicy, Tier
from ckptkit.proving import Verify, checked_verify
from ckptkit.staging import checked_choice
from ckptkit.tuning import DurableProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller asked for, checked. `staging` is a choice of `ckptkit.staging`."""

    options: ocp.CheckpointManagerOptions
    tiers: tuple[Tier, ...]  # fastest first
    host_id: str
    events: EventLog
    staging: str
    timeout_s: float
    backpressure: Backpressure
    on_failure: FailurePolicy
    replicas: ReplicaPolicy | None
    verify: Verify
    durable: DurableProfile

    def __post_init__(self) -> None:
        layout.checked_name(self.host_id, "host_id")
        checked_choice(self.staging)
        checked_verify(self.verify)
        self.backpressure.check_tiers(self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One of each, for one run. `arenas` by tier, `pipeline` with its threads running."""

    durable: DurableSteps
    arenas: Mapping[str, Arena]
    restorer: Restorer
    book: Book
    branch: Branch
    known: KnownSteps
    decider: Decider
    pipeline: SavePipeline
    keeper: Keeper


def make_parts(url: str, settings: Settings, setup: Setup, coordinator: Coordinator) -> Parts:
    """Makes the parts over the durable root at `url`; called by all processes together.

    Raises what `CheckpointManager` raises. Cost: two meetings, and a look at every tier.
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
    )
    say_what_was_left(durable, events, coordinator)
    host_dirs = {
        tier.name: Path(tier.path) / layout.job_name(durable.url, tier.job) / settings.host_id
        for tier in settings.tiers
    }
    memory = HostMemory(settings.backpressure.host_bytes_max)
    in_flight_max = settings.backpressure.in_flight_max
    arenas = open_arenas(settings.tiers, host_dirs, settings.host_id, memory, in_flight_max, coordinator, timeout_s)
    restorer = Restorer(host_dirs, durable, epochs, coordinator, events, timeout_s, settings.verify)
    held, epoch = take_stock(restorer, durable, book.ancestry, coordinator, timeout_s)
    book.refill(held)
    keeper = Keeper(settings.tiers, arenas, book, in_flight_max)
    keeper.opened()
    known = KnownSteps(options, durable, restorer)
    known.refill(book.steps())
    pipeline = SavePipeline(
        make_tiers(arenas, memory, in_flight_max, durable, epochs),
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
    return Parts(
        durable=durable,
        arenas=arenas,
        restorer=restorer,
        book=book,
        branch=Branch(book, epoch + 1),
        known=known,
        decider=Decider(options, settings.tiers, durable_infos(book, durable), coordinator, timeout_s),
        pipeline=pipeline,
        keeper=keeper,
    )
