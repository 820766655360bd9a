"""What a manager does when it is made: look at the durable root, open this host's tiers, agree on what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.arena import Arena
from ckptkit.coordination import Coordinator, gather
from ckptkit.durable import DurableSteps, EpochRecords
from ckptkit.durable.epochs import Ancestry
from ckptkit.durable.leftovers import left_behind
from ckptkit.durable.steps import make_root
from ckptkit.errors import CheckpointError, heard_from
from ckptkit.events import EventLog, Kind
from ckptkit.host_memory import HostMemory
from ckptkit.layout import PAGE_BYTES
from ckptkit.manager.restoring import Restorer
from ckptkit.manager.taken import DURABLE, MEMORY, Tiers
from ckptkit.manifest import SaveId
from ckptkit.policy import Tier
from ckptkit.sharding import Box, boxes_by_process
from ckptkit.store import open_store

UNKNOWN_BYTES = 1 << 60  # of a state before the first save: slots that follow from bytes begin with the fewest
STORE_DEADLINE_S = 20.0  # for small reads and writes of the durable root: a restart should not hang on a dead bucket

_NAMES_MAX = 20  # of leftovers, in one event


def epoch_records(url: str, events: EventLog) -> EpochRecords:
    """The epoch records of a durable root; one that had to be read from its copy is said in an event."""

    def said(problem: str) -> None:
        events.emit(Kind.REJECTED, tier=DURABLE, reason=problem)

    return EpochRecords(open_store(url, deadline_s=STORE_DEADLINE_S), said)


def first_look(
    epochs: EpochRecords, url: str, options: ocp.CheckpointManagerOptions, coordinator: Coordinator, timeout_s: float
) -> Ancestry:
    """The epoch records, read by process 0. The first use of the durable root, so its errors come early."""

    def read(_: list[Any]) -> dict[str, Any]:
        if options.create and not options.read_only:
            make_root(url, options)
        ancestry = epochs.read()
        if options.create and not options.read_only:
            epochs.probe()
        return ancestry.to_json()

    return Ancestry.from_json(coordinator.agree("first-look", None, read, timeout_s=timeout_s))


def say_what_was_left(durable: DurableSteps, events: EventLog, coordinator: Coordinator) -> None:
    """Process 0 names what a run that died did not commit. Nothing is removed: its writer may still live."""
    if coordinator.process != 0:
        return
    names = left_behind(open_store(durable.url, deadline_s=STORE_DEADLINE_S), durable.steps())
    if names:
        events.emit(Kind.LEFT_BEHIND, tier=DURABLE, path=durable.url, names=names[:_NAMES_MAX], count=len(names))


def open_arenas(
    tiers: Sequence[Tier],
    host_dirs: Mapping[str, Path],
    host_id: str,
    memory: HostMemory,
    in_flight_max: int,
    coordinator: Coordinator,
    timeout_s: float,
) -> dict[str, Arena]:
    """Opens this process's slot directories; when one process cannot, all raise, so that none is left waiting."""
    hosts = gather(coordinator, "hosts", host_id, timeout_s=timeout_s)
    local_rank = hosts[: coordinator.process].count(host_id)
    arenas: dict[str, Arena] = {}
    failure: CheckpointError | None = None
    try:
        for tier in tiers:
            arenas[tier.name] = Arena.open(
                host_dirs[tier.name],
                local_rank,
                slots=tier.slots_for(UNKNOWN_BYTES, in_flight_max),
                synced=tier.medium == "ssd",
                memory=memory if tier.medium == "ram" else None,
                keeps_found=tier.keep is not None,
            )
    except CheckpointError as error:
        failure = error
    mine = failure and [type(failure).__name__, str(failure)]
    said = gather(coordinator, "arenas", mine, timeout_s=timeout_s)
    failed = [process for process, why in enumerate(said) if why]
    if failed:
        for arena in arenas.values():
            arena.close()
        raise failure or heard_from(failed[0], *said[failed[0]])
    return arenas


def abstract_slot_bytes(trees: Mapping[str, Any]) -> tuple[int, int]:
    """The bytes of slot that a save of `trees` takes on this process, and the most on any.

    Leaves may be `jax.ShapeDtypeStruct`; without a sharding an abstract leaf counts as whole on every process. Exact:
    every distinct box of a leaf begins a page.
    """
    by_process = [0] * jax.process_count()
    for leaf in jax.tree.leaves(dict(trees)):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        sharding = getattr(array, "sharding", None)
        held = boxes_by_process(sharding, array.shape) if sharding is not None else {Box.whole(array.shape): None}
        for box, processes in held.items():
            for process in range(len(by_process)) if processes is None else processes:
                by_process[process] += -(-box.size * array.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
    return by_process[jax.process_index()], max(by_process)


def make_tiers(
    arenas: Mapping[str, Arena], memory: HostMemory, in_flight_max: int, durable: DurableSteps, epochs: EpochRecords
) -> Tiers:
    """Where saves go: staged in the ramdisk's slots, or without one in host memory for as many as may be in flight."""
    staging = arenas.get("ram") or Arena(None, slots=in_flight_max, synced=False, memory=memory)
    return Tiers(
        staging=staging,
        staging_name="ram" if "ram" in arenas else MEMORY,
        disk=arenas.get("ssd"),
        durable=durable,
        epochs=epochs,
    )


def take_stock(
    restorer: Restorer, durable: DurableSteps, ancestry: Ancestry, coordinator: Coordinator, timeout_s: float
) -> tuple[dict[SaveId, list[str]], int]:
    """Every save with the tiers that hold it, agreed by all processes, and the highest epoch that was seen.

    Cost: a listing and a small read per durable step, on process 0.
    """
    mine = [
        [save.epoch, save.step, save.number, tier]
        for save, held in restorer.local_saves().items()
        for tier, pairs in held.held.items()
        if any((m.writer.process, m.writer.count) == (coordinator.process, coordinator.count) for _, m in pairs)
    ]

    def stock(reports: list[list[list[Any]]]) -> dict[str, Any]:
        seen = {tuple(entry[:3]) for report in reports for entry in report}
        common = [
            save
            for save in sorted(seen)
            if all(any(tuple(entry[:3]) == save for entry in report) for report in reports)
        ]
        tiers = {
            save: sorted({entry[3] for report in reports for entry in report if tuple(entry[:3]) == save})
            for save in common
        }
        listed = [restorer.identity(step, ancestry) for step in durable.steps()]
        newest = [[save.epoch, save.step, save.number] for save in listed]
        return {
            "fast": [[*save, tiers[save]] for save in common],
            "durable": newest,
            "epoch": max([ancestry.epoch, *(save[0] for save in seen), *(e for e, _, _ in newest)]),
        }

    agreed = coordinator.agree("stock", mine, stock, timeout_s=timeout_s)
    held: dict[SaveId, list[str]] = {}
    for epoch, step, number, names in agreed["fast"]:
        held.setdefault(SaveId(epoch, step, number), []).extend(names)
    for epoch, step, number in agreed["durable"]:
        held.setdefault(SaveId(epoch, step, number), []).append(DURABLE)
    return held, agreed["epoch"]
