"""`ckptkit.patch.patch_orbax` and `python -m ckptkit.patch`: each in a process of its own, because a patch stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.patch import read_tiers

JOB = str(Path(__file__).with_name("job.py"))


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)


def test_job_that_knows_orbax_alone_gets_tiers_and_digests(tmp_path: Path) -> None:
    """A job whose source nobody changes would run on stock Orbax."""
    file = tmp_path / "tiers.toml"
    file.write_text(f'host_id = "h"\n[ram]\npath = "{tmp_path}/ram"\nevery_steps = 1\n')
    run = python("-m", "ckptkit.patch", "--tiers", str(file), "--", JOB, str(tmp_path), "--steps", "3")
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert all(module.startswith("ckptkit.") for module in found["classes"]), found
    assert found["tiers"] == [["durable", "ram"]]
    assert found["argv"] == [JOB, str(tmp_path), "--steps", "3"], "the job sees its own arguments"
    assert "patch_orbax replaced" in run.stderr
    assert "orbax.checkpoint.experimental.v1.training.Checkpointer" in run.stderr
    assert ckptkit.verify(str(tmp_path / "tree")).steps[0].state == "proven"
    assert list((tmp_path / "ram").rglob("h/0/slot-*.bin")), "the host's name is that of the file"


def test_class_that_is_in_use_is_refused_by_name() -> None:
    """Part of the job would go on with stock Orbax: two managers over one root."""
    run = python("-m", "tests.patch.late")
    assert run.stdout.endswith("done\n"), run.stdout + run.stderr[-3000:]


def test_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    """`python -m trainer` would have no counterpart, or a wrong call no message."""
    run = python("-m", "ckptkit.patch", "--ram", str(tmp_path / "ram"), "--", "-m", "tests.patch.job", str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1])["tiers"] == [["durable", "ram"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ram]\npath = 3 4", "is not TOML"),
        ("[gpu]\n", "gpu: expected host_id and the tables ram, ssd, peer"),
        ("ram = 3\n", r"\[ram\]: not a table"),
        ('[ram]\npath = "/x"\nevery = 3\n', r"\[ram\]: keys every: expected every_seconds"),
        ("[ssd]\nevery_steps = 3\n", r"\[ssd\]: path is missing"),
        ('[ram]\npath = "/x"\nevery_steps = 0\n', "at least 1"),
        ('[ram]\npath = "/x"\nevery_steps = 1\nevery_seconds = 3\n', "every_steps and every_seconds: give one"),
    ],
)
def test_wrong_tiers_file_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    """A misspelt key would leave a job without its ramdisk."""
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tiers(file)


def test_tiers_file_has_every_tier(tmp_path: Path) -> None:
    """A policy of the file would not reach the tier."""
    file = tmp_path / "tiers.toml"
    file.write_text(
        'host_id = "h"\n[ram]\npath = "/r"\nevery_seconds = 30\nkeep_unflushed = 2\njob = "a"\n'
        '[ssd]\npath = "/s"\nslots = 4\nkeep_newest = 3\n[peer]\ncopies = 1\nevery_steps = 5\n'
    )
    tiers: list[Any] = [
        ckptkit.Tier.ram("/r", save=ckptkit.EverySeconds(30), keep=ckptkit.KeepUnflushed(2), job="a"),
        ckptkit.Tier.ssd("/s", slots=4, keep=ckptkit.KeepNewest(3)),
        ckptkit.Tier.peer(copies=1, save=ckptkit.EverySteps(5)),
    ]
    assert read_tiers(file) == (tiers, {"host_id": "h"})
