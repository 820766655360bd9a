"""One process's reading of a planned save: verified, placed, and put together into items."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import numpy as np

from ckptkit.durable.orbax.file_items import read_by, registered
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.events import EventLog, Kind
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import SaveId
from ckptkit.restore import stock_restore
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.place import DEVICE_BUFFER_BYTES, Placer, device_buffers_of
from ckptkit.restore.plan import Key, RestorePlan, plan_restore
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.read import OnRejected, execute
from ckptkit.restore.request import RestoreRequest
from ckptkit.snapshot.small_items import give_back
from ckptkit.util.gc_pause import collection_paused, old_afterwards
from ckptkit.util.own_context import own_context
from ckptkit.util.pages import empty_block
from ckptkit.util.waits import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The part of a save that one process has read and verified, on its devices. `prepared` None: `stock` is Orbax's
    result."""

    prepared: Prepared | None = None
    leaves: dict[Key, Any] = field(default_factory=dict)
    read_bytes: Mapping[str, int] = field(default_factory=lambda: {"durable (orbax)": 0})
    stock: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Shared:
    """The data that replicas have read for each other: complete leaves, pieces of others, and the bytes by source."""

    assembly: Assembly
    read_bytes: Counter[str] = field(default_factory=Counter)
    announced: set[tuple[Key, Box]] = field(default_factory=set)  # that the durable tier was asked to read ahead
    failure: Exception | None = None  # of this process, not yet known to the others


