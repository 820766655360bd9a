"""The life of a restore: gather, rank, plan, read and verify, vote; the next candidate when the vote fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

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
from ckptkit.job.vote import act_together
from ckptkit.model.manifest import SaveId, itemsize_of
from ckptkit.model.policies import BroadcastOptions
from ckptkit.model.tiers import DURABLE
from ckptkit.restore import host_values
from ckptkit.restore.broadcast.coordinator import BroadcastChoice, Broadcaster
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.execute import LocalRead, Shared, Verified
from ckptkit.restore.host_values import Told
from ckptkit.restore.inventory import Held, from_runs, holders_of, to_runs, uncommitted_by, writers_of
from ckptkit.restore.local_tiers import Holdings, LocalSave
from ckptkit.restore.plan import Candidate, RestorePlan
from ckptkit.restore.prepare import Prepared, Preparer, only_by_orbax
from ckptkit.restore.request import RestoreRequest
from ckptkit.restore.sources import PeerShares, SourceSearch, Why
from ckptkit.restore.tree import Target
from ckptkit.store.backends import properties_of
from ckptkit.util import clock
from ckptkit.util.gc_pause import old_afterwards
from ckptkit.util.pages import whole_pages
from ckptkit.util.words import command_line, on_each_host

_T = TypeVar("_T")
_log = logging.getLogger("ckptkit")
_NAMED_MAX = 8  # processes, in one message
LISTED_DURABLE_STEPS = 8  # how many durable steps, newest first, are looked into before older ones are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A save that was not restored, the tiers that were tried, and why: the same on every process."""

    save_id: SaveId
    where: str
    reason: Reason
    is_incomplete: bool = False  # some processes had not committed it when the job ended: nothing is damaged

    @property
    def is_damage(self) -> bool:
        """Whether the save itself is at fault: bytes are damaged, or files are missing."""
        return self.reason.is_damage

    @property
    def is_unsuited(self) -> bool:
        """Whether the save is intact, as far as it was committed: a repair changes nothing."""
        return self.is_incomplete or self.reason.is_intact

    def __str__(self) -> str:
        return f"step {self.save_id.step} in {self.where}: {self.reason.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore: items by name, their save, and whether it was saved without names."""

    items: Mapping[str, Any]
    save_id: SaveId
    default_item: bool
    slot_bytes: int  # that a save of the same would take
    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by tier
    duration_s: float = 0.0  # from the call to the placed items
    damaged: frozenset[str] = frozenset()  # tiers whose copy had a damaged cell, which this process read elsewhere
    proven: bool = True  # every cell, by its digest; False for a step of stock Orbax, which has none


