"""A save that was taken, and where it goes: the records that the threads of the pipeline hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from ckptkit import snapshot, staging
from ckptkit.arena import Arena, Slot
from ckptkit.durable.epochs import EpochRecords
from ckptkit.durable.shardings import sharding_text
from ckptkit.durable.steps import DurableSteps
from ckptkit.manager.items import SaveItems
from ckptkit.manifest import SaveId

DURABLE = "durable"
MEMORY = "memory"  # the staging area of a run without a fast tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save on its way through the tiers. `slot` is None where this process had no room for it."""

    save_id: SaveId
    items: SaveItems
    description: snapshot.Description
    slot: Slot | None
    staging: staging.Staging | None
    due: frozenset[str]
    waits: bool  # for its turn in the durable tier, on every process alike
    metrics: Any
    staged_s: float  # monotonic, when the step loop was let go


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Where saves go: the staging arena (a fast tier's, or anonymous memory), a slower arena, the durable root."""

    staging: Arena
    staging_name: str
    disk: Arena | None
    durable: DurableSteps
    epochs: EpochRecords


def with_shardings(description: snapshot.Description) -> snapshot.Description:
    """Adds the words for each leaf's sharding to its record; the same sharding is put into words once."""
    words: dict[jax.sharding.Sharding, str | None] = {}

    def added(source: snapshot.LeafSource) -> snapshot.LeafSource:
        if source.sharding is None:
            return source
        if source.sharding not in words:
            words[source.sharding] = sharding_text(source.sharding)
        text = words[source.sharding]
        if text is None:
            return source
        return replace(source, record=replace(source.record, extra={**source.record.extra, "sharding": text}))

    return replace(description, items={item: tuple(map(added, sources)) for item, sources in description.items.items()})
