"""`copy`: steps from one root to another, between disks and buckets. Each is verified there before its marker."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

import xxhash

from ckptkit.durable.commit import commit_mark, intents
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import Lease, WriterClaim
from ckptkit.durable.lifecycle.places import Place, step_items
from ckptkit.durable.lifecycle.root_record import certificate_key, certified_saves, shield_records
from ckptkit.durable.sidecars import marker_text
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError, StoreError, store_error
from ckptkit.formats.ranges import open_ranges
from ckptkit.model import paths
from ckptkit.store import Store, open_store, put_new
from ckptkit.store.backends import properties_of
from ckptkit.store.local import (
    make_durable,
    remove_empty,
    remove_unfinished_puts,
    require_free,
    sync_directory,
    sync_tree,
)
from ckptkit.store.quarantine import alone_at
from ckptkit.store.remote import RemoteStore, forget_listings
from ckptkit.store.retry import retried
from ckptkit.upkeep.adoption import Adoption, restamp_sidecars
from ckptkit.upkeep.copy_planning import JOURNAL, CopyPlan, CopyStep, sizes_of, stamp_of
from ckptkit.util import clock
from ckptkit.verification.durable import prove_written
from ckptkit.verification.pool import Limits

Moved = Callable[[int, int], None]  # bytes copied, bytes in all

_PART = f"{paths.TEMPORARY}-copy"  # in the name of a step that is being copied, on a disk
_JOURNAL_S = 5.0  # between two writes of it
_THREADS = 8
_LEASE_S = 120.0
_DELETED = "deleted meanwhile"


def copy(plan: CopyPlan, *, resume: bool = False, timeout_s: float = 20.0, progress: Moved | None = None) -> CopyPlan:
    """Copies the steps of the plan, oldest first. Returns the plan as it was carried out.

    The target holds a complete, verified step or no step. Its objects are copied first, then verified, then its commit
    marker is written. Cells of ckptkit are compared with the digests of the save; objects of stock Orbax and small
    files with the bytes that were read. In a root of ckptkit the step is leased while it is read, so that a running job
    does not prune it. The epoch records of a root, or the claim of a new epoch (`--as newest`), are written when the
    first step is verified, before its mark: abandoned steps stay abandoned, and a refused copy changes nothing.

    An interrupted copy leaves no step; `resume` continues where it stopped, without it the copy begins again. Cost:
    every byte is read from the source once and from the target once; 128 MiB are held, and the verification's memory.

    Raises `CorruptCheckpointError` where the source is damaged: nothing of that step is left at the target, and the
    other steps are copied first. Raises `StoreFullError` before anything is written, `StoreError`.
    """
    _check_room(plan)
    target = open_store(plan.target, deadline_s=timeout_s)
    if properties_of(plan.target).file_system:
        make_durable(plan.target)
    done, notes, total, before = [], list(plan.notes), plan.copied_bytes, 0
    damaged: list[CorruptCheckpointError] = []
    with _with_notes(done, plan.problems, damaged), _leased(plan, timeout_s, notes) as kept:
        shield_records(target)
        records, left = _Records(plan, target), _names_of_leftovers(target)
        for each in plan.steps:
            if each.act == "skip":
                _drop_leftovers(each, target, left, timeout_s)
            if each.act == "copy":
                copying = _Copying(each, plan.adoption, records, timeout_s, _shifted(progress, before, total))
                try:
                    why = copying.run(resume=resume) if each.step in kept else "its job is deleting it"
                except CorruptCheckpointError as error:
                    damaged.append(error)
                    continue
                if why is not None and each.source == plan.source:
                    raise StepNotFoundError(f"{each.source}: {why}; nothing was copied", path=each.source)
                each = each if why is None else replace(each, act="leave", reason=why)
                before += each.stored_bytes
            done.append(each)
        if done:
            records.write()
            _copy_certificates(plan, done, target, timeout_s)
        for error in damaged:
            raise error
    return replace(plan, done=True, steps=tuple(done), notes=tuple(notes))


@contextmanager
def _with_notes(
    done: Sequence[CopyStep], problems: Sequence[str], damaged: Sequence[CorruptCheckpointError]
) -> Iterator[None]:
    """Adds notes to the error that ends the work: the other steps that are damaged, and the steps that were copied."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        for problem in (*problems, *(each for each in damaged if each is not error)):
            error.add_note(f"damaged: {problem}")
        if copied := [str(each.step) for each in done if each.act == "copy"]:
            error.add_note(f"copied and proven: {'step' if len(copied) == 1 else 'steps'} {', '.join(copied)}")
        raise


