"""The contents of a durable root: its steps with class and state, and the directories that are not steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

from ckptkit.durable.lifecycle.certificates import certified_saves
from ckptkit.durable.lifecycle.classify import Content, NameFormat, StepClass, class_of, content_of, run_format
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.sidecars import incomplete, marked_save, of_one_save, wrong_step
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.places import ItemKind, Place, committed_at_s, is_committed, item_kind, readable, step_items
from ckptkit.inspection.records import StepState
from ckptkit.inspection.shares import items_missing, marked_above, read_sidecars, sidecar_processes, sidecars_lost
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.util.words import first_of

_NAMES_MAX = 20  # of directories in one note
_WHY = {
    "link": "links, which are never steps",
    "name": "not steps of this run, their names have another format (`ckptkit steps --step-prefix` lists them)",
    "item": "trees that were saved without a manager; a restart does not take them",
    "root": "separate roots with steps of their own",
    "nothing": "not steps: nothing in them shows that Orbax or ckptkit wrote them",
    "slots": "slots of a fast tier",
}

LeftOutReason = Literal["link", "name", "item", "root", "nothing", "slots"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DurableStep:
    """One step directory. `identity` orders it among the saves; stock Orbax's steps get one, and have no save id.

    `shares`: the processes whose sidecars are there, and how many wrote the step; None where nobody recorded it.
    """

    place: Place
    step: int
    state: StepState
    identity: SaveId
    kind: StepClass
    at_s: float | None = None
    shares: tuple[tuple[int, ...], int] | None = None
    problem: str | None = None

    @property
    def save_id(self) -> SaveId | None:
        """Which save it is; None for one that stock Orbax wrote."""
        return self.identity if self.identity.ours else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RootSteps:
    """The steps of a root, ascending; and by reason the names of directories that look like steps and are not."""

    steps: tuple[DurableStep, ...]
    names: NameFormat
    left_out: Mapping[LeftOutReason, tuple[str, ...]]

    @property
    def notes(self) -> list[str]:
        """The directories that are left out and why, one sentence for each reason."""
        return [f"{_WHY[why]}: {first_of(names, _NAMES_MAX)}" for why, names in self.left_out.items()]


def read_ancestry(place: Place) -> tuple[Ancestry, list[str]]:
    """The rollbacks that a root records; where the record is damaged, none and the reason."""
    try:
        with readable(f"{place.url}/{paths.EPOCHS_DIR}"):
            ancestry, problems = EpochRecords(place.store).check()
            return ancestry, [f"{problem}; the other copy was read" for problem in problems]
    except CorruptCheckpointError as error:
        return Ancestry(), [f"{error}; which steps a rollback abandoned is not known"]


def read_root(place: Place, ancestry: Ancestry, *, step_prefix: str | None = None) -> RootSteps:
    """The steps of a root with their classes and states. Every command and the manager decide by the same rules.

    A directory is a step of the run where its name has the root's format and something in it shows that it is a step
    (`ckptkit.durable.lifecycle.classify`). `step_prefix` chooses the format, empty for plain numbers; without it the
    marks of our saves decide. Links are never steps.

    Cost: a listing for each directory and its items, a small read for each step; nothing is written. Raises
    `StoreError` for what cannot be reached.
    """
    contents, left_out = _contents(place)
    steps = [name for name, content in contents.items() if content == "step"]
    items = [name for name, content in contents.items() if content == "item"]
    unmanaged = not any(_base_name(name) == name for name in steps)
    named = steps if not unmanaged else [*steps, *items]
    names = run_format(
        sorted({_base_name(name) for name in named}),
        lambda name: place.below(name).read(paths.COMMIT_MARK),
        prefix=step_prefix,
    )
    found: list[DurableStep] = []
    for name, content in contents.items():
        step = names.step_of(_base_name(name))
        if content not in ("step", "item"):
            left_out[name] = content
        elif step is None:
            left_out[name] = "name"
        elif content == "item" and not unmanaged:
            left_out[name] = "item"
        else:
            found += _durable_step(place.below(name), step, ancestry)
    by_reason = {why: tuple(sorted(name for name, of in left_out.items() if of == why)) for why in _WHY}
    return RootSteps(
        steps=tuple(sorted(found, key=lambda each: (each.step, each.place.name))),
        names=names,
        left_out={why: found for why, found in by_reason.items() if found},  # pyright: ignore[reportArgumentType]
    )


def certified_in(place: Place) -> frozenset[SaveId]:
    """The saves of a root that a replay came to. Cost: a listing, where a run of ours has saved."""
    return certified_saves(place.store) if f"{paths.SIDECAR_DIR}/" in place.names() else frozenset()


def newest_committed(steps: Iterable[DurableStep]) -> DurableStep | None:
    """The committed step of the newest save, which is not the highest number where a later epoch began lower."""
    committed = [step for step in steps if step.state == "committed"]
    return max(committed, key=lambda step: step.identity, default=None)


def _contents(place: Place) -> tuple[dict[str, Content], dict[str, LeftOutReason]]:
    """The contents of each directory whose name a step could have; and which of them are links."""
    contents: dict[str, Content] = {}
    left_out: dict[str, LeftOutReason] = {}
    claimed: set[str] | None = None
    for name in place.directories():
        if paths.step_of_name(name) is None or name == paths.SIDECAR_DIR:
            continue
        if place.is_link(name):
            left_out[name] = "link"
            continue
        each = place.below(name)
        content = content_of(each.names(), lambda below, each=each: each.below(below).names())
        if content == "nothing" and not each.names() and not os.path.isdir(each.url):
            continue  # deleted meanwhile
        if content == "nothing" and not is_committed(each):
            if claimed is None:
                claimed = _claimed(place)
            content = "step" if _base_name(name) != name or name in claimed else content
        contents[name] = content
    return contents, left_out


def _claimed(place: Place) -> set[str]:
    """The directories that a save in a bucket has announced."""
    names = place.below(paths.SIDECAR_DIR).below(paths.INTENTS_DIR.rpartition("/")[2]).names()
    return {found[1] for name in names if (found := paths.intent_of_name(name)) is not None}


def _base_name(name: str) -> str:
    """The name that a directory has once it is committed."""
    return name.partition(paths.TEMPORARY)[0]


def _durable_step(place: Place, step: int, ancestry: Ancestry) -> list[DurableStep]:
    """The directory as a step; nothing where it was deleted meanwhile."""
    stock = ancestry.of_stock(step)
    if not is_committed(place):
        kind = StepClass.STOCK if paths.epoch_of_temporary(place.name) is None else StepClass.WHOLE
        return [DurableStep(place=place, step=step, state="unfinished", identity=stock, kind=kind)]
    items: dict[str, ItemKind | None] = {name: item_kind(place.below(name)) for name in step_items(place)}
    if item_kind(place) is not None:  # saved without a manager: the step is the item
        items = {"": item_kind(place)}
    try:
        return [_recorded(place, step, items, ancestry)]
    except CorruptCheckpointError as error:
        # Looked at again, because a step that is pruned meanwhile is not damaged.
        return [_damaged(place, step, items, str(error))] if place.again().names() else []


def _recorded(place: Place, step: int, items: Mapping[str, ItemKind | None], ancestry: Ancestry) -> DurableStep:
    """Which save a step is: one sidecar of each item names it, or the mark, or Orbax's metadata."""
    identity, shares, problem = _marked(place, step), None, None
    lost = [why for name in items if (why := sidecars_lost(_item(place, name))) is not None]
    for name in items:
        item = _item(place, name)
        processes = sidecar_processes(item)
        if not processes:
            continue
        identity, shares, why = _of_sidecars(item, processes, step)
        problem = why or problem
    if lost:
        problem = problem or lost[0]
    if not items:
        problem = problem or f"step {step} in {place.url}: it holds no item"
    identity, at_s = _of_metadata(place, identity)
    if identity is not None and "" not in items:
        problem = problem or items_missing(place, ours=True)
    found = ancestry.identity(step, identity)
    return DurableStep(
        place=place,
        step=step,
        state="damaged" if problem else "abandoned" if ancestry.superseded(found) else "committed",
        identity=found,
        kind=class_of(identity, items, [problem] if problem else [], lost=bool(lost)),
        at_s=at_s,
        shares=shares,
        problem=problem,
    )


