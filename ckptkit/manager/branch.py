"""The line of saves that this run continues: what each is called, and what a rollback abandons."""

from __future__ import annotations

from ckptkit.manager.book import Book, StepRecord
from ckptkit.manifest import SaveId


class Branch:
    """Gives saves their identity. Belongs to the step loop's thread; the same on every process."""

    def __init__(self, book: Book, epoch: int):
        self._book = book
        self._epoch = epoch
        self._number = 0
        self._has_saved = False
        self._base: SaveId | None = None

    @property
    def base(self) -> SaveId | None:
        """What was restored last, and the next save continues from; None where it continues from the last save."""
        return self._base

    def continue_from(self, save_id: SaveId) -> None:
        """The run goes on from `save_id`: the next save is a rollback, where that is not the newest one."""
        self._base = save_id

    def records(self) -> list[StepRecord]:
        """The records that the next save would stand beside: without what a rollback is about to abandon."""
        records = self._book.records()
        if self._base is None:
            return records
        return [record for record in records if record.step <= self._base.step]

    def next_save(self, step: int) -> SaveId:
        """The identity of a save that is taken now; begins an epoch where one is due."""
        self._begin_epoch()
        save_id = SaveId(self._epoch, step, self._number)
        self._number += 1
        return save_id

    def pass_over(self) -> None:
        """A save raised here before it was taken. On other processes it may be taken, and all have to count alike."""
        self._number += 1

    def _begin_epoch(self) -> None:
        """The first save after a start or a rollback begins an epoch, and abandons what was above its base."""
        if self._has_saved and (self._base is None or self._is_newest(self._base)):
            self._base = None  # it is no rollback: the saves that follow abandon nothing
            return
        if self._has_saved:
            self._epoch += 1
        base_step = self._base.step if self._base is not None else None
        self._book.ancestry = self._book.ancestry.begin(self._epoch, base_step, self._book.stock_steps())
        self._has_saved = True
        self._base = None

    def _is_newest(self, save_id: SaveId) -> bool:
        records = self._book.records()
        return bool(records) and records[-1].step == save_id.step
