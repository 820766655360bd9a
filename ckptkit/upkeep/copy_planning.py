"""The plan of `copy`: the steps of a root, or one of them, compared with the target. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.listing import DurableStep, RootSteps, read_root
from ckptkit.durable.lifecycle.places import Place, nothing_at, other_place, place_around
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import no_directory, require_free_name
from ckptkit.inspection.sizes import sizes_below
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import SaveId
from ckptkit.model.paths import STEP_METADATA
from ckptkit.store.roots import root_url
from ckptkit.upkeep.adoption import AdoptedAs, Adoption, plan_adoption
from ckptkit.util.plain import plain_fields
from ckptkit.util.words import command_line

CopyAction = Literal["copy", "skip", "leave"]

JOURNAL = paths.COPY_JOURNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """One step, and what becomes of it. `skip`: the target has this save; `leave`: it cannot be copied, and why.

    `stamp` is the digest of Orbax's metadata of the step, with its times in nanoseconds: two runs may give two saves
    the same identity.
    """

    step: int
    source: str
    target: str
    save_id: SaveId | None
    sizes: Mapping[str, int]
    stamp: str | None
    act: CopyAction
    reason: str | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(self.sizes.values())

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        counts = {"bytes": self.stored_bytes, "objects": len(self.sizes)}
        return {**plain_fields(self, without=("sizes", "stamp")), **counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The steps in the order in which they are copied. `ancestry`: the rollbacks that come along with a whole root;
    `adoption`: the new identity of a single step of another run. `problems`: the damage of steps that stay behind."""

    source: str
    target: str
    steps: tuple[CopyStep, ...]
    ancestry: Ancestry | None
    done: bool = False
    notes: tuple[str, ...] = ()
    adoption: Adoption | None = None
    problems: tuple[str, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the steps that are, or were, to be copied."""
        return sum(each.stored_bytes for each in self.steps if each.act == "copy")

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        adopted_as = None if self.adoption is None else plain_fields(self.adoption.save_id)
        found = plain_fields(self, without=("ancestry", "adoption"))
        return {"format": FORMAT, **found, "adopted_as": adopted_as, "bytes": self.copied_bytes}


def plan_copy(
    source: str,
    target: str,
    *,
    as_step: int | None = None,
    adopted: AdoptedAs | None = None,
    step_prefix: str | None = None,
    timeout_s: float = 20.0,
) -> CopyPlan:
    """The plan of `copy`; nothing is written.

    `source` is a durable root or one step in a root. Of a root, every committed step of its branch is copied, and the
    steps that its rollbacks abandoned; a single step may be an abandoned one. `target` is a root, where steps keep
    their names. A step that the target has already is skipped. A single step of another run gets a new identity
    with `adopted`, as the newest or the oldest save of the target, under the number `as_step` (default: its own).
    `step_prefix` chooses the steps of a root whose names have several formats. Cost: a listing per directory of both,
    and small reads.

    Raises `StepNotFoundError` if the source does not exist, and `CorruptCheckpointError` for a single damaged step.
    Raises `CheckpointError` if the target has another save under a step's number, or has steps of another run and
    `adopted` is not given.
    """
    url, into = root_url(source), root_url(target)
    place = Place.open(url, timeout_s=timeout_s)
    if not place.names():
        raise no_directory(url, "there is nothing to copy; check the path")
    shown = other_place(place, around=False)
    whole = shown is None or shown.at != url or shown.kind not in ("step", "item")
    if not whole and (around := place_around(place)) is not None:
        why = f"it is not a step of a root: {around.words}; `{command_line('copy', around.at, target)}` copies that"
        raise nothing_at(url, why)
    if whole and (adopted is not None or as_step is not None):
        raise CheckpointError(f"{url} is a root; name one step of it for --as and --as-step", path=url)
    root = url if whole else url.rpartition("/")[0]
    if into == root:
        raise CheckpointError(f"{target} is where the step is; name another root", path=into)
    if not Place.open(into, timeout_s=timeout_s).names():
        require_free_name(into, timeout_s=timeout_s)
    own_prefix = step_prefix if whole else place.name.rpartition("_")[0]
    here = _Root.look(root, own_prefix, timeout_s)
    there = _Root.look(into, step_prefix, timeout_s)
    if whole:
        return _whole_root(here, there)
    return _single(here, there, url, as_step, adopted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Root:
    """One side of a copy."""

    place: Place
    ancestry: Ancestry
    found: RootSteps

    @classmethod
    def look(cls, url: str, step_prefix: str | None, timeout_s: float) -> _Root:
        place = Place.open(url, timeout_s=timeout_s)
        ancestry = EpochRecords(place.store).read()
        return cls(place=place, ancestry=ancestry, found=read_root(place, ancestry, step_prefix=step_prefix))

    @property
    def steps(self) -> list[DurableStep]:
        """The steps that were committed, damaged ones too."""
        return [each for each in self.found.steps if each.state != "unfinished"]

    def shares_saves_with(self, other: _Root) -> int:
        """The newest epoch that both roots had in common; 0 for none, -1 where they are of different runs."""
        epoch, same = EpochRecords(self.place.store).is_same_run(EpochRecords(other.place.store))
        if epoch:
            return epoch if same else -1
        stamps = {(each.step, each.save_id): each for each in self.steps}
        shared = [
            each.identity.epoch
            for each in other.steps
            if (mine := stamps.get((each.step, each.save_id))) is not None
            and (stamp := stamp_of(each.place)) is not None
            and stamp == stamp_of(mine.place)
        ]
        return max(shared, default=-1)


def _whole_root(here: _Root, there: _Root) -> CopyPlan:
    chosen = [each for each in here.found.steps if each.state == "committed" and each.problem is None]
    into, ours, theirs = there.place.url, here.ancestry, there.ancestry
    begun = dict(ours.runs)
    is_forked = any(begun.get(epoch, run) != run for epoch, run in theirs.runs)
    follows = theirs == ours or _follows(ours, theirs)
    if (
        is_forked
        or (theirs.epoch and not follows)
        or (_is_in_use(there) and (theirs.epoch or ours.epoch) and here.shares_saves_with(there) < 0)
    ):
        raise CheckpointError(f"{into} has a history of its own (epoch {theirs.epoch}); name an empty root", path=into)
    if theirs.root and ours.root and theirs.root != ours.root:
        raise CheckpointError(
            f"{into} is another root already: a job was started there. Name an empty one; or if that job has saved "
            f"nothing, remove {into}/{paths.SIDECAR_DIR} first",
            path=into,
        )
    problems = tuple(each.problem for each in here.found.steps if each.problem is not None)
    if not chosen and problems:
        raise CorruptCheckpointError(f"{here.place.url} has no whole step: {'; '.join(problems)}", path=here.place.url)
    if not chosen:
        raise StepNotFoundError(f"{here.place.url} has no committed step that could be copied", path=here.place.url)
    known = {each.place.name: each for each in there.found.steps}
    left = [each for each in here.found.steps if each not in chosen]
    notes = [f"not copied: step {each.step}, {'damaged' if each.problem else each.state}" for each in left]
    return CopyPlan(
        source=here.place.url,
        target=into,
        steps=tuple(_planned(each, known.get(each.place.name), f"{into}/{each.place.name}") for each in chosen),
        ancestry=ours if ours.epoch else None,
        notes=(*notes, *(f"not copied: {note}" for note in here.found.notes)),
        problems=problems,
    )


def _is_in_use(root: _Root) -> bool:
    return bool(root.steps) or root.ancestry.epoch > 0


def _single(here: _Root, there: _Root, url: str, as_step: int | None, adopted: AdoptedAs | None) -> CopyPlan:
    chosen = [each for each in here.found.steps if each.place.url == url]
    _check_single(chosen, url)
    (step,) = chosen
    into, number = there.place.url, step.step if as_step is None else as_step
    name = there.found.names.name_of(number) if there.steps else step.place.name if as_step is None else None
    target = f"{into}/{name or here.found.names.name_of(number)}"
    known = {each.place.url: each for each in there.found.steps}
    adoption, there_already = None, known.get(target)
    if adopted is not None and there_already is not None and _is_adopted(there, there_already, step, adopted):
        planned = replace(_made(step, target), act="skip", reason="the target has this save")
    elif adopted is None:
        if number != step.step:
            raise CheckpointError(
                f"step {step.step} is not copied as step {number}: its records name its number; give it a new identity "
                "with `--as newest` or `--as history`",
                step=step.step,
                path=into,
            )
        planned = _planned(step, there_already, target)
        if planned.act == "copy":
            _require_same_run(here, there, step)
    else:
        saves = [each.identity for each in there.steps]
        stock = [each.step for each in there.steps if each.save_id is None]
        adoption = plan_adoption(into, there.ancestry, saves, stock, number, adopted)
        planned = _planned(step, there_already, target)
    return CopyPlan(
        source=url,
        target=into,
        steps=(planned,),
        ancestry=None,
        notes=() if adopted is None else _adopted_notes(planned, into, adopted),
        adoption=adoption,
    )


def _require_same_run(here: _Root, there: _Root, step: DurableStep) -> None:
    """Raises `CheckpointError` if a step would be ordered among the steps of another run."""
    if not _is_in_use(there):
        return
    shared = here.shares_saves_with(there)
    if shared >= 0 and step.identity.epoch <= max(shared, 0) and not there.ancestry.superseded(step.identity):
        return
    into, steps = there.place.url, ", ".join(str(each.step) for each in there.steps[-5:])
    what = f"steps of another run ({steps})" if there.steps else f"a run of its own (epoch {there.ancestry.epoch})"
    raise CheckpointError(
        f"step {step.step} is not copied: {into} has {what}. Without a new identity the next restart could take "
        f"step {step.step} for the newest, and the save after it would supersede them. Choose `--as newest` (the next "
        "restart takes it) or `--as history` (no restart takes it unasked), with `--as-step N`, or name an empty root",
        step=step.step,
        path=into,
    )


def _adopted_notes(planned: CopyStep, into: str, adopted: AdoptedAs) -> tuple[str, ...]:
    unsigned = f"{planned.target} is not signed: it has a new identity; sign it again"
    signed = () if paths.SIGNATURE not in planned.sizes else (unsigned,)
    return (*signed, *_order_notes(into, paths.step_of_name(planned.target.rpartition("/")[2]) or 0, adopted))


def _order_notes(into: str, step: int, adopted: AdoptedAs) -> tuple[str, ...]:
    if adopted == "newest":
        note = f"the next restart of {into} takes step {step}; the next durable save of a running job is refused"
        return (note,)
    return (
        f"no restart of {into} takes step {step} unasked; a run with a limit of steps deletes it first, as the oldest: "
        f"`{command_line('pin', into, step)}` keeps it",
    )


def _check_single(chosen: Sequence[DurableStep], url: str) -> None:
    if not chosen:
        raise StepNotFoundError(f"{url} is not a step of a root: its name is not a step's; copy it as files", path=url)
    (step,) = chosen
    if step.problem is not None:
        raise CorruptCheckpointError(f"{url} is damaged and is not copied: {step.problem}", path=url)
    if step.state == "unfinished":
        raise StepNotFoundError(f"{url} was never committed; it has no step to copy", path=url)


def _follows(ancestry: Ancestry, older: Ancestry) -> bool:
    """Whether `older` may be an earlier state of the same history: what it abandoned is still abandoned."""
    return older.epoch < ancestry.epoch and all(
        any(each.epoch >= before.epoch and each.covers(before) for each in ancestry.rollbacks)
        for before in older.rollbacks
    )


def _is_adopted(root: _Root, there: DurableStep, step: DurableStep, adopted: AdoptedAs) -> bool:
    """Whether a step of the target is this save, which an earlier run of the same copy has given its new identity."""
    stamp, saves = stamp_of(step.place), [each.identity for each in root.steps]
    at_end = there.identity == (max(saves) if adopted == "newest" else min(saves))
    return at_end and there.state == "committed" and stamp is not None and stamp_of(there.place) == stamp


def _made(each: DurableStep, target: str) -> CopyStep:
    return CopyStep(
        step=each.step,
        source=each.place.url,
        target=target,
        save_id=each.save_id,
        sizes=sizes_of(each.place),
        stamp=stamp_of(each.place),
        act="copy",
    )


def _planned(each: DurableStep, there: DurableStep | None, target: str) -> CopyStep:
    made = _made(each, target)
    if there is None or there.state == "unfinished":
        return made
    same = made.stamp is not None and stamp_of(there.place) == made.stamp
    if not same or there.save_id != each.save_id or there.state == "damaged":
        raise CheckpointError(
            f"{made.target} exists already, and is not known to be the same save; move it away, or name another root",
            step=each.step,
            path=made.target,
        )
    return replace(made, act="skip", reason="the target has this save")


def sizes_of(place: Place) -> dict[str, int]:
    """The objects of a step and their bytes."""
    return {key: size for key, size in sizes_below(place).items() if key != JOURNAL}


def stamp_of(place: Place) -> str | None:
    """The digest of Orbax's metadata of a step; None where it has none."""
    data = place.read(STEP_METADATA)
    return None if data is None else digest_of(data)
