"""The steps of a durable root: which directories they are, which saves they hold, and their state.

The one lister: the manager, `ckptkit.latest_step`, followers and every command ask it, so that they cannot disagree. No
index object exists, since it could go stale: the listing itself is the truth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, final

from ckptkit.durable.lifecycle.classify import (
    Content,
    NameFormat,
    StepClass,
    class_of,
    has_several_formats,
    run_format,
)
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.places import (
    ItemKind,
    Place,
    committed_at_s,
    content_in,
    is_committed,
    item_kind,
    require_possible_root,
    step_items,
)
from ckptkit.durable.lifecycle.step_records import (
    items_missing,
    marked_above,
    marked_in,
    read_sidecars,
    save_in_metadata,
    sidecar_processes,
    sidecars_lost,
)
from ckptkit.durable.sidecars import incomplete, of_one_save, wrong_step
from ckptkit.errors import CorruptCheckpointError, NewerFormatError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import open_store
from ckptkit.store.roots import root_url
from ckptkit.util.words import first_of

_LOOKS = 16  # directories that are looked into at a time
_TIMEOUT_S = 20.0  # of a request of `latest_step`
_NAMES_MAX = 20  # of directories in one note
_WHY = {
    "link": "links, which are never steps",
    "name": "not steps of this run, their names have another format (`ckptkit steps --step-prefix` lists them)",
    "item": "trees that were saved without a manager; a restart does not take them",
    "root": "separate roots with steps of their own",
    "nothing": "not steps: nothing in them shows that Orbax or ckptkit wrote them",
    "slots": "slots of a fast tier",
}

_OF_OTHERS = "of another root, so they count as older than what ckptkit saved in this one"

StepState = Literal["committed", "partial", "unfinished", "abandoned", "damaged"]
LeftOutReason = Literal["link", "name", "item", "root", "nothing", "slots"]
StepListing = dict[int, list[str] | None]  # committed steps, each with the names right below it, if they were listed

_Name = TypeVar("_Name")
_Found = TypeVar("_Found")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DurableStep:
    """One step directory. `identity` orders it among the saves; stock Orbax's steps get one, and have no save id.

    `problem`: what is damaged. A restart takes a committed step all the same: it lacks only Orbax's metadata.
    `shares`: the processes whose sidecars are there, and how many wrote the step; None where it was not recorded.
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
        """The directories that are left out and why, one sentence for each reason; then steps of another root."""
        notes = [f"{_WHY[why]}: {first_of(names, _NAMES_MAX)}" for why, names in self.left_out.items()]
        others = [each.place.name for each in self.steps if each.identity.of_another_root]
        return [*notes, f"{_OF_OTHERS}: {first_of(others, _NAMES_MAX)}"] if others else notes


