"""That this run, and no other, commits under its epoch."""

from __future__ import annotations

import threading
from typing import Any

from ckptkit.coordination import Coordinator
from ckptkit.errors import CheckpointError
from ckptkit.manager.book import Book
from ckptkit.manager.outcomes import Outcomes
from ckptkit.manager.taken import DURABLE, Tiers
from ckptkit.manifest import SaveId


class EpochClaim:
    """The record of this run's epoch in the durable root, and the check that no later run has begun.

    `claim` is safe from several threads; `fence` is a meeting, and belongs to the durable thread.
    """

    def __init__(self, tiers: Tiers, coordinator: Coordinator, book: Book, outcomes: Outcomes, timeout_s: float):
        self._tiers = tiers
        self._coordinator = coordinator
        self._book = book
        self._outcomes = outcomes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._claimed: int | None = None

    def claim(self, save_id: SaveId) -> None:
        """Process 0 records the run's epoch before its first save can be committed anywhere.

        Raises `CheckpointError` where another run has it. A root that cannot be reached degrades the durable tier:
        it is tried again with the next save, and training goes on.
        """
        if self._coordinator.process != 0:
            return
        with self._lock:
            if self._claimed == save_id.epoch:
                return
            try:
                self._tiers.epochs.write(self._book.ancestry)
                self._claimed = save_id.epoch
            except FileExistsError as error:
                raise CheckpointError(
                    f"another run has begun epoch {save_id.epoch} in {self._tiers.durable.url}; stop one of the two",
                    step=save_id.step,
                    path=self._tiers.durable.url,
                ) from error
            except CheckpointError as error:
                self._outcomes.degraded(save_id.step, DURABLE, error)

    def fence(self, save_id: SaveId) -> None:
        """Refuses to commit durably once a later run has begun: its branch must not be overtaken by this one.

        Called by all processes; raises `CheckpointError` on all of them.
        """

        def newest(_: list[Any]) -> int:
            return self._tiers.epochs.read().epoch

        epoch = self._coordinator.agree("fence", None, newest, timeout_s=self._timeout_s)
        if epoch > save_id.epoch:
            raise CheckpointError(
                f"step {save_id.step} is not committed to {self._tiers.durable.url}: this run has epoch "
                f"{save_id.epoch}, and a later run has begun epoch {epoch} there; stop this run",
                step=save_id.step,
                tier=DURABLE,
            )
