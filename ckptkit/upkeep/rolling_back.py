"""`rollback`: returns the run to a step by an epoch record. Deletes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import Lease, pinned_steps
from ckptkit.durable.lifecycle.listing import read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError, StoreError
from ckptkit.inspection.records import FORMAT, StepEntry
from ckptkit.inspection.steps import list_steps
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.model.tiers import DURABLE
from ckptkit.store import open_store
from ckptkit.upkeep.arenas import list_arenas
from ckptkit.util.plain import plain
from ckptkit.util.words import command_line
from ckptkit.verification import verify
from ckptkit.verification.records import VerifyProgress

_LEASE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """The saves that a rollback abandons: newer than the `chosen` step, of the branch that continues from there."""

    root: str
    host_id: str
    chosen: StepEntry
    abandoned: tuple[StepEntry, ...]
    before: Ancestry
    after: Ancestry
    done: bool = False
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step to which the run goes back."""
        return self.chosen.step

    @property
    def save_id(self) -> SaveId | None:
        """The save of that step; None for one of stock Orbax."""
        return self.chosen.save_id

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": FORMAT,
            "root": self.root,
            "step": self.step,
            "save_id": plain(self.save_id),
            "epoch": self.after.epoch,
            "done": self.done,
            "abandoned": [
                {"step": each.step, "save_id": plain(each.save_id), "tiers": [held.tier for held in each.holdings]}
                for each in self.abandoned
            ],
            "notes": self.notes,
        }


