"""Faults on real processes: each happens as planned, the job comes back, and the table is true."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.launch import ExitCode, RestartPolicy, WarmStart, Workers
from ckptkit.launch.chaos import Chaos, ChaosRun, Fault, FaultKind, FaultPlan, Hazard, _flipped

# A job that counts to 40 in a file, goes on from there, and says at its end what it has counted: its "state".
COUNTS = """
import os, sys, time
from pathlib import Path
from ckptkit.util import heartbeat
home = Path(sys.argv[1])
home.mkdir(parents=True, exist_ok=True)
saved = home / f"saved-{os.environ['CKPTKIT_PROCESS']}"
count = int(saved.read_text()) if saved.exists() else 0
while count < 40:
    time.sleep(0.02)
    count += 1
    heartbeat.beat(count)
    if count % 4 == 0:
        saved.with_suffix(".new").write_text(str(count))
        saved.with_suffix(".new").replace(saved)
told = os.environ.get("CKPTKIT_STATE_DIGEST")
if told:
    Path(told.replace("{process}", os.environ["CKPTKIT_PROCESS"])).write_text(str(count + WRONG))
"""


def script(tmp_path: Path, wrong: str = "0") -> str:
    path = tmp_path / "counts.py"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(COUNTS.replace("WRONG", wrong))
    return str(path)


def run(tmp_path: Path, plan: FaultPlan, *, processes: int = 2) -> tuple[ChaosRun, list[str]]:
    said: list[str] = []
    command = [sys.executable, script(tmp_path), str(tmp_path / "job")]
    chaos = Chaos(
        Workers(command, processes=processes, warm=WarmStart(is_cold=True)),
        plan,
        policy=RestartPolicy(restarts=10, backoff_s=0.0, grace_s=0.1),
        on_output=lambda process, line: said.append(line),
        say=said.append,
    )
    return chaos.run(), said


def test_same_seed_plans_the_same_faults() -> None:
    """A campaign that found a fault of the job could not be repeated."""

    def plan(seed: int) -> list[Fault]:
        hazards = (wipe("/home/{process}/ram", 0.5),)
        weights: dict[FaultKind, float] = {"kill": 2.0, "freeze": 1.0}
        return list(FaultPlan(seed=seed, mtbf_s=3.0, count=200, weights=weights, wipes=hazards).faults(4))

    faults = plan(7)
    assert faults == plan(7)
    assert faults != plan(8)
    assert {fault.victim for fault in faults} == {0, 1, 2, 3}
    assert 2.0 < sum(fault.after_s for fault in faults) / 200 < 4.0
    assert 100 < sum(fault.kind == "kill" for fault in faults) < 170
    assert 60 < sum(fault.wipes == (f"/home/{fault.victim}/ram",) for fault in faults) < 140


def wipe(path: str, chance: float) -> Hazard:
    return Hazard(path=path, chance=chance)


@pytest.mark.parametrize(("path", "chance"), [("/", 0.5), ("/home", 0.5), ("runs/x", 0.5), ("/home/x", 1.5)])
def test_directories_that_are_not_the_jobs_own_are_refused(path: str, chance: float) -> None:
    """A mistyped path would empty a disk."""
    with pytest.raises(ValueError, match=path):
        wipe(path, chance)


def test_job_comes_back_from_every_kind_of_fault(tmp_path: Path) -> None:
    """The table would show what was planned, and not what the job went through."""
    (tmp_path / "ram").mkdir()
    (tmp_path / "ram" / "slot").write_bytes(bytes(100))
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "step").write_bytes(bytes(100))
    plan = FaultPlan(
        seed=3,
        mtbf_s=0.05,
        count=6,
        weights={"kill": 1.0, "freeze": 1.0, "preempt": 1.0},
        freeze_s=0.2,
        wipes=(wipe(str(tmp_path / "ram"), 1.0),),
        flips=(wipe(str(tmp_path / "disk"), 1.0),),
    )
    planned = list(plan.faults(2))
    assert {fault.kind for fault in planned} == {"kill", "freeze", "preempt"}
    ended, said = run(tmp_path, plan)
    assert (ended.code, ended.unplanned) == (ExitCode.OK, ())
    done = [each.fault for each in ended.injected]
    assert done == planned[: len(done)]
    assert len(done) >= 3, said
    assert [(tmp_path / "job" / f"saved-{process}").read_text() for process in (0, 1)] == ["40", "40"]
    for each in ended.injected:
        if each.fault.kind == "freeze":
            assert each.did == [f"froze process {each.fault.victim} for 0.2 s"]
            continue
        assert each.did[1].startswith(f"emptied {tmp_path}/ram: ")
        assert each.did[2].startswith(f"flipped a bit of {tmp_path}/disk/step, byte ")
        assert each.back_s is None or each.back_s > 0
    assert list((tmp_path / "ram").iterdir()) == []
    assert any(each.back_s is not None for each in ended.injected)


def test_loss_that_no_fault_explains_is_named(tmp_path: Path) -> None:
    """A job that crashes by itself would be counted as one that survived its faults."""
    code = "import sys; sys.exit(3 if sys.argv[1] == '0' else 0)"
    chaos = Chaos(
        Workers([sys.executable, "-c", code, "{attempt}"], processes=1),
        FaultPlan(seed=0, mtbf_s=60.0, count=1),
        policy=RestartPolicy(restarts=2, backoff_s=0.0),
        on_output=lambda process, line: None,
        say=lambda line: None,
    )
    ended = chaos.run()
    assert (ended.code, ended.injected) == (ExitCode.OK, ())
    assert ended.unplanned == ("attempt 0: process 0 was lost by itself",)


def test_flip_changes_one_bit(tmp_path: Path) -> None:
    """A flip that changes nothing, or a whole file, would prove nothing about checksums."""
    data = os.urandom(1000)
    (tmp_path / "step").write_bytes(data)
    (tmp_path / "small").write_bytes(b"x")
    assert str(tmp_path / "step") in str(_flipped(tmp_path, random.Random(0)))
    after = (tmp_path / "step").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(data, after, strict=True)) == 1
    assert (tmp_path / "small").read_bytes() == b"x"


def chaos_command(tmp_path: Path, *words: str, wrong: str = "0") -> list[str]:
    command = [sys.executable, script(tmp_path, wrong), str(tmp_path / "{run}")]
    return ["chaos", "--processes", "2", "--cold", *words, "--", *command]


def test_command_reports_each_fault_and_compares_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reader would have to find out from logs whether the job is what it would have been."""
    words = ("--faults", "2", "--mtbf", "0.05", "--compare", "--json")
    assert main(chaos_command(tmp_path, *words)) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["state"] == "equal"
    assert told["code"] == 0
    assert [each["fault"]["kind"] for each in told["faults"]] == ["kill", "kill"]
    assert told["back_s_max"] > 0
    assert main(chaos_command(tmp_path / "again", *words[:-1])) == 0
    out = capfd.readouterr().out
    assert "the job ended well after" in out
    assert "2 faults; next step after" in out
    assert out.endswith("state at the end: equal to that of the undisturbed run, on every process\n")


