"""The steps that a run has, over all tiers, as this process knows them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptkit.durable.epochs import Ancestry
from ckptkit.manifest import SaveId

State = Literal["in_flight", "committed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One save: its state and the tiers that hold it whole."""

    step: int
    save_id: SaveId
    state: State
    tiers: tuple[str, ...] = ()


class Book:
    """Saves by identity. Safe from several threads; abandoned branches are left out of every answer."""

    def __init__(self, ancestry: Ancestry):
        self._lock = threading.Lock()
        self._records: dict[SaveId, StepRecord] = {}
        self.ancestry = ancestry

    def begin(self, save_id: SaveId) -> None:
        """A save was taken and is under way."""
        with self._lock:
            self._records[save_id] = StepRecord(step=save_id.step, save_id=save_id, state="in_flight")

    def commit(self, save_id: SaveId, tier: str) -> None:
        """`tier` holds the save, on all processes."""
        with self._lock:
            record = self._records.get(save_id)
            tiers = {*(record.tiers if record else ()), tier}
            self._records[save_id] = StepRecord(
                step=save_id.step, save_id=save_id, state="committed", tiers=tuple(sorted(tiers))
            )

    def fail(self, save_id: SaveId) -> None:
        """A save is over and no tier holds it: it is forgotten, older ones are not."""
        with self._lock:
            record = self._records.get(save_id)
            if record is not None and not record.tiers:
                del self._records[save_id]

    def keep_only(self, tier: str, held: Iterable[SaveId]) -> None:
        """`tier` holds nothing but `held` any more: slots were reused, steps pruned."""
        kept = set(held)
        with self._lock:
            for save_id, record in list(self._records.items()):
                if tier not in record.tiers or save_id in kept:
                    continue
                tiers = tuple(name for name in record.tiers if name != tier)
                if tiers:
                    self._records[save_id] = StepRecord(
                        step=record.step, save_id=save_id, state=record.state, tiers=tiers
                    )
                else:
                    del self._records[save_id]

    def records(self) -> list[StepRecord]:
        """Every save that is committed or under way, oldest first."""
        with self._lock:
            visible = [record for record in self._records.values() if not self.ancestry.superseded(record.save_id)]
        return sorted(visible, key=lambda record: record.save_id)

    def stock_steps(self) -> list[int]:
        """Steps that stock Orbax wrote, those of abandoned branches too: what an epoch record has to name."""
        with self._lock:
            return sorted(record.step for record in self._records.values() if not record.save_id.ours)

    def latest_step(self) -> int | None:
        """The step of the newest save, as Orbax counts it: one under way is listed."""
        records = self.records()
        return records[-1].step if records else None
