"""`pin` and `unpin`: a durable step that is not pruned."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckptkit.durable.lifecycle.leases import announced_deletions, pinned_steps, record_text
from ckptkit.durable.lifecycle.listing import DurableStep, read_root
from ckptkit.durable.lifecycle.places import Place, require_possible_root
from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import read_ancestry
from ckptkit.model import paths
from ckptkit.store import Store, open_store
from ckptkit.store.roots import root_url
from ckptkit.util import clock
from ckptkit.util.words import command_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """The outcome for a pin. `changed`: it was (or would be) added or removed. `pinned`: every pinned step afterwards.
    `problems`: damage of the step, which does not prevent the pin, and of the root's records."""

    root: str
    step: int
    changed: bool
    pinned: tuple[int, ...]
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": FORMAT, **asdict(self)}


def pin(
    root: str,
    step: int,
    *,
    reason: str = "",
    step_prefix: str | None = None,
    dry_run: bool = False,
    timeout_s: float = 20.0,
) -> Pinning:
    """Keeps a durable step of `root` from every pruning, a running job's too, until `unpin`.

    A step of an abandoned branch can be pinned too: its number cannot be saved again to the durable tier until `unpin`.
    Only a deletion that names the step (`CheckpointManager.delete`) removes it. Fast tiers have no pins. Raises
    `StepNotFoundError` where the root has no such committed step, `CheckpointError` where it is being deleted.
    """
    url = root_url(root)
    place = Place.open(url, timeout_s=timeout_s)
    found, problems = _found(place, step, step_prefix)
    store = open_store(url, deadline_s=timeout_s)
    before = pinned_steps(store)
    if not dry_run:
        put_pin(store, step, reason)
        try:
            _found(place.again(), step, step_prefix)  # a deletion that ended before the pin did not see it
        except StepNotFoundError:
            if step not in before:
                store.delete(_key(step))
            raise
    problems += [each.problem for each in found if each.problem is not None]
    pinned = tuple(sorted({*before, step}))
    return Pinning(root=url, step=step, changed=step not in before, pinned=pinned, problems=tuple(problems))


def _found(place: Place, step: int, step_prefix: str | None) -> tuple[list[DurableStep], list[str]]:
    """The durable steps of a number, and damage of the root's records. Raises `StepNotFoundError` where none of them is
    committed."""
    ancestry, problems = read_ancestry(place)
    found = [each for each in read_root(place, ancestry, step_prefix=step_prefix).steps if each.step == step]
    if not any(each.state != "unfinished" for each in found):
        raise StepNotFoundError(
            f"{place.url} has no committed durable step {step}; `{command_line('steps', place.url)}` lists those that "
            "it has",
            step=step,
            path=place.url,
        )
    return found, problems


def unpin(root: str, step: int, *, dry_run: bool = False, timeout_s: float = 20.0) -> Pinning:
    """Removes the pin of a step, even of a deleted step. Raises `StepNotFoundError` without a pin."""
    url = root_url(root)
    store = open_store(url, deadline_s=timeout_s)
    before = pinned_steps(store)
    if step not in before:
        require_possible_root(Place.open(url, timeout_s=timeout_s))
        shown = ", ".join(map(str, sorted(before))) or "none"
        raise StepNotFoundError(f"{url} has no pin of step {step}; pinned are: {shown}", step=step, path=url)
    if not dry_run:
        store.delete(_key(step))
    return Pinning(root=url, step=step, changed=True, pinned=tuple(sorted(before - {step})))


def put_pin(store: Store, step: int, reason: str = "") -> None:
    """Pins a step: once this has returned, no pruning deletes it. Pinning it again changes the reason.

    Cost: a put, a listing and a small read. Raises `StoreError`, and `CheckpointError` where the step is about to be
    deleted: the pin came too late.
    """
    record: dict[str, Any] = {"step": step, "reason": reason, "at_s": round(clock.wall_s(), 3)}
    key = _key(step)
    known = store.stat(key) is not None
    shield_records(store)
    store.put(key, record_text(record))
    if not known and announced_deletions(store, [step]):
        store.delete(key)
        raise CheckpointError(f"step {step} in {store.url} is being deleted; it cannot be pinned any more", step=step)


def pin_reason(store: Store, step: int) -> str:
    """The reason that was given for a pin; empty without one, or if the record is damaged (the pin still counts). Cost:
    a small read."""
    with suppress(FileNotFoundError, CorruptCheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(store.get(_key(step)))["reason"])
    return ""


def _key(step: int) -> str:
    return f"{paths.LEASES_DIR}/{paths.pin_name(step)}"
