"""Orbax's log entries of saves and restores, for the caller's `ocp.logging.AbstractLogger`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptkit import clock
from ckptkit.durable.stock import restore_statistics, save_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """When a call began, by both clocks."""

    monotonic_s: float = field(default_factory=clock.monotonic_s)
    wall_s: float = field(default_factory=clock.wall_s)


def save_entry(began: Began, step: int, directory: Any, *, synchronous: bool) -> dict[str, Any]:
    """The entry of a `save` that returns now."""
    return save_statistics(
        step=step,
        directory=str(directory),
        synchronous=synchronous,
        checkpoint_manager_blocking_start_time=began.wall_s,
        checkpoint_manager_blocking_duration_secs=clock.monotonic_s() - began.monotonic_s,
    )


def restore_entry(began: Began, step: int, directory: Any) -> dict[str, Any]:
    """The entry of a `restore` that returns now."""
    return restore_statistics(
        step=step,
        directory=str(directory),
        checkpoint_manager_start_time=began.wall_s,
        checkpoint_manager_duration_secs=clock.monotonic_s() - began.monotonic_s,
    )
