"""The steps that a run has, over all tiers, as this process knows them; and the identity of the next save."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import PEER
from ckptkit.util import clock
from ckptkit.util.words import on_each_host

SaveState = Literal["in_flight", "committed", "rejected", "failed"]
OVERTAKEN = "a signal handler took a later save in the middle of this one"
_NAMED_MAX = 20  # steps, in one message
_NAMES_KEPT = 10_000  # of calls of `save`: more than can wait for their votes
_TAKERS_KEPT = 16  # more than there are handlers in the middle of each other
FAILURES_MAX = 100  # how many failed saves are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One save: its state and the tiers that hold it completely.

    `held_bytes` is what this process holds of it (None: written by an earlier run), `verified_s` when its digests
    were last verified or made here (wall clock; None: not by this run).
    """

    step: int
    save_id: SaveId
    state: SaveState
    tiers: tuple[str, ...] = ()
    held_bytes: int | None = None
    verified_s: float | None = None


class Ledger:
    """Saves by identity. Safe from several threads; abandoned branches are left out of every answer, and saves that a
    restore found damaged of all but `rejected` and `every`.

    The lock is for changes. Answers take none: a signal handler may save in the middle of one.
    """

    def __init__(self, ancestry: Ancestry):
        self._lock = threading.RLock()
        self._records: dict[SaveId, StepRecord] = {}
        self._failed: dict[SaveId, StepRecord] = {}
        self._rejected: frozenset[SaveId] = frozenset()
        self._restored: SaveId | None = None
        self._passed_over: frozenset[SaveId] = frozenset()  # newer than `_restored` when that was restored
        self.ancestry = ancestry

    def begin(self, save_id: SaveId) -> None:
        """A save was taken and is under way."""
        with self._lock:
            self._records[save_id] = StepRecord(step=save_id.step, save_id=save_id, state="in_flight")

    def commit(self, save_id: SaveId, tier: str) -> None:
        """`tier` holds the save, on all processes."""
        with self._lock:
            record = self._records.get(save_id) or StepRecord(step=save_id.step, save_id=save_id, state="committed")
            self._records[save_id] = replace(record, state="committed", tiers=tuple(sorted({*record.tiers, tier})))
            self._failed.pop(save_id, None)

    def hold(self, save_id: SaveId, tier: str, held_bytes: int) -> None:
        """This process has just verified its part of a save that `tier` holds; ignored if it is not booked there."""
        with self._lock:
            record = self._records.get(save_id)
            if record is not None and tier in record.tiers and tier != PEER:
                self._records[save_id] = replace(record, held_bytes=held_bytes, verified_s=clock.wall_s())

    def identify(self, assumed: SaveId, save_id: SaveId) -> None:
        """Renames the save in flight from `assumed` to `save_id`, as process 0 decided."""
        with self._lock:
            record = self._records.get(assumed) if assumed != save_id else None
            if record is not None:
                self._records.setdefault(save_id, replace(record, save_id=save_id))
                del self._records[assumed]

    def drop(self, tier: str, save_ids: Iterable[SaveId]) -> None:
        """`tier` does not hold these saves any more."""
        dropped = set(save_ids)
        self.keep_only(tier, self.committed_in(tier) - dropped)

    def continue_from(self, save_id: SaveId) -> None:
        """The run continues from `save_id`, which was restored: no newer save that is known now is the latest."""
        with self._lock:
            self._restored, self._passed_over = save_id, frozenset(each for each in self._records if each > save_id)
            self._rejected -= {save_id}

    def reject(self, save_ids: Iterable[SaveId]) -> None:
        """A restore found these damaged: they are not listed until one is restored after all. One of epoch 0 is a step
        whose identity cannot be read: every save of that number."""
        found = set(save_ids)
        unidentified = {save_id.step for save_id in found if save_id.ours and save_id.epoch == 0}
        with self._lock:
            self._rejected |= found | {each for each in self._records if each.step in unidentified}

    def verified(self, save_id: SaveId) -> None:
        """Every cell that this process needs of the save was verified just now."""
        with self._lock:
            if save_id in self._records:
                self._records[save_id] = replace(self._records[save_id], verified_s=clock.wall_s())

    def fail(self, save_id: SaveId, *, remembered: bool = True) -> None:
        """A save is over and no tier holds it: it does not count as a step any more. `failed` returns it if it is
        `remembered`."""
        with self._lock:
            record = self._records.get(save_id)
            if record is not None and not record.tiers:
                del self._records[save_id]
                if remembered:
                    self._failed[save_id] = replace(record, state="failed")
                while len(self._failed) > FAILURES_MAX:
                    del self._failed[next(iter(self._failed))]

    def keep_only(self, tier: str, held: Iterable[SaveId]) -> None:
        """`tier` holds nothing but `held` any more: slots were reused, steps pruned."""
        kept = set(held)
        with self._lock:
            for save_id, record in list(self._records.items()):
                if tier not in record.tiers or save_id in kept:
                    continue
                tiers = tuple(name for name in record.tiers if name != tier)
                if tiers:
                    self._records[save_id] = replace(record, tiers=tiers)
                    continue
                del self._records[save_id]
                self._restored = None if self._restored == save_id else self._restored

    def refill(self, held: Mapping[SaveId, Iterable[str]]) -> None:
        """The tiers were read again: they hold `held` and no more, ascending. Saves in flight come after those."""
        with self._lock:
            records: dict[SaveId, StepRecord] = {}
            for save_id in sorted(held):
                record = self._records.get(save_id) or StepRecord(step=save_id.step, save_id=save_id, state="committed")
                records[save_id] = replace(record, state="committed", tiers=tuple(sorted(held[save_id])))
            under_way = {s: r for s, r in self._records.items() if r.state == "in_flight" and s not in records}
            self._records = records | under_way

    def committed_in(self, tier: str) -> set[SaveId]:
        """Every save that `tier` holds on all processes, those of abandoned branches too."""
        return {record.save_id for record in list(self._records.values()) if tier in record.tiers}

    def forget(self, step: int) -> None:
        """The step was deleted from every tier."""
        with self._lock:
            for save_id in [each for each in self._records if each.step == step]:
                del self._records[save_id]
                self._rejected -= {save_id}
            if self._restored is not None and self._restored.step == step:
                self._restored, self._passed_over = None, frozenset()

    def records(self) -> list[StepRecord]:
        """Every save that is committed or under way, oldest first."""
        return sorted(self._unsorted(), key=lambda record: _age(record.save_id))

    def every(self) -> list[StepRecord]:
        """Every record, those of abandoned branches too, oldest first."""
        return sorted(self._records.values(), key=lambda record: record.save_id)

    def failed(self) -> list[StepRecord]:
        """The saves that failed and are held nowhere, oldest first: of the last ones, a bounded number."""
        return sorted(self._failed.values(), key=lambda record: record.save_id)

    def rejected(self) -> list[StepRecord]:
        """The saves that a restore found damaged, and that are still there, oldest first."""
        found = [each for each in self.every() if each.save_id in self._rejected]
        return [replace(each, state="rejected") for each in found if not self.ancestry.superseded(each.save_id)]

    def newest_save(self) -> SaveId | None:
        """The newest save of this branch that is there, damaged or not."""
        return max((r.save_id for r in self.every() if not self.ancestry.superseded(r.save_id)), default=None)

    def stock_steps(self) -> list[int]:
        """Steps that stock Orbax wrote, those of abandoned branches too: what an epoch record has to name."""
        return sorted(record.step for record in list(self._records.values()) if not record.save_id.ours)

    def steps(self) -> list[int]:
        """The steps in the order of their newest saves."""
        return list(dict.fromkeys(record.step for record in reversed(self.records())))[::-1]

    def latest_step(self) -> int | None:
        """The step of the newest save, one under way too. After a restore it is the restored step, until a newer one is
        saved, or found by another look at the tiers."""
        came = [each.save_id for each in self._unsorted() if each.save_id not in self._passed_over]
        if (restored := self._restored) is not None:  # also another job's, which was not there at the listing
            came.append(restored)
        return max(came, key=_age).step if came else None

    def passed_over(self) -> list[StepRecord]:
        """The saves that are newer than the restored one, oldest first: the next save abandons them."""
        return [record for record in self.records() if record.save_id in self._passed_over]

    def _unsorted(self) -> list[StepRecord]:
        superseded, hidden = self.ancestry.superseded, self._rejected
        records = list(self._records.values())  # in one piece: other threads change it meanwhile
        return [r for r in records if r.save_id not in hidden and not superseded(r.save_id)]