def _check_room(plan: CopyPlan) -> None:
    if not properties_of(plan.target).file_system:
        return
    above = plan.target
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    require_free(above, plan.copied_bytes, target=plan.target)


@final
class _Records:
    """The epoch records that belong to the copied steps. They fence off a running job of the target, so they are
    written late: when the first step has arrived and is verified, before its mark.

    Raises `CheckpointError` where a run has begun since the plan was made, at once and in `write`.
    """

    def __init__(self, plan: CopyPlan, target: Store):
        self._plan, self._target = plan, EpochRecords(target)
        self._written = False
        if plan.adoption is not None:
            self._target.advance(plan.adoption.before, None)

    def write(self) -> None:
        """Writes them, once."""
        if self._written:
            return
        if self._plan.adoption is not None:
            self._target.advance(self._plan.adoption.before, self._plan.adoption.after)
        if self._plan.ancestry is not None:
            self._copy(self._plan.ancestry, EpochRecords(open_store(self._plan.source)))
        self._written = True

    def _copy(self, ancestry: Ancestry, source: EpochRecords) -> None:
        if self._target.read() != ancestry or source.read() == ancestry:  # or what an interrupted copy lacks of it
            with suppress(FileExistsError):  # an earlier run of this copy, or another with the same content
                source.copy_newest(self._target)
        if self._target.read() != ancestry:
            raise CheckpointError("a run has begun at the source or the target meanwhile; run it again")


@contextmanager
def _leased(plan: CopyPlan, timeout_s: float, notes: list[str]) -> Iterator[frozenset[int]]:
    """Leases all steps of the plan at once, because a copy may take hours; gives those that are kept."""
    steps = [each.step for each in plan.steps if each.act == "copy"]
    root = plan.steps[0].source.rpartition("/")[0]
    with ExitStack() as held:
        kept = frozenset(steps)
        if steps and f"{paths.SIDECAR_DIR}/" in Place.open(root, timeout_s=timeout_s).names():
            try:
                kept = held.enter_context(
                    Lease(open_store(root, deadline_s=timeout_s), *steps, lease_s=_LEASE_S)
                ).kept()
            except StoreError as error:
                notes.append(f"the steps could not be leased, a running job might prune them meanwhile: {error}")
        yield kept


def _copy_certificates(plan: CopyPlan, done: Sequence[CopyStep], target: Store, timeout_s: float) -> None:
    """Certified saves are certified in the copy of a root, which has their bytes and their names."""
    if plan.ancestry is not None:
        source = open_store(plan.source, deadline_s=timeout_s)
        there = {each.save_id for each in done if each.act != "leave"}
        for save in (certified_saves(source) & there) - certified_saves(target):
            target.put(certificate_key(save), b"")


def _names_of_leftovers(root: Store) -> set[str]:
    """The steps with an intent and the names of the claims, in the records of a root in a bucket or on a mount: of
    copies in progress, and of killed ones. Cost: two listings. Raises `StoreError`."""
    if root.properties.atomic_rename:
        return set()
    claims = set(root.list(paths.LEASES_DIR))
    return {of[1] for _, each in intents(root) if (of := paths.intent_of_name(each)) is not None} | claims


def _drop_leftovers(step: CopyStep, root: Store, left_of: Collection[str], timeout_s: float) -> None:
    """Deletes what a copy that was killed after its commit has left of itself: a lock, or its journal, intent and
    claim. Where another process makes the step now, these are not touched. Raises `StoreError`."""
    name = step.target.rpartition("/")[2]
    try:
        if root.properties.atomic_rename:
            if os.path.lexists(f"{root.url}/{_lock_name(name)}"):
                with alone_at(Path(root.url), _lock_name(name), step.target), suppress(FileNotFoundError):
                    os.unlink(f"{root.url}/{_lock_name(name)}")
            return
        open_store(step.target, deadline_s=timeout_s).delete(JOURNAL)
        if {name, paths.claim_name(name)} & set(left_of):
            with WriterClaim(root, name):
                root.delete_many(_intents_of_copies(root, name))
    except StoreError:
        raise
    except CheckpointError:  # another process works there
        return


