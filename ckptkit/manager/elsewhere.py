"""A restore from another durable root, which is only read."""

from __future__ import annotations

from contextlib import closing

import orbax.checkpoint as ocp

from ckptkit.broadcast import BroadcastOptions
from ckptkit.coordination import Coordinator
from ckptkit.durable import DurableSteps
from ckptkit.durable.stock import StockManager
from ckptkit.events import EventLog
from ckptkit.manager.asked import RestoreItems
from ckptkit.manager.opening import epoch_records
from ckptkit.manager.restoring import Restored, Restorer
from ckptkit.proving import Verify


def restore_elsewhere(
    url: str,
    step: int | None,
    wanted: RestoreItems,
    *,
    options: ocp.CheckpointManagerOptions,
    stock: StockManager,
    coordinator: Coordinator,
    events: EventLog,
    timeout_s: float,
    verify: Verify,
    broadcast: BroadcastOptions,
    name: str,
) -> Restored:
    """`Restorer.restore` from the durable root at `url` alone, with the step names of `options` and the handlers of
    `stock`. Called by all processes together; `name` is another each time."""
    read_only = ocp.CheckpointManagerOptions(
        read_only=True,
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
        step_name_format=options.step_name_format,
        lightweight_initialize=True,
    )
    with closing(DurableSteps(url, read_only, coordinator, timeout_s=timeout_s)) as durable:
        durable.stock.adopt_handlers(stock)
        epochs = epoch_records(url, events)
        restorer = Restorer({}, durable, epochs, coordinator, events, timeout_s, verify, broadcast=broadcast, name=name)
        return restorer.restore(step, wanted)
