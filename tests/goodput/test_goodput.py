"""The account of a run: every second is counted once, and under the right name."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ckptkit.events import Event, EventLog, Kind
from ckptkit.goodput import GoodputReport, Part, goodput_report, load_run, steps_done, timeline_of
from ckptkit.goodput.runs import attempts_of
from ckptkit.goodput.text import caveats


def at(
    kind: Kind,
    at_s: float,
    process: int = 0,
    step: int | None = None,
    tier: str | None = None,
    **fields: object,
) -> Event:
    return Event(kind=kind, at_s=at_s, process=process, step=step, tier=tier, fields=fields)


def span(name: str, start_s: float, end_s: float, step: int | None = None) -> Event:
    return at(Kind.SPAN, end_s, step=step, span=name, duration_s=end_s - start_s)


def two_attempts() -> list[list[Event]]:
    """Steps 0..4, process 1 lost during step 5 at 20 s, resumed at step 3, to the end of step 6."""
    first = [
        at(Kind.STARTED, 2.0, attempt=0),
        span("initialization", 2.0, 5.0),
        span("compile", 5.0, 9.0),
        *(span("step", 9.0 + 2 * k, 11.0 + 2 * k, step=k) for k in range(5)),
        span("checkpoint_save", 12.5, 13.0, step=1),  # inside step 1
        at(Kind.STAGED, 12.9, step=2, stall_s=0.5),
        at(Kind.COMMITTED, 13.4, step=2, tier="ram", duration_s=0.5),
    ]
    other = [
        at(Kind.STARTED, 2.5, process=1, attempt=0),
        at(Kind.STAGED, 12.9, process=1, step=2, stall_s=0.7),
        at(Kind.COMMITTED, 13.4, process=1, step=2, tier="ram", duration_s=0.7),
    ]
    second = [
        at(Kind.STARTED, 24.0, attempt=1),
        span("initialization", 24.0, 26.0),
        span("checkpoint_restore", 26.0, 27.0),
        span("broadcast", 26.25, 26.5),  # of the restore
        at(Kind.RESTORED, 27.0, step=3, sources={"ram": 60, "ssd": 40}, duration_s=1.0),
        *(span("step", 27.0 + 2 * k, 29.0 + 2 * k, step=3 + k) for k in range(4)),
        at(Kind.FINISHED, 35.5),
    ]
    again = [
        at(Kind.STARTED, 24.0, process=1, attempt=1),
        at(Kind.RESTORED, 27.2, process=1, step=3, sources={"ssd": 100}, duration_s=1.2),
    ]
    launcher = [
        at(Kind.STARTED, 0.0, process=-1, attempt=0),
        at(Kind.DISRUPTED, 20.0, process=-1, attempt=0, lost=1, cause="SIGKILL", wiped=["ram"]),
        at(Kind.RELAUNCHED, 22.0, process=-1, attempt=1),
        at(Kind.FINISHED, 36.0, process=-1),
    ]
    return [first, other, second, again, launcher]


def parts(report: GoodputReport) -> dict[str, float]:
    return {str(part): round(seconds, 6) for part, seconds in report.parts_s.items() if seconds}


def test_each_second_of_a_known_run_is_classified() -> None:
    """Breaks when lost steps count as productive, a nested span twice, or recovery is not seen."""
    report = goodput_report(two_attempts())
    assert report.wall_s == 35.5  # process 0 reports its end; the launcher notices it at 36
    assert parts(report) == {
        "initialization": 2.0 + 3.0 + 2.0,  # until process 0 logs; its span; the second attempt's
        "compile": 4.0,
        "checkpoint_save": 0.5,
        "productive": 6.0 - 0.5 + 8.0,
        "wasted_progress_from_disruption": 4.0,  # steps 3 and 4
        "infrastructure_recovery_from_disruption": 5.0,  # last span at 19, next attempt at 24
        "checkpoint_restore": 1.0,
        "other": 0.5,
    }
    # Steps 0 to 2 less the save in step 1, the first counted as the others' mean; then four whole ones.
    assert report.goodput.ml_goodput == pytest.approx((1.75 + 1.5 + 2.0 + 8.0) / 35.5)
    assert report.goodput.effective_training_time == pytest.approx((35.5 - 7 - 4 - 4 - 5 - 1) / 35.5)
    assert report.goodput.new_steps == pytest.approx(7 * 2.0 / 35.5)
    assert report.goodput.distinct_steps == 7


def test_disruption_records_lost_steps_and_resume_phases() -> None:
    """Breaks when lost steps or the phases of a resume are attributed to another loss."""
    (loss,) = goodput_report(two_attempts()).disruptions
    assert (loss.attempt, loss.process, loss.cause, loss.wiped) == (0, 1, "SIGKILL", ("ram",))
    assert loss.lost_steps == 2
    assert loss.resume_s == pytest.approx(9.0)  # step 3 again, at 29
    assert loss.caught_up_s == pytest.approx(13.0)  # step 5, which nobody had done, at 33
    assert {part: s for part, s in loss.resume_parts_s.items() if s} == {
        Part.RECOVERY: 4.0,
        Part.INITIALIZATION: 2.0,
        Part.CHECKPOINT_RESTORE: 1.0,
        Part.PRODUCTIVE: 2.0,
    }


def test_step_is_lost_once_to_the_loss_that_undid_it() -> None:
    """Breaks when a deep rewind is charged to an earlier, cheap loss, or a loss before any step has a price."""

    def attempt(number: int, steps: range) -> list[Event]:
        begin_s = 100.0 * number
        spans = [span("step", begin_s + k, begin_s + k + 1, step=step) for k, step in enumerate(steps)]
        return [at(Kind.STARTED, begin_s, attempt=number), *spans]

    logs = [attempt(0, range(42)), attempt(1, range(40, 77)), attempt(2, range(0)), attempt(3, range(1, 90))]
    report = goodput_report(logs)
    assert [loss.lost_steps for loss in report.disruptions] == [2, 76, 0]
    assert report.parts_s[Part.WASTED] == pytest.approx(2 + 76)


def test_saves_and_restores_are_aggregated_over_processes() -> None:
    """Breaks when a save of two processes counts as two, or a tier's bytes are those of one process."""
    report = goodput_report(two_attempts())
    assert report.saves.saves == 1
    assert report.saves.stall_ms_p50 == report.saves.stall_ms_p99 == pytest.approx(700.0)
    assert report.saves.commit_s_p50 == {"ram": pytest.approx(0.6)}
    (restore,) = report.restores
    assert (restore.attempt, restore.step) == (1, 3)
    assert restore.source_bytes == {"ram": 60, "ssd": 140}
    assert restore.restore_s == 1.2
    assert restore.waited_s == 1.0


