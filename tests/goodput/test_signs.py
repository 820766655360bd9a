"""The account of a loop that records no steps: they are taken from its calls of the manager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.events import Event, EventLog, Kind, read_events
from ckptkit.goodput import Part, goodput_report, load_run
from ckptkit.goodput.runs import attempts_of
from ckptkit.goodput.signs import strides_of, usual_step_s
from ckptkit.manager.run_account import RunAccount
from ckptkit.restore.local_tiers import LocalTiers
from tests.goodput.test_goodput import at, parts, span

EVERY = ocp.CheckpointManagerOptions(save_interval_steps=1)


def called(step: int, at_s: float) -> Event:
    return at(Kind.CALLED, at_s, step=step, call="should_save")


def save(step: int, start_s: float, end_s: float) -> Event:
    return span("checkpoint_save", start_s, end_s, step=step)


def healthy(begin_s: float = 0.0, first: int = 1, steps: int = 4, compile_s: float = 3.0) -> list[Event]:
    """A start of two seconds, a compilation, steps of a second, each saved in a tenth of one; killed after the last."""
    log = [at(Kind.STARTED, begin_s, attempt=0), at(Kind.OPENED, begin_s + 2.0)]
    if first > 1:
        log += [at(Kind.RESTORED, begin_s + 3.0, step=first - 1, sources={}, duration_s=1.0)]
        log += [span("checkpoint_restore", begin_s + 2.0, begin_s + 3.0)]
    now_s = log[-1].at_s + compile_s
    for step in range(first, first + steps):
        log.append(save(step, now_s + 1.0, now_s + 1.1))
        now_s += 1.1
    return log


def test_steps_are_taken_from_saves() -> None:
    """Breaks when a loop that wrote no spans has a goodput of 0 %, or its compilation counts as training."""
    report = goodput_report([healthy()])
    assert report.steps_from == "calls"
    assert parts(report) == {"initialization": 2.0, "compile": 3.0, "productive": 4.0, "checkpoint_save": 0.4}
    assert report.goodput.distinct_steps == 4
    assert report.goodput.ml_goodput == pytest.approx(4.0 / 9.4)


def test_loop_that_saves_rarely_has_all_its_steps() -> None:
    """Breaks when fifty steps between two saves count as one."""
    log = [at(Kind.STARTED, 0.0, attempt=0), at(Kind.OPENED, 0.0)]
    log += [save(50 * k, 10.0 * k, 10.0 * k + 1.0) for k in range(1, 4)]
    report = goodput_report([log])
    assert report.goodput.distinct_steps == 150
    assert report.goodput.step_s_p50 == pytest.approx(9.0 / 50)


def test_steps_after_a_restart_are_counted_once() -> None:
    """Breaks when what a loop repeats after a kill is productive twice, or the restart is training."""
    second = healthy(begin_s=20.0, first=3, steps=4)
    report = goodput_report([healthy(), [at(Kind.STARTED, 20.0, attempt=1), *second[1:]]])
    assert report.goodput.distinct_steps == 6
    assert report.parts_s[Part.WASTED] == pytest.approx(2.0)  # steps 3 and 4
    assert report.parts_s[Part.PRODUCTIVE] == pytest.approx(6.0)
    (loss,) = report.disruptions
    assert (loss.cause, loss.lost_steps) == ("unknown", 2)


def test_last_step_before_a_restart_counts_if_it_was_kept() -> None:
    """Breaks when a start that lost nothing has one step fewer than it took: no step begins after the last."""
    second = healthy(begin_s=20.0, first=5, steps=4)
    report = goodput_report([healthy(), [at(Kind.STARTED, 20.0, attempt=1), *second[1:]]])
    assert report.goodput.ml_goodput == pytest.approx(8.0 / report.wall_s)
    second = healthy(begin_s=20.0, first=4, steps=4)
    report = goodput_report([healthy(), [at(Kind.STARTED, 20.0, attempt=1), *second[1:]]])
    assert report.goodput.ml_goodput == pytest.approx(7.0 / report.wall_s)


def test_several_calls_about_a_step_are_one_step() -> None:
    """Breaks when a loop that asks should_save, saves, and asks for a preemption has three steps for one."""
    log = [at(Kind.STARTED, 0.0, attempt=0), at(Kind.OPENED, 0.0)]
    for step in range(1, 5):
        log += [called(step, step), save(step, step + 0.1, step + 0.2), span("checkpoint_save", step + 0.3, step + 0.4)]
        log += [save(step, step + 0.05, step + 0.25)]  # the loop's own span around the manager's
    (attempt,), _ = attempts_of([log])
    assert [step for step, _ in attempt.steps] == [1, 2, 3, 4]


def test_call_about_an_earlier_step_is_no_step() -> None:
    """Breaks when a trainer that saves its end as step 0, or counts epochs in a second manager, has lost all it did."""
    stray = save(0, 6.5, 6.6)
    second = healthy(begin_s=20.0, first=5)
    second = [at(Kind.STARTED, 20.0, attempt=1), *second[1:], save(0, second[-1].at_s, second[-1].at_s + 0.1)]
    report = goodput_report([[*healthy(), save(2, 9.4, 9.5)], second])
    assert (report.goodput.distinct_steps, report.disruptions[0].lost_steps) == (8, 0)
    assert report.parts_s[Part.PRODUCTIVE] == pytest.approx(8.0)
    opened = at(Kind.OPENED, 0.0)
    assert [each.last for each in strides_of([opened, save(100, 5.0, 5.1), stray, save(200, 8.0, 8.1)])] == [100, 200]
    again = [opened, save(7, 5.0, 5.1), at(Kind.OPENED, 6.0), stray, save(1, 7.0, 7.1)]
    assert [each.last for each in strides_of(again)] == [7, 0, 1]  # a new manager begins another training


def test_numbers_far_apart_are_single_steps() -> None:
    """Breaks when a loop that counts samples makes a million spans of one step."""
    strides = strides_of([at(Kind.OPENED, 0.0), *(save(10**6 * k, k, k + 0.1) for k in range(1, 4))])
    assert [stride.steps for stride in strides] == [1, 1, 1]
    assert usual_step_s(strides) == pytest.approx(0.9)


def test_second_manager_in_a_run_is_no_new_start() -> None:
    """Breaks when a manager that is made for an evaluation ends the step before it."""
    log = [at(Kind.OPENED, 0.0), save(1, 1.0, 1.1), at(Kind.OPENED, 1.5), save(2, 2.1, 2.2)]
    assert [round(stride.step_s, 6) for stride in strides_of(log)] == [1.0, 1.0]


def test_computation_that_a_save_waits_for_is_the_steps() -> None:
    """Breaks when a loop that dispatches steps ahead has slow saves and no goodput: the save waits for its step."""
    log = [at(Kind.STARTED, 0.0, attempt=0), at(Kind.OPENED, 0.0)]
    for step in range(1, 5):
        log += [at(Kind.STAGED, step + 0.95, step=step, stall_s=0.1, computing_s=0.8), save(step, step + 0.1, step + 1)]
    report = goodput_report([log])
    assert report.parts_s[Part.CHECKPOINT_SAVE] == pytest.approx(0.4)
    explicit = [span("step", step, step + 0.1, step=step) for step in range(1, 5)]
    report = goodput_report([[*log, *explicit]])
    assert report.parts_s[Part.PRODUCTIVE] == pytest.approx(4 * 0.9)


@pytest.mark.parametrize(("end", "losses"), [({}, 0), ({"failed": True}, 1), (None, 1)])
def test_closed_manager_is_a_normal_end(end: dict[str, bool] | None, losses: int) -> None:
    """Breaks when a script that came to its end and is run again tomorrow has lost a process."""
    closed = [] if end is None else [Event(kind=Kind.CLOSED, at_s=9.5, process=0, fields=end)]
    second = healthy(begin_s=100.0, first=5)
    report = goodput_report([[*healthy(), *closed], [at(Kind.STARTED, 100.0, attempt=1), *second[1:]]])
    assert len(report.disruptions) == losses
    assert (report.parts_s[Part.STOPPED] > 90) is (losses == 0)


@pytest.mark.parametrize(
    ("told", "losses"),
    [
        ([at(Kind.FINISHED, 10.0, process=-1, code=0)], 0),  # nobody closed the manager
        ([at(Kind.DISRUPTED, 10.0, process=-1, attempt=0, lost=1, cause="SIGKILL")], 1),
        ([], 1),  # the launcher was lost too
    ],
)
def test_log_of_the_launcher_decides_what_a_loss_is(told: list[Event], losses: int) -> None:
    """Breaks when the night between two runs counts as recovery, or a host that took its launcher along as no loss."""
    launcher = [at(Kind.STARTED, 0.0, process=-1, attempt=0), *told, at(Kind.STARTED, 99.0, process=-1, attempt=1)]
    second = [at(Kind.STARTED, 100.0, attempt=1), *healthy(begin_s=100.0, first=5)[1:]]
    report = goodput_report([healthy(), second, launcher])
    assert len(report.disruptions) == losses
    assert (report.parts_s[Part.STOPPED] > 90) is (losses == 0)
    assert (report.parts_s[Part.RECOVERY] > 90) is (losses == 1)


def test_manager_that_closes_early_is_no_end() -> None:
    """Breaks when a manager that was closed before the training makes the kill in mid-run a normal end."""
    log = healthy()
    early = [*log[:2], at(Kind.CLOSED, 2.5), *log[2:]]
    report = goodput_report([early, [at(Kind.STARTED, 50.0, attempt=1), *healthy(begin_s=50.0, first=5)[1:]]])
    assert len(report.disruptions) == 1


def test_run_without_any_sign_has_no_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks when a run that nothing is known of is reported as 0 %."""
    log = EventLog.for_run(tmp_path)
    log.emit(Kind.STAGED, step=5, strategy="-", reason="-", stall_s=0.01)
    log.close()
    assert goodput_report(load_run(tmp_path)).goodput.ml_goodput is None
    assert main(["goodput", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no step information" in out
    assert "manager.step(step)" in out
    assert " 0.00%" not in out
    assert (
        main(["goodput", str(tmp_path), "--html", str(tmp_path / "a.html"), "--prometheus", f"{tmp_path}/a.prom"]) == 0
    )
    assert "no step information" in (tmp_path / "a.html").read_text()
    assert "goodput_ratio" not in (tmp_path / "a.prom").read_text()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("program_startup", Part.INITIALIZATION),
        ("tpu_initialization", Part.INITIALIZATION),
        ("data_loading_sync", Part.DATA_LOADING),
        ("unproductive_checkpoint_save_time", Part.CHECKPOINT_SAVE),
        ("unproductive_checkpoint_restore_time", Part.CHECKPOINT_RESTORE),
        ("evaluation", Part.CUSTOM),
    ],
)
def test_span_names_of_others_are_mapped(name: str, part: Part, tmp_path: Path) -> None:
    """Breaks when time under a name of ml-goodput's, or of the user's own, counts as effective training time."""
    steps = [span("step", k, k + 1, step=k) for k in range(10)]
    log = [at(Kind.STARTED, 0.0, attempt=0), *steps[:5], span(name, 5.0, 10.0), *steps_after(5, 10.0)]
    report = goodput_report([log])
    assert report.parts_s[part] == pytest.approx(5.0)
    assert report.custom_s == ({name: 5.0} if part is Part.CUSTOM else {})
    if part in (Part.INITIALIZATION, Part.CHECKPOINT_RESTORE, Part.CUSTOM):
        assert report.goodput.effective_training_time == pytest.approx(10 / 15)


