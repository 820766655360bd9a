"""Programs as people write them, killed twice under `ckptkit run`: their ends are those of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.parametrize(
    ("name", "line", "dtypes"),
    [
        ("x64", "5 sets os.environ['JAX_ENABLE_X64'] before it imports jax", {"float64", "int64"}),
        ("keras", "5 sets os.environ['KERAS_BACKEND'] before it imports numpy", {"float32", "uint32", "int32"}),
        (
            "hydra",
            "5 imports hydra, which is not a library that a template may hold, before it imports jax",
            {"float32", "int32"},
        ),
    ],
    ids=["x64", "keras", "hydra"],
)
def test_program_that_is_killed_twice_ends_like_an_undisturbed_one(
    name: str, line: str, dtypes: set[str], tmp_path: Path
) -> None:
    """A restart would train with another precision, another backend, or another configuration."""
    if name != "x64" and find_spec(name) is None:  # an import of Keras would look for TensorFlow
        pytest.skip(f"{name} is not installed: make campaign NAME=others")
    script = str(PROGRAMS / f"{name}_train.py")
    straight, _ = end_of([sys.executable, script], tmp_path / "straight")
    killed, shown = end_of([sys.executable, "-m", "ckptkit.cli", "run", "--", sys.executable, script], tmp_path / "run")
    assert f"ckptkit run: all starts are cold: {script} line {line}\n" in shown
    assert [each for each in shown.splitlines() if "begins after" in each] == [
        f"[0] begins after {step}" for step in (None, 2, 5)
    ]
    assert shown.count("(SIGKILL)") == 2
    assert {each.dtype.name for each in straight.values()} == dtypes
    assert sorted(killed) == sorted(straight)
    for leaf, value in straight.items():
        assert (killed[leaf].dtype, killed[leaf].tobytes()) == (value.dtype, value.tobytes()), leaf


def end_of(command: list[str], root: Path) -> tuple[dict[str, np.ndarray], str]:
    """The last state of a run, by leaf, and what the run printed."""
    root.mkdir()
    word = f"root={root}" if "hydra" in command[-1] else str(root)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    words = [*command, word]
    done = subprocess.run(words, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    with np.load(root / "end.npz") as file:
        return dict(file), done.stdout
