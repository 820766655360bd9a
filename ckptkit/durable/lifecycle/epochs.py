"""Epoch records: which run saved from which base, so that an abandoned branch can never win.

One small object per run that saved, and a copy of it: `{"epoch": E, "ancestry": [[epoch, base step, epoch of the base,
number of the base], ...], "stock": [[step, epoch], ...], "run": ..., "runs": [[epoch, run], ...], "root": ...,
"digest": ...}`. A save of an epoch before `E` that was made after its base was abandoned when epoch `E` began.
Steps of stock Orbax have no identity of their own. A step that is first seen when epoch `E` begins was written after
the epoch before it, and is recorded for that one. A step that no record names was written since.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.durable.lifecycle.root_record import RootRecord, make_root_record, read_root_record
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreError
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import SaveId, check_names
from ckptkit.store import Store

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Rollback:
    """Epoch `epoch` began from a save of step `step`: the identity `base`, which records of earlier formats lack."""

    epoch: int
    step: int
    base: SaveId | None = None

    def abandons(self, save: SaveId) -> bool:
        """Whether `save` was made after the base, in an epoch before this one."""
        if save.epoch >= self.epoch:
            return False
        return save.step > self.step if self.base is None else save.made > self.base.made

    def covers(self, older: Rollback) -> bool:
        """Whether everything that `older` abandons is abandoned by this, later rollback too."""
        if self.base is None or older.base is None:
            return self.step <= older.step and (self.base is None or self.base.epoch < older.epoch)
        return self.base.made <= older.base.made

    def to_json(self) -> list[int]:
        """The record as plain values: two numbers, or four."""
        base = [] if self.base is None else [self.base.epoch, self.base.number]
        return [self.epoch, self.step, *base]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Rollback:
        """The result of `to_json`; raises ValueError or TypeError for other values."""
        epoch, step, *base = map(int, values)
        if not base:
            return cls(epoch, step)
        of_epoch, number = base
        return cls(epoch, step, SaveId(of_epoch, step, number))


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The history of a root: which run began which epoch, and from which save. `epoch` is the newest epoch that saved.

    The one place for the order of saves: `SaveId` orders those of a branch, `superseded` and `disowned` find the
    saves that are not on it. `identity` is the save that a durable step counts as.
    """

    epoch: int = 0
    rollbacks: tuple[Rollback, ...] = ()
    stock: tuple[tuple[int, int], ...] = ()  # steps of stock Orbax, each with the epoch that it counts for
    runs: tuple[tuple[int, str], ...] = ()  # epochs with the runs that began them; without those of earlier formats
    root: str = ""  # the id of the root; empty in records of earlier formats
    deleted: frozenset[SaveId] = field(default=frozenset(), compare=False)  # by somebody, also on hosts that were away

    @property
    def head(self) -> str:
        """Names the newest record."""
        return f"{self.epoch}-{dict(self.runs).get(self.epoch, '')}"

    def of_stock(self, step: int) -> SaveId:
        """The identity of a durable step that stock Orbax wrote."""
        return SaveId(dict(self.stock).get(step, self.epoch), step, -1)

    def identity(self, step: int, named: SaveId | None) -> SaveId:
        """The save that a durable step counts as, given the save that it names (None: it is of stock Orbax).

        A step of another root, which somebody put here, was not saved on this branch: it counts as older than all that
        was, and it is in no fast tier (`SaveId.of_another_root`).
        """
        if named is None:
            return self.of_stock(step)
        elsewhere = named.root and self.root and named.root != self.root
        return SaveId(0, step, -1, named.run, named.root) if elsewhere else named

    def superseded(self, save: SaveId) -> bool:
        """Whether `save` belongs to a branch that a later epoch abandoned.

        Cost: constant. The step loop asks for each save at each call, and a restart adds a rollback: bases ascend with
        the epochs (`begin`), so the first one of a later epoch decides. Those of earlier formats come before it.
        """
        for at in range(bisect_right(self.rollbacks, save.epoch, key=_epoch_of), len(self.rollbacks)):
            if self.rollbacks[at].abandons(save):
                return True
            if self.rollbacks[at].base is not None:
                return False
        return False

    def may_be_abandoned(self, step: int) -> bool:
        """Whether a damaged durable step, which names no save, may belong to an abandoned branch."""
        return any(step > rollback.step for rollback in self.rollbacks)

    def disowned(self, save: SaveId) -> bool:
        """Whether a save in a fast tier is of no run of this branch. Not for durable steps, which are in the root.

        The run that made it is the one that recorded its epoch here; or it could not record its epoch, and no run has
        recorded one since. A save of an earlier format names no run. One that was deleted stays deleted, and so does
        an older save of its step, which it had replaced.
        """
        if any(gone.step == save.step and save <= gone for gone in self.deleted):
            return True
        if not save.run:
            return False
        if save.root != self.root:
            return True
        known = dict(self.runs).get(save.epoch)
        return known != save.run and (known is not None or save.after != self.head)

    def is_unrecorded(self, save: SaveId) -> bool:
        """Whether the run of a disowned save had recorded its epoch, in a record that is not here: this root was
        replaced by an older copy of it."""
        oldest = self.runs[0][0] if len(self.runs) >= _RUNS_KEPT else 0  # the records of earlier ones were dropped
        of_this_root = bool(save.run) and save.root == self.root and save.epoch >= oldest
        return of_this_root and not save.after and dict(self.runs).get(save.epoch) != save.run

    def begin(self, epoch: int, base: SaveId | None, run: str, stock_steps: Iterable[int] = ()) -> Ancestry:
        """The ancestry once `run` saves in `epoch`, after it restored `base` (None: it restored nothing).

        `stock_steps` are the steps of stock Orbax that are there now.
        """
        rollbacks, runs = self.rollbacks, dict(self.runs)
        if base is not None:
            added = Rollback(epoch, base.step, SaveId(base.epoch, base.step, base.number))
            rollbacks = (*(each for each in rollbacks if not added.covers(each)), added)
            if base.run:  # its run may not have been able to record it
                runs.setdefault(base.epoch, base.run)
        runs[epoch] = run
        stock = tuple((step, self.of_stock(step).epoch) for step in sorted(set(stock_steps)))
        known = tuple(sorted(runs.items())[-_RUNS_KEPT:])
        return Ancestry(epoch, rollbacks, stock, known, self.root, self.deleted)

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        deleted = {"deleted": [save.to_list() for save in sorted(self.deleted)]} if self.deleted else {}
        return {
            "epoch": self.epoch,
            "ancestry": [rollback.to_json() for rollback in self.rollbacks],
            "stock": [list(pair) for pair in self.stock],
            "runs": [list(pair) for pair in self.runs],
            "root": self.root,
            **deleted,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Ancestry:
        """The ancestry of a record; raises ValueError, KeyError or TypeError for what is none."""
        return cls(
            int(record["epoch"]),
            tuple(map(Rollback.from_json, record["ancestry"])),
            tuple((int(step), int(epoch)) for step, epoch in record["stock"]),
            tuple((int(epoch), str(run)) for epoch, run in record.get("runs", ())),
            str(record.get("root", "")),
            frozenset(map(SaveId.from_list, record.get("deleted", ()))),
        )


def _epoch_of(rollback: Rollback) -> int:
    return rollback.epoch


_DELETED_KEPT = 1000  # of the newest saves that were deleted
_RUNS_KEPT = 4096  # of the newest epochs; saves of older ones in a fast tier are not restored
_FIELDS = {"epoch", "ancestry", "stock", "run", "runs", "root"}


def _digest(record: dict[str, Any]) -> str:
    return digest_of(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def _unsealed(data: bytes, epoch: int) -> Ancestry:
    """Raises ValueError, KeyError, TypeError and similar errors if it is not a record, or not that of `epoch`."""
    record = json.loads(data)
    digest = record.pop("digest", None)
    if set(record) - _FIELDS:  # a damaged name would else make it one of those that had no digest yet
        raise ValueError(f"it has fields {sorted(record)}")
    if digest is not None and digest != _digest(record):
        raise ValueError("it does not match its own digest")
    ancestry = Ancestry.from_json(record)
    numbers = [ancestry.epoch, *sum(ancestry.stock, ()), *(epoch for epoch, _ in ancestry.runs)]
    for rollback in ancestry.rollbacks:
        numbers += [max(0, number) for number in rollback.to_json()[2:]] + [rollback.epoch, rollback.step]
    if not all(0 <= number < _NUMBER_MAX for number in numbers):
        raise ValueError("it has numbers that no run has")
    for each in (*(run for _, run in ancestry.runs), ancestry.root):
        check_names(SaveId(0, 0, 0, each))
    if ancestry.epoch != epoch:
        raise ValueError(f"it is of epoch {ancestry.epoch}")
    return ancestry


_NUMBER_MAX = 10**18  # beyond every step: Orbax's names have 18 digits at most


class EpochRecords:
    """The records under one durable root. Reading costs one listing and one small get.

    A record that is damaged or missing is read from its copy; `report` is called about it once.
    """

    def __init__(self, store: Store, report: Callable[[str], None] = lambda problem: None):
        self._store = store
        self._report = report
        self._known: set[str] = set()

    def read(self) -> Ancestry:
        """The newest record; an empty one where nothing was ever saved.

        Raises `CorruptCheckpointError` where neither the record nor its copy can be read.
        """
        ancestry, problems = self._look(stop_at_first=True)
        for problem in problems:
            if str(problem) not in self._known:
                self._known.add(str(problem))
                self._report(f"{problem}; its copy was read")
        return ancestry

    def root_record(self, ancestry: Ancestry, *, create: bool) -> RootRecord:
        """The record of the root, given what `read` returned. With `create` a root without an id gets one, and a record
        that is damaged or missing is written again from the id in the newest epoch record.

        Cost: a small read, or two small requests. Raises `CorruptCheckpointError` where no record has the id.
        """
        try:
            found = read_root_record(self._store)
        except CorruptCheckpointError as error:
            if not ancestry.root:
                raise
            self._report(f"{error}; the newest epoch record has the id")
            if create:
                self._store.delete(paths.ROOT_KEY)
            found = RootRecord()
        if found.id or not create:
            return found if found.id else RootRecord(ancestry.root, not ancestry.root)
        return make_root_record(self._store, earlier=ancestry.epoch > 0 and not ancestry.root, known=ancestry.root)

    def newest_epoch(self) -> int:
        """The newest epoch that a run has begun, from the names of the records; 0 for none. Cost: one listing."""
        return self._newest()[0]

    def is_same_run(self, other: EpochRecords) -> tuple[int, bool]:
        """The newest epoch that both roots have a record of, 0 for none, and whether one run wrote both records.

        Cost: two listings and two small reads. Raises `CorruptCheckpointError` for a damaged record.
        """
        mine, theirs = self._newest()[1], other._newest()[1]
        epoch = max(
            {paths.epoch_of_name(name) or 0 for name in mine} & {paths.epoch_of_name(n) or 0 for n in theirs} | {0}
        )
        if epoch == 0:
            return 0, False
        runs = [json.loads(each._record(epoch)).get("run") for each in (self, other)]
        return epoch, runs[0] is not None and runs[0] == runs[1]

    def copy_newest(self, to: EpochRecords) -> None:
        """Writes the newest record to another root, byte for byte, the id of the root, and which saves were deleted:
        whose runs they are stays known, and no host brings back a deleted save.

        Raises `FileExistsError` where the other root has another record of that epoch.
        """
        root = read_root_record(self._store)
        if root.id:
            make_root_record(to._store, earlier=root.earlier, known=root.id)
        epoch = self.newest_epoch()
        to._claim(epoch, self._record(epoch))
        if deleted := self.read().deleted - to.read().deleted:  # after the claim: a refused copy changes nothing
            to.delete(deleted)

    def _record(self, epoch: int) -> bytes:
        """The record of an epoch, or its copy where the record is damaged or gone."""
        problem: Exception | None = None
        for key in self._keys(epoch):
            try:
                data = self._store.get(key)
                _unsealed(data, epoch)
                return data
            except (FileNotFoundError, *_UNREADABLE) as error:
                problem = error
        path = f"{self._store.url}/{self._keys(epoch)[0]}"
        raise CorruptCheckpointError(f"epoch record {path} cannot be read: {problem}", path=path) from problem

    def check(self) -> tuple[Ancestry, list[CorruptCheckpointError]]:
        """The result or error of `read`, with the damage of the record or its copy. Cost: one more small get."""
        return self._look(stop_at_first=False)

    def mend(self) -> list[str]:
        """Writes the newest record again where it is damaged or gone, and its copy where that is damaged, each from
        the other; gives their keys. Raises `CorruptCheckpointError` where neither can be read."""
        epoch, names = self._newest()
        good: bytes | None = None
        bad: list[str] = []
        for key in self._keys(epoch) if names else ():
            try:
                data = self._store.get(key)
                _unsealed(data, epoch)
                good = good or data
            except FileNotFoundError:
                bad += [key] if key == self._keys(epoch)[0] else []
            except _UNREADABLE:
                bad.append(key)
        if bad and good is None:
            self._look(stop_at_first=True)
        for key in bad:
            assert good is not None
            self._store.put(key, good)
        return bad

    def _look(self, *, stop_at_first: bool) -> tuple[Ancestry, list[CorruptCheckpointError]]:
        listed = self._store.list(paths.EPOCHS_DIR)
        deleted = frozenset(SaveId(*save) for save in map(paths.save_of_deleted, listed) if save is not None)
        epoch, names = _newest_of(listed)
        if not names:
            return Ancestry(root=read_root_record(self._store).id, deleted=deleted), []
        found: Ancestry | None = None
        problems: list[CorruptCheckpointError] = []
        record, copy = self._keys(epoch)
        for key in (record, copy):
            if stop_at_first and found is not None:
                break
            path = f"{self._store.url}/{key}"
            try:
                found = _unsealed(self._store.get(key), epoch) if found is None else found
                if key == copy:
                    _unsealed(self._store.get(key), epoch)
            except FileNotFoundError:
                if key == record:
                    problems.append(CorruptCheckpointError(f"epoch record {path} is gone", path=path))
            except _UNREADABLE as error:
                problems.append(CorruptCheckpointError(f"epoch record {path} cannot be read: {error}", path=path))
        if found is None:
            raise problems[0] from problems[0].__cause__
        return replace(found, root=found.root or read_root_record(self._store).id, deleted=deleted), problems

    def delete(self, saves: Collection[SaveId]) -> None:
        """Records that somebody deleted these saves: hosts that are away now may still hold them. Cost: a small put for
        each, and a listing. Raises `StoreError`."""
        for save in saves:
            self._store.put(_deleted_key(save), b"")
        found = [SaveId(*save) for save in map(paths.save_of_deleted, self._store.list(paths.EPOCHS_DIR)) if save]
        for save in sorted(found)[:-_DELETED_KEPT]:
            self._store.delete(_deleted_key(save))

    def _newest(self) -> tuple[int, list[str]]:
        return _newest_of(self._store.list(paths.EPOCHS_DIR))

    def _keys(self, epoch: int) -> tuple[str, str]:
        return tuple(f"{paths.EPOCHS_DIR}/{name(epoch)}" for name in (paths.epoch_name, paths.epoch_copy_name))  # pyright: ignore[reportReturnType]

    def probe(self) -> None:
        """Writes and deletes a small object: better now than at the first save.

        Raises `StoreError` where the root cannot be written, naming it and what to do.
        """
        key = f"{paths.SIDECAR_DIR}/probe"
        try:
            self._store.put(key, b"")
        except FileNotFoundError as error:
            raise StoreError(
                f"{self._store.url} cannot be written: there is no such bucket; create it, or correct its name",
                path=self._store.url,
            ) from error
        except StoreError as error:
            if type(error) is not StoreError or not self._store.properties.file_system:  # these name a remedy
                raise
            why = getattr(error.__cause__, "strerror", None) or error
            raise StoreError(
                f"{self._store.url} cannot be written ({why}): make it writable for this user, or restore from it with "
                "CheckpointManagerOptions(read_only=True)",
                path=self._store.url,
            ) from error
        self._store.delete(key)

    def write(self, ancestry: Ancestry) -> None:
        """Claims `ancestry.epoch`; raises `FileExistsError` where another run has claimed it. Raises `StoreError` where
        the service would let two runs claim it: each claim is put twice if that is possible.

        The record is the claim; its copy follows, and is written again by the next call where it did not land.
        """
        record = {**ancestry.to_json(), "run": dict(ancestry.runs).get(ancestry.epoch, "")}
        record.pop("deleted", None)  # files of their own
        self._claim(ancestry.epoch, json.dumps({**record, "digest": _digest(record)}).encode())

    def advance(self, before: Ancestry, after: Ancestry | None) -> None:
        """Writes `after` over `before`, which a plan was made for: a run that is under way is fenced off by it. None
        only looks.

        Raises `CheckpointError` where a run has begun, or gone back, since the plan was made.
        """
        changed = CheckpointError(
            f"{self._store.url} changed since it was looked at: a run began, or went back; run it again"
        )
        if self.read() != before:
            raise changed
        try:
            if after is not None:
                self.write(after)
        except FileExistsError as error:
            raise changed from error

    def _claim(self, epoch: int, record: bytes) -> None:
        key, copy = self._keys(epoch)
        names = self._store.list(paths.EPOCHS_DIR)
        alone = copy.rpartition("/")[2] in names and key.rpartition("/")[2] not in names
        if alone and self._store.get(copy) != record:
            raise FileExistsError(f"{self._store.url}/{copy} exists")  # of a claim whose record is missing
        try:
            self._store.put(key, record, mode="create")
            if self._store.properties.may_ignore_conditions:
                self._store.put(key, record, mode="create")
                raise StoreError(
                    f"{self._store.url}: the service stored {key} twice, and the second request had a condition "
                    "(If-None-Match) that forbids it. There two runs could write one root: use a service that obeys it",
                    path=self._store.url,
                )
        except FileExistsError:
            if self._store.get(key) != record:  # a put that landed and reported an error is this run's own
                raise
        self._store.put(copy, record)


def _newest_of(listed: Iterable[str]) -> tuple[int, list[str]]:
    names = [name for name in listed if paths.epoch_of_name(name) is not None]
    return max((paths.epoch_of_name(name) or 0 for name in names), default=0), names


def _deleted_key(save: SaveId) -> str:
    return f"{paths.EPOCHS_DIR}/{paths.deleted_name(save.epoch, save.step, save.number, save.run)}"