@pytest.mark.parametrize(
    ("name", "part"),
    [("TPU_INITIALIZATION", Part.INITIALIZATION), ("DATA_LOADING_SYNC", Part.DATA_LOADING), ("OTHER", Part.OTHER)],
)
def test_names_are_known_as_ml_goodput_writes_them(name: str, part: Part) -> None:
    """Breaks when a log with ml-goodput's names in capitals is all `custom`."""
    report = goodput_report([[at(Kind.STARTED, 0.0, attempt=0), span(name, 0.0, 3.0), *steps_after(0, 3.0)]])
    assert report.parts_s[part] == pytest.approx(3.0)
    assert report.custom_s == {}


@pytest.mark.parametrize("name", ["STEP", "PRODUCTIVE", "Step", "stpe", "eval_step"])
def test_no_other_name_is_training(name: str) -> None:
    """Breaks when time under a name that is none of ours raises a goodput by any definition."""
    log = [at(Kind.STARTED, 0.0, attempt=0), *steps_after(0, 0.0), span(name, 5.0, 15.0), *steps_after(5, 15.0)]
    report = goodput_report([log])
    assert report.custom_s == {name: 10.0}
    shares = (report.goodput.ml_goodput, report.goodput.effective_training_time, report.goodput.new_steps)
    assert shares == (pytest.approx(0.5),) * 3


