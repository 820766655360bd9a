"""The durable root when a run begins: process 0 looks at its records, and all get the same."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.places import Place, require_possible_root
from ckptkit.durable.lifecycle.root_record import RootRecord
from ckptkit.durable.orbax.manager import make_root
from ckptkit.errors import CheckpointError, StoreError
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import Coordinator
from ckptkit.model.manifest import new_id
from ckptkit.model.tiers import DURABLE
from ckptkit.store import Store, open_store
from ckptkit.store.backends import properties_of

STORE_DEADLINE_S = 20.0  # for small reads and writes of the durable root: a restart should not hang on a dead bucket


def root_store(url: str) -> Store:
    """The store of a durable root, for small reads and writes."""
    return open_store(url, deadline_s=STORE_DEADLINE_S)


def epoch_records(url: str, events: EventLog) -> EpochRecords:
    """The epoch records of a durable root; an event reports a record that had to be read from its copy."""

    def said(problem: str) -> None:
        events.emit(Kind.REJECTED, tier=DURABLE, reason=problem)

    return EpochRecords(root_store(url), said)


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
    Raises `StepNotFoundError`, with the right call, for a path that can be no root: a step, an item, or inside of one.
    """

    def read(urls: list[Any]) -> dict[str, Any]:
        for process, other in enumerate(urls):
            if other != url:
                raise CheckpointError(
                    f"the processes of the job have different durable roots: process 0 has {url}, process {process} "
                    f"has {other}; give all of them one root that every process sees"
                )
        require_possible_root(Place.open(url, timeout_s=STORE_DEADLINE_S))
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