def test_calls_that_saved_nothing_are_no_saves() -> None:
    """An attempt that is lost before its first save would count one for each step: the stall of a run of stock Orbax
    was 0.5 ms, and is 2 s."""
    calls = [span("checkpoint_save", 1.0 + k, 1.0005 + k, step=k) for k in range(20)]
    lost = [at(Kind.STARTED, 0.0, attempt=0), *calls]
    saving = [at(Kind.STARTED, 30.0, attempt=1), at(Kind.STAGED, 33.0, step=3, stall_s=2.0)]
    saves = goodput_report([lost, saving]).saves
    assert (saves.saves, saves.stall_ms_p50) == (1, pytest.approx(2000.0))
    assert timeline_of([lost, saving]).stalls_ms == (pytest.approx(2000.0),)


def test_stall_percentiles_match_numpy() -> None:
    """Breaks when p99 of a few saves is not interpolated (it would be the maximum, or the one below)."""
    log = [at(Kind.STARTED, 0.0, attempt=0)]
    log += [at(Kind.STAGED, 1.0 + k, step=k, stall_s=k / 1000) for k in range(11)]
    saves = goodput_report([log]).saves
    assert (saves.stall_ms_p50, saves.stall_ms_p99) == (pytest.approx(5.0), pytest.approx(9.9))


def test_nesting_of_spans_is_decided_by_their_ends() -> None:
    """Breaks when nesting is told by starts: the outer's is late by what its thread was preempted at its end."""
    log = [at(Kind.STARTED, 0.0, attempt=0), span("data_loading", 0.0, 4.0), span("step", 0.5, 10.5, step=0)]
    assert parts(goodput_report([log])) == {"data_loading": 4.0, "productive": 6.5}


def test_disruptions_are_found_without_a_launcher_log() -> None:
    """Breaks when a cluster's own restarts (no launcher.jsonl) are not accounted for."""
    report = goodput_report(two_attempts()[:-1])
    (loss,) = report.disruptions
    assert (loss.process, loss.cause, loss.lost_steps) == (None, "unknown", 2)
    (told,) = caveats(report)
    assert told.startswith("No log has the process or the cause of 1 loss: `ckptkit run` writes both")
    assert not caveats(goodput_report(two_attempts())), "the launcher's log has both"
    assert loss.resume_s == pytest.approx(10.0)  # from the last sign of life, at 19


