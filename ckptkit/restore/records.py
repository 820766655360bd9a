"""The result of a restore, and the candidates that were rejected before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.errors import Reason
from ckptkit.model.manifest import SaveId

Outcome = Literal["restored", "damaged", "unsuited", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A save that was not restored, the tiers that were tried, and why: the same on every process."""

    save_id: SaveId
    where: str
    reason: Reason
    is_incomplete: bool = False  # some processes had not committed it when the job ended: nothing is damaged

    @property
    def outcome(self) -> Outcome:
        """The outcome of the candidate: the table in `restore/flow.py`."""
        if "no item" in self.reason.causes and not self.is_damage:
            return "unreachable"
        return "unsuited" if self.is_unsuited else "damaged"

    @property
    def is_damage(self) -> bool:
        """Whether the save itself is at fault: bytes are damaged, or files are missing."""
        return self.reason.is_damage

    @property
    def is_unsuited(self) -> bool:
        """Whether the save is intact, as far as it was committed: a repair changes nothing."""
        return self.is_incomplete or self.reason.is_intact

    def __str__(self) -> str:
        return f"step {self.save_id.step} in {self.where}: {self.reason.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore: items by name, their save, and whether it was saved without names."""

    items: Mapping[str, Any]
    save_id: SaveId
    default_item: bool
    slot_bytes: int  # that a save of the same would take
    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by tier
    duration_s: float = 0.0  # from the call to the placed items
    damaged: frozenset[str] = frozenset()  # tiers whose copy had a damaged cell, which this process read elsewhere
    proven: bool = True  # every cell, by its digest; False for a step of stock Orbax, which has none
    rejected: Sequence[Rejection] = ()  # newer ones, in the order in which they were tried; those of unknown age last