def plan_rollback(
    root: str,
    step: int,
    *,
    tiers: Sequence[str] = (),
    host_id: str,
    unread: bool = False,
    step_prefix: str | None = None,
    timeout_s: float = 20.0,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> RollbackPlan:
    """The saves that a rollback to `step` abandons, in the root and in this host's fast `tiers`. Writes only a lease.

    The step is read and verified first (`unread`: its records are trusted instead), because once the record is written
    no restart takes a newer one. It is leased meanwhile, where the root can be written. A tier that is not given is not
    read, but the record is valid for it too.

    Raises `StepNotFoundError` for a step that no restart would take (none there, abandoned, not whole),
    `CorruptCheckpointError` where it is damaged or the epoch records are, `StoreError` for what cannot be reached.
    """
    listing = list_steps(root, tiers=tiers, host_id=host_id, step_prefix=step_prefix, timeout_s=timeout_s)
    place = Place.open(listing.root, timeout_s=timeout_s)
    before = EpochRecords(place.store).read()
    entry = _chosen(listing.steps, step, listing.root)
    if not unread:
        with ExitStack() as held:
            if f"{paths.SIDECAR_DIR}/" in place.names():
                with suppress(StoreError):  # `rollback` looks again
                    held.enter_context(_held(listing.root, step, timeout_s))
            _verify(entry, listing.root, timeout_s, progress)
    if entry.save_id is None:
        _require_of_this_root(place, before, step, step_prefix)
    identity = entry.save_id or before.of_stock(step)
    live = [each for each in listing.steps if each.state in ("committed", "partial")]
    newer = tuple(each for each in live if (each.save_id or before.of_stock(each.step)) > identity)
    stock = [each.step for each in listing.steps if each.save_id is None and each.state in ("committed", "abandoned")]
    seen = [each.save_id.epoch for each in listing.steps if each.save_id is not None]
    epoch = max([before.epoch, *seen]) + 1
    return RollbackPlan(
        root=listing.root,
        host_id=host_id,
        chosen=entry,
        abandoned=newer,
        before=before,
        after=before.begin(epoch, identity, new_id(), stock),
        notes=(
            *listing.notes,
            *(f"damaged: {each}" for each in listing.problems),
            *_notes(listing.root, entry, newer, pinned_steps(place.store), tiers, host_id),
        ),
    )


def rollback(plan: RollbackPlan, *, timeout_s: float = 20.0) -> RollbackPlan:
    """Writes the epoch record: from now on every restart takes the step, and not an abandoned one.

    A running job is fenced off: its next durable save is refused with the reason. Stop the job, and start it again.
    Abandoned saves stay until they are pruned, or their numbers are saved again. A rollback cannot be undone.

    The step is leased, so that no running job and no `prune` deletes it, and looked at once more: a record never names
    a step that was deleted.

    Cost: five small writes, and a look at every step. Raises `CheckpointError` where a run has begun or gone back since
    the plan was made, or a process deletes the step; `StepNotFoundError` where it was deleted.
    """
    store = open_store(plan.root, deadline_s=timeout_s)
    shield_records(store)
    records = EpochRecords(store)
    records.advance(plan.before, None)
    with _held(plan.root, plan.step, timeout_s):
        _require_there(plan, timeout_s)
        records.advance(plan.before, plan.after)
    return replace(plan, done=True)


@contextmanager
def _held(root: str, step: int, timeout_s: float) -> Iterator[None]:
    """Keeps a step from being deleted. Raises `CheckpointError` where a process deletes it already, `StoreError`."""
    with Lease(open_store(root, deadline_s=timeout_s), step, lease_s=_LEASE_S) as lease:
        if not lease.granted():
            raise CheckpointError(
                f"{root} is not rolled back: step {step} is being deleted; go back to another step",
                step=step,
                path=root,
            )
        yield


def _require_there(plan: RollbackPlan, timeout_s: float) -> None:
    """Raises `StepNotFoundError` or `CheckpointError` where the step is not the save that the plan was made for."""
    held = {each.tier: each.path for each in plan.chosen.holdings}
    prefix = held[DURABLE].rpartition("/")[2].rpartition("_")[0] if DURABLE in held else None
    tiers = [tier for tier in held if tier != DURABLE]
    listing = list_steps(plan.root, tiers=tiers, host_id=plan.host_id, step_prefix=prefix, timeout_s=timeout_s)
    now = _chosen(listing.steps, plan.step, plan.root)
    if now.save_id != plan.save_id or (DURABLE in held and DURABLE not in {each.tier for each in now.holdings}):
        raise CheckpointError(
            f"{plan.root} is not rolled back: step {plan.step} was deleted or saved anew meanwhile; run it again",
            step=plan.step,
            path=plan.root,
        )


def _require_of_this_root(place: Place, ancestry: Ancestry, step: int, step_prefix: str | None) -> None:
    """Raises `CheckpointError` for a step of another root: no rollback makes it the newest. Cost: as `read_root`."""
    durable = read_root(place, ancestry, step_prefix=step_prefix).steps
    if any(each.step == step and each.identity.of_another_root for each in durable):
        raise CheckpointError(
            f"{place.url} is not rolled back: step {step} is of another root, so it counts as the oldest. To continue "
            f"from it, restore it in the job, with `manager.restore({step})`, and save",
            step=step,
            path=place.url,
        )


def _chosen(entries: Sequence[StepEntry], step: int, root: str) -> StepEntry:
    of_number = [each for each in entries if each.step == step]
    for each in of_number:
        if each.state == "committed" and each.problem is None:
            return each
    for each in of_number:
        if each.problem is not None:
            raise CorruptCheckpointError(f"{root} is not rolled back: {each.problem}", step=step, path=root)
    states = ", ".join(each.state for each in of_number)
    why = f"it is {states}" if of_number else "there is none"
    places = [each.path for entry in of_number if entry.state == "abandoned" for each in entry.holdings]
    for place in places[:1] if any(each.startswith(f"{root}/") for each in places[:1]) else ():
        why += f"; `{command_line('copy', place, 'NEW_ROOT')}` takes it to a root where it is not"
    raise StepNotFoundError(f"{root}: no restart would take step {step}: {why}", step=step, path=root)


def _verify(entry: StepEntry, root: str, timeout_s: float, progress: Callable[[VerifyProgress], None] | None) -> None:
    durable = [each for each in entry.holdings if each.tier == DURABLE]
    for holding in durable or entry.holdings:
        found = verify(holding.path, entry.step, timeout_s=timeout_s, progress=progress)
        for proof in found.steps:
            if proof.findings and proof.save_id in (None, entry.save_id):
                raise CorruptCheckpointError(
                    f"{root} is not rolled back: step {entry.step} is damaged: {proof.findings[0].problem}",
                    step=entry.step,
                    path=holding.path,
                )


def _notes(
    root: str,
    entry: StepEntry,
    newer: Sequence[StepEntry],
    pinned: set[int],
    tiers: Sequence[str],
    host_id: str,
) -> tuple[str, ...]:
    notes = []
    if entry.save_id is None:
        highest = max(each.step for each in (entry, *newer))
        notes.append(
            "only jobs of ckptkit follow the record: a job of stock Orbax ignores it and restores the highest number, "
            f"{highest}. For such a job move the newer steps out of the root"
        )
    if not any(each.tier == DURABLE for each in entry.holdings):
        notes.append("only fast tiers of this host hold it: if they are lost, a restart takes an older step")
    blocked = sorted({each.step for each in newer} & pinned)
    if blocked:
        notes.append(
            f"pinned: {', '.join(map(str, blocked))}; these numbers cannot be saved anew until they are unpinned"
        )
    live = [each.path for each in list_arenas(tiers, root=root, host_id=host_id) if each.live]
    if live:
        notes.append(f"a process runs here ({', '.join(live)}): stop it, its next durable save will be refused")
    return tuple(notes)
