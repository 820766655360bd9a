"""The three rings: what a training job runs, what a person runs on checkpoints, and what is optional around both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ckptkit
from tests.cases import long_except

HERE = Path(ckptkit.__file__).parent
_CONTRACT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
LAYERS = [[name.strip() for name in layer.split("|")] for layer in _CONTRACT["layers"]]
AROUND = [name for layer in LAYERS[: LAYERS.index(["cli"])] for name in layer]
KEPT = [name for layer in LAYERS[LAYERS.index(["cli"]) :] for name in layer]

# A save, a restore after it from each tier, and the commands that a person runs on the root, by import and by name.
_MAIN_JOB = """
import importlib, pkgutil, sys
import jax.numpy as jnp, orbax.checkpoint as ocp
import ckptkit
from ckptkit.cli import main

kept = sys.argv[2].split(",")
for each in pkgutil.walk_packages(ckptkit.__path__, "ckptkit."):
    if each.name.split(".")[1] in kept and not each.name.endswith("__main__") and ".exporters" not in each.name:
        importlib.import_module(each.name)
root, ram = sys.argv[1] + "/root", sys.argv[1] + "/ram"
for step in (1, 2):
    with ckptkit.CheckpointManager(root, tiers=[ckptkit.Tier.ram(ram)]) as manager:
        if step == 2:
            assert manager.restore(None)["w"].tolist() == [1.0, 1.0]
        assert manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(2, float(step))}), force=True)
for words in (["--help"], ["steps", root], ["inspect", root], ["verify", root], ["scrub", root, "--tier", ram]):
    assert main(words) == 0, words
assert main(["diff", root + "/1", root + "/1"]) == 0
print("whole")
"""


def run_without(folders: list[str], place: Path) -> str:
    """The main job over a copy of the package without `folders`; returns what it printed."""
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE, place / "lib" / "ckptkit", ignore=leave)
    for folder in folders:
        shutil.rmtree(place / "lib" / "ckptkit" / folder)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MAIN_JOB, str(place), ",".join(KEPT)],
        env={**os.environ, "PYTHONPATH": str(place / "lib"), "JAX_PLATFORMS": "cpu"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("folder", long_except(["launch"], AROUND))
def test_main_job_runs_without_an_optional_package(folder: str, tmp_path: Path) -> None:
    """An optional package would be needed after all, and nobody could read the core without it."""
    printed = run_without([folder], tmp_path)
    assert printed.endswith("whole\n")
    if folder == "launch":
        assert "chaos" not in printed


def test_main_job_runs_without_any_optional_package(tmp_path: Path) -> None:
    """One could be needed only where another is missing."""
    assert run_without(list(AROUND), tmp_path).endswith("whole\n")
