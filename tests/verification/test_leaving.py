"""The table of actions and classes, and the steps that no action may touch."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.listing import StepState
from ckptkit.verification.leaving import ALLOWED, Action, reason_to_leave

FAULTS = Path(__file__).parents[2] / "docs/FAULTS.md"
ACTIONS: tuple[Action, ...] = get_args(Action)
STATES: tuple[StepState, ...] = get_args(StepState)


def test_pinned_and_used_steps_stay() -> None:
    """A step that a person or a reader relies on would go."""
    actions: tuple[Action, ...] = ("delete", "quarantine")
    for action, kind, state in product(actions, StepClass, STATES):
        about = (action, kind, state)
        assert reason_to_leave(action, kind, state, pinned=True), about
        assert reason_to_leave(action, kind, state, in_use=True), about


def test_steps_that_were_never_committed_stay() -> None:
    """A save in flight would lose its files."""
    for action, kind in product(ACTIONS, StepClass):
        assert reason_to_leave(action, kind, "unfinished"), (action, kind)


def test_only_damaged_saves_of_ours_are_put_aside() -> None:
    """A good step of stock Orbax, or one with a custom handler, would be moved out of its root."""
    allowed = {kind for kind in StepClass if reason_to_leave("quarantine", kind, "committed") is None}
    assert allowed == {StepClass.DAMAGED}


def test_documented_table_is_the_one_in_code() -> None:
    """Users would read other rules than those that the commands follow."""
    rows = re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \|$", FAULTS.read_text(), re.MULTILINE)
    documented = {action: set(kinds.strip().split("; ")) for action, kinds in rows if action in ACTIONS}
    assert documented == {action: {str(kind) for kind in kinds} for action, kinds in ALLOWED.items()}
