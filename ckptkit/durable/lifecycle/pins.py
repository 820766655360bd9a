"""Pins: steps that no process prunes until the pin is removed. A pin is a lease without an end.

A small object among the leases, with the step in its name. A writer sees it in the listing that it makes before it
deletes, and a damaged pin still counts. It pins the step's number: a save that would replace a pinned step, after a
rollback, is refused.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any

from ckptkit.durable.lifecycle.leases import announced_deletions
from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.store import Store
from ckptkit.util import clock


def pinned_steps(store: Store) -> set[int]:
    """The steps that are pinned in a durable root. Cost: a listing. Raises `StoreError`."""
    steps = (paths.step_of_pin(name) for name in store.list(paths.LEASES_DIR))
    return {step for step in steps if step is not None}


def pin_reason(store: Store, step: int) -> str:
    """The reason that was given for a pin; empty without one, or if the record is damaged (the pin still counts). Cost:
    a small read."""
    with suppress(FileNotFoundError, CorruptCheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(store.get(f"{paths.LEASES_DIR}/{paths.pin_name(step)}"))["reason"])
    return ""


def put_pin(store: Store, step: int, reason: str = "") -> None:
    """Pins a step: once this has returned, no pruning deletes it. Pinning it again changes the reason.

    Cost: a put, a listing and a small read. Raises `StoreError`, and `CheckpointError` where the step is about to be
    deleted: the pin came too late.
    """
    record: dict[str, Any] = {"step": step, "reason": reason, "at_s": round(clock.wall_s(), 3)}
    holder = f"{socket.gethostname()}:{os.getpid()}"
    key = f"{paths.LEASES_DIR}/{paths.pin_name(step)}"
    known = store.stat(key) is not None
    shield_records(store)
    store.put(key, json.dumps({**record, "holder": holder}).encode())
    if not known and step in announced_deletions(store):
        store.delete(key)
        raise CheckpointError(f"step {step} in {store.url} is being deleted; it cannot be pinned any more", step=step)


def take_pin(store: Store, step: int) -> bool:
    """Takes the pin of a step out; whether there was one. Raises `StoreError`."""
    key = f"{paths.LEASES_DIR}/{paths.pin_name(step)}"
    known = store.stat(key) is not None
    store.delete(key)
    return known
