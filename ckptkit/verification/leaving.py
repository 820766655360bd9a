"""What a command may do to a step of each class, and why it leaves the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, final

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.listing import StepState

Action = Literal["delete", "mend", "quarantine", "replace", "overtake"]

# `docs/FAULTS.md` has the table for users, and a test compares the two. Entries that are not steps are never touched.
ALLOWED: Mapping[Action, frozenset[StepClass]] = MappingProxyType(
    {
        # `prune` and a run's own policies, by the user's rules.
        "delete": frozenset({StepClass.WHOLE, StepClass.STOCK, StepClass.PARTLY}),
        # `scrub --repair`: the same bits are written back, from another copy of the same save.
        "mend": frozenset({StepClass.DAMAGED}),
        # `scrub --repair`, where no copy has the bits: moved to `_ckptkit/_quarantine`.
        "quarantine": frozenset({StepClass.DAMAGED}),
        # A save that a run makes under the number of a step that a rollback abandoned.
        "replace": frozenset({StepClass.WHOLE, StepClass.DAMAGED, StepClass.STOCK, StepClass.PARTLY}),
        # `--as newest`: a save of another run becomes the newest of this root.
        "overtake": frozenset({StepClass.WHOLE, StepClass.STOCK, StepClass.PARTLY}),
    }
)
_WITH_PIN = frozenset({"mend", "overtake"})  # the step stays, with the same bits
_NEEDS_STATE: Mapping[Action, frozenset[StepState]] = MappingProxyType(
    {
        "delete": frozenset({"committed", "abandoned"}),
        "mend": frozenset({"committed", "abandoned", "damaged"}),
        "quarantine": frozenset({"committed", "abandoned", "damaged"}),
        "replace": frozenset({"abandoned"}),
        "overtake": frozenset({"committed", "abandoned"}),
    }
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Conditions of a directory besides its class."""

    state: StepState
    pinned: bool = False
    in_use: bool = False


def reason_to_leave(action: Action, kind: StepClass, standing: Standing) -> str | None:
    """Why a directory of this class must not be touched in this way; None where it may be. Pure."""
    if kind is StepClass.FOREIGN:
        return "it is not a step of this run"
    if standing.state == "unfinished":
        return "never committed: a save in flight, or interrupted"
    if standing.pinned and action not in _WITH_PIN:
        return "pinned"
    if standing.in_use and action not in _WITH_PIN:
        return "in use"
    if kind in ALLOWED[action] and standing.state in _NEEDS_STATE[action]:
        return None
    if not kind.ours and action in ("mend", "quarantine"):
        return "Orbax wrote it without digests: nothing shows which bytes were meant; restore it with Orbax"
    if standing.state == "damaged" or kind is StepClass.DAMAGED:
        return "damaged: `ckptkit scrub` reports what can be done"
    return f"it is {standing.state}"
