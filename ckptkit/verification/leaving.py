"""Why a command leaves a step alone: by its class, its state, its pins and its readers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.listing import StepState

Action = Literal["delete", "mend", "quarantine"]

# `docs/FAULTS.md` has the table for users, and a test compares the two. It also has what a run and `copy` may replace:
# `DurableSteps` and `plan_adoption` decide that.
ALLOWED: Mapping[Action, frozenset[StepClass]] = MappingProxyType(
    {
        # `prune` and a run's own policies, by the user's rules.
        "delete": frozenset({StepClass.WHOLE, StepClass.STOCK, StepClass.PARTLY}),
        # `scrub --repair`: the same bits are written back, from another copy of the same save.
        "mend": frozenset({StepClass.DAMAGED}),
        # `scrub --repair`, where no copy has the bits: moved to `_ckptkit/_quarantine`.
        "quarantine": frozenset({StepClass.DAMAGED}),
    }
)
_STATES: Mapping[Action, frozenset[StepState]] = MappingProxyType(
    {
        "delete": frozenset({"committed", "abandoned"}),
        "mend": frozenset({"committed", "abandoned", "damaged"}),
        "quarantine": frozenset({"committed", "abandoned", "damaged"}),
    }
)


def reason_to_leave(
    action: Action, kind: StepClass, state: StepState, *, pinned: bool = False, in_use: bool = False
) -> str | None:
    """Why a step of this class and state must not be touched in this way; None where it may be. Pure."""
    if state == "unfinished":
        return "never committed: a save in flight, or interrupted"
    if action != "mend":  # a mended step stays, with the same bits
        if pinned:
            return "pinned"
        if in_use:
            return "in use"
    if kind in ALLOWED[action] and state in _STATES[action]:
        return None
    if not kind.ours and action in ("mend", "quarantine"):
        return "Orbax wrote it without digests: nothing shows which bytes were meant; restore it with Orbax"
    if state == "damaged" or kind is StepClass.DAMAGED:
        return "damaged: `ckptkit scrub` reports what can be done"
    return f"it is {state}"
