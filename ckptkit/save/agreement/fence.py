"""The record of a run's epoch in the durable root, and the check that no later run has begun."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from ckptkit.errors import CheckpointError, StoreError, TransientStoreError
from ckptkit.job.coordination import Coordinator
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.save.agreement.protocol import Agree, SaveProtocol
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.book.outcomes import Outcomes
from ckptkit.save.records import SaveTargets


class EpochFence:
    """The record of this run's epoch in the durable root, and the check that no later run has begun.

    `claim` is safe from several threads; `fence` is an exchange, and belongs to the durable thread.
    """

    def __init__(self, tiers: SaveTargets, coordinator: Coordinator, ledger: Ledger, outcomes: Outcomes):
        self._tiers = tiers
        self._coordinator = coordinator
        self._ledger = ledger
        self._outcomes = outcomes
        self._lock = threading.RLock()
        self._head = ledger.ancestry.head  # the newest record that this run has seen, or written
        self._claimed: int | None = None
        self._unclaimed: CheckpointError | None = None  # why the root does not have the record yet

    def claim(self, save_id: SaveId) -> SaveId:
        """Process 0 records the run's epoch before its first save can be committed anywhere; returns the identity under
        which the save is committed.

        Raises `CheckpointError` where another run has it. A root that cannot be reached degrades the durable tier:
        it is tried again with the next save, and training continues. The save is committed to fast tiers then, and its
        identity names the record that it follows: a restart takes it if no other run has begun since.
        """
        if self._coordinator.process != 0:
            return save_id
        with self._lock:
            if self._claimed is not None and self._claimed >= save_id.epoch:
                return save_id
            try:
                self._tiers.epochs.write(self._ledger.ancestry)
                self._claimed, self._head = save_id.epoch, self._ledger.ancestry.head
            except FileExistsError as error:
                alone = ". If both are processes of one job, call jax.distributed.initialize() first in each"
                raise CheckpointError(
                    f"another run has begun epoch {save_id.epoch} in {self._tiers.durable.url}; stop one of the two"
                    f"{alone * (self._coordinator.count == 1)}",
                    step=save_id.step,
                    path=self._tiers.durable.url,
                ) from error
            except CheckpointError as error:
                self._unclaimed = error
                self._outcomes.degraded(save_id.step, DURABLE, error)
                return replace(save_id, after=self._head)
            return save_id

    def fence(self, save_id: SaveId, about: str) -> SaveProtocol:
        """Refuses to commit durably once a later run has begun: its branch must not be overtaken by this one. And
        before this run has recorded its epoch: another one could take the same.

        Called by all processes for the same try `about`; raises `CheckpointError` on all of them.
        """

        def check(_: list[Any]) -> None:
            self.claim(save_id)  # where the root could not be reached when the save was committed here
            if self._claimed is None:
                why = self._unclaimed
                kind = type(why) if isinstance(why, StoreError) else TransientStoreError  # a full disk stays one
                raise kind(
                    f"step {save_id.step} is not committed to {self._tiers.durable.url}: epoch {save_id.epoch} of this "
                    f"run could not be recorded there{f': {why}' if why else ''}",
                    step=save_id.step,
                    tier=DURABLE,
                ) from why
            self.check(save_id)

        yield Agree("fence", about, None, check)

    def check(self, save_id: SaveId) -> None:
        """On process 0: raises `CheckpointError` where a later run has begun, or the root has lost this run's record.
        Cost: a listing."""
        epoch = self._tiers.epochs.newest_epoch()
        if self._claimed is not None and epoch < self._claimed:
            raise CheckpointError(
                f"step {save_id.step} is not committed to {self._tiers.durable.url}: the record of this run (epoch "
                f"{self._claimed}) is not there any more, so the root was removed or replaced; start the run again",
                step=save_id.step,
                tier=DURABLE,
            )
        if epoch > save_id.epoch:
            raise CheckpointError(
                f"step {save_id.step} is not committed to {self._tiers.durable.url}: this run has epoch "
                f"{save_id.epoch}, and a later run has begun epoch {epoch} there; stop this run",
                step=save_id.step,
                tier=DURABLE,
            )