def _intents_of_copies(root: Store, name: str) -> list[str]:
    """The keys of the intents of copies of a step: one for each that was killed, and that of one in progress."""
    found = [(each, paths.intent_of_name(each)) for _, each in intents(root)]
    return [f"{paths.INTENTS_DIR}/{each}" for each, of in found if of == (0, name) and each != paths.going_name(name)]


def _lock_name(name: str) -> str:
    return f".{name}{_PART}.lock"


def _shifted(progress: Moved | None, before: int, total: int) -> Moved | None:
    return None if progress is None else lambda moved, _: progress(before + moved, total)


@final
class _Copying:
    """One step that is being copied. On a disk it has a temporary name; in a bucket it is not a step without its
    marker."""

    def __init__(
        self,
        step: CopyStep,
        adoption: Adoption | None,
        records: _Records,
        timeout_s: float,
        progress: Moved | None,
    ):
        self._step, self._adoption, self._records = step, adoption, records
        self._root, _, self._name = step.target.rpartition("/")
        renamed = properties_of(step.target).atomic_rename
        self._place = step.target + _PART if renamed else step.target
        self._store = open_store(self._place, deadline_s=timeout_s)
        self._intent = f"{paths.INTENTS_DIR}/{paths.intent_name(self._name, 0, uuid.uuid4().hex)}"
        self._timeout_s = timeout_s
        self._progress = progress
        self._arrived: dict[str, tuple[int, str]] = {}
        self._arrived_bytes = 0
        self._written_s = clock.monotonic_s()
        self._lock = threading.Lock()

    def run(self, *, resume: bool) -> str | None:
        """Copies, verifies, commits. Returns None, or why the step is left: it was deleted meanwhile.

        One process at a time: a second one would delete the files that the first has copied, or the first those that
        the second is about to commit. On a disk a lock ensures that, in a bucket a claim. If a run saves this step in
        the target, it takes the intent, and the copy fails.
        """
        if not self._is_there():
            return _DELETED
        try:
            if self._store.properties.atomic_rename:
                self._run_on_disk(resume)
            else:
                self._run_in_bucket(resume)
        except (CheckpointError, FileNotFoundError):
            if self._is_there():
                raise
            return _DELETED
        return None

    def _is_there(self) -> bool:
        return bool(Place.open(self._step.source, timeout_s=self._timeout_s).names())

    def _run_on_disk(self, resume: bool) -> None:
        lock = _lock_name(self._name)
        with alone_at(Path(self._root), lock, self._step.target):
            try:
                self._run(resume)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(f"{self._root}/{lock}")

    def _run_in_bucket(self, resume: bool) -> None:
        root = open_store(self._root, deadline_s=self._timeout_s)
        with WriterClaim(root, self._name) as held:
            self._claim = held
            root.delete_many(_intents_of_copies(root, self._name))  # who has the claim is the only one
            put_new(root, self._intent, self._mark_text())
            try:
                self._run(resume)
            finally:
                with suppress(StoreError):
                    root.delete(self._intent)

    def _run(self, resume: bool) -> None:
        self._begin(resume)
        keys = [key for key in self._step.sizes if key not in self._arrived and self._is_copied(key)]
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-copy")
        try:
            for _ in pool.map(self._copy, keys):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with suppress(CheckpointError, OSError):
                self._write_journal() if self._is_there() else self._remove()
            raise
        pool.shutdown()
        self._write_journal()
        try:
            self._prove()
        except (CorruptCheckpointError, FileNotFoundError):
            self._require_own_place()  # the files of another writer do not show damage of the source
            self._remove()
            raise
        if self._adoption is not None:
            self._restamp(self._adoption)
        self._records.write()
        self._commit()

    def _restamp(self, adoption: Adoption) -> None:
        self._arrived = {key: each for key, each in self._arrived.items() if paths.SIDECAR_DIR not in key.split("/")}
        self._write_journal()  # a copy that is resumed reads the sidecars again: here they change
        items = step_items(Place.open(self._place, timeout_s=self._timeout_s))
        restamp_sidecars(self._store, items, adoption.save_id)

    def _begin(self, resume: bool) -> None:
        names = self._store.list("")
        if not names:
            self._write_journal()
            return
        journal = self._journal()
        if journal is None and not self._store.properties.atomic_rename:
            raise CheckpointError(
                f"{self._place} holds an unfinished step that is not a copy: a save in flight, or interrupted. Delete "
                "it when no job saves there, or name another root",
                path=self._place,
            )
        if resume and journal is not None and journal["source"] == self._described():
            self._arrived = {key: (size, digest) for key, (size, digest) in journal["objects"].items()}
            self._arrived_bytes = sum(size for size, _ in self._arrived.values())
            return
        self._remove()
        self._write_journal()

    def _is_copied(self, key: str) -> bool:
        """The mark is written last. A signature does not cover a new identity."""
        return key != paths.COMMIT_MARK and not (self._adoption is not None and key == paths.SIGNATURE)

    def _copy(self, key: str) -> None:
        size, digest = copy_object(f"{self._step.source}/{key}", f"{self._place}/{key}")
        with self._lock:
            self._arrived[key] = size, digest
            self._arrived_bytes += size  # a running sum: a step may have 100,000 objects
            if self._progress is not None:
                self._progress(self._arrived_bytes, self._step.stored_bytes)
            due = clock.monotonic_s() - self._written_s > _JOURNAL_S
            if due:
                self._write_journal()

    def _prove(self) -> None:
        """Compares our cells with their digests, and objects without such digests with the bytes that were read."""
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
        if not covered:
            self._require_same_source()
        keys = [key for key in self._arrived if not (covered and "d" in key.split("/")[:-1])]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-copy") as pool:
            there = pool.map(lambda key: digest_of_object(f"{self._place}/{key}"), keys)
            for key, found in zip(keys, there, strict=True):
                if found != self._arrived[key]:
                    what = f"{self._place}/{key} is not what was read of {self._step.source}; run it again"
                    raise CorruptCheckpointError(what, path=self._place)

    def _require_same_source(self) -> None:
        """Steps of stock Orbax have no digests, which would show that a part belongs to another save."""
        place = Place.open(self._step.source, timeout_s=self._timeout_s)
        if stamp_of(place) != self._step.stamp or sizes_of(place) != self._step.sizes:
            self._remove()
            raise CheckpointError(
                f"{self._step.source} was replaced, or changed, while it was copied, and nothing of it is kept; run it "
                "again",
                step=self._step.step,
                path=self._step.source,
            )

    def _mark_text(self) -> bytes:
        """The mark of the step: that of the source, which names the same save, or one with the new identity."""
        if self._adoption is not None:
            return marker_text(self._step.target, self._adoption.save_id).encode()
        if paths.COMMIT_MARK in self._step.sizes:
            return open_store(self._step.source, deadline_s=self._timeout_s).get(paths.COMMIT_MARK)
        return marker_text(self._step.target).encode()

    def _commit(self) -> None:
        store, text = self._store, self._mark_text()
        if not store.properties.atomic_rename:
            for item in step_items(Place.open(self._place, timeout_s=self._timeout_s)):
                if f"{item}/{paths.COMMIT_MARK}" not in self._arrived:  # a disk's items of stock Orbax have none
                    store.put(f"{item}/{paths.COMMIT_MARK}", text)
            if store.properties.file_system:
                remove_unfinished_puts(self._place)
                sync_tree(self._place)
            self._put_mark(text)
            store.delete(JOURNAL)  # last: without it and without a mark, nobody could tell what the objects are
            return
        store.delete(JOURNAL)
        if paths.COMMIT_MARK in self._step.sizes or self._adoption is not None:
            store.put(paths.COMMIT_MARK, text)
        remove_unfinished_puts(self._place)  # of an interrupted copy that is continued
        sync_tree(self._place)
        try:
            os.rename(self._place, self._step.target)
        except OSError as error:
            raise CheckpointError(f"{self._step.target} was made meanwhile", path=self._step.target) from error
        sync_directory(self._root)

    def _put_mark(self, text: bytes) -> None:
        """Commits in a bucket: only while this process has the claim, and no run has taken the intent away."""
        if self._claim.lost:
            raise self._taken()
        root = open_store(self._root, deadline_s=self._timeout_s)
        try:
            commit_mark(root, self._intent, f"{self._name}/{paths.COMMIT_MARK}", text)
        except (FileNotFoundError, FileExistsError) as error:
            raise self._taken() from error
        forget_listings(self._root)  # what this process remembers of them is older than the step

    def _taken(self) -> CheckpointError:
        text = f"{self._step.target} is not committed: a run, or another copy, has begun to write it"
        return CheckpointError(text, path=self._place)

    def _is_own_place(self) -> bool:
        """Whether nobody else writes there: on a disk nobody can; in a bucket, while claim and intent are there."""
        if self._store.properties.atomic_rename:
            return True
        root = open_store(self._root, deadline_s=self._timeout_s)
        return not self._claim.lost and root.stat(self._intent) is not None

    def _require_own_place(self) -> None:
        if not self._is_own_place():
            raise self._taken()

    def _remove(self) -> None:
        """Removes what has arrived; in a bucket only while it cannot be what another process writes."""
        if self._store.properties.atomic_rename:
            shutil.rmtree(self._place, ignore_errors=True)
            return
        if not self._is_own_place():
            return
        found = self._store.stat_all("")
        if paths.COMMIT_MARK not in found:
            self._store.delete_unchanged(found)
            if self._store.properties.file_system:
                remove_empty(self._place)

    def _described(self) -> dict[str, Any]:
        """The state of the source when the copy began: objects of another state are of no use."""
        save = None if self._step.save_id is None else asdict(self._step.save_id)
        return {"url": self._step.source, "save": save, "stamp": self._step.stamp, "sizes": dict(self._step.sizes)}

    def _journal(self) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            found = json.loads(self._store.get(JOURNAL))
            return {"source": found["source"], "objects": dict(found["objects"])}
        return None

    def _write_journal(self) -> None:
        self._written_s = clock.monotonic_s()
        record = {"source": self._described(), "objects": self._arrived}
        self._store.put(JOURNAL, json.dumps(record).encode())