def _of_sidecars(
    item: Place, processes: Sequence[int], step: int
) -> tuple[SaveId, tuple[tuple[int, ...], int], str | None]:
    """The save that an item's sidecars name, the processes that are there of how many, and what is wrong with them."""
    first = read_sidecars(item, processes[:1], extent="head")
    identity, expected = first[processes[0]].save_id, first[processes[0]].writer.count
    beyond = [process for process in processes if process >= expected]
    own = of_one_save(first | read_sidecars(item, beyond, extent="head"), partial(marked_above, item))
    present = tuple(process for process in processes if process < expected or process in own)
    return identity, (present, expected), wrong_step(item.url, identity, step) or incomplete(item.url, present, own)


def _marked(place: Place, step: int) -> SaveId | None:
    mark = place.read(paths.COMMIT_MARK)
    named = None if mark is None else marked_save(mark)
    return named if named is not None and named.step == step else None


def _of_metadata(place: Place, known: SaveId | None) -> tuple[SaveId | None, float | None]:
    """Which save a step is and when it was committed; Orbax's metadata names a save of ours that has no arrays.

    Raises `CorruptCheckpointError` for damaged metadata of a save of ours. Stock Orbax restores its own steps without.
    """
    try:
        metadata = place.json(paths.STEP_METADATA) or {}
        with readable(f"{place.url}/{paths.STEP_METADATA}"):
            record = (metadata.get("custom_metadata") or {}).get(paths.SAVE_ID_FIELD)
            named = None if record is None else SaveId.from_list(record)
            return known or named, committed_at_s(place)
    except CorruptCheckpointError:
        if known is not None:
            raise
        return None, None


def _damaged(place: Place, step: int, items: Mapping[str, ItemKind | None], why: str) -> DurableStep:
    """A step whose records cannot be read. Its marker, or one of its items, tells whether ckptkit wrote it."""
    mark = place.read(paths.COMMIT_MARK)
    signed = any(f"{paths.SIDECAR_DIR}/" in _item(place, name).names() for name in items)
    return DurableStep(
        place=place,
        step=step,
        state="damaged",
        identity=SaveId(0, step, -1),
        kind=class_of(None if mark is None else marked_save(mark), items, [why], lost=signed),
        problem=f"step {step} in {place.url}: {why}",
    )


def _item(place: Place, name: str) -> Place:
    return place.below(name) if name else place
