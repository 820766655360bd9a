"""Roots to keep in order: small steps, saved by a manager of ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp

import ckptkit

HOST = "h0"


def manager_of(root: Path | str, *, ram: Path | None = None, **options: Any) -> ckptkit.CheckpointManager:
    """A manager that saves every step, to the durable root and, where one is given, to a ramdisk."""
    options = {"save_interval_steps": 1, **options}
    tiers = [] if ram is None else [ckptkit.Tier.ram(str(ram))]
    return ckptkit.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(**options),
        tiers=tiers,
        host_id=HOST,
        processes=ckptkit.ProcessOptions(timeout_s=60),
    )


def save(manager: ckptkit.CheckpointManager, step: int, value: int | None = None) -> None:
    state = {"w": jnp.full(64, step if value is None else value)}
    manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def make_root(root: Path | str, steps: Iterable[int], *, ram: Path | None = None, **options: Any) -> None:
    with manager_of(root, ram=ram, **options) as manager:
        for step in steps:
            save(manager, step)


def restored(root: Path | str, step: int | None = None, **options: Any) -> tuple[int, int]:
    """The step that a restart takes, and the value that its state has."""
    with manager_of(root, **options) as manager:
        value = int(manager.restore(step)["w"][0])
        assert manager.restored_save_id is not None
        return manager.restored_save_id.step, value