def _age(save_id: SaveId) -> tuple[tuple[int, float, int], str]:
    """Sorts as the saves do: made once for each, where a comparison makes it twice."""
    return save_id.made, save_id.run


class Calls:
    """How often a call was made for each step."""

    def __init__(self) -> None:
        self._made: list[_Steps] = []  # once, twice, ...

    def enter(self, step: int) -> int:
        """Counts a call; returns how often it was made for this step before."""
        before = next((times for times, steps in enumerate(self._made) if step not in steps), len(self._made))
        if before == len(self._made):
            self._made.append(_Steps())
        self._made[before].add(step)
        return before


class _Steps:
    """A set of steps. Those that were added at equal distances take the room of one: a loop adds millions."""

    def __init__(self) -> None:
        self._runs: list[range] = []
        self._highest = -1

    def __contains__(self, step: int) -> bool:
        return step <= self._highest and any(step in run for run in reversed(self._runs))

    def add(self, step: int) -> None:
        self._highest = max(self._highest, step)
        last = self._runs[-1] if self._runs else range(0)
        if (len(last) == 1 and step > last[0]) or (len(last) > 1 and step - last[-1] == last.step):
            self._runs[-1] = range(last[0], step + 1, step - last[-1])
        else:
            self._runs.append(range(step, step + 1))


