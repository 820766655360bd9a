"""Epoch records: which run saved from which base, so that an abandoned branch can never win.

One small object per run that saved: `{"epoch": E, "ancestry": [[epoch, base step], ...], "stock": [[step, epoch], ...],
"run": ...}`. A save of an epoch before `E` at a step above `base step` was abandoned when epoch `E` began from there.
Steps of stock Orbax have no identity of their own: a step that is first seen when epoch `E` begins was written after
the epoch before it, and is recorded as of that one; one that no record names was written since.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptkit import layout
from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.manifest import SaveId
from ckptkit.store import Store


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Every rollback that is known: `(epoch, base step)` pairs. `epoch` is the newest epoch that saved."""

    epoch: int = 0
    rollbacks: tuple[tuple[int, int], ...] = ()
    stock: tuple[tuple[int, int], ...] = ()  # steps of stock Orbax, each with the epoch that it counts for

    def of_stock(self, step: int) -> SaveId:
        """The identity of a durable step that stock Orbax wrote."""
        return SaveId(dict(self.stock).get(step, self.epoch), step, -1)

    def superseded(self, save: SaveId) -> bool:
        """Whether `save` belongs to a branch that a later epoch abandoned."""
        return any(save.epoch < epoch and save.step > base for epoch, base in self.rollbacks)

    def begin(self, epoch: int, base_step: int | None, stock_steps: Iterable[int] = ()) -> Ancestry:
        """The ancestry once `epoch` saves after it restored `base_step` (None: it restored nothing).

        `stock_steps` are the steps of stock Orbax that are there now.
        """
        added = () if base_step is None else ((epoch, base_step),)
        # A rollback to a step at or below an earlier one's makes that one's record redundant for good.
        kept = tuple(pair for pair in self.rollbacks if base_step is None or pair[1] < base_step)
        stock = tuple((step, self.of_stock(step).epoch) for step in sorted(set(stock_steps)))
        return Ancestry(epoch, kept + added, stock)

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return {
            "epoch": self.epoch,
            "ancestry": [list(pair) for pair in self.rollbacks],
            "stock": [list(pair) for pair in self.stock],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Ancestry:
        """The ancestry of a record; raises ValueError, KeyError or TypeError for what is none."""
        rollbacks = tuple((int(epoch), int(step)) for epoch, step in record["ancestry"])
        return cls(int(record["epoch"]), rollbacks, tuple((int(step), int(epoch)) for step, epoch in record["stock"]))


class EpochRecords:
    """The records under one durable root. Reading costs one listing and one small get."""

    def __init__(self, store: Store):
        self._store = store
        self._run = uuid.uuid4().hex

    def read(self) -> Ancestry:
        """The newest record; an empty one where nothing was ever saved."""
        epochs = [epoch for name in self._store.list(layout.EPOCHS_DIR) if (epoch := layout.epoch_of_name(name))]
        if not epochs:
            return Ancestry()
        key = f"{layout.EPOCHS_DIR}/{layout.epoch_name(max(epochs))}"
        try:
            ancestry = Ancestry.from_json(json.loads(self._store.get(key)))
            if ancestry.epoch != max(epochs):
                raise ValueError(f"it is of epoch {ancestry.epoch}")
            return ancestry
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            path = f"{self._store.url}/{key}"
            raise CorruptCheckpointError(f"epoch record {path} cannot be read: {error}", path=path) from error

    def probe(self) -> None:
        """Writes and deletes a small object: better now than at the first save.

        Raises `StoreError` where the root cannot be written, naming it and what to do.
        """
        key = f"{layout.SIDECAR_DIR}/probe"
        try:
            self._store.put(key, b"")
        except FileNotFoundError as error:
            raise StoreError(
                f"{self._store.url} cannot be written: {error}; create the bucket, or correct its name",
                path=self._store.url,
            ) from error
        self._store.delete(key)

    def write(self, ancestry: Ancestry) -> None:
        """Claims `ancestry.epoch`; raises `FileExistsError` where another run has claimed it."""
        key = f"{layout.EPOCHS_DIR}/{layout.epoch_name(ancestry.epoch)}"
        # Named, so that a repeated put can tell its own record from the same words of another run.
        record = json.dumps({**ancestry.to_json(), "run": self._run}).encode()
        try:
            self._store.put(key, record, mode="create")
        except FileExistsError:
            if self._store.get(key) != record:  # a put that landed and reported an error is this run's own
                raise
