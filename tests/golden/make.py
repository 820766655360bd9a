"""Writes a small checkpoint of every tier: `python -m tests.golden.make DIRECTORY`.

The directories `tests/golden/<version>` were made by the release of that version and are never made again: a later
release reads them, and writes files of the same names and fields.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit

STEPS = (2, 4)


def state(step: int) -> dict[str, Any]:
    """Every kind of leaf, a few bytes each."""
    return {
        "w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4) + step,
        "b": jnp.full((5,), -0.0, jnp.bfloat16),
        "mask": jnp.array([True, False]),
        "key": jax.random.key(step),
        "host": np.arange(3, dtype=np.int8),
        "count": step,
        "rate": 0.5,
    }


def manager(home: Path, **options: Any) -> ckptkit.CheckpointManager:
    """Over `home`, with a tier of each kind that one process can have."""
    tiers = [
        ckptkit.Tier.ram(str(home / "ram"), save=ckptkit.EverySteps(1), slots=3),
        ckptkit.Tier.ssd(str(home / "ssd"), save=ckptkit.EverySteps(2), slots=2),
    ]
    options = {"save_interval_steps": 2, **options}
    return ckptkit.CheckpointManager(
        home / "root", options=ocp.CheckpointManagerOptions(**options), tiers=tiers, host_id="host-0"
    )


def save_args(step: int) -> Any:
    """A tree and a small item."""
    return ocp.args.Composite(state=ocp.args.StandardSave(state(step)), notes=ocp.args.JsonSave({"step": step}))


def make(home: Path) -> None:
    """Saves `STEPS` below `home`."""
    with manager(home) as made:
        for step in STEPS:
            made.save(step, args=save_args(step), metrics={"loss": 1.0 / step})
            made.wait_until_finished()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
