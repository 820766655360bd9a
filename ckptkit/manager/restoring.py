"""The life of a restore: gather, rank, plan, read and prove, vote; the next candidate when the vote fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit import clock, layout
from ckptkit.coordination import Coordinator
from ckptkit.durable.epochs import Ancestry, EpochRecords
from ckptkit.durable.steps import DurableSteps
from ckptkit.durable.stock import DEFAULT_ITEM
from ckptkit.errors import (
    CorruptCheckpointError,
    ItemNotFoundError,
    NoRestorableStepError,
    StepNotFoundError,
    TreeMismatchError,
    heard_from,
)
from ckptkit.events import EventLog, Kind
from ckptkit.manager import by_orbax
from ckptkit.manager.asked import Asked, RestoreItems, TreeAnswer, asked_of, tree_answer
from ckptkit.manager.local_tiers import Holdings, LocalSave, LocalTiers
from ckptkit.manager.small_items import give_back
from ckptkit.manager.taken import DURABLE
from ckptkit.manifest import Manifest, SaveId
from ckptkit.plan import Candidate, Key, RestorePlan, Source, plan_restore, rank_candidates
from ckptkit.reading import execute
from ckptkit.restore import Target, place, targets_of
from ckptkit.sharding import Box

LISTED_DURABLE_STEPS = 8  # how many durable steps, newest first, are looked into before older ones are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore gave: items by name, the save they are of, and whether it was saved without names."""

    items: Mapping[str, Any]
    save_id: SaveId
    default_item: bool
    slot_bytes: int  # that a save of the same would take
    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by tier
    proven: bool = True  # False for a step of stock Orbax, which has no digests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What a process would restore of a save, and from where: the tree is compared, every box has a source."""

    asked: Asked
    answers: Mapping[str, TreeAnswer]
    targets: Sequence[Target]
    inline: Mapping[str, Any]
    plan: RestorePlan
    holdings: Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proven:
    """What one process has read and proven of a save, on its devices. `prepared` None: `stock` is what Orbax gave."""

    prepared: _Prepared | None = None
    leaves: Mapping[Key, Any] = field(default_factory=dict)
    read_bytes: Mapping[str, int] = field(default_factory=lambda: {"durable (orbax)": 0})
    stock: Mapping[str, Any] = field(default_factory=dict)


