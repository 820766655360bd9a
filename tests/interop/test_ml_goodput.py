"""The same run, given to Google's own calculator: the two must agree."""

from __future__ import annotations

import contextlib
import datetime
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.events import Event, Kind
from ckptkit.goodput import goodput_report

ORIGIN_S = 1.75e9
NEVER = datetime.datetime.fromtimestamp(0, datetime.UTC)


class LocalLogger:
    """In place of Cloud Logging: entries in a list."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def write_cloud_logging_entry(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)

    def read_cloud_logging_entries(self, *window: Any, **named: Any) -> tuple[list[dict[str, Any]], Any]:
        del window, named
        from ml_goodput_measurement.src import goodput_utils  # it imports scipy.stats: not in each worker of a run

        last = goodput_utils.get_timestamp_from_log_entry(self.entries[-1])
        return self.entries, (last, last)


def span(name: str, start_s: float, end_s: float, step: int | None = None) -> Event:
    fields = {"span": name, "duration_s": end_s - start_s}
    return Event(kind=Kind.SPAN, at_s=end_s, process=0, step=step, fields=fields)


def google_percent(logs: list[list[Event]], cache: Path) -> float:
    """The calculator's result for process 0's events: steps by their starts; saves and data loading as pauses."""
    logger = LocalLogger()
    from ml_goodput_measurement.src import goodput as google

    recorder = google.GoodputRecorder("job", "log", True, logger)  # pyright: ignore[reportArgumentType]
    last_s = 0.0

    def when(at_s: float) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(at_s, datetime.UTC)

    for log in logs:
        recorder.record_job_start_time(when(log[0].at_s))
        entries: list[tuple[float, int, Any]] = []
        for event in log:
            if event.kind != Kind.SPAN:
                continue
            begin_s, last_s = event.at_s - event.fields["duration_s"], event.at_s
            match event.fields["span"]:
                case "step":
                    entries.append(
                        (begin_s, 0, lambda at=begin_s, n=event.step or 0: recorder.record_step_start_time(n, when(at)))
                    )
                case "initialization":
                    entries.append((begin_s, 0, lambda at=begin_s: recorder.record_tpu_init_start_time(when(at))))
                    entries.append((last_s, 1, lambda at=last_s: recorder.record_tpu_init_end_time(when(at))))
                case "checkpoint_save" | "data_loading" as kind:
                    entries.append(
                        (
                            begin_s,
                            2,
                            lambda at=begin_s, k=kind: recorder.record_custom_badput_event_start_time(when(at), k),
                        )
                    )
                    entries.append(
                        (last_s, 1, lambda at=last_s, k=kind: recorder.record_custom_badput_event_end_time(when(at), k))
                    )
        for _, _, record in sorted(entries, key=lambda entry: entry[:2]):
            record()
    recorder.record_job_end_time(when(last_s))
    from ml_goodput_measurement.src import goodput as google

    calculator = google.GoodputCalculator("job", "log", logger, cache_dir=str(cache))  # pyright: ignore[reportArgumentType]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that its cache cannot be written as JSON
        return calculator.get_job_goodput()[0]


LIVES = st.lists(
    st.tuples(
        st.integers(3, 25),  # steps of an attempt
        st.integers(1, 6),  # how many of them the next one repeats
        st.floats(1.0, 40.0),  # seconds until it comes up
        st.floats(0.0, 20.0),  # seconds to the first step
        st.lists(st.floats(0.5, 3.0), min_size=25, max_size=25),  # seconds of its steps
    ),
    min_size=1,
    max_size=5,
)


def play(lives: Any) -> list[list[Event]]:
    now_s, step, logs = ORIGIN_S, 0, []
    for number, (steps, repeats, gap_s, start_s, lengths_s) in enumerate(lives):
        now_s += gap_s if number else 0.0
        log = [Event(kind=Kind.STARTED, at_s=now_s, process=0, fields={"attempt": number})]
        log.append(span("initialization", now_s, now_s + start_s))
        now_s += start_s
        for length_s in lengths_s[:steps]:
            log.append(span("data_loading", now_s, now_s + 0.05))
            log.append(span("step", now_s + 0.05, now_s + length_s, step=step))
            log.append(span("checkpoint_save", now_s + length_s + 0.01, now_s + length_s + 0.2))
            now_s, step = now_s + length_s + 0.25, step + 1  # 0.05 s of the loop's own
        if number == len(lives) - 1:
            log.pop()  # the run ends with its last step: the calculator counts all up to the job's end as that step's
        logs.append(log)
        step = max(1, step - min(repeats, steps - 1))
    return logs


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=LIVES)
def test_goodput_matches_ml_goodput(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Breaks when `ml_goodput` is a number of our own: 0.1 percentage points on any history are the bar."""
    logs = play(lives)
    ours = 100.0 * (goodput_report(logs).goodput.ml_goodput or 0.0)
    theirs = google_percent(logs, tmp_path_factory.mktemp("cache"))
    assert ours == pytest.approx(theirs, abs=0.1)
