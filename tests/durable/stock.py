"""Stock Orbax in a process of its own, which never imports ckptkit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_RESTORE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
home, *places = sys.argv[1:]
for root, step in zip(places[::2], places[1::2]):
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [int(step)], manager.all_steps()
        found = manager.restore(int(step), args=ocp.args.StandardRestore())
    np.savez(f"{home}/{step}", **{name: np.asarray(value) for name, value in found.items()})
assert not any(name.partition(".")[0] == "ckptkit" for name in sys.modules)
"""


def restored_alone(roots: Mapping[int, str | Path], home: Path) -> dict[int, dict[str, np.ndarray]]:
    """The leaves of each step, restored from a root that has no other step; `home` is a directory for them."""
    home.mkdir()
    places = [str(each) for step, root in roots.items() for each in (root, step)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _RESTORE, home, *places], check=True, env=environment, timeout=180)
    found = dict[int, dict[str, np.ndarray]]()
    for step in roots:
        with np.load(home / f"{step}.npz") as leaves:
            found[step] = dict(leaves)
    return found


def linked_alone(root: Path, step: int, alone: Path) -> Path:
    """The root with its hard links, after all steps but this one were deleted."""
    shutil.copytree(root, alone, copy_function=os.link)
    for other in alone.iterdir():
        if other.name.isdecimal() and other.name != str(step):
            shutil.rmtree(other)
    return alone
