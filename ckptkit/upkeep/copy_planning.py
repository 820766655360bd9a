"""What `copy` would do: the steps of a root, or one of them, against what the target has. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.inspection.directories import item_kind
from ckptkit.inspection.places import Place, no_directory
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import DurableStep, read_root
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId, digest_of
from ckptkit.model.paths import STEP_METADATA
from ckptkit.store.roots import root_url

CopyAction = Literal["copy", "skip", "leave"]

JOURNAL = "_ckptkit_copy.json"  # beside the objects of a step on its way: what has arrived


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
        """Of all its objects."""
        return sum(self.sizes.values())

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "step": self.step,
            "source": self.source,
            "target": self.target,
            "save_id": None if self.save_id is None else asdict(self.save_id),
            "bytes": self.stored_bytes,
            "objects": len(self.sizes),
            "act": self.act,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The steps in the order in which they are copied. `ancestry`: the rollbacks that come along with a whole root."""

    source: str
    target: str
    steps: tuple[CopyStep, ...]
    ancestry: Ancestry | None
    done: bool = False
    notes: tuple[str, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """Of the steps that are, or were, to be copied."""
        return sum(each.stored_bytes for each in self.steps if each.act == "copy")

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": FORMAT,
            "source": self.source,
            "target": self.target,
            "done": self.done,
            "bytes": self.copied_bytes,
            "steps": [each.to_json() for each in self.steps],
            "notes": self.notes,
        }


def plan_copy(source: str, target: str, *, timeout_s: float = 20.0) -> CopyPlan:
    """What `copy` would do; nothing is written.

    `source` is a durable root (every committed step of its branch, and what its rollbacks abandoned) or one step in a
    root, also one that was abandoned; `target` is a root, where steps keep their names. A target that has the same save
    already is skipped. Cost: a listing per directory of both, and small reads.

    Raises `StepNotFoundError` where nothing is there, `CheckpointError` where the target has another save of a step's
    number, or a history of its own, `CorruptCheckpointError` for a single step that is damaged.
    """
    url, into = root_url(source), root_url(target)
    place = Place.open(url, timeout_s=timeout_s)
    if not place.names():
        raise no_directory(url, "there is nothing to copy; check the path")
    whole = not (item_kind(place) is not None or STEP_METADATA in place.names() or paths.COMMIT_MARK in place.names())
    root = url if whole else url.rpartition("/")[0]
    if into == root:
        raise CheckpointError(f"{target} is where the step is; name another root", path=into)
    ancestry = EpochRecords(Place.open(root, timeout_s=timeout_s).store).read()
    in_root = read_root(Place.open(root, timeout_s=timeout_s), ancestry)
    found = in_root.steps
    chosen = [s for s in found if s.state == "committed"] if whole else [s for s in found if s.place.url == url]
    there = Place.open(into, timeout_s=timeout_s)
    records = EpochRecords(there.store).read()
    notes = [f"not copied: step {s.step}, {s.state}" for s in found if s not in chosen] if whole else []
    if not whole:
        _check_single(chosen, url)
    elif records.epoch and records != ancestry and not _follows(ancestry, records):
        raise CheckpointError(f"{into} has a history of its own (epoch {records.epoch}); name an empty root", path=into)
    if not chosen:
        raise StepNotFoundError(f"{url} has no committed step that could be copied", path=url)
    known = {each.place.name: each for each in read_root(there, records).steps}
    return CopyPlan(
        source=url,
        target=into,
        steps=tuple(_planned(each, known.get(each.place.name), into) for each in chosen),
        ancestry=ancestry if whole and ancestry.epoch else None,
        notes=tuple(notes),
    )


def _check_single(chosen: Sequence[DurableStep], url: str) -> None:
    if not chosen:
        raise StepNotFoundError(f"{url} is no step of a root: its name is no step's; copy it as files", path=url)
    (step,) = chosen
    if step.state == "damaged":
        raise CorruptCheckpointError(f"{url} is damaged and is not copied: {step.problem}", path=url)
    if step.state == "unfinished":
        raise StepNotFoundError(f"{url} was never committed; there is no step to copy", path=url)


def _follows(ancestry: Ancestry, older: Ancestry) -> bool:
    """Whether `older` may be an earlier state of the same history: what it abandoned is still abandoned."""
    return older.epoch < ancestry.epoch and all(
        any(epoch >= e and base <= b for epoch, base in ancestry.rollbacks) for e, b in older.rollbacks
    )


def _planned(each: DurableStep, there: DurableStep | None, into: str) -> CopyStep:
    made = CopyStep(
        step=each.step,
        source=each.place.url,
        target=f"{into}/{each.place.name}",
        save_id=each.save_id,
        sizes=sizes_of(each.place),
        stamp=stamp_of(each.place),
        act="copy",
    )
    if there is None or there.state == "unfinished":
        return made
    same = made.stamp is not None and stamp_of(there.place) == made.stamp
    if not same or there.save_id != each.save_id or there.state == "damaged":
        raise CheckpointError(
            f"{made.target} is there already, and is not known to be the same save; move it away, or name another root",
            step=each.step,
            path=made.target,
        )
    return replace(made, act="skip", reason="the target has this save")


def sizes_of(place: Place) -> dict[str, int]:
    """The objects of a step and their bytes."""
    return {key: size for key, size in place.sizes().items() if key != JOURNAL}


def stamp_of(place: Place) -> str | None:
    """The digest of Orbax's metadata of a step; None where it has none."""
    data = place.read(STEP_METADATA)
    return None if data is None else digest_of(data)