class Restorer:
    """Restores saves. Every method is called by all processes together, in the same order."""

    def __init__(
        self,
        host_dirs: Mapping[str, Path],
        durable: DurableSteps,
        epochs: EpochRecords,
        coordinator: Coordinator,
        events: EventLog,
        timeout_s: float,
    ):
        self._local = LocalTiers(host_dirs, events)
        self._durable = durable
        self._epochs = epochs
        self._coordinator = coordinator
        self._events = events
        self._timeout_s = timeout_s

    def local_saves(self) -> dict[SaveId, LocalSave]:
        """What this host's fast tiers hold; a local look, for any thread."""
        return self._local.saves()

    def restore(self, step: int | None, wanted: RestoreItems) -> Restored:
        """The newest save that every process can have and that proves whole (`step`: only that one).

        Raises `StepNotFoundError` where there is no candidate, `NoRestorableStepError` where all were rejected;
        a tree mismatch, a missing permission and a tier that cannot be reached raise at once and never fall back.
        """
        local = {save: held for save, held in self.local_saves().items() if step is None or save.step == step}
        prepared: dict[SaveId, _Prepared] = {}
        rejected: list[tuple[str, int, str]] = []
        tried: set[SaveId] = set()
        for looked_into in (LISTED_DURABLE_STEPS, None):
            for candidate in self._candidates(local, prepared, wanted, step, looked_into):
                if candidate.save_id in tried:
                    continue
                tried.add(candidate.save_id)
                outcome = candidate.refusal or self._try(
                    candidate, local.get(candidate.save_id), prepared.pop(candidate.save_id, None), wanted
                )
                if isinstance(outcome, Restored):
                    return outcome
                rejected.append((candidate.where, candidate.save_id.step, outcome))
                self._events.emit(Kind.REJECTED, step=candidate.save_id.step, tier=candidate.where, reason=outcome)
        if not rejected:
            what = f"step {step} was not found" if step is not None else "no step was found"
            raise StepNotFoundError(
                f"{what} in {self._durable.url} or in the fast tiers of any host; list what there is with "
                f"`ckptkit steps {self._durable.url}`",
                step=step,
                path=self._durable.url,
            )
        if all(ItemNotFoundError.__name__ in reason for _, _, reason in rejected):
            raise ItemNotFoundError("; ".join(dict.fromkeys(r for _, _, r in rejected)), path=self._durable.url)
        raise NoRestorableStepError(rejected, path=self._durable.url)

    def _candidates(
        self,
        local: Mapping[SaveId, LocalSave],
        prepared: dict[SaveId, _Prepared],
        wanted: RestoreItems,
        step: int | None,
        looked_into: int | None,
    ) -> list[Candidate]:
        report = self._report(local, prepared, wanted)

        def rank(reports: list[list[list[Any]]]) -> list[dict[str, Any]]:
            fast = [{SaveId(*entry[:3]): entry[3] for entry in entries} for entries in reports]
            ancestry = self._epochs.read()
            ranked = rank_candidates(fast, self._durable_saves(ancestry, step, looked_into), ancestry.superseded, step)
            return [{**asdict(candidate), "save_id": list(asdict(candidate.save_id).values())} for candidate in ranked]

        agreed = self._coordinator.agree("candidates", report, rank, timeout_s=self._timeout_s)
        return [Candidate(**{**entry, "save_id": SaveId(*entry["save_id"])}) for entry in agreed]

    def _durable_saves(self, ancestry: Ancestry, step: int | None, looked_into: int | None) -> list[SaveId]:
        """The newest durable saves, on process 0."""
        saves: list[SaveId] = []
        for each in reversed([s for s in self._durable.steps() if step is None or s == step]):
            save = self.identity(each, ancestry)
            # Abandoned steps do not count: a rollback may leave any number of them above the newest good one.
            saves += [] if ancestry.superseded(save) else [save]
            if len(saves) == looked_into:
                break
        return saves

    def identity(self, step: int, ancestry: Ancestry) -> SaveId:
        """Which save a durable step is, on process 0. A damaged step is of unknown age: the oldest there is."""
        try:
            return self._durable.save_id(step) or ancestry.of_stock(step)
        except CorruptCheckpointError as error:  # a candidate of unknown age: tried last, and rejected with this reason
            self._events.emit(Kind.REJECTED, step=step, tier=DURABLE, reason=str(error))
            return SaveId(0, step, 0)

    def _report(
        self, local: Mapping[SaveId, LocalSave], prepared: dict[SaveId, _Prepared], wanted: RestoreItems
    ) -> list[list[Any]]:
        """What this host's fast tiers hold, newest first, each with why it cannot be had from them alone, or None.

        Looked into until one can be had: those behind it are rarely asked for, and then refused when they are tried.
        """
        report = []
        for save in sorted(local, reverse=True):
            refusal = None
            if not prepared:
                prepared_or_why = self._prepare_fast(local[save], wanted)
                if isinstance(prepared_or_why, _Prepared):
                    prepared[save] = prepared_or_why
                else:
                    refusal = prepared_or_why
            report.append([*astuple(save), refusal])
        return report

    def _prepare_fast(self, save: LocalSave, wanted: RestoreItems) -> _Prepared | str | None:
        """How to have `save` from its own host's fast tiers alone, or why that cannot be; None: raised when tried."""
        try:
            holdings = self._local.holdings(save)
            if not holdings.manifests:
                return f"the slots of save {save.save_id} are gone"
            asked = self._asked(holdings.manifests, wanted)
            return _only_by_orbax(asked) if asked.orbax else self._prepare(save.save_id, holdings, asked)
        except (TreeMismatchError, ItemNotFoundError):
            return None  # it is held; the mismatch is raised when the candidate is tried
        except Exception as error:  # noqa: BLE001  said in the vote: who does not come leaves the others waiting
            return f"{type(error).__name__}: {error}"

    def _try(
        self, candidate: Candidate, local: LocalSave | None, prepared: _Prepared | None, wanted: RestoreItems
    ) -> Restored | str:
        """The restored items, or why the processes together reject this candidate."""
        start_s = clock.monotonic_s()
        save_id = candidate.save_id
        error: Exception | None = None
        proven = None
        try:
            proven = self._read(candidate, local, prepared, wanted)
        except Exception as caught:  # noqa: BLE001  voted on: who does not vote leaves the others waiting
            error = caught
        verdict = self._vote(error)
        if verdict["fatal"] is not None:
            if error is not None and _is_fatal(error):
                raise error
            raise heard_from(*verdict["fatal"])
        if verdict["reject"] is not None:
            return verdict["reject"]
        assert proven is not None
        items = self._assemble(proven, save_id)
        self._events.emit(
            Kind.RESTORED,
            step=save_id.step,
            sources=proven.read_bytes,
            save_id=str(save_id),
            duration_s=round(clock.monotonic_s() - start_s, 6),
        )
        return Restored(
            items=items,
            save_id=save_id,
            default_item=DEFAULT_ITEM in items,
            slot_bytes=0 if proven.prepared is None else _slot_bytes(proven.prepared.targets),
            read_bytes=proven.read_bytes,
            proven=proven.prepared is not None,
        )

    def _read(
        self, candidate: Candidate, local: LocalSave | None, prepared: _Prepared | None, wanted: RestoreItems
    ) -> _Proven:
        """Plans, reads, proves and places this process's part; launches no collective.

        The durable tier is asked only for what the fast ones do not cover, or hold damaged.
        """
        fast = prepared.holdings if prepared is not None else self._local.holdings(local)
        if fast.manifests:
            try:
                return self._read_prepared(prepared or self._prepared_of(candidate, fast, wanted))
            except (CorruptCheckpointError, ValueError) as error:
                if isinstance(error, TreeMismatchError) or not candidate.durable:
                    raise
        if not candidate.durable:
            raise CorruptCheckpointError(
                f"the slots of save {candidate.save_id} are gone or damaged", step=candidate.save_id.step
            )
        reader = self._durable.reader(candidate.save_id.step)
        durable = tuple(reader.manifests())
        if candidate.save_id.ours and {manifest.save_id for manifest in durable} - {candidate.save_id}:
            raise CorruptCheckpointError(
                f"step {candidate.save_id.step} in {self._durable.url} is no longer save {candidate.save_id}",
                step=candidate.save_id.step,
            )
        if not durable and not fast.manifests:
            return _Proven(stock=by_orbax.restore_stock(self._durable, candidate.save_id.step, wanted))
        both = Holdings(
            sources=(*fast.sources, Source(tier=DURABLE, manifests=durable, remote=True)),
            readers=(*fast.readers, reader.read),
        )
        return self._read_prepared(self._prepared_of(candidate, both, wanted))

    def _prepared_of(self, candidate: Candidate, holdings: Holdings, wanted: RestoreItems) -> _Prepared:
        asked = self._asked(holdings.manifests, wanted)
        if asked.orbax and not candidate.durable:
            raise CorruptCheckpointError(_only_by_orbax(asked), step=candidate.save_id.step)
        return self._prepare(candidate.save_id, holdings, asked)

    def _prepare(self, save_id: SaveId, holdings: Holdings, asked: Asked) -> _Prepared:
        answers = self._answers(save_id, holdings.manifests, asked)
        targets = self._targets(save_id, answers)
        inline = self._inline(holdings.manifests, asked)
        plan = plan_restore(save_id, {target.key: target.boxes for target in targets}, holdings.sources)
        return _Prepared(asked=asked, answers=answers, targets=targets, inline=inline, plan=plan, holdings=holdings)

    def _read_prepared(self, prepared: _Prepared) -> _Proven:
        plan, by_key = prepared.plan, {target.key: target for target in prepared.targets}
        self._events.emit(Kind.PLANNED, step=plan.save_id.step, sources=plan.bytes_by_tier(), save_id=str(plan.save_id))
        leaves: dict[Key, Any] = {}

        def proven(key: Key, blocks: Mapping[Box, np.ndarray]) -> None:
            if key[0] in prepared.asked.trees:  # what Orbax gives back is only proven
                leaves[key] = place(by_key[key], blocks)

        read_bytes = execute(plan, prepared.holdings.readers, self._rejected(plan.save_id), proven)
        return _Proven(prepared=prepared, leaves=leaves, read_bytes=read_bytes)

    def _asked(self, manifests: Sequence[Manifest], wanted: RestoreItems) -> Asked:
        return asked_of(wanted, manifests, where=self._durable.url)

    def _answers(self, save_id: SaveId, manifests: Sequence[Manifest], asked: Asked) -> dict[str, TreeAnswer]:
        """How each tree is given back. One that Orbax is to give back is read and proven as it was saved."""
        proven_only = dict.fromkeys(name for name in asked.orbax if any(name in m.arrays for m in manifests))
        return {
            item: tree_answer(arg, manifests, item, step=save_id.step, where=self._durable.url)
            for item, arg in {**asked.trees, **proven_only}.items()
        }

    def _targets(self, save_id: SaveId, answers: Mapping[str, TreeAnswer]) -> list[Target]:
        where = self._durable.url
        return [
            target
            for item, answer in answers.items()
            for target in targets_of(item, answer.abstract, answer.leaves, step=save_id.step, where=where)
        ]

    def _assemble(self, proven: _Proven, save_id: SaveId) -> dict[str, Any]:
        """The trees of what is proven; sets the iterators: nothing before this changes what the caller has."""
        prepared = proven.prepared
        if prepared is None:
            return dict(proven.stock)
        items: dict[str, Any] = {}
        for item in prepared.asked.trees:
            placed = [proven.leaves[target.key] for target in prepared.targets if target.key[0] == item]
            items[item] = prepared.answers[item].finished(placed)
        for name, stored in prepared.inline.items():
            items[name] = give_back(stored, prepared.asked.inline[name])
        if prepared.asked.orbax:
            items |= by_orbax.restore_items(self._durable, save_id.step, prepared.asked.orbax)
        return items

    def _inline(self, manifests: Sequence[Manifest], asked: Asked) -> dict[str, Any]:
        """The small items. A data iterator's state belongs to one process out of as many as there were."""
        inline = {}
        for name in asked.inline:
            holders = [manifest for manifest in manifests if name in manifest.inline]
            if holders[0].inline[name]["kind"] == "grain":
                holders = [m for m in holders if m.writer.process == self._coordinator.process]
                count = manifests[0].writer.count
                if count != self._coordinator.count or not holders:
                    raise CorruptCheckpointError(
                        f"item {name!r} is a data iterator saved by {count} processes, and this job has "
                        f"{self._coordinator.count}: restore on {count}, or keep one global position in a JSON item"
                    )
            inline[name] = holders[0].inline[name]
        return inline

    def _rejected(self, save_id: SaveId) -> Any:
        def emit(tier: str, error: CorruptCheckpointError) -> None:
            self._events.emit(Kind.REJECTED, step=save_id.step, tier=tier, reason=str(error))

        return emit

    def _vote(self, error: Exception | None) -> dict[str, Any]:
        """One verdict for all: a fatal error raises everywhere, a rejection sends everybody to the next candidate."""
        value = None if error is None else [_is_fatal(error), type(error).__name__, str(error)]

        def worst(values: list[Any]) -> dict[str, Any]:
            said = [(process, *each) for process, each in enumerate(values) if each is not None]
            fatal = [[process, name, text] for process, is_fatal, name, text in said if is_fatal]
            reject = [f"process {process}: {name}: {text}" for process, is_fatal, name, text in said if not is_fatal]
            return {"fatal": fatal[0] if fatal else None, "reject": "; ".join(reject) or None}

        return self._coordinator.agree("restore", value, worst, timeout_s=self._timeout_s)


def _slot_bytes(targets: Sequence[Target]) -> int:
    page, sizes = layout.PAGE_BYTES, [(t.boxes, np.dtype(t.dtype).itemsize) for t in targets]
    return sum(-(-box.size * itemsize // page) * page for boxes, itemsize in sizes for box in boxes)


def _is_fatal(error: Exception) -> bool:
    """Only what is proven bad or absent falls back to something older; unreachable is not absent."""
    return not isinstance(error, CorruptCheckpointError | FileNotFoundError | ItemNotFoundError)


def _only_by_orbax(asked: Asked) -> str:
    return f"only Orbax restores {sorted(asked.orbax)} in this form, and only from a durable step"