PART_BYTES = 8 << 20  # held of each object in transfer
_TRIES = 4  # of an object at least, where the store fails in a way that may pass: a large one takes long


def copy_object(source: str, target: str) -> tuple[int, str]:
    """Copies one object over the target's. Returns its size and the digest (xxh3-128) of the bytes that were read.

    Holds at most two parts. Nothing is synced. Raises `StepNotFoundError` if the source no longer exists, `StoreError`.
    """

    def attempt() -> tuple[int, str]:
        digest = xxhash.xxh3_128()
        size = _write(target, _read(source, digest))
        return size, digest.hexdigest()

    return retried(attempt, tries_min=_TRIES)


def digest_of_object(url: str, new_digest: Callable[[], Any] = xxhash.xxh3_128) -> tuple[int, str]:
    """The bytes and the digest of an object, read in parts. Raises what `copy_object` does."""

    def attempt() -> tuple[int, str]:
        digest = new_digest()
        return sum(len(part) for part in _read(url, digest)), digest.hexdigest()

    return retried(attempt, tries_min=_TRIES)


def _read(url: str, digest: Any) -> Iterator[bytes]:
    ranges = open_ranges(url)
    try:
        for start in range(0, ranges.size, PART_BYTES):
            part = ranges.read(start, min(PART_BYTES, ranges.size - start))
            digest.update(part)
            yield part
    finally:
        ranges.close()


def _write(url: str, parts: Iterator[bytes]) -> int:
    written = 0

    def counted() -> Iterator[bytes]:
        nonlocal written
        for part in parts:
            written += len(part)
            yield part

    if not properties_of(url).file_system:
        directory, _, name = url.rpartition("/")
        RemoteStore(directory).put_parts(name, counted())
        return written
    try:
        Path(url).parent.mkdir(parents=True, exist_ok=True)
        with open(url, "wb") as file:
            for part in counted():
                file.write(part)
    except CheckpointError:  # of the source
        raise
    except OSError as error:
        raise store_error(error, error.filename or url) from error
    return written