def test_loss_without_a_restart_is_recovery_to_the_end() -> None:
    """Breaks when a run whose restarts were spent counts the wait as `other` or its steps as wasted."""
    first, other, *_ = two_attempts()
    lost = at(Kind.DISRUPTED, 20.0, process=-1, attempt=0, lost=0, cause="exit code 1")
    report = goodput_report([first, other, [lost, at(Kind.FINISHED, 25.0, process=-1)]])
    assert report.parts_s[Part.RECOVERY] == pytest.approx(6.0)
    assert report.parts_s[Part.WASTED] == 0.0
    (loss,) = report.disruptions
    assert (loss.resume_s, loss.caught_up_s, loss.resume_parts_s) == (None, None, {})


def test_attempt_without_events_extends_the_recovery() -> None:
    """Breaks when a process 0 that was lost at once leaves a hole that is called `other`."""
    first, other, second, _, launcher = two_attempts()
    stillborn = [at(Kind.STARTED, 22.0, process=1, attempt=1)]
    report = goodput_report(
        [first, other, stillborn, [replace(second[0], fields={"attempt": 2}), *second[1:]], launcher]
    )
    assert parts(report) == parts(goodput_report(two_attempts()))
    assert [loss.lost_steps for loss in report.disruptions] == [2]


def test_empty_log_directory_is_refused() -> None:
    """Breaks when an empty directory reads as a perfect run."""
    with pytest.raises(ValueError, match="nothing to account for"):
        goodput_report([[], [at(Kind.STARTED, 0.0, process=-1, attempt=0)]])


def test_load_run_reads_event_logs(tmp_path: Path) -> None:
    """Breaks when the names of the files or of the fields drift between writer and reader."""
    with pytest.raises(FileNotFoundError, match=r"attempt-<a>-process-<p>\.jsonl"):
        load_run(tmp_path)
    for attempt in (0, 1):
        log = EventLog(tmp_path / f"attempt-{attempt}-process-0.jsonl", process=0)
        log.emit(Kind.STARTED, attempt=attempt, pid=1)
        with log.span("step", step=7):
            pass
        log.close()
    launcher = EventLog(tmp_path / "launcher.jsonl", process=-1)
    launcher.emit(Kind.DISRUPTED, attempt=0, lost=1, cause="SIGKILL", wiped=[])
    launcher.close()
    (tmp_path / "notes.jsonl").write_text("not an event\n")
    report = goodput_report(load_run(tmp_path))
    assert [(d.process, d.lost_steps) for d in report.disruptions] == [(1, 1)]
    assert report.goodput.distinct_steps == 1


def test_log_without_a_start_takes_attempt_from_its_file_name(tmp_path: Path) -> None:
    """Breaks when a loop that writes no `started` has only one attempt: repeated steps would be productive."""
    for attempt, steps in enumerate((range(6), range(3, 9))):
        for process in (0, 1):
            log = EventLog(tmp_path / f"attempt-{attempt}-process-{process}.jsonl")  # each claims to be process 0
            for step in steps:
                with log.span("step", step=step):
                    pass
            log.close()
    logs = load_run(tmp_path)
    report = goodput_report(logs)
    assert [loss.lost_steps for loss in report.disruptions] == [3]
    assert report.goodput.distinct_steps == 9
    assert [len(attempt.steps) for attempt in attempts_of(logs)[0]] == [6, 6]


def test_start_with_a_reused_number_is_a_separate_attempt() -> None:
    """Breaks when a container that starts again with the same arguments counts what it repeats as productive."""

    def life(begin_s: float, steps: range, number: int) -> list[Event]:
        spans = [span("step", begin_s + k, begin_s + k + 1, step=step) for k, step in enumerate(steps)]
        return [at(Kind.STARTED, begin_s, attempt=number), *spans]

    submitted_again = life(40.0, range(5, 9), 0)
    report = goodput_report([[*life(0.0, range(6), 0), *submitted_again], life(20.0, range(3, 8), 1)])
    assert [(loss.attempt, loss.lost_steps) for loss in report.disruptions] == [(0, 3), (1, 3)]
    assert report.goodput.distinct_steps == 9
    assert parts(report) == {
        "productive": 3 + 2 + 4,
        "wasted_progress_from_disruption": 3 + 3,
        "infrastructure_recovery_from_disruption": 14 + 15,
    }


def test_clock_offset_of_another_host_changes_nothing() -> None:
    """Breaks when a host whose clock is an hour ahead adds an hour to the run, or a loss is over before it began."""
    logs = two_attempts()
    ahead = [[replace(e, at_s=e.at_s + 3600.0 * (e.process == 1)) for e in log] for log in logs]
    assert goodput_report(ahead).wall_s == 35.5
    assert parts(goodput_report(ahead)) == parts(goodput_report(logs))
    (loss,) = goodput_report(ahead[:-1]).disruptions
    assert loss.resume_s == pytest.approx(10.0)
    moved = [replace(event, at_s=event.at_s - 60.0) for event in logs[2]]  # process 0 came back on another host
    (loss,) = goodput_report([logs[0], moved]).disruptions
    assert loss.resume_s == loss.caught_up_s == 0.0


