"""The fault benchmark: its schedule, its ceiling, its damage and its verdict, and one short campaign end to end."""

from __future__ import annotations

import json
import lzma
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import ckptkit
from bench.fault_places import Every, Places
from bench.fault_report import Reference, judge, show, summary
from bench.fault_run import Outcome, _Run
from bench.fault_schedule import NEWEST, RAMDISK, ceiling_s, gap_closed, plan_faults, text_of
from bench.fault_tuning import first_guess, learned, sweep
from bench.faults import limit_s
from ckptkit import EventLog, Kind
from ckptkit.launch import ExitCode, Workers
from ckptkit.launch.faults import Fault
from ckptkit.launch.harm import emptied
from ckptkit.util.pages import is_cached

ROOT = Path(__file__).parents[2]


def faults(seed: int, *, mtbf_s: float = 60.0, horizon_s: float = 2000.0, **other: Any) -> tuple[Fault, ...]:
    return plan_faults(seed=seed, mtbf_s=mtbf_s, horizon_s=horizon_s, processes=2, **other)


def test_a_seed_repeats_its_schedule_with_every_kind_of_fault() -> None:
    """Contenders would get different faults, or never a lost ramdisk or a flipped bit."""
    planned = faults(3)
    assert planned == faults(3) != faults(4)
    assert sum(bool(fault.wipes) for fault in planned[:10]) == 5
    assert 3 <= sum(bool(fault.flips) for fault in planned[:10]) <= 4
    assert {fault.victims for fault in planned} == {(0,), (1,)}
    assert text_of(planned[0]).startswith(f"{planned[0].after_s:.1f} s: process {planned[0].victims[0]}")
    assert [fault.after_s for fault in planned] == sorted(fault.after_s for fault in planned)


def test_trace_is_compressed_in_time(tmp_path: Path) -> None:
    """A trace of years would have no fault within minutes."""
    gaps_min = [60, 30, 240, 10, 20, 60]
    rows, at_min = ["System,Prob Started,Down Time", "2,01/01/2000 00:00,5"], 0
    for gap in gaps_min:
        at_min += gap
        rows.append(f"2,01/01/2000 {at_min // 60:02d}:{at_min % 60:02d},5")
    path = tmp_path / "failures.csv.xz"
    path.write_bytes(lzma.compress("\n".join(rows).encode()))
    played = faults(1, mtbf_s=7.0, horizon_s=1000.0, trace=path)
    gaps_s = np.diff([0.0, *(fault.after_s for fault in played)])
    assert gaps_s[: len(gaps_min)].mean() == pytest.approx(7.0)
    assert sorted(gaps_s[: len(gaps_min)]) == pytest.approx(sorted(7.0 * gap / 70 for gap in gaps_min))


def fault(at_s: float) -> Fault:
    return Fault(number=0, after_s=at_s, since="launch", kind="kill", victims=(0,))


def test_ceiling_loses_only_startup_and_interrupted_steps() -> None:
    """A share of a gap to a wrong ceiling means nothing."""
    times = {"start_s": 5.0, "step_s": 1.0}
    assert ceiling_s((), steps=10, **times) == 15.0
    assert ceiling_s((fault(8.5),), steps=10, **times) == 8.5 + 5 + 7, "three whole steps are kept"
    assert ceiling_s((fault(8.5), fault(10.0)), steps=10, **times) == 10.0 + 5 + 7, "killed while it starts"
    assert ceiling_s((fault(15.5),), steps=10, **times) == 15.0, "a fault after the end"
    assert gap_closed(0.7, 0.5, 0.9) == pytest.approx(0.5)
    assert gap_closed(0.4, 0.5, 0.9) == pytest.approx(-0.25)
    assert gap_closed(0.7, 0.9, 0.9) is None


def test_short_run_has_time_for_its_starts_on_a_busy_machine() -> None:
    """A run of a few seconds would be called unfinished because other work kept the processors busy."""
    start_s, killed_at_s, slowdown = 6.2, 1.0, 5.0
    assert limit_s(5.0, start_s) > killed_at_s + slowdown * (2 * start_s + 4 * 0.4)
    assert limit_s(240.0, start_s) == 3 * 240.0 + start_s, "as in the stored results"


def test_intervals_are_multiples_and_the_best_tried_is_chosen() -> None:
    """A save of a slower tier between two of the faster would cost a copy of its own."""
    guess = first_guess("ckptkit", 60.0, 0.9)
    assert guess.ram is not None
    assert guess.ssd is not None
    assert guess.ssd % guess.ram == guess.durable % guess.ssd == 0
    best, rows = sweep(64.0, 1.0, lambda every: {8: 0.3, 16: 0.5, 32: 0.4}[every.durable])
    assert best == Every(durable=16)
    assert [row["goodput"] for row in rows] == [0.3, 0.5, 0.4]


