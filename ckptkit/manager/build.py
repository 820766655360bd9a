"""Builds the parts of a manager in order: the durable root first, so that its errors come before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ckptkit.durable.cells.tensorstore_wait import require_usable
from ckptkit.durable.steps import DurableSteps
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.manager.fast_tiers import gather_job_hosts, make_tiers, open_arenas, open_peers, own_host_dirs
from ckptkit.manager.metadata import MetadataIndex, durable_infos
from ckptkit.manager.root import epoch_records, first_look
from ckptkit.manager.settings import Settings
from ckptkit.manager.start_warnings import (
    report_durable_mount,
    report_tier_mounts,
    say_left,
    say_what_was_left,
    warn_of_other_hosts,
    warn_of_other_roots,
    warn_of_slots_alone,
    warn_of_steps_from_elsewhere,
    warn_of_unrecorded,
)
from ckptkit.manager.stock import take_stock
from ckptkit.model.manifest import Writer
from ckptkit.model.tiers import DURABLE, Tier, places_text
from ckptkit.peers.link import PeerLink
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.flow import RestoreFlow
from ckptkit.save.book.ledger import Branch, Ledger
from ckptkit.save.book.retention import Retention
from ckptkit.save.decider import Decider
from ckptkit.save.pipeline import SavePipeline
from ckptkit.save.threads import machinery
from ckptkit.slots.arena import Arena
from ckptkit.slots.host_memory import HostMemory
from ckptkit.snapshot.provenance import provenance_here
from ckptkit.snapshot.staging import Stager
from ckptkit.util.sharing import share_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the bytes of steps are."""

    tiers: tuple[Tier, ...]  # those that can be had among these hosts, fastest first
    arenas: Mapping[str, Arena]  # by tier
    durable: DurableSteps
    link: PeerLink | None  # None: processes do not read each other's tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Knowledge about steps: which exist, their metrics and metadata, and which save is due."""

    inventory: Inventory
    ledger: Ledger
    branch: Branch
    metadata_index: MetadataIndex
    decider: Decider


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """One of each, for one run; `pipeline` with its threads running."""

    job: Job
    storage: Storage
    history: History
    restore_flow: RestoreFlow
    pipeline: SavePipeline
    retention: Retention


def make_components(url: str, settings: Settings, setup: Mapping[str, Any], job: Job) -> Components:
    """Makes the parts over the durable root at `url`; called by all processes together. `setup`: further arguments of
    Orbax's constructor.

    Raises the errors of `CheckpointManager`. Cost: five exchanges, and a look at every tier.
    """
    options, coordinator, events = settings.options, job.coordinator, job.events
    require_usable(url)
    # Opened first: its errors name what is wrong with the root, and nothing else is open yet.
    epochs = epoch_records(url, events)
    looked = first_look(epochs, url, options, coordinator)
    ledger = Ledger(looked.ancestry)
    durable = DurableSteps(
        url,
        options,
        coordinator,
        setup=setup,
        profile=settings.durable,
        report=lambda step, reason: events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=reason),
        cleaned=lambda names: say_left(Kind.CLEANED, url, names, events),
    )
    say_what_was_left(durable, job)
    if coordinator.process == 0:
        report_durable_mount(durable.url, events)
    host_dirs = own_host_dirs(durable.url, settings, looked.root)
    job_hosts = gather_job_hosts(settings, job)
    share_host(job_hosts.rank[1])
    memory = HostMemory(settings.saving.host_bytes_max)
    in_flight_max = settings.saving.in_flight_max
    tiers = job_hosts.tiers
    warn_of_other_hosts(host_dirs, job_hosts)
    if job_hosts.rank[0] == 0:
        warn_of_other_roots(host_dirs, durable.url, looked.root, settings)
    arenas: Mapping[str, Arena] = {}
    if not options.read_only:  # it only looks at the existing files: slots are for processes that save
        arenas = open_arenas(job_hosts, host_dirs, memory, in_flight_max, coordinator)
    with ExitStack() as opened:  # another try after an error makes others, and these would hold their places
        for arena in arenas.values():
            opened.callback(arena.close)
        if arenas and job_hosts.rank[0] == 0:
            report_tier_mounts(tiers, host_dirs, events)
        link, peer_copies = open_peers(job_hosts, host_dirs, arenas, settings.processes.peers, job)
        if link is not None:
            opened.callback(link.close)
        inventory = Inventory(
            host_dirs,
            durable,
            epochs,
            events,
            client=link.client if link is not None else None,
            rank=job_hosts.rank if link is not None else (0, 1),
        )
        restore_flow = RestoreFlow(inventory, job, settings.processes.broadcast)
        stock = take_stock(inventory, ledger.ancestry, coordinator)
        if coordinator.process == 0:
            warn_of_slots_alone(stock.held, durable.url, host_dirs, settings)
            warn_of_unrecorded(stock.unrecorded, durable.url)
            warn_of_steps_from_elsewhere(stock.held, durable.url)
        ledger.refill(stock.held)
        retention = Retention(tiers, arenas, ledger, in_flight_max)
        retention.opened()
        metadata_index = MetadataIndex(options, durable, inventory, ledger.steps)
        metadata_index.refill(ledger.steps())
        branch = Branch(ledger, stock.epoch + 1, looked.run)
        pipeline = SavePipeline(
            make_tiers(arenas, memory, in_flight_max, inventory, peer_copies),
            job,
            Writer(
                process=coordinator.process,
                count=coordinator.count,
                host=settings.host_id,
                provenance=provenance_here(
                    settings.saving.revision,
                    with_command=settings.saving.record_command,
                    places=places_text({tier.name: tier.path for tier in tiers if tier.path}),
                ),
            ),
            branch,
            Decider(options, tiers, durable_infos(ledger, durable), coordinator, latest=ledger.latest_step),
            retention,
            settings.saving,
            machinery(coordinator, Stager(memory, device_bytes_max=settings.saving.device_copy_bytes_max)),
        )
        opened.pop_all()
    return Components(
        job=job,
        storage=Storage(tiers=tiers, arenas=arenas, durable=durable, link=link),
        history=History(
            inventory=inventory,
            ledger=ledger,
            branch=branch,
            metadata_index=metadata_index,
            decider=pipeline.decider,
        ),
        restore_flow=restore_flow,
        pipeline=pipeline,
        retention=retention,
    )
