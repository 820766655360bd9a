"""The life of a restore: gather, rank, plan, read and prove, vote; the next candidate when the vote fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from ckptkit import clock, layout
from ckptkit.arena import SlotReader, read_manifests, slot_directories
from ckptkit.coordination import Coordinator
from ckptkit.durable.epochs import Ancestry, EpochRecords
from ckptkit.durable.reader import is_damage
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
from ckptkit.manager.asked import Asked, RestoreItems, TreeAnswer, asked_of, tree_answer
from ckptkit.manager.partly import choose_of_stock, whole_step
from ckptkit.manager.small_items import give_back
from ckptkit.manager.taken import DURABLE
from ckptkit.manifest import Manifest, SaveId
from ckptkit.plan import Candidate, Key, Source, plan_restore, rank_candidates
from ckptkit.restore import BoxReader, Target, execute, place, targets_of

LISTED_DURABLE_STEPS = 8  # how many durable steps, newest first, are looked into before older ones are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSave:
    """A save as this host's fast tiers hold it: by tier, the slot directories with their manifests."""

    save_id: SaveId
    held: Mapping[str, tuple[tuple[Path, Manifest], ...]]

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests of the save on this host."""
        return tuple(manifest for pairs in self.held.values() for _, manifest in pairs)


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
class _Holdings:
    """Sources of one save in order of cost, and how the boxes of each are read."""

    sources: tuple[Source, ...]
    readers: tuple[BoxReader, ...]

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Every manifest of every source."""
        return tuple(manifest for source in self.sources for manifest in source.manifests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proven:
    """What one process has read and proven of a save, in host memory; `stock`: what stock Orbax restored instead."""

    asked: Asked = Asked()  # noqa: RUF009  frozen
    answers: Mapping[str, TreeAnswer] = field(default_factory=dict)
    targets: Sequence[Target] = ()
    blocks: Mapping[Key, Any] = field(default_factory=dict)
    inline: Mapping[str, Any] = field(default_factory=dict)
    read_bytes: Mapping[str, int] = field(default_factory=lambda: {"durable (orbax)": 0})
    stock: dict[str, Any] | None = None


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
        self._host_dirs = host_dirs
        self._durable = durable
        self._epochs = epochs
        self._coordinator = coordinator
        self._events = events
        self._timeout_s = timeout_s

    def local_saves(self) -> dict[SaveId, LocalSave]:
        """What this host's fast tiers hold. Opens only directories of this host's own id."""
        found: dict[SaveId, dict[str, list[tuple[Path, Manifest]]]] = {}
        for tier, host_dir in self._host_dirs.items():
            pairs, damaged = read_manifests(slot_directories(host_dir))
            for error in damaged:
                self._events.emit(Kind.REJECTED, tier=tier, reason=str(error))
            for directory, manifest in pairs:
                found.setdefault(manifest.save_id, {}).setdefault(tier, []).append((directory, manifest))
        return {
            save: LocalSave(save_id=save, held={tier: tuple(pairs) for tier, pairs in tiers.items()})
            for save, tiers in found.items()
        }

    def restore(self, step: int | None, wanted: RestoreItems) -> Restored:
        """The newest save that every process can have and that proves whole (`step`: only that one).

        Raises `StepNotFoundError` where there is no candidate, `NoRestorableStepError` where all were rejected;
        a tree mismatch, a missing permission and a tier that cannot be reached raise at once and never fall back.
        """
        local = self.local_saves()
        rejected: list[tuple[str, int, str]] = []
        tried: set[SaveId] = set()
        for looked_into in (LISTED_DURABLE_STEPS, None):
            for candidate in self._candidates(local, wanted, step, looked_into):
                if candidate.save_id in tried:
                    continue
                tried.add(candidate.save_id)
                outcome = candidate.refusal or self._try(candidate, local.get(candidate.save_id), wanted)
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
        self, local: Mapping[SaveId, LocalSave], wanted: RestoreItems, step: int | None, looked_into: int | None
    ) -> list[Candidate]:
        report = [[*asdict(save).values(), self._refusal(held, wanted)] for save, held in local.items()]

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

    def _refusal(self, save: LocalSave, wanted: RestoreItems) -> str | None:
        """Why this process cannot have `save` from its own host's fast tiers alone; None when it can."""
        try:
            asked = self._asked(save.manifests, wanted)
            if asked.orbax:
                return f"only Orbax restores {sorted(asked.orbax)} in this form, and only from a durable step"
            targets = self._targets(save.save_id, self._answers(save.save_id, save.manifests, asked))
            plan_restore(save.save_id, {target.key: target.boxes for target in targets}, _fast_sources(save))
            self._inline(save.manifests, asked)
        except (TreeMismatchError, ItemNotFoundError):
            return None  # it is held; the mismatch is raised when the candidate is tried
        except Exception as error:  # noqa: BLE001  said in the vote: who does not come leaves the others waiting
            return f"{type(error).__name__}: {error}"
        return None

    def _try(self, candidate: Candidate, local: LocalSave | None, wanted: RestoreItems) -> Restored | str:
        """The restored items, or why the processes together reject this candidate."""
        start_s = clock.monotonic_s()
        save_id = candidate.save_id
        error: Exception | None = None
        proven = None
        try:
            proven = self._read(candidate, local, wanted)
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
            slot_bytes=_slot_bytes(proven.targets),
            read_bytes=proven.read_bytes,
            proven=proven.stock is None,
        )

    def _read(self, candidate: Candidate, local: LocalSave | None, wanted: RestoreItems) -> _Proven:
        """Plans, reads and proves this process's part; touches no device.

        The durable tier is asked only for what the fast ones do not cover, or hold damaged.
        """
        fast = self._fast_holdings(local)
        if fast.manifests:
            try:
                return self._read_from(candidate.save_id, fast, wanted)
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
            return _Proven(stock=self._restore_stock(candidate.save_id.step, wanted))
        both = _Holdings(
            sources=(*fast.sources, Source(tier=DURABLE, manifests=durable)), readers=(*fast.readers, reader.read)
        )
        return self._read_from(candidate.save_id, both, wanted)

    def _read_from(self, save_id: SaveId, holdings: _Holdings, wanted: RestoreItems) -> _Proven:
        asked = self._asked(holdings.manifests, wanted)
        answers = self._answers(save_id, holdings.manifests, asked)
        targets = self._targets(save_id, answers)
        inline = self._inline(holdings.manifests, asked)
        plan = plan_restore(save_id, {target.key: target.boxes for target in targets}, holdings.sources)
        self._events.emit(Kind.PLANNED, step=save_id.step, sources=plan.bytes_by_tier(), save_id=str(save_id))
        blocks, read_bytes = execute(plan, holdings.readers, self._rejected(save_id))
        return _Proven(
            asked=asked, answers=answers, targets=targets, blocks=blocks, inline=inline, read_bytes=read_bytes
        )

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
        """Places what is proven on the devices, and sets the iterators: nothing before this has a side effect."""
        if proven.stock is not None:
            return proven.stock
        items: dict[str, Any] = {}
        for item in proven.asked.trees:
            placed = [place(target, proven.blocks[target.key]) for target in proven.targets if target.key[0] == item]
            items[item] = proven.answers[item].finished(placed)
        for name, stored in proven.inline.items():
            items[name] = give_back(stored, proven.asked.inline[name])
        if proven.asked.orbax:
            items |= self._by_orbax(save_id.step, proven.asked.orbax)
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

    def _restore_stock(self, step: int, wanted: RestoreItems) -> dict[str, Any]:
        """A step that stock Orbax wrote, read by stock Orbax: correct bytes cannot be proven, only readability."""
        if not self._durable.reader(step).item_names():
            raise CorruptCheckpointError(f"step {step} in {self._durable.url} holds no item", step=step, tier=DURABLE)
        try:
            return self._restore_by_orbax(step, wanted)
        except ItemNotFoundError:
            raise
        except Exception as error:
            if is_damage(error):
                message = f"step {step} in {self._durable.url}: {type(error).__name__}: {error}"
                raise CorruptCheckpointError(message, step=step, tier=DURABLE) from error
            raise

    def _restore_by_orbax(self, step: int, wanted: RestoreItems) -> dict[str, Any]:
        stock = self._durable.stock
        held = set(self._durable.reader(step).item_names())
        wanted.check_mode(held)
        if wanted.args is not None:
            if missing := sorted(set(wanted.args) - held):
                raise ItemNotFoundError(
                    f'Item "{missing[0]}" was not found in step {step}. Available items: {sorted(held)}', step=step
                )
            return self._by_orbax(step, wanted.args)
        if wanted.choose is not None:
            return choose_of_stock(self._durable.reader(step).url, wanted.choose)
        if (found := whole_step(self._durable.reader(step).url)) is not None:
            return found
        found = stock.orbax.restore(step)
        return dict(found.items()) if isinstance(found, ocp.args.Composite) else {DEFAULT_ITEM: found}

    def _by_orbax(self, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
        """Some items of a durable step, by Orbax's manager and the caller's handlers."""
        if set(args) == {DEFAULT_ITEM}:
            return {DEFAULT_ITEM: self._durable.stock.orbax.restore(step, args=args[DEFAULT_ITEM])}
        return dict(self._durable.stock.orbax.restore(step, args=ocp.args.Composite(**args)).items())

    def _fast_holdings(self, save: LocalSave | None) -> _Holdings:
        """One source per slot directory, so that a reader knows where a record's bytes stand."""
        sources: list[Source] = []
        readers: list[BoxReader] = []
        for tier, pairs in (save.held if save is not None else {}).items():
            for directory, manifest in pairs:
                try:
                    readers.append(_slot_reader(directory, manifest))
                except (OSError, ValueError) as error:  # the slot is gone or empty: the next source is taken
                    self._events.emit(Kind.REJECTED, step=manifest.save_id.step, tier=tier, reason=str(error))
                    continue
                sources.append(Source(tier=tier, manifests=(manifest,)))
        return _Holdings(sources=tuple(sources), readers=tuple(readers))

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


def _fast_sources(save: LocalSave) -> list[Source]:
    return [Source(tier=tier, manifests=tuple(manifest for _, manifest in pairs)) for tier, pairs in save.held.items()]


def _slot_reader(directory: Path, manifest: Manifest) -> BoxReader:
    slot = SlotReader(directory, manifest)

    def read(item: str, leaf: Any, record: Any, wanted: Any, into: Any) -> None:
        del item
        try:
            slot.read(leaf, record, wanted, into)
        except CorruptCheckpointError as error:
            if slot.gone():  # reused for a newer save in the meantime: not damage
                message = f"{directory}: save {manifest.save_id} was superseded while it was read"
                raise CorruptCheckpointError(message, path=str(directory)) from error
            raise

    return read
