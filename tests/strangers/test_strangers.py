"""Public trainers over ckptkit: killed, resumed, and compared bit for bit.

`make campaign NAME=strangers` installs each apart.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptkit.goodput import goodput_report, load_run
from tests.forked import run_forked
from tests.goodput.by_hand import goodput_by_hand

SCRIPTS = {
    "artifex": "artifex_nnx.py",
    "blaxbird": "blaxbird_train.py",
    "flaxdiff": "flaxdiff_train.py",
    "keras": "keras_fit.py",
    "maxtext": "maxtext_train.py",
    "mlip": "mlip_train.py",
    "opifex": "opifex_store.py",
    "tunix": "tunix_peft.py",
}
WITHOUT_MANAGER = {
    "flax": "flax_checkpoints.py",
    "nnx_ppo": "nnx_ppo_train.py",
}  # they save trees at paths of their own: no steps, no tiers
COMPUTATIONS = {"keras": 4, "mlip": 2}  # of a step, where the trainer saves epochs
OWN_OPTIMIZER = {"maxtext"}  # made of its settings: its device cannot be made slow
KILLED_AFTER = 3
STEP_S = 2.0  # of the starts whose account is looked at
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_stranger_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """The drop-in would serve our own scripts alone."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make campaign NAME=strangers")
    script = Path(__file__).with_name(SCRIPTS[name])
    straight = train(script, tmp_path / "straight", "--stock")
    slowly = ("--step-s", str(STEP_S / COMPUTATIONS.get(name, 1)))
    assert train(script, tmp_path / "run", "--kill-after", str(KILLED_AFTER), *slowly) is None
    lost, back = tmp_path / "lost", tmp_path / "back"
    for copy in (lost, back):
        shutil.copytree(tmp_path / "run" / "steps", copy / "steps")  # the durable tier alone

    kept, lost, back = (train(script, tmp_path / "run", *slowly), train(script, lost), train(script, back, "--stock"))
    assert kept["sources"] == ["ram"], "the ramdisk outlives the process"
    assert lost["sources"] == ["durable"], "the host is lost"
    for run in (kept, lost, back):
        assert run["first"] == kept["first"] > 0
        assert run["bits"] == straight["bits"]
    assert kept["tiers"] == ["durable", "ram"]
    if name not in OWN_OPTIMIZER:
        assert_account_agrees_with_one_made_by_hand(tmp_path / "run", kept, COMPUTATIONS.get(name, 1))


def assert_account_agrees_with_one_made_by_hand(root: Path, last: dict[str, Any], computations: int) -> None:
    """Nobody prepared these trainers for an account: their steps are known from their calls alone."""
    report = goodput_report(load_run(root / "account"))
    taken = (root / "by_hand").read_text().rpartition("start")[2].count("compute") // computations
    by_hand = goodput_by_hand(root / "by_hand", [last["first"], taken], computations=computations)
    assert report.steps_from == "calls"
    assert report.goodput.distinct_steps == last["first"] + taken
    assert len(report.disruptions) == 1
    assert report.goodput.ml_goodput == pytest.approx(by_hand, abs=0.02)
    assert report.goodput.ml_goodput == pytest.approx(by_hand, rel=0.1)  # also where starts take long
    print(f"goodput {report.goodput.ml_goodput:.4f}, by hand {by_hand:.4f}, of {report.wall_s:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_MANAGER)
def test_killed_stranger_without_a_manager_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Trainers that save a tree at a path would resume from what a disk has changed, and not report it."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make campaign NAME=strangers")
    script = Path(__file__).with_name(WITHOUT_MANAGER[name])
    straight = train(script, tmp_path / "straight", "--stock")
    assert train(script, tmp_path / "run", "--kill-after", str(KILLED_AFTER)) is None
    for copy in ("back", "damaged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    for run in (train(script, tmp_path / "run"), train(script, tmp_path / "back", "--stock")):
        assert run["first"] == KILLED_AFTER + 1
        assert run["bits"] == straight["bits"]
    report = goodput_report(load_run(tmp_path / "run" / "account"))
    assert (report.steps_from, report.goodput.ml_goodput) == ("nothing", None)  # not 0 %: nothing tells of its steps
    data = max((tmp_path / "damaged").rglob("d/*"), key=lambda path: (path.parts[-4], path.stat().st_size))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    assert "CorruptCheckpointError" in (start(script, tmp_path / "damaged").stderr)


def train(script: Path, root: Path, *arguments: str) -> Any:
    """One start of the script: what it reports, None where it was killed."""
    done = start(script, root, *arguments)
    if "--kill-after" in arguments:
        assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
        return None
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def start(script: Path, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(root), *arguments]
    return run_forked(command, env=environ, timeout=280)