def test_costly_saves_get_longer_intervals() -> None:
    """Ours would be run at an interval that has nothing to do with what its saves cost."""

    def every(stall_s: float) -> int:
        events = []
        log = EventLog()
        log.observe(events.append)
        for step in range(1, 20):
            log.emit(Kind.STAGED, step=step, strategy="x", reason="", bytes=1, tiers=["durable"], stall_s=stall_s)
            log.emit(Kind.COMMITTED, step=step, tier="durable", bytes=1, duration_s=0.1)
        return learned("ckptkit-durable", events, 60.0, 0.1).durable

    assert every(0.01) < every(0.5)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Steps 1 to 3 in all tiers: ram has all, disk 2, durable 2."""
    made = Places(disk=tmp_path / "disk", ram=tmp_path / "ram")
    tiers = [
        ckptkit.Tier.ram(str(made.ramdisk(0))),
        ckptkit.Tier.ssd(str(made.disk / "ssd"), save=ckptkit.EverySteps(2)),
    ]
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with ckptkit.CheckpointManager(made.durable, tiers=tiers, options=options, host_id="host-0") as manager:
        for step in (1, 2, 3):
            state = {"w": jnp.full((64, 64), step, jnp.float32), "n": jnp.int32(step)}
            assert manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
    return made


def test_bit_flip_hits_array_data_of_the_newest_remaining_step(places: Places) -> None:
    """A bit that turns where nobody reads would prove that nothing was noticed."""
    found = places.flip(random.Random(1))
    assert found is not None
    assert found.startswith("step 3: slot-")
    assert ckptkit.verify(str(places.ramdisk(0))).corrupt
    assert not ckptkit.verify(str(places.disk / "ssd")).corrupt
    emptied(places.ramdisk(0))
    found = places.flip(random.Random(2))
    assert found is not None
    assert found.startswith("step 2: slot-")
    assert ckptkit.verify(str(places.disk / "ssd")).corrupt
    for manifest in places.disk.glob("ssd/*/*/*/step-*.json"):
        manifest.unlink()
    assert not ckptkit.verify(str(places.durable)).corrupt
    places.flip(random.Random(3))
    assert ckptkit.verify(str(places.durable)).corrupt
    *older, _ = sorted(path for path in places.durable.glob("*") if path.name.isdecimal())
    for step in older:
        shutil.rmtree(step)
    assert older
    assert places.flip(random.Random(5)) is None  # the only copy: nobody could go on without it
    places.remove()
    assert places.flip(random.Random(4)) is None


@pytest.mark.disk
def test_host_that_loses_its_ramdisk_reads_checkpoints_from_the_disk(tmp_path: Path) -> None:
    """A contender would read from the memory of a lost host."""
    places = Places(disk=tmp_path / "disk", ram=tmp_path / "ram")
    path = places.durable / "1" / "data"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())

    second_half = np.memmap(path, np.uint8, "r")[1 << 19 :]
    assert is_cached(second_half)
    places.drop_page_cache().join()
    assert not is_cached(second_half)


def test_fault_of_a_schedule_damages_the_run_itself(places: Places) -> None:
    """Contenders would be killed, and never lose what their tiers are for."""
    code = "import sys, time; time.sleep(60 if sys.argv[1] == '0' else 0)"
    workers = Workers([sys.executable, "-c", code, "{attempt}"], processes=1)
    planned = Fault(number=0, after_s=0.2, since="launch", kind="kill", victims=(0,), wipes=(RAMDISK,), flips=(NEWEST,))
    outcome = _Run(workers, places, [planned]).run(60.0)
    assert (outcome.code, outcome.flips, outcome.unplanned) == (ExitCode.OK, 1, 0)
    (told,) = outcome.happened
    assert told.startswith("0.2 s: process 0, ramdisk wiped, a bit flipped (step 2: slot-")
    assert list(places.ramdisk(0).iterdir()) == []
    assert ckptkit.verify(str(places.disk / "ssd")).corrupt


def test_verdict_detects_wrong_bits_and_unfinished_runs(tmp_path: Path) -> None:
    """A campaign could end well whatever came back."""
    places = Places(disk=tmp_path / "disk", ram=tmp_path / "ram")
    places.proof.mkdir(parents=True)
    (places.proof / "state-0.json").write_text('{"w": {"0:4": "ab"}}')

    def records(losses: dict[int, str]) -> None:
        lines = [json.dumps({"step": step, "rows": [], "loss": loss}) + "\n" for step, loss in losses.items()]
        (places.proof / "losses-0.jsonl").write_text("".join(lines) + '{"torn')

    launcher = EventLog(places.events / "launcher.jsonl", process=-1)
    launcher.emit(Kind.STARTED, attempt=0)
    log = EventLog(places.events / "attempt-0-process-0.jsonl")
    log.emit(Kind.STARTED, attempt=0)
    for step in range(4):
        log.emit(Kind.SPAN, step=step, span="step", duration_s=0.0)
    log.emit(Kind.FINISHED)
    records({step: f"loss {step}" for step in range(4)})
    reference = Reference.of(places)
    assert (reference.steps, set(reference.losses)) == (4, {0, 1, 2, 3})

    right = judge(places, Outcome(code=ExitCode.OK), reference, 4)
    assert (right["finished"], right["wrong"], right["kept_steps"]) == (True, False, 4)
    assert not judge(places, Outcome(code=ExitCode.INTERRUPTED), reference, 4)["finished"]
    (places.proof / "state-0.json").write_text('{"w": {"0:4": "other"}}')
    assert judge(places, Outcome(code=ExitCode.OK), reference, 4)["wrong"], "the end has other bits"
    assert not judge(places, Outcome(code=ExitCode.OK), reference, 3)["wrong"], "a shorter run has another end"
    records({0: "loss 0", 1: "other", 2: "loss 2"})
    assert judge(places, Outcome(code=ExitCode.INTERRUPTED), reference, 4)["wrong_steps"] == 1

    runs = [
        {**right, "contender": name, "repeat": repeat, "goodput": goodput, "lost_work_s": lost}
        for repeat in range(3)
        for name, goodput, lost in (("ckptkit", 0.7, 1.0), ("orbax", 0.5, 4.0), ("orbax-sync", 0.3, 9.0))
    ]
    against = summary(runs, [0.9, 0.9, 0.8], 1.0)["against"]
    assert against["peer"] == "orbax", "the better of the two"
    assert against["gap_closed"]["median"] == pytest.approx(0.5)
    assert against["gap_closed"]["n"] == 3
    assert against["lost_work_ratio"] == 0.25


def test_run_that_never_starts_is_unfinished(tmp_path: Path) -> None:
    """A campaign of hours would end in a traceback, because of one run that was killed at every start."""
    places = Places(disk=tmp_path / "disk", ram=tmp_path / "ram")
    launcher = EventLog(places.events / "launcher.jsonl", process=-1)
    launcher.emit(Kind.STARTED, attempt=0)
    launcher.emit(Kind.DISRUPTED, attempt=0, lost=0, cause="SIGKILL", wiped=[])
    launcher.emit(Kind.FINISHED, code=130)
    reference = Reference(steps=4, start_s=1.0, compile_s=0.0, step_s=1.0, losses={}, state={})
    found = judge(places, Outcome(), reference, 4)
    assert (found["finished"], found["goodput"], found["disruptions"]) == (False, 0.0, 1)
    runs = [{**found, "contender": name, "repeat": 0} for name in ("ckptkit", "orbax")]
    against = summary(runs, [0.9], 1.0)["against"]
    assert (against["unfinished"], against["gap_closed"]["median"]) == (1, 0.0)
    console = Console(record=True, width=150)
    settings = {"state": "tiny", "processes": 1, "mtbf_s": 60.0, "every": {"ckptkit": "1", "orbax": "1"}}
    settings |= {"steps": 4, "start_s": 1.0, "step_s": 1.0}
    show({"settings": settings, "runs": runs, "summary": summary(runs, [0.9], 1.0)}, console)
    assert "ckptkit, repeat 0: never finished" in console.export_text()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A campaign in which every run is killed once, while it starts: no machine is too slow or too fast for that."""
    place = tmp_path_factory.mktemp("faults")

    def fits(seed: int) -> bool:
        first, second = plan_faults(seed=seed, mtbf_s=60.0, horizon_s=2000.0, processes=1)[:2]
        return first.after_s < 1.0 and second.after_s > 150.0

    seed = next(seed for seed in range(1000) if fits(seed))
    command = [sys.executable, "-m", "bench", "faults", "--state", "tiny", "--seconds", "5", "--sweep-seconds", "0"]
    command += ["--repeats", "1", "--contender", "ckptkit", "--contender", "orbax", "--seed", str(seed)]
    command += ["--json", str(place / "result.json"), "--ramdisk", str(place), "--disk", str(place)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ceiling of a checkpoint that costs nothing" in done.stdout
    assert [path.name for path in place.iterdir()] == ["result.json"], "a campaign leaves nothing behind"
    return json.loads((place / "result.json").read_text())


@pytest.mark.long
def test_campaign_finishes_with_correct_bits(result: dict[str, Any]) -> None:
    """Contenders could be driven by the benchmark into ends of their own."""
    assert [run["contender"] for run in result["runs"]] == ["ckptkit", "orbax"]
    for run in result["runs"]:
        assert run["finished"], run["last_lines"]
        assert not run["wrong"], run["happened"]
        assert run["disruptions"] == len(run["happened"]) == 1, run["happened"]
        assert run["kept_steps"] == result["settings"]["steps"]
        assert run["saves"] >= 1
        assert run["written_bytes"]["durable"] > 0
        assert 0 < run["goodput"] <= 1.5


@pytest.mark.long
def test_campaign_records_schedule_intervals_and_machine(result: dict[str, Any]) -> None:
    """Figures without schedule, intervals and machine cannot be compared."""
    assert result["settings"]["every"].keys() == {"ckptkit", "orbax"}
    assert len(result["schedules"]) == len(result["ceilings"]) == 1
    assert result["environment"]["packages"]["orbax-checkpoint"]
    against = result["summary"]["against"]
    assert against["peer"] == "orbax"
    assert against["unfinished"] == against["wrong"] == 0
    for figure in ("goodput", "ml_goodput", "effective_training_time", "new_steps", "lost_work_s", "stall_ms"):
        assert result["summary"]["contenders"]["orbax"][figure]["n"] == 1
