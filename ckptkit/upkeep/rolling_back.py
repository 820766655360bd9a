"""`rollback`: returns the run to a step by an epoch record. Deletes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import pinned_steps
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.errors import CorruptCheckpointError, StepNotFoundError
from ckptkit.inspection.records import FORMAT, StepEntry
from ckptkit.inspection.steps import list_steps
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.model.tiers import DURABLE
from ckptkit.store import open_store
from ckptkit.upkeep.arenas import list_arenas
from ckptkit.util.words import command_line
from ckptkit.verification import verify
from ckptkit.verification.records import VerifyProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """The saves that a rollback abandons: newer than `step`, of the branch that continues from there until now."""

    root: str
    step: int
    save_id: SaveId | None
    abandoned: tuple[StepEntry, ...]
    before: Ancestry
    after: Ancestry
    done: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": FORMAT,
            "root": self.root,
            "step": self.step,
            "save_id": None if self.save_id is None else asdict(self.save_id),
            "epoch": self.after.epoch,
            "done": self.done,
            "abandoned": [
                {
                    "step": each.step,
                    "save_id": None if each.save_id is None else asdict(each.save_id),
                    "tiers": [holding.tier for holding in each.holdings],
                }
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
    """The saves that a rollback to `step` abandons, in the root and in this host's fast `tiers`; nothing is written.

    The step is read and verified first (`unread`: its records are trusted instead), because once the record is written
    no restart takes a newer one. A tier that is not given is not read, but the record is valid for it too.

    Raises `StepNotFoundError` for a step that no restart would take (none there, abandoned, not whole),
    `CorruptCheckpointError` where it is damaged or the epoch records are, `StoreError` for what cannot be reached.
    """
    listing = list_steps(root, tiers=tiers, host_id=host_id, step_prefix=step_prefix, timeout_s=timeout_s)
    place = Place.open(listing.root, timeout_s=timeout_s)
    before = EpochRecords(place.store).read()
    entry = _chosen(listing.steps, step, listing.root)
    if not unread:
        _verify(entry, listing.root, timeout_s, progress)
    identity = entry.save_id or before.of_stock(step)
    live = [each for each in listing.steps if each.state in ("committed", "partial")]
    newer = tuple(each for each in live if (each.save_id or before.of_stock(each.step)) > identity)
    stock = [each.step for each in listing.steps if each.save_id is None and each.state in ("committed", "abandoned")]
    seen = [each.save_id.epoch for each in listing.steps if each.save_id is not None]
    epoch = max([before.epoch, *seen]) + 1
    return RollbackPlan(
        root=listing.root,
        step=step,
        save_id=entry.save_id,
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

    Cost: three small writes. Raises `CheckpointError` where a run has begun or gone back since the plan was made.
    """
    store = open_store(plan.root, deadline_s=timeout_s)
    shield_records(store)
    EpochRecords(store).advance(plan.before, plan.after)
    return replace(plan, done=True)


def _chosen(entries: Sequence[StepEntry], step: int, root: str) -> StepEntry:
    of_number = [each for each in entries if each.step == step]
    for each in of_number:
        if each.state == "committed":
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
