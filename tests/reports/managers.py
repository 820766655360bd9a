"""Managers of small states for the tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import ckptkit

args: Any = ocp.args


def over(root: Path, *, ram: bool = False, **options: Any) -> Any:
    """A manager over `root`, and a ramdisk tier if asked."""
    tiers = [ckptkit.Tier.ram(str(root.parent / "ram"), save=ckptkit.EverySteps(1))] if ram else ()
    given = ocp.CheckpointManagerOptions(**options)
    return ckptkit.CheckpointManager(root, options=given, tiers=tiers, host_id="host")


def saved(root: Path, tree: Any, *steps: int, **options: Any) -> None:
    """Saves `tree` as each of `steps` (0 if none is given)."""
    with over(root, **options) as manager:
        for step in steps or (0,):
            assert manager.save(step, args=args.StandardSave(tree))
            manager.wait_until_finished()


def restored(root: Path, template: Any = None, step: int | None = None) -> Any:
    """A step as a new process would restore it."""
    with over(root) as manager:
        return manager.restore(step, args=args.StandardRestore(template))


def on_devices(value: Any, count: int, *spec: Any) -> jax.Array:
    """An array split over `count` devices along its first dimension, unless `spec` is given."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
    return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*(spec or ("x",)))))
