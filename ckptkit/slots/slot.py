"""One slot: its memory, the save in it, and who uses it; and which slot is written next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np

from ckptkit.model.manifest import SaveId


@dataclass(frozen=True, slots=True)
class Contents:
    """The bytes of a slot on a disk, as far as they are known: a digest for each cell, by its byte range. `kept_saves`:
    how many saves in a row have left some of them as they were."""

    digests: Mapping[tuple[int, int], str]
    kept_saves: int = 0


UNKNOWN: Final = Contents({})


@dataclass(eq=False, slots=True)
class Slot:
    """One reusable block of host memory. `memory` is a flat uint8 view; no jax.Array may reference it."""

    name: str
    memory: np.ndarray
    save_id: SaveId | None = None  # the save in its committed manifest
    leases: int = 0  # who reads or writes it now
    contents: Contents = UNKNOWN  # whoever writes the slot sets it; unknown again where a write or a sync fails


class Reusable(Protocol):
    """The conditions for writing a slot."""

    save_id: SaveId | None
    leases: int


_Slot = TypeVar("_Slot", bound=Reusable)


def reusable(slots: Iterable[_Slot], protected: Collection[SaveId]) -> _Slot | None:
    """The slot to be written next: an empty one, or the one with the oldest save. None while all are leased or hold
    a protected save."""
    free = [slot for slot in slots if slot.leases == 0 and slot.save_id not in protected]
    return min(free, key=lambda slot: slot.save_id or SaveId(-1, -1, -1), default=None)
