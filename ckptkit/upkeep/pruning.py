"""`prune`: keeps durable steps by a keep policy and deletes the others, with or without a running job.

The plan is made from one listing and one verification. Before anything is deleted, the deletion is announced, and the
steps are listed again and compared with the plan.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.delete import move_away, remove_step
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import PruneGuard, pinned_steps
from ckptkit.durable.lifecycle.listing import DurableStep, StepState, read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreError, store_error
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import require_root
from ckptkit.inspection.sizes import linked_bytes, stored_bytes
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import EverySteps, KeepBytes, KeepNewest
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.store.local import sync_directory
from ckptkit.store.roots import root_url
from ckptkit.util import clock
from ckptkit.util.plain import plain_fields
from ckptkit.verification.deletions import DeletionNotice, finish_deletions
from ckptkit.verification.durable import prove_step
from ckptkit.verification.leaving import reason_to_leave
from ckptkit.verification.pool import Limits
from ckptkit.verification.records import VerifyProgress

Keep = KeepNewest | KeepBytes | EverySteps
PruneAction = Literal["keep", "delete", "leave"]

_POLL_S = 0.5  # between two looks at leases that are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of a step's files. `shared`: of them, the files that have another name too, by the file's number."""

    all_bytes: int
    shared: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneStep:
    """The outcome for one durable step, and the reason. `leave`: pruning does not decide about it."""

    step: int
    path: str
    state: StepState
    kind: StepClass
    save_id: SaveId | None
    size: StepBytes
    act: PruneAction
    reasons: tuple[str, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of its files, those that other steps have too included."""
        return self.size.all_bytes

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.rpartition("/")[2]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = plain_fields(self, without=("kind", "size"))
        return {**found, "class": str(self.kind), "bytes": self.stored_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """The steps of a root, ascending by number, with the decision on each. `proven`: the newest step that verified
    completely. `ancestry`: the epoch records for which the plan holds. `problems`: damage, which stays. `notes`:
    entries that are not steps of the run, and stay, and damage for which a step is not the newest whole one."""

    root: str
    keep: tuple[Keep, ...]
    steps: tuple[PruneStep, ...]
    proven: int | None
    ancestry: Ancestry
    done: bool = False
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def doomed(self) -> tuple[PruneStep, ...]:
        """The steps that are, or were, to be deleted."""
        return tuple(each for each in self.steps if each.act == "delete")

    @property
    def freed_bytes(self) -> int:
        """Bytes of all that. A file stays as long as another step has it."""
        kept = {file for each in self.steps if each.act != "delete" for file in each.size.shared}
        gone = {file: size for each in self.doomed for file, size in each.size.shared.items() if file not in kept}
        own = sum(each.stored_bytes - sum(each.size.shared.values()) for each in self.doomed)
        return own + sum(gone.values())

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = plain_fields(self, without=("keep", "proven", "ancestry"))
        sums = {"freed_bytes": self.freed_bytes, "proven_step": self.proven}
        return {"format": FORMAT, **found, "keep": [keep_text(rule) for rule in self.keep], **sums}


def plan_prune(
    root: str,
    keep: Sequence[Keep],
    *,
    unread: bool = False,
    step_prefix: str | None = None,
    timeout_s: float = 20.0,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> PrunePlan:
    """The durable steps of `root` that `prune` would delete; deletes nothing.

    A step stays if one of `keep` keeps it: `KeepNewest(count)`, `KeepBytes(bytes_max)` of the newest, or every step
    of `EverySteps(steps)`. In any case these stay: the newest step that verifies completely, pinned steps, and steps
    that a process reads. Steps of abandoned branches do not count for any rule and are deleted. Uncommitted and damaged
    steps are left alone, and so is every directory that is not a step of the run. `step_prefix` chooses the name
    format; without it the run's own saves decide (see `ckptkit steps`).

    Cost: a look at every step, and a full read of the newest one, then of older ones until one is complete. A step of
    stock Orbax is verified as far as possible. With `unread`, the records of a step are trusted instead.

    Raises `StepNotFoundError` if the root does not exist, and `StoreError` if it cannot be reached. Raises
    `CorruptCheckpointError` if the epoch records cannot be read: then it is unknown which steps are abandoned. Raises
    ValueError without a `keep`.
    """
    if not keep:
        raise ValueError("give a keep policy: KeepNewest, KeepBytes or EverySteps")
    place = Place.open(root_url(root), timeout_s=timeout_s)
    place.names()  # first: its error names the root itself
    ancestry = EpochRecords(place.store).read()
    in_root = read_root(place, ancestry, step_prefix=step_prefix)
    require_root(place, in_root)
    found = in_root.steps
    branch = sorted((each for each in found if each.state == "committed"), key=lambda each: each.identity)[::-1]
    looked = _newest_whole(branch, Limits(progress=progress), timeout_s, unread=unread)
    proven, corrupt = looked.whole, looked.corrupt
    damaged = [
        f"{each.problem}; it is left as it is"
        for each in found
        if each.problem is not None and each.place.url not in corrupt
    ]
    whole = [each for each in branch if each.place.url not in corrupt]
    sizes = {
        each.place.url: StepBytes(all_bytes=stored_bytes(each.place), shared=linked_bytes(each.place)) for each in found
    }
    kept: dict[str, list[str]] = {each.place.url: [] for each in found}
    for rule in keep:
        for each in kept_by(rule, [(each.place.url, each.step, sizes[each.place.url].all_bytes) for each in whole]):
            kept[each].append(keep_text(rule))
    if proven is not None:
        kept[proven.place.url].append("the newest whole step")
    if looked.blemished is not None and looked.blemished is not proven:
        kept[looked.blemished.place.url].append("newer, and a restore with a template takes it")
    pinned = pinned_steps(place.store)
    in_use = PruneGuard(place.store).leased([each.step for each in found]) - pinned
    _add(kept, found, pinned, "pinned")
    _add(kept, found, in_use, "in use")
    top = max((each.step for each in branch), default=-1)
    steps = [
        _judged(each, sizes[each.place.url], kept[each.place.url], corrupt.get(each.place.url), top) for each in found
    ]
    return PrunePlan(
        root=place.url,
        keep=tuple(keep),
        steps=tuple(sorted(steps, key=lambda each: each.step)),
        proven=None if proven is None else proven.step,
        ancestry=ancestry,
        problems=(*damaged, *corrupt.values()),
        notes=(*in_root.notes, *looked.notes),
    )


def prune(plan: PrunePlan, *, wait_s: float = 0.0, timeout_s: float = 20.0) -> PrunePlan:
    """Deletes the steps of the plan, oldest first. Returns the plan as it was carried out.

    Safe while a job runs. The steps are announced first, so that no new reader opens one. Steps that a process reads
    stay, and so do steps that were pinned, saved anew or pruned since. The lease of a dead reader is dropped after it
    was watched for its lifetime, for at most `wait_s`. If a rollback or a new run happened meanwhile, nothing is
    deleted. If this stops half way, each step is either committed or gone, and the next call removes what is left.

    It cannot see a job that has restored an older step by its number and has saved nothing since: let it save first.

    Raises `CheckpointError` where the plan does not hold any more, `StoreError` where a step cannot be deleted.
    """
    store = open_store(plan.root, deadline_s=timeout_s)
    finish_deletions(store)
    if not plan.doomed:
        return replace(plan, done=True)
    numbers = [each.step for each in plan.doomed]
    with DeletionNotice(store, numbers) as notice:
        spared = _spared(PruneGuard(store), numbers, wait_s)
        there = _still_there(plan, timeout_s)
        acted: dict[str, PruneStep] = {}
        for each in plan.doomed:
            if each.step in spared:
                acted[each.path] = replace(each, act="keep", reasons=("in use, or pinned",))
            elif there.get(each.path) != each.save_id or each.path not in there:
                acted[each.path] = replace(each, act="leave", reasons=("it was deleted or saved anew meanwhile",))
            elif notice.lost:
                raise StoreError(f"{plan.root} did not answer in time to renew the announcement; run it again")
            elif not _removed(each):
                acted[each.path] = replace(each, act="leave", reasons=("it was saved anew meanwhile",))
    return replace(plan, done=True, steps=tuple(acted.get(each.path, each) for each in plan.steps))


def kept_by(rule: Keep, newest_first: Sequence[tuple[str, int, int]]) -> list[str]:
    """Which of some steps, each a name, a number and bytes, a rule keeps. Pure."""
    if isinstance(rule, EverySteps):
        return [name for name, step, _ in newest_first if rule.due(step)]
    if isinstance(rule, KeepNewest):
        return [name for name, _, _ in newest_first[: rule.count]]
    total, kept = 0, list[str]()
    for name, _, size in newest_first:  # the newest one always, as in a fast tier
        total += size
        if kept and total > rule.bytes_max:
            break
        kept.append(name)
    return kept


def keep_text(rule: Keep) -> str:
    """A rule as the command line has it."""
    if isinstance(rule, EverySteps):
        return f"every={rule.steps}"
    return f"newest={rule.count}" if isinstance(rule, KeepNewest) else f"bytes={rule.bytes_max}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """The newest step without damage, and what is wrong with those before it, by path.

    `blemished`: the newest step that a restore takes or rejects, by what it is asked for: a file of stock Orbax is
    damaged or missing, and `notes` has which. It is the newest whole one only if no older step is without.
    """

    whole: DurableStep | None
    blemished: DurableStep | None
    corrupt: Mapping[str, str]
    notes: Sequence[str]


def _newest_whole(newest_first: Sequence[DurableStep], limits: Limits, timeout_s: float, *, unread: bool) -> _Looked:
    corrupt: dict[str, str] = {}
    blemished: DurableStep | None = None
    notes: list[str] = []
    for each in newest_first:
        if each.problem is not None:
            corrupt[each.place.url] = each.problem
            continue
        if unread:
            return _Looked(whole=each, blemished=None, corrupt=corrupt, notes=())
        of_step: list[str] = []
        proofs = prove_step(each.place, each.step, limits, of_step, timeout_s=timeout_s)
        if not proofs:  # replaced while it was read: a look of its own is due
            raise CheckpointError(f"step {each.step} in {each.place.url} was replaced while it was read; run it again")
        if proofs[0].findings:
            corrupt[each.place.url] = f"step {each.step}: {proofs[0].findings[0].problem}"
        elif proofs[0].unread or not of_step:  # notes of what was not understood hold for every step of the run
            return _Looked(whole=each, blemished=blemished, corrupt=corrupt, notes=notes)
        else:
            blemished = blemished or each
            notes += of_step
    return _Looked(whole=blemished, blemished=blemished, corrupt=corrupt, notes=notes)


def _add(kept: dict[str, list[str]], found: Sequence[DurableStep], steps: set[int], why: str) -> None:
    for each in found:
        if each.step in steps:
            kept[each.place.url].append(why)


def _judged(each: DurableStep, size: StepBytes, kept: Sequence[str], corrupt: str | None, top: int) -> PruneStep:
    left = reason_to_leave("delete", each.kind, "damaged" if corrupt is not None else each.state)
    if left is not None:
        act, reasons = "leave", (left,)
    elif kept:
        act, reasons = "keep", tuple(kept)
    elif each.state == "abandoned" and each.step > top and not each.place.store.properties.atomic_rename:
        # In a bucket, a save that takes its number while its objects are deleted would lose objects of the same names.
        act, reasons = "leave", ("abandoned, and its number is still ahead of the run, which replaces it",)
    elif each.state == "abandoned":
        act, reasons = "delete", ("abandoned",)
    else:
        why = "of another root, so the oldest, and no rule keeps it"
        act, reasons = "delete", (why if each.identity.of_another_root else "no rule keeps it",)
    return PruneStep(
        step=each.step,
        path=each.place.url,
        state=each.state,
        kind=each.kind,
        save_id=each.save_id,
        size=size,
        act=act,
        reasons=reasons,
    )


def _spared(guard: PruneGuard, steps: Sequence[int], wait_s: float) -> set[int]:
    deadline = clock.Deadline(wait_s)
    while (spared := guard.leased(steps)) and not deadline.passed:
        time.sleep(min(_POLL_S, deadline.left_s))
    return spared


def _still_there(plan: PrunePlan, timeout_s: float) -> dict[str, SaveId | None]:
    """The saves of the steps as they are now, by path. Raises `CheckpointError` where the plan does not hold."""
    place = Place.open(plan.root, timeout_s=timeout_s)
    ancestry = EpochRecords(place.store).read()
    # Names of the plan itself: the directories that go may be those that decided on a name format.
    prefix = plan.steps[0].name.rpartition("_")[0]
    found = {each.place.url: each for each in read_root(place, ancestry, step_prefix=prefix).steps}
    stays = [each for each in plan.steps if each.step == plan.proven and each.act == "keep"]
    whole = all(
        each.path in found and found[each.path].state == "committed" and found[each.path].save_id == each.save_id
        for each in stays
    )
    if ancestry != plan.ancestry or not whole:
        raise CheckpointError(
            f"{plan.root} changed since it was looked at: a run began, or went back; nothing was deleted, run it again",
            path=plan.root,
        )
    return {url: each.save_id for url, each in found.items()}


def _removed(each: PruneStep) -> bool:
    """Deletes a step; False where another save has its number by now."""
    try:
        if not properties_of(each.path).atomic_rename:
            return remove_step(each.path, shutil.rmtree, lambda: _is_still(each))
        aside = move_away(each.path)
        if each.save_id is not None and DurableReader(aside, step=each.step).save_id() != each.save_id:
            os.rename(aside, each.path)
            for name in (aside, each.path):  # without these, a power failure would leave it where it is deleted
                sync_directory(os.path.dirname(name))
            return False
        shutil.rmtree(aside)
    except FileNotFoundError:
        return False  # the job has pruned it itself
    except OSError as error:
        raise store_error(error, error.filename or each.path, then="it was not deleted") from error
    return True


def _is_still(each: PruneStep) -> bool:
    """Whether a step is the save that the plan was made for: many deletions take long, and a job may go back meanwhile
    and save its number again."""
    try:
        return each.save_id is None or DurableReader(each.path, step=each.step).save_id() == each.save_id
    except CorruptCheckpointError:
        return False