class Branch:
    """Names calls of `save` and gives saves their identity. `enter` and `next_save` belong to the step loop's thread.
    They take no lock, and each changes what it changes at once: a signal handler may save in the middle of one.

    Process 0's identity of a save holds; the others compute it from the same calls, and adopt process 0's.
    A call is named by its step, by how often this process made it for that step, and by the restore that the run
    continues from. No name comes twice, and a process that missed a call has the names of the others at the next step.
    """

    def __init__(self, ledger: Ledger, epoch: int, run: str):
        self._run = run
        self.ledger = self._ledger = ledger
        self._epoch = epoch
        self._number = 0
        self._has_saved = False
        self._found = ledger.newest_save()  # at the start
        self._base: SaveId | None = None
        self._names: dict[str, int] = {}  # of calls of `save`, numbered
        self._entered = 0
        self._takers = deque([0], maxlen=_TAKERS_KEPT)  # the numbers of the last calls that took a save
        self._line = 0  # restores that the run continued from
        self._restored_elsewhere = False
        self._calls: dict[str, Calls] = {}  # by kind

    @property
    def base(self) -> SaveId | None:
        """The last restored save, from which the next save continues; None if it continues from the last save."""
        return self._base

    @property
    def has_saved(self) -> bool:
        """Whether this run has made a save."""
        return self._has_saved

    def continue_from(self, save_id: SaveId) -> None:
        """The run continues from `save_id`: the next save is a rollback if that is not the newest one."""
        self.ledger.continue_from(save_id)
        self._base = save_id
        self._line += 1
        self._calls.clear()

    def continue_from_elsewhere(self) -> None:
        """The run continues from a save of another root."""
        self._restored_elsewhere = True

    def refuse_to_start_anew(self, url: str, repair: str) -> None:
        """Raises `CheckpointError` for the first save of a run whose restore found every step damaged.

        The save would be newer than these steps: a restart would restore it, and delete them, even where they can be
        repaired, or where only this host reads them wrongly. `repair` is the command for that.
        """
        has_state = self._has_saved or self._line > 0 or self._restored_elsewhere
        damaged = sorted({record.step for record in self._ledger.rejected()})
        if has_state or not damaged or self._ledger.records():
            return
        named = ", ".join(map(str, damaged[-_NAMED_MAX:]))
        raise CheckpointError(
            f"{url}: a restore found every step damaged ({named}), and a new run would replace them. Repair them "
            f"{on_each_host(repair)}, delete each with delete(step), or save to another directory",
            path=url,
        )

    def records(self) -> list[StepRecord]:
        """The records next to the next save, of damaged steps too, but without those that a rollback is about to
        abandon."""
        records = [*self._ledger.records(), *self._ledger.rejected()]
        if self._base is None:
            return records
        return [record for record in records if record.save_id <= self._base]

    def enter(self, step: int, call: str = "save") -> str:
        """The name of a call for `step`, before anything can raise in it, so that all processes count it."""
        name = f"{self._line}.{step}.{self._calls.setdefault(call, Calls()).enter(step)}"
        if call == "save":
            self._entered += 1
            self._names[name] = self._entered
            if len(self._names) > _NAMES_KEPT:
                del self._names[next(iter(self._names))]
        return name

    def order(self, name: str) -> float:
        """Numbers the names of calls of `save` in their order; infinite for other names.

        A save that this process missed is placed by its restores, step and repetition: process 0 may be ahead, or
        still at a call that did not begin here.
        """
        known = self._names.get(name)
        if known is not None:
            return known
        place = _place_of(name)
        later = (number for each, number in list(self._names.items()) if place and _place_of(each) > place)
        return min(later, default=math.inf) - 0.5

    def next_save(self, name: str, step: int) -> SaveId:
        """The identity of a save that is taken now, in the call `name`; begins an epoch where one is due."""
        self._begin_epoch()
        self._takers.append(self._names[name])
        number = self._number
        self._number = number + 1
        return SaveId(self._epoch, step, number, self._run, self._ledger.ancestry.root)

    def is_overtaken(self, name: str) -> bool:
        """Whether a call after `name` took a save already: that of a signal handler, in the middle of this one."""
        return self._names[name] < max(self._takers)

    def adopt(self, save_id: SaveId) -> None:
        """Process 0 gave this identity to a save: the next ones follow it."""
        self._epoch = save_id.epoch
        if self._number <= save_id.number:
            self._number = save_id.number + 1

    def state(self) -> list[Any]:
        """The state that a process needs to count like this one."""
        return [self._epoch, self._number, self._has_saved, self._line]

    def synchronise(self, state: Sequence[Any]) -> None:
        """Counts on from process 0's `state`."""
        self._epoch, self._number, self._has_saved, self._line = state

    def _begin_epoch(self) -> None:
        """The first save after a start or a rollback begins an epoch, and abandons what was above its base. A run that
        restored nothing continues from the newest save that it has listed, also where it has deleted that one: hosts
        that are away may hold newer ones."""
        if self._has_saved and self._base in (None, self._ledger.newest_save()):
            self._base = None  # it is not a rollback: the saves that follow abandon nothing
            return
        listed = [each for each in (self._found, self._ledger.newest_save()) if each is not None]
        base, epoch = self._base or max(listed, default=None), self._epoch + self._has_saved
        ancestry = self._ledger.ancestry.begin(epoch, base, self._run, self._ledger.stock_steps())
        self._epoch, self._has_saved, self._base, self._ledger.ancestry = epoch, True, None, ancestry


def _place_of(name: str) -> tuple[int, ...]:
    """The restores, the step and the repetition in the name of a save; nothing in another name."""
    parts = name.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