@pytest.mark.parametrize("name", ["checkpoint_restore", "compile", "program_startup", "training_prep"])
def test_badput_between_two_steps_is_of_neither(name: str) -> None:
    """Breaks when a restore in mid-run, or a second compilation, is the training of the step before it."""
    log = [at(Kind.STARTED, 0.0, attempt=0), *steps_after(0, 0.0), span(name, 5.0, 15.0), *steps_after(5, 15.0)]
    assert goodput_report([log]).goodput.ml_goodput == pytest.approx(0.5)


def steps_after(first: int, at_s: float) -> list[Event]:
    return [span("step", at_s + k, at_s + k + 1, step=first + k) for k in range(5)]


def test_unknown_span_name_is_a_warning_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks when a misspelt span is counted without a warning."""
    log = EventLog.for_run(tmp_path)
    log.record(Event.span("stpe\n\x1b[2J", start_s=0.0, end_s=5.0))
    log.close()
    assert main(["goodput", str(tmp_path)]) == 0
    assert "stpe??[2J (5 s)" in capsys.readouterr().out


def test_log_of_others_is_converted(tmp_path: Path) -> None:
    """Breaks when a log with given times cannot be written, or its saves and restores count as none."""
    log = EventLog(tmp_path / "attempt-0-process-0.jsonl")
    log.record(Event.span("checkpoint_restore", start_s=1e9, end_s=1e9 + 4))
    for step in range(5):
        log.record(Event.span("step", start_s=1e9 + 4 + step, end_s=1e9 + 5 + step, step=step))
    log.record(Event.span("checkpoint_save", start_s=1e9 + 9, end_s=1e9 + 10, step=5))
    log.close()
    report = goodput_report(load_run(tmp_path))
    assert report.wall_s == pytest.approx(10.0)
    assert parts(report) == {"checkpoint_restore": 4.0, "productive": 5.0, "checkpoint_save": 1.0}
    assert (report.saves.saves, report.saves.stall_ms_p50) == (1, pytest.approx(1000.0))
    assert [(each.restore_s, each.source_bytes) for each in report.restores] == [(pytest.approx(4.0), {})]
    with pytest.raises(ValueError, match="ends at 1, before it starts at 2"):
        Event.span("step", start_s=2, end_s=1)


def test_manager_tells_of_its_calls(tmp_path: Path) -> None:
    """Breaks when the manager records no saves, restores or steps, or two lines for one step."""
    events = EventLog.for_run(tmp_path / "run")
    state = {"w": jnp.zeros(8)}
    options = ocp.CheckpointManagerOptions(save_interval_steps=3)
    with ckptkit.CheckpointManager(tmp_path / "root", options=options, events=events) as manager:
        for step in range(7):
            if manager.should_save(step):
                manager.save(step, args=ocp.args.StandardSave(state))
            manager.reached_preemption(step)
        manager.wait_until_finished()
        manager.restore(6, args=ocp.args.StandardRestore(state))
    found = read_events(tmp_path / "run" / "attempt-0-process-0.jsonl")
    assert [event.step for event in found if event.kind == Kind.CALLED] == list(range(7))
    spans = [(event.fields["span"], event.step) for event in found if event.kind == Kind.SPAN]
    assert [step for name, step in spans if name == "checkpoint_save" and step is not None] == [0, 3, 6]
    assert [name for name, _ in spans].count("checkpoint_restore") == 1
    assert found[-1].kind == Kind.CLOSED
    assert found[-1].fields == {}
    assert goodput_report(load_run(tmp_path / "run")).goodput.distinct_steps == 7


def test_attempt_that_restored_nothing_shows_no_restore() -> None:
    """Breaks when a start that looked for a step and found none is shown as a restore of step None."""
    log = [at(Kind.STARTED, 0.0, attempt=0), at(Kind.OPENED, 1.0), span("checkpoint_restore", 1.0, 2.0)]
    assert goodput_report([[*log, span("step", 2.0, 3.0, step=0)]]).restores == ()


def test_time_of_a_restore_counts_from_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when the event leaves out what comes before the read: two figures for one restore contradict."""
    events = EventLog.for_run(tmp_path / "run")
    state = {"w": jnp.zeros(8)}
    saves = LocalTiers.saves
    with ckptkit.CheckpointManager(tmp_path / "root", options=EVERY, events=events) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        monkeypatch.setattr(LocalTiers, "saves", lambda self: (time.sleep(0.2), saves(self))[1])
        manager.restore(0, args=ocp.args.StandardRestore(state))
    (restore,) = goodput_report(load_run(tmp_path / "run")).restores
    assert restore.waited_s is not None
    assert 0.2 <= restore.restore_s <= restore.waited_s


