"""Conventions of Orbax's callers: step numbers in any integer type, log entries of saves and restores."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptkit.durable.orbax.manager import restore_statistics, save_statistics
from ckptkit.model.paths import STEP_LIMIT
from ckptkit.save.records import Save
from ckptkit.util import clock


def step_number(step: Any) -> Any:
    """A step as an int: NumPy's and JAX's scalars too, a training loop's counter often is one; whole floats.

    A value that is not a number is returned as it is: no step has it, and a save refuses it.
    """
    try:
        return operator.index(step)
    except TypeError:
        return int(step) if isinstance(step, float) and step.is_integer() else step


def saved_step_number(step: Any) -> int:
    """The same for a save. Raises TypeError for a value that is not a whole number, ValueError for one that no manifest
    can name."""
    number = step_number(step)
    if not isinstance(number, int):
        raise TypeError(f"step {step!r} is not a whole number")
    if number >= STEP_LIMIT:
        raise ValueError(f"step {number} cannot be saved: steps are below {STEP_LIMIT}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """When a call began, by both clocks."""

    monotonic_s: float = field(default_factory=clock.monotonic_s)
    wall_s: float = field(default_factory=clock.wall_s)


@dataclass(slots=True)
class Spans:
    """Parts of a call, by Orbax's names: when each began (wall clock), and for how long it lasted."""

    fields: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """The body is the part `name`."""
        began = Began()
        try:
            yield
        finally:
            self.fields[f"{name}_start_time"] = began.wall_s
            self.fields[f"{name}_duration_secs"] = clock.monotonic_s() - began.monotonic_s


def save_entry(
    began: Began, save: Save, directory: Any, *, synchronous: bool, between_s: float | None
) -> dict[str, Any]:
    """The entry of a `save` that returns now, and that began `between_s` after the one before."""
    ahead_s = began.wall_s - began.monotonic_s  # of the wall clock
    spans = {"wait_for_prev": (save.waiting_s, save.turn_s), "checkpointer_blocking": (save.turn_s, save.ended_s)}
    fields = {f"{name}_start_time": begin_s + ahead_s for name, (begin_s, _) in spans.items()}
    fields |= {f"{name}_duration_secs": end_s - begin_s for name, (begin_s, end_s) in spans.items()}
    if between_s is not None:
        fields["time_between_consecutive_saves_sec"] = between_s
    return save_statistics(
        step=save.step,
        directory=str(directory),
        synchronous=synchronous,
        checkpoint_manager_blocking_start_time=began.wall_s,
        checkpoint_manager_blocking_duration_secs=clock.monotonic_s() - began.monotonic_s,
        get_old_steps_start_time=clock.wall_s(),
        get_old_steps_duration_secs=0.0,  # a background thread finds them: no save waits for it
        **fields,
    )


def restore_entry(began: Began, step: int, directory: Any, spans: Spans) -> dict[str, Any]:
    """The entry of a `restore` that returns now."""
    return restore_statistics(
        step=step,
        directory=str(directory),
        checkpoint_manager_start_time=began.wall_s,
        checkpoint_manager_duration_secs=clock.monotonic_s() - began.monotonic_s,
        **spans.fields,
    )