def test_different_state_at_the_end_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job that resumes wrongly would pass."""
    wrong = "('disturbed' in sys.argv[1].split('/'))"
    words = ("--faults", "1", "--mtbf", "0.05", "--compare")
    assert main(chaos_command(tmp_path, *words, wrong=wrong)) == 20
    assert "state at the end: DIFFERENT from that of the undisturbed run" in capfd.readouterr().out


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The person would learn which directory is emptied by seeing it empty."""
    words = ("--faults", "3", "--wipe", f"{tmp_path}/ram-{{process}}:1", "--dry-run")
    assert main(chaos_command(tmp_path, *words)) == 0
    out = capfd.readouterr().out.splitlines()
    assert len(out) == 3
    for line in out:
        victim = line.partition("kill process ")[2][0]
        assert line.endswith(f"; empty {tmp_path}/ram-{victim}")
    assert not (tmp_path / "disturbed").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "explode:1"], "choose among kill, freeze, preempt"),
        (["--kind", "kill:0"], "of which one is above 0"),
        (["--wipe", "/:0.5"], "give a directory of the job's own"),
        (["--wipe", "/dev/shm/x"], "write DIR:CHANCE"),
        (["--flip", "/dev/shm/x:2"], "the chance is 2, expected 0 to 1"),
        (["--compare"], "give each run its own directories"),
    ],
)
def test_wrong_plan_is_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half a campaign would have run, or the wrong directory been emptied."""
    assert main(["chaos", *words, "--", sys.executable, "-c", f"open('{tmp_path}/ran', 'w')"]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()