def test_step_of_a_save_that_a_loss_cut_off_is_in_the_log(tmp_path: Path) -> None:
    """Breaks when the launcher counts a step that was done before the loss and `goodput` does not."""
    events = EventLog(tmp_path / "attempt-0-process-0.jsonl")
    with RunAccount(events, progress=False).saving(5) as call:
        (begun,) = read_events(tmp_path / "attempt-0-process-0.jsonl")
        call.taken = True
    assert (begun.kind, begun.step) == (Kind.CALLED, 5)


def test_save_that_announces_its_call_is_one_stride() -> None:
    """Breaks when the wait of a save for its own step is not a part of the step."""
    restored, done = at(Kind.RESTORED, 10.0, step=4), save(5, 13.0, 14.0)
    begun = at(Kind.CALLED, 12.0, step=5, call="save")
    assert strides_of([restored, begun, done]) == strides_of([restored, done])
    assert [stride.end_s for stride in strides_of([restored, begun])] == [12.0]


def test_step_spans_replace_the_calls(tmp_path: Path) -> None:
    """Breaks when a loop that records its steps has each of them twice in its log."""
    events = EventLog.for_run(tmp_path / "run")
    with ckptkit.CheckpointManager(tmp_path / "root", options=EVERY, events=events) as manager:
        for step in range(3):
            with manager.step(step):
                assert not manager.reached_preemption(step)
    found = read_events(tmp_path / "run" / "attempt-0-process-0.jsonl")
    assert [event.step for event in found if event.fields.get("span") == "step"] == [0, 1, 2]
    assert Kind.CALLED not in [event.kind for event in found]