def read_root(
    place: Place,
    ancestry: Ancestry,
    *,
    step_prefix: str | None = None,
    known: Mapping[str, DurableStep] = MappingProxyType({}),
) -> RootSteps:
    """The steps of a root with their classes and states. Every command and the manager decide by the same rules.

    A directory is a step of the run where its name has the root's format and something in it shows that it is a step
    (`ckptkit.durable.lifecycle.classify`). `step_prefix` chooses the format, empty for plain numbers; without it the
    marks of our saves decide. Links are never steps. `known` are steps by directory that are not looked into again.

    Cost: a listing for each directory and its items, a small read for each step; nothing is written. Raises
    `StepNotFoundError` for a place that can be no root (`other_place`), `StoreError` for what cannot be reached.
    """
    require_possible_root(place, around=False)
    contents, left_out = _contents(place, known)
    steps = [name for name, content in contents.items() if content == "step"]
    items = [name for name, content in contents.items() if content == "item"]
    unmanaged = not any(_base_name(name) == name for name in steps)
    named = steps if not unmanaged else [*steps, *items]
    names = run_format(
        sorted({_base_name(name) for name in named}),
        partial(_mark, place),
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
        elif name in known:
            found.append(known[name])
        else:
            found += _durable_step(place.below(name), step, ancestry)
    if not found:
        require_possible_root(place)
    by_reason = {why: tuple(sorted(name for name, of in left_out.items() if of == why)) for why in _WHY}
    return RootSteps(
        steps=tuple(sorted(found, key=lambda each: (each.step, each.place.name))),
        names=names,
        left_out={why: found for why, found in by_reason.items() if found},  # pyright: ignore[reportArgumentType]
    )


def newest_committed(steps: Iterable[DurableStep]) -> DurableStep | None:
    """The committed step of the newest save, which is not the highest number where a later epoch began lower."""
    committed = [step for step in steps if step.state == "committed"]
    return max(committed, key=lambda step: step.identity, default=None)


def committed_steps(root: str, name_format: Any, known: Iterable[int] = ()) -> StepListing:
    """The committed steps whose names are those of `name_format`, ascending; those of `known` are not looked into.

    Steps are recognised as in `read_root`. A directory that only has the name of a step is not one, nor is a link, nor
    a tree that was saved without a manager. Cost: a listing, and one for each unknown step.
    """
    place, trusted = Place(open_store(root)), set(known)
    named: dict[int, str] = {}
    for name in _step_names(place):
        step = paths.step_of_name(name, temporary=False)
        if step is not None and name_format.build_name(step) == name:
            named[step] = name
    unknown = sorted(set(named) - trusted)
    looked = _side_by_side(lambda step: _names_of_step(place.below(named[step])), unknown)
    committed = {step: below for step, below in zip(unknown, looked, strict=True) if below is not None}
    return {step: committed.get(step) for step in sorted({*committed, *(trusted & set(named))})}


def latest_step(root: str) -> int | None:
    """The step of the newest save in a durable root, which a restart without fast tiers would take; None without one.

    The newest save is the one made last; no rollback has abandoned it, and its sidecars are whole. Cost: the epoch
    record, a listing, a small read for each step, 16 at a time, and a look into the newest. Steps without a mark of
    ours are looked into: in a root without saves of ours from the highest number on, until one is a step, because stock
    Orbax saves in the order of the numbers. Raises `StoreError` where the root cannot be read, `CorruptCheckpointError`
    for damaged epoch records.
    """
    store = open_store(root_url(root))
    ancestry, place = EpochRecords(store).read(), Place(store)
    names = [name for name in _step_names(place) if paths.step_of_name(name, temporary=False) is not None]
    if has_several_formats(names):  # all are looked into: which have a step in them decides
        looked = _side_by_side(lambda name: _names_of_step(place.below(name)), names)
        names = [name for name, below in zip(names, looked, strict=True) if below is not None]
    step_of = run_format(names, partial(_mark, place)).step_of
    named = {name: step for name in names if (step := step_of(name)) is not None}
    marked = dict(zip(named, _side_by_side(lambda name: marked_in(place.below(name)), list(named)), strict=True))
    guarded = Place.open(store.url, timeout_s=_TIMEOUT_S)

    def look(name: str) -> SaveId | None:
        each = guarded.below(name)
        if item_kind(each) is not None or content_in(each) != "step":
            return None
        found = newest_committed(_durable_step(each, named[name], ancestry))
        return None if found is None else found.identity

    def order(name: str) -> SaveId:
        return ancestry.identity(named[name], marked[name])

    ours = sorted((name for name, save in marked.items() if save is not None), key=order, reverse=True)
    others = sorted((name for name, save in marked.items() if save is None), key=order, reverse=True)
    found = [next(filter(None, map(look, ours)), None)]
    found += _side_by_side(look, others) if ancestry.epoch else [next(filter(None, map(look, others)), None)]
    return max(saves).step if (saves := [save for save in found if save is not None]) else None


def _side_by_side(look: Callable[[_Name], _Found], names: Sequence[_Name]) -> list[_Found]:
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-list") as pool:
        return list(pool.map(look, names))


def _step_names(place: Place) -> list[str]:
    """The directories, not links, whose names any step could have."""
    return [
        name
        for name in place.directories()
        if name != paths.SIDECAR_DIR and paths.step_of_name(name) is not None and not place.is_link(name)
    ]


def _names_of_step(place: Place) -> list[str] | None:
    """The names in a directory that is a committed step of a manager; None for any other."""
    return place.names() if is_committed(place) and content_in(place) == "step" else None


def _mark(place: Place, name: str) -> bytes | None:
    return place.below(name).read(paths.COMMIT_MARK)


def _contents(place: Place, known: Mapping[str, DurableStep]) -> tuple[dict[str, Content], dict[str, LeftOutReason]]:
    """The contents of each directory whose name a step could have; and which of them are links."""
    contents: dict[str, Content] = {}
    named = _step_names(place)
    left_out: dict[str, LeftOutReason] = {
        name: "link" for name in place.directories() if paths.step_of_name(name) is not None and place.is_link(name)
    }
    claimed: set[str] | None = None
    for name in named:
        each = known[name].place if name in known else place.below(name)  # which was listed when it was looked into
        content = content_in(each)
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
        found = _recorded(place, step, items, ancestry)
    except CorruptCheckpointError as error:
        found = _damaged(place, step, items, str(error))
    if found.problem is None:
        return [found]
    again = place.again()  # a step that is pruned meanwhile is not damaged
    return [found] if again.names() and is_committed(again) else []


def _recorded(place: Place, step: int, items: Mapping[str, ItemKind | None], ancestry: Ancestry) -> DurableStep:
    """Which save a step is: one sidecar of each item names it, or the mark, or Orbax's metadata.

    Raises `NewerFormatError` where only a sidecar names it that this version cannot read.
    """
    identity, shares, problem, newer = marked_in(place), None, None, None
    identity = identity if identity is not None and identity.step == step else None
    lost = [why for name in items if (why := sidecars_lost(_item(place, name))) is not None]
    for name in items:
        item = _item(place, name)
        processes = sidecar_processes(item)
        if not processes:
            continue
        try:
            identity, shares, why = _of_sidecars(item, processes, step)
            problem = why or problem
        except NewerFormatError as error:
            newer = error
    if lost:
        problem = problem or lost[0]
    if not items:
        problem = problem or f"step {step} in {place.url}: it holds no item"
    identity, at_s, blemish = _of_metadata(place, identity)
    if identity is None and newer is not None:
        raise newer
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
        problem=problem or blemish,
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


def _of_metadata(place: Place, known: SaveId | None) -> tuple[SaveId | None, float | None, str | None]:
    """Which save a step is and when it was committed; Orbax's metadata names a save of ours that has no arrays.

    And what is wrong with the metadata of a save of ours, which a restart takes without. Stock Orbax restores its own
    steps without, too.
    """
    try:
        return known or save_in_metadata(place), committed_at_s(place), None
    except CorruptCheckpointError as error:
        return known, None, None if known is None else f"step {known.step} in {place.url}: {error}"


def _damaged(place: Place, step: int, items: Mapping[str, ItemKind | None], why: str) -> DurableStep:
    """A step whose records cannot be read. Its marker, or one of its items, shows whether ckptkit wrote it."""
    signed = any(f"{paths.SIDECAR_DIR}/" in _item(place, name).names() for name in items)
    return DurableStep(
        place=place,
        step=step,
        state="damaged",
        identity=SaveId(0, step, -1),
        kind=class_of(marked_in(place), items, [why], lost=signed),
        problem=f"step {step} in {place.url}: {why}",
    )


def _item(place: Place, name: str) -> Place:
    return place.below(name) if name else place
