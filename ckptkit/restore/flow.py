"""The whole of a restore: `RestoreFlow.restore`, from the look at all tiers to the items.

A candidate has one of four outcomes, and each has one consequence (`FOLLOWS`):

| outcome | what is known of the save | what follows |
|---|---|---|
| restored | every process has what it wants, proven by digests as far as the save has any | the items |
| damaged | bytes differ from their digests, or parts of it are missing | the next older save; a repair is named |
| unsuited | it is intact, but this call cannot use it | the next older save |
| unreachable | nothing, or nothing against it | an error: an older save would cost steps |

Unsuited is what some processes had not committed and replicas do not hold either, is for another number of processes,
or is only in a form of Orbax's. Unreachable is what this call cannot have: a tier or a process does not answer, a
permission is missing, the tree that is asked for is another, or an intact save lacks an item.

The processes vote twice on a candidate: on its plan, before any array is read, and on what each has read. There the
error of one process decides for all. `CorruptCheckpointError`, `FileNotFoundError` and `ItemNotFoundError` reject the
candidate; any other is raised on all, also where some reject (`job/vote.py`). An error in another line is raised by its
process, and the others time out. So they do, with `CoordinationError`, if a process is killed. Objects of the caller
change in `_give_back` alone, except an iterator in a step that Orbax wrote. A restore changes nothing in the tiers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, final

import jax
import numpy as np

from ckptkit.durable.orbax.manager import DEFAULT_ITEM
from ckptkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ItemNotFoundError,
    NoRestorableStepError,
    PeerUnreachableError,
    Reason,
    StepNotFoundError,
    TreeMismatchError,
)
from ckptkit.events import Kind
from ckptkit.job.coordination import Job, ScopedCoordinator
from ckptkit.job.vote import RejectedError, voted
from ckptkit.model.manifest import SaveId, itemsize_of
from ckptkit.model.policies import BroadcastOptions
from ckptkit.model.tiers import DURABLE
from ckptkit.restore import host_values
from ckptkit.restore.broadcast.coordinator import BroadcastChoice, Broadcaster
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.execute import LocalRead, Shared, Verified
from ckptkit.restore.inventory import Held, from_runs, holders_of, to_runs, uncommitted_by, writers_of
from ckptkit.restore.local_tiers import Holdings, LocalSave
from ckptkit.restore.plan import Candidate, RestorePlan
from ckptkit.restore.prepare import Prepared, Preparer
from ckptkit.restore.records import Outcome, Rejection, Restored
from ckptkit.restore.request import RestoreRequest
from ckptkit.restore.sources import PeerShares, SourceSearch, Why
from ckptkit.restore.tree import Target
from ckptkit.store.backends import properties_of
from ckptkit.util import clock
from ckptkit.util.gc_pause import old_afterwards
from ckptkit.util.pages import whole_pages
from ckptkit.util.words import command_line, on_each_host

FOLLOWS: Mapping[Outcome, Literal["given back", "next older", "raised"]] = {
    "restored": "given back",
    "damaged": "next older",
    "unsuited": "next older",
    "unreachable": "raised",  # of rejections: where an intact save lacks an item. All else is raised by the vote
}
LISTED_DURABLE_STEPS = 8  # how many durable steps, newest first, are looked into before older ones are asked for
_NAMED_MAX = 8  # processes, in one message

_log = logging.getLogger("ckptkit")


@final
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Restore:
    """One call of `restore`: of the newest save, or of `step` alone.

    `about` names its exchanges: it is unique, and the same on every process. `caller` launches collectives if the
    current thread must not.
    """

    # Of the call.
    step: int | None
    wanted: RestoreRequest
    about: str
    caller: CallerThread | None = None
    start_s: float = field(default_factory=clock.monotonic_s)

    # Looked at, and ranked.
    local: Mapping[SaveId, LocalSave] = field(default_factory=dict)  # this host's
    prepared: dict[SaveId, Prepared] = field(default_factory=dict)  # for the report: those that this host has whole
    reports: list[list[Held]] = field(default_factory=list)  # on process 0: of all processes
    candidates: Sequence[Candidate] = ()
    manifests_damaged: bool = False  # on any process: what those recorded is not known
    rejected: Sequence[Rejection] = ()  # in the order in which they were tried


@final
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Attempt:
    """A restore of one candidate."""

    candidate: Candidate
    prepared: Prepared | None  # compared and planned. None: not yet; after the plan: stock Orbax restores it
    search: SourceSearch = field(init=False)
    is_planned: bool = False  # on all processes: what is rejected now was read
    told: host_values.Told = field(default_factory=host_values.Told)  # values in host memory, for all
    shared: Shared | None = None  # what replicas have read for each other
    choice: BroadcastChoice = field(init=False)  # and why
    verified: Verified = field(init=False)


@final
class RestoreFlow:
    """Restores saves, one after the other: all processes of the job call `restore` together."""

    def __init__(
        self,
        inventory: Inventory,
        job: Job,
        broadcast: BroadcastOptions = BroadcastOptions(),  # noqa: B008  frozen
    ):
        self._inventory = inventory
        self._url = inventory.durable.url
        self._coordinator = coordinator = ScopedCoordinator(job.coordinator)
        self._events = job.events
        self._preparer = Preparer(self._url, coordinator)
        self._reading = LocalRead(inventory.durable, job.events)
        job, is_remote = replace(job, coordinator=coordinator), properties_of(self._url).round_trips
        self._broadcaster = Broadcaster(broadcast, self._reading, job, is_remote=is_remote)
        self._waits_for = "its begin"

    def restore(self, restore: Restore) -> Restored:
        """Restores the newest save that every process can read and that verifies completely.

        Raises `StepNotFoundError` without a candidate, `NoRestorableStepError` if all were rejected. For what is
        unreachable it raises `TreeMismatchError`, `ItemNotFoundError`, `PeerUnreachableError`, `StoreError`,
        `CoordinationError`, or `CheckpointError` (a tier that may not be read; an error of another process).
        """
        self._look(restore)
        for candidate in self._rank(restore):  # newest first, agreed by all processes
            attempt = Attempt(candidate=candidate, prepared=restore.prepared.pop(candidate.save_id, None))
            try:
                self._refuse(attempt)  # what the reports rule out
                self._find_shares(restore, attempt)
                with self._vote("plan"):
                    self._plan(restore, attempt)  # compares the trees, if `_rank` has not; a source for every box
                self._agree_on_host_values(attempt)
                self._share(restore, attempt)  # replicas read for each other, where that pays: the first array bytes
                with self._vote("restore"):
                    self._read(restore, attempt)  # each cell is proven by its digest, and placed as it comes
            except RejectedError as rejected:
                rejection = self._reject(restore, attempt, rejected.reason)
                del attempt  # with its arrays and slots: what is raised later holds this frame
                if FOLLOWS[rejection.outcome] != "next older":
                    raise self._lacks_item(restore, rejection) from None
                continue
            return self._give_back(restore, attempt)
        raise self._nothing_left(restore)

    def waiting_text(self) -> str:
        """The event that the restore under way waits for, and its progress, as text. Safe from other threads."""
        meter = self._reading.meter.text()
        return f"restore waits for {self._waits_for}{f': {meter}' if meter else ''}"

    # Look and rank.

    def _look(self, restore: Restore) -> None:
        """Begins the restore here, and looks at this host's tiers."""
        self._coordinator.begin(restore.about)
        self._reading.begin()
        self._waits_for = "what the tiers of all processes hold"
        found, step = self._inventory.local.saves(), restore.step
        restore.local = {save: held for save, held in found.items() if step is None or save.step == step}
        if (client := self._inventory.client) is not None:
            client.try_again()

    def _rank(self, restore: Restore) -> Iterator[Candidate]:
        """The candidates, newest first. Older durable steps are looked into once all before them were rejected."""
        tried: set[SaveId] = set()
        for looked_into in (LISTED_DURABLE_STEPS, None):
            self._gather(restore, looked_into)
            for candidate in restore.candidates:
                if candidate.save_id not in tried:
                    tried.add(candidate.save_id)
                    yield candidate

    def _gather(self, restore: Restore, looked_into: int | None) -> None:
        """Process 0 ranks what all processes report, and what the durable tier holds."""

        def rank(reports: list[dict[str, Any]]) -> dict[str, Any]:
            refused = [
                f"process {process}: {each['refused']}" for process, each in enumerate(reports) if each["refused"]
            ]
            if refused:
                raise CheckpointError(f"{refused[0]}. Nothing is restored while it may hold the newest step")
            restore.reports = [[Held.from_json(entry) for entry in each["held"]] for each in reports]
            ranked = self._inventory.candidates(restore.reports, restore.step, looked_into)
            damaged = any(each["damaged"] for each in reports)
            if not damaged:  # a share whose manifest is damaged looks like one that was not committed
                ranked = [replace(each, uncommitted=_uncommitted(restore, each)) for each in ranked]
            entries = [{**asdict(each), "save_id": each.save_id.to_list()} for each in ranked]
            return {"damaged": damaged, "ranked": entries}

        tiers = self._inventory.local
        said = {"held": self._report(restore), "refused": tiers.refused, "damaged": tiers.damaged}
        agreed = self._coordinator.agree("candidates", said, rank)
        restore.manifests_damaged = agreed["damaged"]
        restore.candidates = [_candidate(entry) for entry in agreed["ranked"]]

    def _report(self, restore: Restore) -> list[list[Any]]:
        """The saves in this host's fast tiers, newest first, each with the reason why they alone do not suffice, or
        None.

        Examines saves until one can be restored. Older ones are rarely needed: they are examined when they are tried.
        """
        report = []
        for save in sorted(restore.local, reverse=True):
            refusal = None
            if not restore.prepared:
                with old_afterwards():  # for records that all stay: some milliseconds
                    prepared_or_why = self._prepare_fast(restore.local[save], restore.wanted)
                if isinstance(prepared_or_why, Prepared):
                    restore.prepared[save] = prepared_or_why
                else:
                    refusal = prepared_or_why
            report.append(self._inventory.report(restore.local[save], refusal))
        return report

    def _prepare_fast(self, save: LocalSave, wanted: RestoreRequest) -> Prepared | Reason | None:
        """How to restore `save` from this host's fast tiers alone, or why it cannot be; None: raised when tried."""
        try:
            holdings = self._inventory.local.holdings(save)
            if not holdings.manifests:
                return Reason(f"the slots of save {save.save_id} are gone")
            return self._preparer.prepared(save.save_id, holdings, wanted, is_durable=False)
        except (TreeMismatchError, ItemNotFoundError):
            return None  # it is held; the mismatch is raised when the candidate is tried
        except Exception as error:  # noqa: BLE001  reported in the vote: a missing process leaves the others waiting
            return Reason.of(error)

    # One candidate: compared, and planned.

    def _vote(self, channel: str) -> AbstractContextManager[None]:
        """The next lines are this process's part. An error there rejects the candidate on all processes, or is raised
        on all of them."""
        return voted(self._coordinator, channel)

    def _refuse(self, attempt: Attempt) -> None:
        """Rejects what not every process can have."""
        candidate = attempt.candidate
        if candidate.refusal is not None:
            raise RejectedError(candidate.uncommitted or candidate.refusal)

    def _find_shares(self, restore: Restore, attempt: Attempt) -> None:
        """Opens this host's slots of the save, for the search for sources; those that cannot be opened are reported,
        and left out. Where the processes are linked, process 0 tells which of them hold shares."""
        candidate, client, peers = attempt.candidate, self._inventory.client, None
        save_id, reports = candidate.save_id, restore.reports
        self._reading.damaged.clear()
        self._waits_for = f"a plan of all processes for step {save_id.step}"
        inventory, known = self._inventory.local, attempt.prepared
        own = inventory.holdings(restore.local.get(save_id)) if known is None else known.holdings
        if client is not None and candidate.fast:
            count, runs = self._coordinator.ask_process_0(
                "holders", lambda: [writers_of(reports, save_id), to_runs(holders_of(reports, save_id))]
            )
            peers = PeerShares(
                client=client,
                process=(self._coordinator.process, self._coordinator.count),
                count=count,
                holders=from_runs(runs),
                alike=lambda manifests: self._preparer.alike(save_id, manifests, restore.wanted),
            )
        open_durable = self._inventory.durable_opener(save_id.step)
        attempt.search = SourceSearch(candidate, own, peers, open_durable, self._events)

    def _plan(self, restore: Restore, attempt: Attempt, why: Why = "uncovered") -> None:
        """Searches until every wanted box has a source; without `prepared` afterwards, stock Orbax restores the save.
        Reads only manifests."""
        search, known = attempt.search, attempt.prepared if why == "uncovered" else None

        def prepare(holdings: Holdings) -> Prepared:
            candidate = attempt.candidate
            return known or self._preparer.prepared(
                candidate.save_id, holdings, restore.wanted, is_durable=candidate.durable
            )

        try:
            planned = search.planned(prepare, why)
        except ItemNotFoundError:
            search.require_all_items()
            raise
        if planned is not None:
            self._say_planned(planned.plan)
        attempt.prepared = planned and attempt.told.put_into(planned)

    def _agree_on_host_values(self, attempt: Attempt) -> None:
        """Values in host memory that the processes saved differently: all take those of one."""
        attempt.is_planned = True
        rejected = self._reading.rejected(attempt.candidate.save_id)
        attempt.told = host_values.agreed(self._coordinator, attempt.prepared, rejected)
        attempt.prepared = attempt.prepared and attempt.told.put_into(attempt.prepared)
        self._waits_for = f"the bytes of step {attempt.candidate.save_id.step}"

    # Read, and given back.

    def _share(self, restore: Restore, attempt: Attempt) -> None:
        """Replicas that want the same boxes of a bucket read each once, and send it to the others by a collective. An
        error in it is voted on in `_read`, or the rest is read there."""
        attempt.shared, attempt.choice = self._broadcaster.share(attempt.prepared, restore.caller)

    def _read(self, restore: Restore, attempt: Attempt) -> None:
        """Reads, verifies and places this process's part, without the other processes. If a planned source does not
        verify, or does not answer, it plans again, with further sources."""
        while attempt.prepared is not None:
            try:
                attempt.verified = self._reading.read(attempt.prepared, attempt.shared)
                return
            except TreeMismatchError:
                raise
            except (CorruptCheckpointError, PeerUnreachableError, ValueError) as error:
                attempt.shared = None
                try:
                    self._plan(restore, attempt, "damaged")
                except CorruptCheckpointError:
                    raise error from None  # the last plan had every source: its error is the reason
        attempt.verified = self._reading.by_orbax(attempt.candidate.save_id.step, restore.wanted)

    def _give_back(self, restore: Restore, attempt: Attempt) -> Restored:
        """Puts the items together; sets the caller's iterators."""
        save_id, proven = attempt.candidate.save_id, attempt.verified
        self._waits_for = f"the items of step {save_id.step}"
        items = self._reading.assemble(proven, save_id)
        rejected = [*restore.rejected, *_unidentified(restore.candidates, above=save_id)]
        is_unknown = _unknown(save_id.step) in [each.save_id for each in restore.candidates]
        restored = Restored(
            items=items,
            save_id=save_id,
            default_item=DEFAULT_ITEM in items and not restore.wanted.named,
            slot_bytes=0 if proven.prepared is None else _slot_bytes(proven.prepared.targets),
            read_bytes=proven.read_bytes,
            duration_s=round(clock.monotonic_s() - restore.start_s, 6),
            damaged=frozenset((*self._reading.damaged, *([DURABLE] if is_unknown else []))),
            proven=proven.prepared is not None and proven.prepared.is_proven,
            rejected=rejected,
        )
        self._events.emit(
            Kind.RESTORED,
            step=save_id.step,
            sources=restored.read_bytes,
            tree_bytes=_array_bytes(items),
            save_id=str(save_id),
            duration_s=restored.duration_s,
            proven=restored.proven,
            **self._said(attempt.choice),
        )
        restore.rejected = rejected
        return restored

    # Rejected.

    def _reject(self, restore: Restore, attempt: Attempt, reason: Reason) -> Rejection:
        """Reports the outcome of the candidate. One that is not covered, and that some processes had not committed when
        the job ended, is incomplete, and not damaged."""
        candidate = attempt.candidate
        if candidate.uncommitted is not None and not attempt.is_planned and "no item" not in reason.causes:
            reason = candidate.uncommitted
        incomplete = reason == candidate.uncommitted
        rejection = Rejection(save_id=candidate.save_id, where=candidate.where, reason=reason, is_incomplete=incomplete)
        restore.rejected = [*restore.rejected, rejection]
        kind = Kind.INCOMPLETE if incomplete else Kind.REJECTED
        said = {"reason": reason.text, "causes": reason.causes}
        self._events.emit(kind, step=candidate.save_id.step, tier=candidate.where, **said)
        return rejection

    def _lacks_item(self, restore: Restore, rejection: Rejection) -> ItemNotFoundError:
        """The error for an item that a save lacks, though its manifests are complete: to restore an older save instead
        would cost steps."""
        text = rejection.reason.text
        if restore.step is None:
            text += (
                f". Step {rejection.save_id.step} is the newest that can be restored, and intact: restore it without "
                "that item, or give the number of an older step"
            )
        return ItemNotFoundError(text, path=self._url)

    def _nothing_left(self, restore: Restore) -> CheckpointError:
        """The error where no candidate was restored."""
        step, rejected = restore.step, restore.rejected
        if not rejected:
            what = f"step {step} was not found" if step is not None else "no step was found"
            return StepNotFoundError(
                f"{what} in {self._url} or in the fast tiers of any host; list what there is with "
                f"`{command_line('steps', self._url)}`",
                step=step,
                path=self._url,
            )
        reasons = [(each.where, each.save_id.step, each.reason.text) for each in rejected]
        intact = not restore.manifests_damaged and all(each.is_unsuited for each in rejected)
        repair = None if intact else on_each_host(self._inventory.repair_command)
        return NoRestorableStepError(reasons, path=self._url, repair=repair)

    # Events and log lines.

    def _say_planned(self, plan: RestorePlan) -> None:
        _log.debug("restore plan: %s", plan)
        self._events.emit(
            Kind.PLANNED,
            step=plan.save_id.step,
            sources=plan.bytes_by_tier(),
            save_id=str(plan.save_id),
            boxes=len(plan.reads),
        )

    def _said(self, choice: BroadcastChoice) -> dict[str, Any]:
        """Fields of the event: whether replicas read for each other, and why. Empty for one process."""
        if self._coordinator.count == 1:
            return {}
        _log.debug("restore, broadcast: %s: %s", "yes" if choice.broadcast else "no", choice.why)
        return {"broadcast": choice.broadcast, "broadcast_why": choice.why}