class Restorer:
    """Restores saves. Every method is called by all processes together, in the same order."""

    def __init__(
        self,
        inventory: Inventory,
        job: Job,
        broadcast: BroadcastOptions = BroadcastOptions(),  # noqa: B008  frozen
    ):
        self._inventory = inventory
        self._url = inventory.durable.url
        self._coordinator = coordinator = ScopedCoordinator(job.coordinator)
        self._preparer = Preparer(self._url, coordinator)
        self._reports: list[list[Held]] = []  # on process 0, of the last gathering
        self.rejected: list[Rejection] = []  # by the last restore, in the order in which they were tried
        self._manifests_damaged = False  # on any process, at the last look: what those recorded is not known
        self._waits_for = "its begin"
        self._told = Told()  # to all processes, of the candidate that is tried
        self._begun_s = 0.0
        self._events = job.events
        self._reading = LocalRead(inventory.durable, job.events)
        job, is_remote = replace(job, coordinator=coordinator), properties_of(self._url).round_trips
        self._broadcaster = Broadcaster(broadcast, self._reading, job, is_remote=is_remote)

    def restore(
        self, step: int | None, wanted: RestoreRequest, about: str, *, caller: CallerThread | None = None
    ) -> Restored:
        """Restores the newest save that every process can read and that verifies completely (`step`: only that one).

        `about` names the restore: it is unique, and the same on every process. `caller` launches collectives if the
        current thread must not.

        Raises `StepNotFoundError` without a candidate, `NoRestorableStepError` if all were rejected. A tree mismatch, a
        missing permission and a tier that cannot be reached raise at once and never fall back.
        """
        self._begun_s = clock.monotonic_s()
        self._coordinator.begin(about)
        self._reading.begin()
        self._waits_for = "what the tiers of all processes hold"
        found = self._inventory.local.saves()
        local = {save: held for save, held in found.items() if step is None or save.step == step}
        prepared: dict[SaveId, Prepared] = {}
        self.rejected = rejected = []
        if (client := self._inventory.client) is not None:
            client.try_again()
        tried: set[SaveId] = set()
        for looked_into in (LISTED_DURABLE_STEPS, None):
            candidates = self._candidates(local, prepared, wanted, step, looked_into)
            for candidate in candidates:
                if candidate.save_id in tried:
                    continue
                tried.add(candidate.save_id)
                held = local.get(candidate.save_id), prepared.pop(candidate.save_id, None)
                refusal = candidate.refusal and (candidate.uncommitted or candidate.refusal)
                outcome = refusal or self._try(candidate, *held, wanted, caller)
                if isinstance(outcome, Restored):
                    rejected += _unidentified(candidates, above=candidate.save_id)
                    if _unknown(candidate.save_id.step) in [each.save_id for each in candidates]:
                        return replace(outcome, damaged=outcome.damaged | {DURABLE})
                    return outcome
                incomplete = outcome == candidate.uncommitted
                rejected.append(
                    Rejection(
                        save_id=candidate.save_id, where=candidate.where, reason=outcome, is_incomplete=incomplete
                    )
                )
                kind = Kind.INCOMPLETE if incomplete else Kind.REJECTED
                said = {"reason": outcome.text, "causes": outcome.causes}
                self._events.emit(kind, step=candidate.save_id.step, tier=candidate.where, **said)
                if "no item" in outcome.causes and not outcome.is_damage:
                    raise ItemNotFoundError(
                        _lacks_item(candidate, outcome.text, is_newest=step is None), path=self._url
                    )
        if not rejected:
            what = f"step {step} was not found" if step is not None else "no step was found"
            raise StepNotFoundError(
                f"{what} in {self._url} or in the fast tiers of any host; list what there is with "
                f"`{command_line('steps', self._url)}`",
                step=step,
                path=self._url,
            )
        reasons = [(r.where, r.save_id.step, r.reason.text) for r in rejected]
        intact = not self._manifests_damaged and all(each.is_unsuited for each in rejected)
        repair = None if intact else on_each_host(self._inventory.repair_command)
        raise NoRestorableStepError(reasons, path=self._url, repair=repair)

    def waiting_text(self) -> str:
        """The event that the restore under way waits for, and its progress, as text. Safe from other threads."""
        meter = self._reading.meter.text()
        return f"restore waits for {self._waits_for}{f': {meter}' if meter else ''}"

    def _candidates(
        self,
        local: Mapping[SaveId, LocalSave],
        prepared: dict[SaveId, Prepared],
        wanted: RestoreRequest,
        step: int | None,
        looked_into: int | None,
    ) -> list[Candidate]:
        report = self._report(local, prepared, wanted)

        def rank(reports: list[dict[str, Any]]) -> dict[str, Any]:
            refused = [
                f"process {process}: {each['refused']}" for process, each in enumerate(reports) if each["refused"]
            ]
            if refused:
                raise CheckpointError(
                    f"{refused[0]}. Nothing is restored while it may hold the newest step: give this user access, or "
                    "remove it"
                )
            self._reports = [[Held.from_json(entry) for entry in each["held"]] for each in reports]
            ranked = self._inventory.candidates(self._reports, step, looked_into)
            damaged = any(each["damaged"] for each in reports)
            if not damaged:  # a damaged manifest may be that of a share that lacks
                ranked = [replace(each, uncommitted=self._uncommitted(each)) for each in ranked]
            entries = [{**asdict(each), "save_id": each.save_id.to_list()} for each in ranked]
            return {"damaged": damaged, "ranked": entries}

        local_tiers = self._inventory.local
        said = {"held": report, "refused": local_tiers.refused, "damaged": local_tiers.damaged}
        agreed = self._coordinator.agree("candidates", said, rank)
        self._manifests_damaged = agreed["damaged"]
        return [_candidate(entry) for entry in agreed["ranked"]]

    def _uncommitted(self, candidate: Candidate) -> Reason | None:
        """Why a save in fast tiers alone was not complete when the job ended, on process 0; None if it was."""
        lacking = [] if candidate.durable else uncommitted_by(self._reports, candidate.save_id)
        named = ", ".join(map(str, lacking[:_NAMED_MAX])) + ", ..." * (len(lacking) > _NAMED_MAX)
        what = f"process{'es' * (len(lacking) > 1)} {named} had not committed it"
        return Reason(f"not complete on all processes when the job ended: {what}") if lacking else None

    def _report(
        self, local: Mapping[SaveId, LocalSave], prepared: dict[SaveId, Prepared], wanted: RestoreRequest
    ) -> list[list[Any]]:
        """The saves in this host's fast tiers, newest first, each with the reason why they alone do not suffice, or
        None.

        Examines saves until one can be restored. Older ones are rarely needed: they are examined when they are tried.
        """
        report = []
        for save in sorted(local, reverse=True):
            refusal = None
            if not prepared:
                with old_afterwards():  # for records that all stay: some milliseconds
                    prepared_or_why = self._prepare_fast(local[save], wanted)
                if isinstance(prepared_or_why, Prepared):
                    prepared[save] = prepared_or_why
                else:
                    refusal = prepared_or_why
            report.append(self._inventory.report(local[save], refusal))
        return report

    def _prepare_fast(self, save: LocalSave, wanted: RestoreRequest) -> Prepared | Reason | None:
        """How to restore `save` from this host's fast tiers alone, or why it cannot be; None: raised when tried."""
        try:
            holdings = self._inventory.local.holdings(save)
            if not holdings.manifests:
                return Reason(f"the slots of save {save.save_id} are gone")
            asked = self._preparer.asked(holdings.manifests, wanted)
            if asked.orbax:
                return Reason(only_by_orbax(asked), ("unsuited",))
            return self._preparer.prepare(save.save_id, holdings, asked)
        except (TreeMismatchError, ItemNotFoundError):
            return None  # it is held; the mismatch is raised when the candidate is tried
        except Exception as error:  # noqa: BLE001  reported in the vote: a missing process leaves the others waiting
            return Reason.of(error)

    def _try(
        self,
        candidate: Candidate,
        local: LocalSave | None,
        prepared: Prepared | None,
        wanted: RestoreRequest,
        caller: CallerThread | None,
    ) -> Restored | Reason:
        """The restored items, or why the processes together reject this candidate.

        The processes agree twice. Before anything is read: each one has a source for all boxes that it wants. Before
        anything is given back: each one has verified all of them.
        """
        save_id = candidate.save_id
        self._reading.damaged.clear()
        self._told = Told()
        self._waits_for = f"a plan of all processes for step {save_id.step}"
        own = prepared.holdings if prepared is not None else self._inventory.local.holdings(local)
        search = self._search(candidate, own, wanted)
        rejection, planned = self._together("plan", lambda: self._plan(search, prepared, wanted))
        if rejection is not None:
            is_covered = "no item" in rejection.causes
            return rejection if is_covered else candidate.uncommitted or rejection
        self._told = host_values.agreed(self._coordinator, planned, self._reading.rejected(save_id))
        planned = planned and self._told.put_into(planned)
        self._waits_for = f"the bytes of step {save_id.step}"
        shared, choice = self._broadcaster.share(planned, caller)
        rejection, proven = self._together("restore", lambda: self._read(search, planned, wanted, shared))
        if rejection is not None:
            return rejection
        assert proven is not None
        self._waits_for = f"the items of step {save_id.step}"
        items = self._reading.assemble(proven, save_id)
        is_proven = proven.prepared is not None and proven.prepared.is_proven
        duration_s = round(clock.monotonic_s() - self._begun_s, 6)
        self._events.emit(
            Kind.RESTORED,
            step=save_id.step,
            sources=proven.read_bytes,
            tree_bytes=_array_bytes(items),
            save_id=str(save_id),
            duration_s=duration_s,
            proven=is_proven,
            **self._said(choice),
        )
        return Restored(
            items=items,
            save_id=save_id,
            default_item=DEFAULT_ITEM in items and not wanted.named,
            slot_bytes=0 if proven.prepared is None else _slot_bytes(proven.prepared.targets),
            read_bytes=proven.read_bytes,
            duration_s=duration_s,
            damaged=frozenset(self._reading.damaged),
            proven=is_proven,
        )

    def _together(self, channel: str, act: Callable[[], _T]) -> tuple[Reason | None, _T | None]:
        return act_together(self._coordinator, channel, act)

    def _search(self, candidate: Candidate, own: Holdings, wanted: RestoreRequest) -> SourceSearch:
        """The sources of the save's boxes; process 0 reports which shares the others hold."""
        save_id, client, peers = candidate.save_id, self._inventory.client, None
        if client is not None and candidate.fast:

            def shares() -> list[Any]:
                return [writers_of(self._reports, save_id), to_runs(holders_of(self._reports, save_id))]

            count, runs = self._coordinator.ask_process_0("holders", shares)
            peers = PeerShares(
                client=client,
                process=(self._coordinator.process, self._coordinator.count),
                count=count,
                holders=from_runs(runs),
                alike=lambda manifests: self._preparer.alike(save_id, manifests, wanted),
            )
        open_durable = self._inventory.durable_opener(save_id.step)
        return SourceSearch(candidate, own, peers, open_durable, self._events)

    def _plan(
        self, search: SourceSearch, prepared: Prepared | None, wanted: RestoreRequest, why: Why = "uncovered"
    ) -> Prepared | None:
        """Searches until every wanted box has a source; None: stock Orbax restores it. Reads only manifests."""

        def prepare(holdings: Holdings) -> Prepared:
            return prepared or self._preparer.prepared(search.candidate, holdings, wanted)

        try:
            planned = search.planned(prepare, why)
        except ItemNotFoundError:
            search.require_all_items()
            raise
        if planned is None:
            return None
        self._say_planned(planned.plan)
        return self._told.put_into(planned)

    def _read(
        self, search: SourceSearch, prepared: Prepared | None, wanted: RestoreRequest, shared: Shared | None
    ) -> Verified:
        """Reads, verifies and places this process's part; launches no collective, and exchanges nothing. Tries further
        sources if a planned one does not verify, or does not answer."""
        while prepared is not None:
            try:
                return self._reading.read(prepared, shared)
            except TreeMismatchError:
                raise
            except (CorruptCheckpointError, PeerUnreachableError, ValueError) as error:
                shared = None
                try:
                    prepared = self._plan(search, None, wanted, "damaged")
                except CorruptCheckpointError:
                    raise error from None  # no source is left: what the last one had is the reason
        return self._reading.by_orbax(search.candidate.save_id.step, wanted)

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


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    """A candidate as process 0 sends it."""
    reasons = {name: Reason.of_json(entry[name]) for name in ("refusal", "uncommitted")}
    return Candidate(**{**entry, **reasons, "save_id": SaveId.from_list(entry["save_id"])})


def _unknown(step: int) -> SaveId:
    """A placeholder for the id of a durable step whose damaged sidecars do not show which save it is."""
    return SaveId(0, step, 0)


def _lacks_item(candidate: Candidate, reason: str, *, is_newest: bool) -> str:
    """The message for an item that an intact save lacks: to restore an older save instead would cost steps."""
    if not is_newest:
        return reason
    return (
        f"{reason}. Step {candidate.save_id.step} is the newest that can be restored, and intact: restore it without "
        "that item, or give the number of an older step"
    )


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