def test_exception_in_the_block_is_no_normal_end(tmp_path: Path) -> None:
    """Breaks when a training that raised is accounted for as one that came to its end."""
    events, seen = EventLog(), []
    events.observe(seen.append)
    with (
        pytest.raises(ZeroDivisionError),
        ckptkit.CheckpointManager(tmp_path / "root", options=EVERY, events=events),
    ):
        raise ZeroDivisionError
    assert seen[-1].kind == Kind.CLOSED
    assert seen[-1].fields == {"failed": True}


VARIABLES = ["CKPTKIT_PROCESS", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX"]


def names_after(directory: Path, starts: int, **variables: str) -> list[str]:
    """The logs after so many starts in fresh processes."""
    code = f"from ckptkit import EventLog; EventLog.for_run({str(directory)!r})"
    env = {name: value for name, value in os.environ.items() if name not in [*VARIABLES, "CKPTKIT_ATTEMPT"]}
    for _ in range(starts):
        subprocess.run([sys.executable, "-c", code], check=True, env=env | variables, timeout=60)
    return sorted(path.name for path in directory.iterdir())


def test_logs_of_a_run_name_themselves(tmp_path: Path) -> None:
    """Breaks when two starts write into one log, or a process takes the name of another."""
    assert names_after(tmp_path, 2) == ["attempt-0-process-0.jsonl", "attempt-1-process-0.jsonl"]
    found = names_after(tmp_path, 1, CKPTKIT_ATTEMPT="7", CKPTKIT_PROCESS="3")
    assert "attempt-7-process-3.jsonl" in found
    assert "attempt-0-process-2.jsonl" in names_after(tmp_path, 1, SLURM_PROCID="2")
    assert names_after(tmp_path, 2, CKPTKIT_ATTEMPT="9", CKPTKIT_PROCESS="0").count("attempt-9-process-0.jsonl") == 1
    lines = (tmp_path / "attempt-9-process-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [9, 9]


def test_rank_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a template that was not filled in makes every process write the log of process 0."""
    monkeypatch.setenv("CKPTKIT_PROCESS", "${RANK}")
    with pytest.raises(ValueError, match=r"CKPTKIT_PROCESS='\$\{RANK\}' in the environment"):
        EventLog.for_run(tmp_path)


def test_log_of_another_process_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks when every process of a job writes the log of process 0, and nobody is told."""
    events = EventLog.for_run(tmp_path / "run", process=3)
    ckptkit.CheckpointManager(tmp_path / "root", options=EVERY, events=events).close()
    (record,) = [record for record in caplog.records if "event log is of process 3" in record.getMessage()]
    assert "this is process 0" in record.getMessage()


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("wrong_s", [0.0, 4e9])
def test_one_wrong_stamp_changes_no_attempt(place: int, wrong_s: float) -> None:
    """A host that counts from 1970 until its clock is set would make a job's mean time between losses decades."""
    stamps = [1.8e9 + 10.0 * number for number in range(6)]
    stamps[place] = wrong_s
    log = [
        Event(kind=Kind.CALLED, at_s=at_s, process=0, step=step, fields={"call": "save"})
        for step, at_s in enumerate(stamps)
    ]
    (attempt,), _ = attempts_of([log])
    assert attempt.first_s is not None
    assert 1.8e9 <= attempt.first_s <= attempt.last_s <= 1.8e9 + 50.0
