"""One row of the table of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEERS = ("orbax_async", "orbax_tuned", "orbax_v1", "orbax_sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `peer` is stock Orbax's best where there are several; None: nobody else has it, or no limit.

    `limit_name` is the contender that was faster than the plain copy, which is then not the limit.
    """

    benchmark: str
    case: str
    figure: str
    meaning: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    torch: float | None = None
    limit: float | None = None
    limit_name: str = ""
    samples: int = 1
    load: float | None = None  # of the machine, when it began

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's; None if it has no meaning: a difference of two times may be below zero."""
        return self.ours / self.peer if self.peer is not None and self.peer > 0 and self.ours >= 0 else None


def load_of(result: Mapping[str, Any]) -> float | None:
    """The load of the machine when the benchmark began; None where it was not stored."""
    load = result.get("environment", {}).get("load")
    return load[0] if load else None