@final
class LocalRead:
    """Reads, verifies and places one process's part; launches no collective, and exchanges nothing."""

    def __init__(self, durable: DurableSteps | None, events: EventLog):
        """`durable`: where the steps of stock Orbax are; None where `read` alone is called."""
        self._durable = durable
        self._events = events
        self.meter = Meter()  # of the bytes that `read` has read
        self.damaged: set[str] = set()  # tiers whose copy of the save had a damaged cell, since `begin`
        self._reported: set[str] = set()
        self._reporting = threading.Lock()

    def begin(self) -> None:
        """A restore begins: what it cannot use is reported once, however often it is tried."""
        self.meter.begin(0)
        self.damaged.clear()
        self._reported.clear()

    def read(self, prepared: Prepared, shared: Shared | None = None) -> Verified:
        """Reads all boxes that `prepared` plans, without those that `shared` has already."""
        if shared is not None and shared.failure is not None:
            raise shared.failure
        plan = prepared.plan if shared is None else _rest(prepared, shared)
        with old_afterwards() if plan.is_brief else nullcontext():
            return self._read(prepared, plan, shared)

    def _read(self, prepared: Prepared, plan: RestorePlan, shared: Shared | None) -> Verified:
        by_key = {target.key: target for target in prepared.targets}
        kept = prepared.kept
        placer = Placer()
        leaves = placer.leaves
        assembly = shared.assembly if shared is not None else None

        def proven(key: Key, blocks: Mapping[Box, np.ndarray]) -> None:
            if assembly is not None and key in assembly:
                assembly.deliver(key, blocks)
            elif key[0] in kept:  # items that Orbax restores are only verified here
                placer.add(by_key[key], blocks)

        def make_block(key: Key, box: Box, dtype: np.dtype) -> np.ndarray:
            buffer = landed.get(key)
            if buffer is not None and buffer.shape == box.shape and buffer.dtype == dtype:
                return landed.pop(key)  # once: who reads it again after a bad source has memory of its own
            if key[0] in kept and (assembly is None or key not in assembly):
                return placer.block(by_key[key], box, dtype)
            return empty_block(box.shape, dtype)

        for target in prepared.targets:
            if not target.form.boxes and target.key[0] in kept:  # no device of this process holds any of it
                placer.add(target, {})
        large = dict.fromkeys([r.key for r in plan.reads if r.nbytes >= DEVICE_BUFFER_BYTES and r.key[0] in kept])
        landed = device_buffers_of(by_key[key] for key in large if assembly is None or key not in assembly)
        durable = len(plan.tiers) - 1
        if (expect := prepared.holdings.expect) is not None:
            announced = shared.announced if shared is not None else ()
            wanted = plan.first_reads(durable)
            # A future for each cell: the collector would look through all of them, for nothing.
            with collection_paused():
                expect([each for each in wanted if ((each[0], each[1].path), each[3]) not in announced])
        rejected = self.rejected(plan.save_id)
        self.meter.begin(sum([read.nbytes for read in plan.reads]))
        reads_ahead = frozenset({durable} if expect is not None else ())
        counted = self.meter.add
        read_bytes = execute(
            plan, prepared.holdings.readers, rejected, proven, make_block, announced=reads_ahead, counted=counted
        )
        placer.finish()
        if shared is not None:
            leaves |= shared.assembly.leaves
            shared.read_bytes.update(read_bytes)
            read_bytes = dict(shared.read_bytes)
        return Verified(prepared=prepared, leaves=leaves, read_bytes=read_bytes)

    def by_orbax(self, step: int, wanted: RestoreRequest) -> Verified:
        """A step that stock Orbax wrote."""
        assert self._durable is not None
        return Verified(stock=stock_restore.restore_stock(self._durable, step, wanted))

    def assemble(self, proven: Verified, save_id: SaveId) -> dict[str, Any]:
        """The trees of the verified leaves. Also sets the iterators; before this, no object of the caller changes."""
        with jax.transfer_guard("allow"):  # of small items, and what Orbax restores
            return self._assembled(proven, save_id)

    def _assembled(self, proven: Verified, save_id: SaveId) -> dict[str, Any]:
        prepared = proven.prepared
        if prepared is None:
            return dict(proven.stock)
        items: dict[str, Any] = {}
        for item in prepared.asked.trees:
            # Each leaf is released once it is cast: memory has one dtype of the tree (of a broadcast's leaves, both).
            placed = (proven.leaves.pop(target.key) for target in prepared.targets if target.key[0] == item)
            with own_context():  # for casts
                items[item] = prepared.answers[item].finished(placed)
        for name, stored in prepared.inline.items():
            items[name] = give_back(stored, prepared.asked.inline[name])
        for name, files in prepared.files.items():
            if (found := self._handler(name, prepared.asked.inline[name], files.handler)) is not None:
                large = {path: proven.leaves[name, leaf.path] for path, leaf in files.large.items()}
                items[name] = read_by(*found, {**files.small, **large})
        if prepared.asked.orbax:
            assert self._durable is not None
            plain = [name for name, arg in prepared.asked.orbax.items() if arg is None]
            args = {name: arg for name, arg in prepared.asked.orbax.items() if arg is not None}
            if plain:
                items |= stock_restore.as_saved(self._durable.reader(save_id.step).url, plain)
            if args:
                items |= stock_restore.restore_items(self._durable, save_id.step, args)
        return items

    def _handler(self, name: str, arg: Any, kind: str) -> tuple[Any, Any] | None:
        """The handler of an item, and its restore argument. None if the item is not asked for by name and has no
        registered handler: it is left out."""
        assert self._durable is not None
        handler_for = self._durable.stock.handler
        return (handler_for(name, arg), arg) if arg is not None else registered(handler_for, name, kind)

    def rejected(self, save_id: SaveId) -> OnRejected:
        """Reports damaged sources in an event: one for each file or cell."""

        def emit(tier: str, error: CheckpointError) -> None:
            owner, reason = error.tier or tier, str(error)
            with self._reporting:
                is_new = reason not in self._reported
                self._reported.add(reason)
                if isinstance(error, CorruptCheckpointError):
                    self.damaged.add(owner)
            if is_new:
                self._events.emit(Kind.REJECTED, step=save_id.step, tier=owner, reason=reason)

        return emit


def _rest(prepared: Prepared, shared: Shared) -> RestorePlan:
    """The plan of what is still missing."""
    others = tuple(read for read in prepared.plan.reads if read.key not in shared.assembly)
    pieces = plan_restore(prepared.plan.save_id, shared.assembly.missing(), prepared.holdings.sources)
    return replace(prepared.plan, reads=(*others, *pieces.reads))