def test_continued_run_has_no_loss() -> None:
    """Breaks when an attempt that came to its end counts as a loss, and the weekend after it as the time to resume."""
    first, _, second, *_ = two_attempts()
    report = goodput_report([[*first, at(Kind.FINISHED, 20.0)], second])
    assert report.disruptions == ()
    assert report.mean_time_to_resume_s == {}


def test_step_that_raised_does_not_count(tmp_path: Path) -> None:
    """Breaks when the step that hangs until another process's loss is noticed counts as done, and then as lost."""
    log = EventLog(tmp_path / "attempt-0-process-0.jsonl")
    for step in range(4):
        with suppress(OSError), log.span("step", step=step):
            time.sleep(0.01)
            if step == 3:
                raise OSError("connection reset by peer")
    log.close()
    assert steps_done(tmp_path) == 3
    report = goodput_report(load_run(tmp_path))
    assert report.goodput.distinct_steps == 3
    assert report.parts_s[Part.WASTED] >= 0.01
    again = EventLog(tmp_path / "attempt-1-process-0.jsonl")
    with again.span("step", step=3):
        pass
    again.close()
    report = goodput_report(load_run(tmp_path))
    assert [loss.lost_steps for loss in report.disruptions] == [0]
    assert report.goodput.distinct_steps == 4


def test_preemption_is_reported_as_preemption() -> None:
    """Breaks when a cluster that takes its machines back looks like one that loses them for reasons unknown."""
    first, _, second, *_ = two_attempts()
    (loss,) = goodput_report([[*first, at(Kind.PREEMPTED, 20.0, step=5, tiers=["ram"])], second]).disruptions
    assert loss.cause == "preempted"


def test_damaged_log_makes_steps_done_unknown(tmp_path: Path) -> None:
    """Breaks when a run cannot go on from its checkpoint because a line of its telemetry is damaged."""
    log = EventLog(tmp_path / "attempt-0-process-0.jsonl")
    for step in range(3):
        with log.span("step", step=step):
            pass
    log.close()
    # Nobody reads the logs of a thousand processes at each start of each of them.
    (tmp_path / "attempt-0-process-1.jsonl").write_text("not an event\nnor this\n")
    assert steps_done(tmp_path) == 3
    path = tmp_path / "attempt-0-process-0.jsonl"
    path.write_text(path.read_text().replace('"step":1', "\0\0\0\0"))  # a block that a power failure took
    assert steps_done(tmp_path) is None
    with pytest.raises(ValueError, match=r"attempt-0-process-0\.jsonl:2"):
        load_run(tmp_path)


def test_phases_of_the_mean_time_to_resume_add_up() -> None:
    """Breaks when a phase is averaged over other losses than the whole is."""
    means = goodput_report(two_attempts()).mean_time_to_resume_s
    assert means.pop("total") == pytest.approx(9.0)
    assert math.fsum(means.values()) == pytest.approx(9.0)
    assert means["infrastructure_recovery_from_disruption"] == pytest.approx(4.0)


def test_the_report_is_plain_json() -> None:
    """Breaks when a field is not a JSON value, or a part loses its name."""
    plain = json.loads(json.dumps(goodput_report(two_attempts()).to_json()))
    assert plain["format"] == "ckptkit.goodput/1"
    assert math.fsum(plain["parts_s"].values()) == pytest.approx(plain["wall_s"])
    assert plain["disruptions"][0]["resume_parts_s"]["checkpoint_restore"] == 1.0


def test_timeline_covers_every_second_and_mark() -> None:
    """Breaks when the picture of a run leaves out a loss, a save or a stretch of time."""
    run = timeline_of(two_attempts())
    assert (run.origin_s, run.wall_s) == (0.0, 35.5)
    assert run.stretches[0].start_s == 0.0
    assert run.stretches[-1].end_s == 35.5
    for before, after in pairwise(run.stretches):
        assert before.end_s == after.start_s
        assert before.part != after.part
    assert [(mark.at_s, mark.loss.lost_steps) for mark in run.losses] == [(20.0, 2)]
    (save,) = run.saves
    assert (save.step, save.tier, save.problem) == (2, "ram", None)
    assert (save.start_s, save.end_s) == (pytest.approx(12.7), pytest.approx(13.4))
    assert [(mark.step, mark.tiers) for mark in run.restores] == [(3, ("ssd", "ram"))]
    assert run.stalls_ms == pytest.approx((500.0, 700.0))