def _uncommitted(restore: Restore, candidate: Candidate) -> Reason | None:
    """Why a save in fast tiers alone was not complete when the job ended, on process 0; None if it was."""
    lacking = [] if candidate.durable else uncommitted_by(restore.reports, candidate.save_id)
    named = ", ".join(map(str, lacking[:_NAMED_MAX])) + ", ..." * (len(lacking) > _NAMED_MAX)
    what = f"{'processes' if len(lacking) > 1 else 'process'} {named} had not committed it"
    return Reason(f"not complete on all processes when the job ended: {what}") if lacking else None


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    """A candidate as process 0 sends it."""
    reasons = {name: Reason.of_json(entry[name]) for name in ("refusal", "uncommitted")}
    return Candidate(**{**entry, **reasons, "save_id": SaveId.from_list(entry["save_id"])})


def _unknown(step: int) -> SaveId:
    """A placeholder for the id of a durable step whose damaged sidecars do not show which save it is."""
    return SaveId(0, step, 0)


def _unidentified(candidates: Sequence[Candidate], *, above: SaveId) -> list[Rejection]:
    """The steps above a save whose damaged sidecars do not show their age: they are tried after all others."""
    why = Reason.of(CorruptCheckpointError("its sidecars are damaged: which save it is cannot be read"))
    unknown = [each for each in candidates if each.save_id == _unknown(each.save_id.step)]
    return [
        Rejection(save_id=each.save_id, where=each.where, reason=why)
        for each in unknown
        if each.save_id.step > above.step
    ]


def _array_bytes(items: Any) -> int:
    """Bytes of all arrays of a tree. JAX computes the size of an array at each request; this computes it once for
    all arrays with the same `aval`."""
    total, known = 0, dict[int, tuple[Any, int]]()  # by the `id` of an array's `aval`, which is kept with it
    for leaf in jax.tree.leaves(items):
        aval = getattr(leaf, "aval", None)
        if (found := known.get(id(aval))) is None and isinstance(leaf, jax.Array | np.ndarray):
            found = (aval, leaf.size * leaf.dtype.itemsize)
            known |= {} if aval is None else {id(aval): found}
        total += 0 if found is None else found[1]
    return total


def _slot_bytes(targets: Sequence[Target]) -> int:
    return sum(
        count * sum(whole_pages(box.size * itemsize_of(form.dtype)) for box in form.boxes)
        for form, count in Counter([target.form for target in targets]).items()
    )
