"""`copy`: steps from one root to another, between disks and buckets; each is proven where it arrives, marker last."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from ckptkit import clock, layout
from ckptkit.durable import EpochRecords
from ckptkit.durable.epochs import Ancestry
from ckptkit.durable.leases import Lease
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError, StoreError, StoreFullError
from ckptkit.inspection.directories import STEP_METADATA, item_kind, step_items
from ckptkit.inspection.places import Place, nothing_at
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.steps import DurableStep, durable_steps
from ckptkit.manifest import SaveId, digest_of
from ckptkit.store import open_store
from ckptkit.store.local import sync_directory
from ckptkit.store.roots import is_remote, root_url
from ckptkit.upkeep.objects import copy_object, digest_of_object
from ckptkit.verification.durable import prove_written
from ckptkit.verification.pool import Limits

Act = Literal["copy", "skip", "leave"]
Moved = Callable[[int, int], None]  # bytes copied, bytes in all

_PART = f"{layout.TEMPORARY}-copy"  # in the name of a step that is on its way, on a disk
_JOURNAL = "_ckptkit_copy.json"  # beside its objects: what has arrived
_JOURNAL_S = 5.0  # between two writes of it
_THREADS = 8
_LEASE_S = 120.0


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
    act: Act
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
        raise nothing_at(url, "there is nothing to copy; check the path")
    whole = not (item_kind(place) is not None or STEP_METADATA in place.names() or layout.COMMIT_MARK in place.names())
    root = url if whole else url.rpartition("/")[0]
    if into == root:
        raise CheckpointError(f"{target} is where the step is; name another root", path=into)
    ancestry = EpochRecords(Place.open(root, timeout_s=timeout_s).store).read()
    found = durable_steps(Place.open(root, timeout_s=timeout_s), ancestry)
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
    known = {each.place.name: each for each in durable_steps(there, records)}
    return CopyPlan(
        source=url,
        target=into,
        steps=tuple(_planned(each, known.get(each.place.name), into) for each in chosen),
        ancestry=ancestry if whole and ancestry.epoch else None,
        notes=tuple(notes),
    )


def copy(plan: CopyPlan, *, resume: bool = False, timeout_s: float = 20.0, progress: Moved | None = None) -> CopyPlan:
    """Copies what the plan says, oldest first; gives the plan as it was carried out.

    A step is at the target whole and proven, or not at all: its objects first, then the proof (of ours, every cell by
    the digest of when it was saved; of stock Orbax and of small files, each object against what was read), then the
    mark of its commit. It is leased while it is read, where the source is a root of ours, so a running job does not
    prune it. The epoch records of a root go first, so that what was abandoned stays so.

    What is interrupted leaves no step; `resume` goes on where it stopped, without it the step is begun anew. Cost:
    every byte is read from the source once and from the target once; 128 MiB are held, and what the proof holds.

    Raises `CorruptCheckpointError` where the source is damaged (nothing of that step is left at the target),
    `StoreFullError` before anything is written, `StoreError`.
    """
    _check_room(plan)
    target = open_store(plan.target, deadline_s=timeout_s)
    if not is_remote(plan.target):
        os.makedirs(plan.target, exist_ok=True)
    if plan.ancestry is not None:
        _copy_records(plan.ancestry, EpochRecords(target))
    done, notes, total, before = [], list(plan.notes), plan.copied_bytes, 0
    for each in plan.steps:
        if each.act == "copy":
            with _leased(each, timeout_s, notes) as kept:
                if kept:
                    _Copying(each, timeout_s, _shifted(progress, before, total)).run(resume=resume)
                else:
                    each = replace(each, act="leave", reason="its job is deleting it")
            before += each.stored_bytes
        done.append(each)
    return replace(plan, done=True, steps=tuple(done), notes=tuple(notes))


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
        sizes={key: size for key, size in each.place.sizes().items() if key != _JOURNAL},
        stamp=_stamp(each.place),
        act="copy",
    )
    if there is None or there.state == "unfinished":
        return made
    same = made.stamp is not None and _stamp(there.place) == made.stamp
    if not same or there.save_id != each.save_id or there.state == "damaged":
        raise CheckpointError(
            f"{made.target} is there already, and is not known to be the same save; move it away, or name another root",
            step=each.step,
            path=made.target,
        )
    return replace(made, act="skip", reason="the target has this save")


def _stamp(place: Place) -> str | None:
    data = place.read(STEP_METADATA)
    return None if data is None else digest_of(data)


def _check_room(plan: CopyPlan) -> None:
    if is_remote(plan.target):
        return
    above = plan.target
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    free = shutil.disk_usage(above).free
    if plan.copied_bytes > free:
        raise StoreFullError(
            f"{above} has {free} bytes free, and {plan.copied_bytes} are needed; nothing was written", path=plan.target
        )


def _copy_records(ancestry: Ancestry, records: EpochRecords) -> None:
    if records.read() == ancestry:
        return
    with suppress(FileExistsError):  # an earlier run of this copy, or another, which would have said the same
        records.write(ancestry)
    if records.read() != ancestry:
        raise CheckpointError("a run has begun at the target meanwhile; nothing was copied")


@contextmanager
def _leased(each: CopyStep, timeout_s: float, notes: list[str]) -> Iterator[bool]:
    """Keeps the source from being pruned; gives False where it is being deleted already."""
    root = each.source.rpartition("/")[0]
    lease = None
    if f"{layout.SIDECAR_DIR}/" in Place.open(root, timeout_s=timeout_s).names():
        try:
            lease = Lease(open_store(root, deadline_s=timeout_s), each.step, lease_s=_LEASE_S)
        except StoreError as error:
            notes.append(f"step {each.step} could not be leased, a running job might prune it meanwhile: {error}")
    try:
        yield lease is None or lease.granted()
    finally:
        if lease is not None:
            lease.release()


def _shifted(progress: Moved | None, before: int, total: int) -> Moved | None:
    return None if progress is None else lambda moved, _: progress(before + moved, total)


@final
class _Copying:
    """One step on its way. On a disk it has a temporary name; in a bucket it is no step without its mark."""

    def __init__(self, step: CopyStep, timeout_s: float, progress: Moved | None):
        self._step = step
        self._place = step.target if is_remote(step.target) else step.target + _PART
        self._store = open_store(self._place, deadline_s=timeout_s)
        self._timeout_s = timeout_s
        self._progress = progress
        self._arrived: dict[str, tuple[int, str]] = {}
        self._written_s = clock.monotonic_s()
        self._lock = threading.Lock()

    def run(self, *, resume: bool) -> None:
        """Copies, proves, commits."""
        self._begin(resume)
        keys = [key for key in self._step.sizes if key not in self._arrived and key != layout.COMMIT_MARK]
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-copy")
        try:
            for _ in pool.map(self._copy, keys):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with suppress(CheckpointError, OSError):
                self._write_journal()
            raise
        pool.shutdown()
        self._write_journal()
        try:
            self._prove()
        except CorruptCheckpointError:
            self._remove()
            raise
        self._commit()

    def _begin(self, resume: bool) -> None:
        names = self._store.list("")
        if not names:
            self._write_journal()
            return
        journal = self._journal()
        if journal is None and is_remote(self._place):
            raise CheckpointError(
                f"{self._place} holds an unfinished step that is no copy; delete it, or name another root",
                path=self._place,
            )
        if resume and journal is not None and journal["source"] == self._described():
            self._arrived = {key: (size, digest) for key, (size, digest) in journal["objects"].items()}
            return
        self._remove()
        self._write_journal()

    def _copy(self, key: str) -> None:
        size, digest = copy_object(f"{self._step.source}/{key}", f"{self._place}/{key}")
        with self._lock:
            self._arrived[key] = size, digest
            if self._progress is not None:
                self._progress(sum(each for each, _ in self._arrived.values()), self._step.stored_bytes)
            due = clock.monotonic_s() - self._written_s > _JOURNAL_S
            if due:
                self._write_journal()

    def _prove(self) -> None:
        """Every cell of ours by its own digest; every object that no digest of ours covers, against what was read."""
        parent, _, name = self._place.rpartition("/")
        place = Place.open(parent, timeout_s=self._timeout_s).below(name)
        (proof,) = prove_written(place, self._step.step, Limits(), [], timeout_s=self._timeout_s) or (None,)
        if proof is None or proof.findings:
            what = "it changed" if proof is None else proof.findings[0].problem
            raise CorruptCheckpointError(
                f"{self._step.source} is damaged, or was damaged on the way, and is not copied: {what}",
                step=self._step.step,
                path=self._step.source,
            )
        covered = proof.state == "proven"
        keys = [key for key in self._arrived if not (covered and "d" in key.split("/")[:-1])]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-copy") as pool:
            there = pool.map(lambda key: digest_of_object(f"{self._place}/{key}"), keys)
            for key, found in zip(keys, there, strict=True):
                if found != self._arrived[key]:
                    what = f"{self._place}/{key} is not what was read of {self._step.source}; run it again"
                    raise CorruptCheckpointError(what, path=self._place)

    def _commit(self) -> None:
        store, place = self._store, Place.open(self._place, timeout_s=self._timeout_s)
        text = f"Checkpoint commit was successful to {self._step.target}".encode()
        marked = layout.COMMIT_MARK in self._step.sizes
        if marked:  # the same save: its mark says so
            text = open_store(self._step.source, deadline_s=self._timeout_s).get(layout.COMMIT_MARK)
        if is_remote(self._place):
            for item in step_items(place):  # a disk's items of stock Orbax have none
                if f"{item}/{layout.COMMIT_MARK}" not in self._arrived:
                    store.put(f"{item}/{layout.COMMIT_MARK}", text)
            store.delete(_JOURNAL)
            store.put(layout.COMMIT_MARK, text, mode="create")
            return
        store.delete(_JOURNAL)
        if marked:
            store.put(layout.COMMIT_MARK, text)
        _sync_below(self._place)
        try:
            os.rename(self._place, self._step.target)
        except OSError as error:
            raise CheckpointError(f"{self._step.target} was made meanwhile", path=self._step.target) from error
        sync_directory(os.path.dirname(self._step.target))

    def _remove(self) -> None:
        if is_remote(self._place):
            self._store.delete_many(self._store.list_all(""))
        else:
            shutil.rmtree(self._place, ignore_errors=True)

    def _described(self) -> dict[str, Any]:
        """The source as it was when the copy began: what arrived of another one is of no use."""
        save = None if self._step.save_id is None else asdict(self._step.save_id)
        return {"url": self._step.source, "save": save, "stamp": self._step.stamp, "sizes": dict(self._step.sizes)}

    def _journal(self) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            found = json.loads(self._store.get(_JOURNAL))
            return {"source": found["source"], "objects": dict(found["objects"])}
        return None

    def _write_journal(self) -> None:
        self._written_s = clock.monotonic_s()
        record = {"source": self._described(), "objects": self._arrived}
        self._store.put(_JOURNAL, json.dumps(record).encode())


def _sync_below(path: str) -> None:
    for directory, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(directory)
