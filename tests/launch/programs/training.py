"""The loop of the programs in this folder: each step is saved, and the first two attempts end in SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import ckptkit

STEPS = 9
KILLED_AFTER = {"0": 2, "1": 5}  # attempt -> step; 6 to 8 are of the last attempt


def train(root: Path, state: Any, step: Callable[[Any, int], Any], use: Callable[[Any], Any] = lambda state: state):
    """Runs `step` from the newest save on; `use` puts a restored state where the program has it. Leaves `end.npz`."""
    tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(1))]
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    with ckptkit.CheckpointManager(root / "steps", options=options, tiers=tiers) as manager:
        if manager.latest_step() is not None:
            state = use(manager.restore(None, args=ocp.args.StandardRestore(state)))
        newest = manager.latest_step()
        print(f"begins after {newest}", flush=True)
        for number in range(0 if newest is None else newest + 1, STEPS):
            state = step(state, number)
            manager.save(number, args=ocp.args.StandardSave(state))
            if number == KILLED_AFTER.get(os.environ.get("CKPTKIT_ATTEMPT", "")):
                manager.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
            manager.wait_until_finished()  # each step is in the ramdisk
    leaves = jax.tree_util.tree_leaves_with_path(state)
    np.savez(root / "end.npz", allow_pickle=False, **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
