"""The demo's own judgement: what it plans, what it refuses, and when identical runs would prove nothing."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.goodput import Disruption, Goodput, GoodputReport, Part, Restore, Saves, goodput_report, load_run
from tests.browser import in_browser, needs_browser
from tests.forked import WARM, one_template
from tools import demo
from tools.demo import DemoError, fresh_places, plan_losses, read_seed, running_bucket, vacuities
from tools.proof import Verdict

ROOT = Path(__file__).parents[2]
VERDICT = Verdict(differences=(), leaves=1, boxes=1, steps=demo.STEPS, repeated_steps=3)


def report(*, disruptions: int, restored: list[tuple[int, int]]) -> GoodputReport:
    loss = Disruption(
        attempt=0,
        process=0,
        cause="SIGKILL",
        wiped=(),
        lost_steps=1,
        resume_s=1.0,
        caught_up_s=2.0,
        resume_parts_s={},
    )
    return GoodputReport(
        wall_s=1.0,
        parts_s=dict.fromkeys(Part, 0.0),
        goodput=Goodput(ml_goodput=0.0, effective_training_time=0.0, new_steps=0.0, distinct_steps=0, step_s_p50=0.0),
        disruptions=tuple(replace(loss, attempt=attempt) for attempt in range(disruptions)),
        saves=Saves(saves=0, stall_ms_p50=None, stall_ms_p99=None, commit_s_p50={}),
        restores=tuple(
            Restore(attempt=attempt, step=step, source_bytes={}, restore_s=0.0) for attempt, step in restored
        ),
        steps_from="spans",
        custom_s={},
    )


def test_every_seed_plans_a_process_and_then_a_host() -> None:
    """Breaks when a seed loses a host before anything is saved, or after the last step."""
    for seed in range(200):
        first, second = plan_losses(seed)
        assert demo.SSD_EVERY < first.step < second.step < demo.STEPS
        assert (first.wiped, second.wiped) == (("ram",), ("ram", "ssd"))
        assert {first.process, second.process} <= set(range(demo.PROCESSES))
    assert plan_losses(7) == plan_losses(7)
    plans = [plan_losses(seed) for seed in range(1, 6)]
    assert len(set(plans)) == 5
    for losses in zip(*plans, strict=True):  # over the seeds that are run, each process has each kind of loss
        assert {loss.process for loss in losses} == set(range(demo.PROCESSES))


@pytest.mark.parametrize("text", ["one", "-1", "", "1.5", str(2**31)])
def test_seed_that_is_not_a_number_is_refused(text: str) -> None:
    """Breaks when a typing error gives a traceback, or is taken for seed 1."""
    with pytest.raises(DemoError, match=f"CKPTKIT_DEMO_SEED is '{text}': give a whole number") as caught:
        read_seed({"CKPTKIT_DEMO_SEED": text})
    assert caught.value.code == 2
    assert read_seed({}) == 1


def test_proof_without_losses_and_restores_is_vacuous() -> None:
    """Breaks when a demo passes whose processes were never lost, or which trained again from the start."""
    losses = plan_losses(1)
    assert vacuities(report(disruptions=2, restored=[(1, 40), (2, 80)]), VERDICT, losses) == []
    assert vacuities(report(disruptions=1, restored=[(1, 40), (2, 0)]), replace(VERDICT, steps=7), losses) == [
        "1 losses happened, 2 were planned",
        "attempt 2 restored no step: it began again",
        "the reference took 7 steps, expected 120",
    ]


def test_ramdisk_files_are_removed_after_any_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a failed demo leaves its ramdisk tier in memory, or one that was killed is never cleaned up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MEMORY", tmp_path)
    monkeypatch.setattr(demo, "MEMORY_NEEDED_BYTES", 1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned, other = tmp_path / f"ckptkit-demo-1-{ended.pid}", tmp_path / "ckptkit-demo-1-mine"
    abandoned.mkdir()
    other.mkdir()
    with pytest.raises(RuntimeError, match="in the middle"), fresh_places(1) as places:  # noqa: PT012
        (places.ram / "slot").write_text("bytes")
        assert not abandoned.exists()
        raise RuntimeError("in the middle")
    assert not places.ram.exists()
    assert places.root.is_dir()
    assert other.exists()


def test_a_machine_without_ramdisk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when the lack of /dev/shm shows only as a failed save, or as a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MEMORY", tmp_path / "nowhere")
    with pytest.raises(DemoError, match="nowhere is not there or not writable") as caught, fresh_places(1):
        pass
    assert caught.value.code == 2
    monkeypatch.setattr(demo, "MEMORY", tmp_path)
    monkeypatch.setattr(demo, "MEMORY_NEEDED_BYTES", 2**60)
    with pytest.raises(DemoError, match="MiB free, the demo needs") as caught, fresh_places(1):
        pass
    assert caught.value.code == 2


def test_bucket_that_does_not_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    """Breaks when the demo waits for an address that never comes, or hides why."""
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DemoError, match=r"the bucket did not start: .*file"), running_bucket(tmp_path / "file"):
        pass


def test_wrong_seed_exits_2_with_one_message() -> None:
    """Breaks when `make demo` with a wrong seed runs, or shows more than one line."""
    env = {**os.environ, "CKPTKIT_DEMO_SEED": "many"}
    ended = subprocess.run(
        [sys.executable, "-m", "tools.demo"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr == "demo: CKPTKIT_DEMO_SEED is 'many': give a whole number from 0 to 2^31 - 1\n"


@pytest.fixture
def short_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The whole demo with a quarter of its steps; its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    short = {"STEPS": 30, "RAM_EVERY": 2, "SSD_EVERY": 6, "DURABLE_EVERY": 12}
    short |= {"LOSS_OF_PROCESS_STEPS": range(8, 14), "LOSS_OF_HOST_STEPS": range(20, 26)}
    for name, value in short.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "WarmStart", lambda: WARM)
    with one_template():
        assert demo.run_demo(1) == 0
    return tmp_path / "runs" / "demo-1"


@pytest.mark.long
@needs_browser
def test_a_browser_shows_every_loss_of_the_demo(short_demo: Path, tmp_path: Path) -> None:
    """Breaks when the demo writes no page, one that a browser complains of, or one that leaves out a kill."""
    dom, said = in_browser(short_demo / "report.html", tmp_path / "profile")
    assert "CONSOLE" not in said
    losses = re.findall(r'<g class="loss"><title>loss of process (\d) \(SIGKILL\)', dom)
    assert losses == [str(loss.process) for loss in plan_losses(1)]
    assert dom.count('class="restore"') == len(losses)
    parts_s = goodput_report(load_run(short_demo / "events")).parts_s
    total_s = math.fsum(parts_s.values())
    assert parts_s[Part.OTHER] < 0.05 * total_s, "no span covers it; the loop's own lines take 1 or 2 %"


def workers_in(directory: Path) -> list[str]:
    """The processes whose working directory is `directory`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                found.append(process.name)
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.mark.long
def test_interrupted_demo_exits_130_and_cleans_up(tmp_path: Path) -> None:
    """Breaks when Ctrl-C in mid-run leaves trainers, or gigabytes in /dev/shm."""
    env = {**os.environ, "CKPTKIT_DEMO_SEED": "99", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.demo"]
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end_s = time.monotonic() + 30.0
    while len(workers_in(tmp_path)) < 1 + demo.PROCESSES and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(workers_in(tmp_path)) >= 1 + demo.PROCESSES
    assert list(demo.MEMORY.glob(f"ckptkit-demo-99-{process.pid}"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert not list(demo.MEMORY.glob(f"ckptkit-demo-99-{process.pid}"))
    assert workers_in(tmp_path) == []
