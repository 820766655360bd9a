"""What a manager does once, when it is made: open this process's slots, and take stock of what all tiers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckptkit.arena import Arena
from ckptkit.coordination import Coordinator, gather
from ckptkit.durable import DurableSteps
from ckptkit.errors import CheckpointError, heard_from
from ckptkit.host_memory import HostMemory
from ckptkit.layout import PAGE_BYTES
from ckptkit.manager.book import Book
from ckptkit.manager.restoring import Restorer
from ckptkit.manager.taken import DURABLE
from ckptkit.manifest import SaveId
from ckptkit.policy import Tier
from ckptkit.sharding import Box, boxes_by_process


def open_arenas(
    tiers: Sequence[Tier],
    host_dirs: Mapping[str, Path],
    host_id: str,
    memory: HostMemory,
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
                slots=tier.slots,
                synced=tier.medium == "ssd",
                memory=memory if tier.medium == "ram" else None,
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


def abstract_slot_bytes(trees: Mapping[str, Any]) -> int:
    """The bytes of slot that a save of `trees` takes on this process; leaves may be `jax.ShapeDtypeStruct`.

    Without a sharding an abstract leaf counts as whole. Exact: every distinct box of a leaf begins a page.
    """
    total_bytes = 0
    for leaf in jax.tree.leaves(dict(trees)):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        sharding = getattr(array, "sharding", None)
        held = boxes_by_process(sharding, array.shape) if sharding is not None else {Box.whole(array.shape): ()}
        mine = [box for box, processes in held.items() if not processes or jax.process_index() in processes]
        total_bytes += sum(-(-box.size * array.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES for box in mine)
    return total_bytes


def take_stock(
    book: Book, restorer: Restorer, durable: DurableSteps, coordinator: Coordinator, timeout_s: float
) -> int:
    """Fills the book with what all tiers hold, agreed by all processes; returns this run's epoch.

    Cost on process 0: a listing of the durable tier and a small read per step.
    """
    me = (coordinator.process, coordinator.count)
    mine = [
        [save.epoch, save.step, save.number, tier]
        for save, held in restorer.local_saves().items()
        for tier, pairs in held.held.items()
        if any((manifest.writer.process, manifest.writer.count) == me for _, manifest in pairs)
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
        saves = [restorer.identity(step, book.ancestry) for step in durable.steps()]
        return {
            "fast": [[*save, tiers[save]] for save in common],
            "durable": [[save.epoch, save.step, save.number] for save in saves],
            "epoch": max([book.ancestry.epoch, *(save[0] for save in seen), *(save.epoch for save in saves)]),
        }

    agreed = coordinator.agree("stock", mine, stock, timeout_s=timeout_s)
    for epoch, step, number, tiers in agreed["fast"]:
        for tier in tiers:
            book.commit(SaveId(epoch, step, number), tier)
    for epoch, step, number in agreed["durable"]:
        book.commit(SaveId(epoch, step, number), DURABLE)
    return agreed["epoch"] + 1
