"""The live metrics of a process: a fold over its events, bounded, and off the step loop."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from ckptkit.events import Event, EventLog, ExporterThread, Kind
from ckptkit.goodput.exporters import METRICS, RunMetrics
from ckptkit.goodput.exporters.metrics import labels_of
from ckptkit.save.records import Refusal
from ckptkit.util import clock


def at(kind: Kind, at_s: float, step: int | None = None, tier: str | None = None, **fields: object) -> Event:
    return Event(kind=kind, at_s=at_s, process=0, step=step, tier=tier, fields=fields)


def found(metrics: RunMetrics) -> dict[str, float]:
    """The value of each series, named as Prometheus names it."""
    return {
        sample.metric.name + "".join(f" {value}" for value in labels_of(sample).values()): sample.value
        for sample in metrics.samples()
    }


RUN = [
    at(Kind.STARTED, 0.0, attempt=2),
    at(Kind.RESTORED, 9.0, step=5, sources={"ram": 100, "peer": 50}, duration_s=1.0),
    at(Kind.CALLED, 10.0, step=6, call="should_save"),
    at(Kind.CALLED, 11.0, step=7, call="should_save"),
    at(Kind.STAGED, 11.1, step=7, stall_s=0.02),
    Event.span("checkpoint_save", start_s=11.0, end_s=12.0, step=7),
    at(Kind.COMMITTED, 12.0, step=7, tier="durable", bytes=10, duration_s=0.9),
    at(Kind.COMMITTED, 22.0, step=9, tier="durable", bytes=10, duration_s=0.9),
    at(Kind.COMMITTED, 32.0, step=11, tier="durable", bytes=10, duration_s=0.9),
    at(Kind.SKIPPED, 33.0, step=12, tier="ram", policy="skip", reason="too early"),
    at(Kind.FAILED, 34.0, step=12, tier="durable", reason="403"),
    at(Kind.RETRIED, 34.0, step=12, tier="durable", reason="503", delay_s=1.0),
    at(Kind.REJECTED, 34.0, step=12, tier="ram", reason="damaged"),
    at(Kind.REPLICAS_DIFFER, 34.0, step=12),
    at(Kind.DEGRADED, 35.0, tier="ssd", reason="no space"),
    at(Kind.DEGRADED, 35.0, tier="ram", reason="no space"),
    at(Kind.RECOVERED, 36.0, tier="ram", failures=1, failed_s=1.0),
]


def test_metrics_of_a_known_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a dashboard shows other numbers than the events have."""
    monkeypatch.setattr(clock, "wall_s", lambda: 40.0)
    metrics = RunMetrics()
    for event in RUN:
        metrics.add(event)
    values = found(metrics)
    assert values == {
        "ckptkit_attempt": 2.0,
        "ckptkit_start_timestamp_seconds": 0.0,
        "ckptkit_step": 7.0,
        "ckptkit_steps_total": 2.0,
        "ckptkit_restores_total": 1.0,
        "ckptkit_restored_bytes_total ram": 100.0,
        "ckptkit_restored_bytes_total peer": 50.0,
        "ckptkit_restore_seconds": 1.0,
        "ckptkit_saves_staged_total": 1.0,
        "ckptkit_save_stall_seconds": 0.02,
        "ckptkit_span_seconds_total checkpoint_save": 1.0,
        "ckptkit_commits_total durable": 3.0,
        "ckptkit_commit_bytes_total durable": 30.0,
        "ckptkit_commit_seconds durable": pytest.approx(2.7),
        "ckptkit_commit_interval_seconds durable": 10.0,
        "ckptkit_last_commit_timestamp_seconds durable": 32.0,
        "ckptkit_last_committed_step durable": 11.0,
        "ckptkit_saves_skipped_total ram skip": 1.0,
        "ckptkit_saves_failed_total durable": 1.0,
        "ckptkit_saves_retried_total durable": 1.0,
        "ckptkit_restores_rejected_total ram": 1.0,
        "ckptkit_replica_differences_total": 1.0,
        "ckptkit_tier_degraded durable": 0.0,
        "ckptkit_tier_degraded ssd": 1.0,
        "ckptkit_tier_degraded ram": 0.0,
        "ckptkit_goodput_estimate_ratio": pytest.approx(1 - (10.0 + 1.0) / 40.0),
    }
    told = {sample.metric.name for sample in metrics.samples()}
    assert {metric.name for metric in METRICS} - told == {"ckptkit_tier_used_ratio"}  # of a tier that has a path


def test_counters_begin_at_zero() -> None:
    """Breaks when the first failed save is not an increase to Prometheus, and the alert waits for the second."""
    metrics = RunMetrics()
    metrics.add(at(Kind.OPENED, 0.0, tiers=["ram"], places={}))
    values = found(metrics)
    for name in ("saves_failed", "saves_retried", "commits", "commit_bytes", "restores_rejected"):
        assert values[f"ckptkit_{name}_total ram"] == values[f"ckptkit_{name}_total durable"] == 0.0
    assert values["ckptkit_replica_differences_total"] == values["ckptkit_restores_total"] == 0.0
    for policy in get_args(get_type_hints(Refusal)["policy"]):
        assert values[f"ckptkit_saves_skipped_total ram {policy}"] == 0.0
    metrics.add(at(Kind.FAILED, 1.0, step=1, tier="ram", reason="403"))
    metrics.add(at(Kind.OPENED, 2.0, tiers=["ram"], places={}))  # a second manager
    assert found(metrics)["ckptkit_saves_failed_total ram"] == 1.0


def test_share_of_a_tier_in_use_is_asked_when_it_is_shown(tmp_path: Path) -> None:
    """Breaks when a ramdisk fills up between two saves, and no alert sees it; or a missing path ends the rest."""
    metrics = RunMetrics()
    metrics.add(at(Kind.OPENED, 0.0, places={"ram": str(tmp_path), "ssd": str(tmp_path / "gone")}))
    values = found(metrics)
    assert 0.0 <= values["ckptkit_tier_used_ratio ram"] <= 1.0
    assert "ckptkit_tier_used_ratio ssd" not in values


def test_number_of_series_is_bounded() -> None:
    """Breaks when a loop that puts the step into the name of its spans fills the memory of the process."""
    metrics = RunMetrics()
    for number in range(3000):
        metrics.add(Event.span(f"step-{number}", start_s=0.0, end_s=1.0))
    assert len([name for name in found(metrics) if name.startswith("ckptkit_span_seconds_total")]) == 1000


class Taking:
    """An exporter that gives each event to `take`."""

    def __init__(self, take: Callable[[Event], None]) -> None:
        self._take = take

    def begin(self, process: int) -> None:
        pass

    def export(self, event: Event) -> None:
        self._take(event)

    def close(self) -> None:
        pass


def test_exporter_that_hangs_drops_events_and_never_waits() -> None:
    """Breaks when a collector that does not answer stops the training, or takes all memory."""
    go_on, taken = threading.Event(), []

    def take(event: Event) -> None:
        go_on.wait(30)
        taken.append(event.step)

    observer = ExporterThread([Taking(take)], 0, waiting_max=10)
    for step in range(1000):
        observer(at(Kind.CALLED, 0.0, step=step))
    assert observer.dropped >= 980
    go_on.set()
    observer.close()
    assert len(taken) + observer.dropped == 1000
    assert taken == sorted(taken)


def test_exporter_that_works_hard_pauses_for_the_step_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a step that ends during a burst of exports waits for the end of the burst."""
    now = {"s": 0.0}
    monkeypatch.setattr(clock, "monotonic_s", lambda: now["s"])
    go_on, all_there, pauses = threading.Event(), threading.Event(), []

    def work(event: Event) -> None:
        go_on.wait(30)
        now["s"] += 2**-13
        if event.step == 99:
            all_there.set()

    observer = ExporterThread([Taking(work)], 0)
    wait = observer._ended.wait
    monkeypatch.setattr(observer._ended, "wait", lambda timeout_s: pauses.append(timeout_s) or wait(timeout_s))
    for step in range(100):
        observer(at(Kind.CALLED, 0.0, step=step))
    go_on.set()
    assert all_there.wait(30)
    observer.close()
    assert len([pause for pause in pauses if pause < 0.01]) == 50  # 0.2 ms are over after each second value


class Failing:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, process: int) -> None:
        self.calls.append(f"begin {process}")

    def export(self, event: Event) -> None:
        self.calls.append(event.kind)
        raise ConnectionError("no collector")

    def close(self) -> None:
        self.calls.append("close")


def test_exporter_that_raises_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks when an exporter's error ends a training, or fills its log, or loses events of the file."""
    exporter, taken = Failing(), []
    log = EventLog(tmp_path / "log.jsonl", process=3, exporters=[exporter, Taking(taken.append)])
    for step in range(20):
        log.emit(Kind.CALLED, step=step, call="save")
    log.close()
    log.close()
    assert exporter.calls == ["begin 3", *["called"] * 20, "close"]
    assert len(taken) == 20, "the next exporter lacks what this one failed at"
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 20


def test_metric_is_worked_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when OpenTelemetry, which asks for one metric at a time, works out all of them each time."""
    asked: list[str] = []
    monkeypatch.setattr(os, "statvfs", lambda place: asked.append(place) or SimpleNamespace(f_blocks=4, f_bavail=1))
    monkeypatch.setattr(clock, "wall_s", lambda: 50.0)
    metrics = RunMetrics()
    for event in [*RUN, at(Kind.OPENED, 40.0, places={"ram": "/ram"})]:
        metrics.add(event)
    one_by_one = [sample for metric in METRICS for sample in metrics.samples_of(metric)]
    assert asked == ["/ram"]
    assert one_by_one == metrics.samples()
    assert metrics.samples(100.0) != metrics.samples()  # as of then


def test_page_lists_every_metric() -> None:
    """An alert would have a name that no longer exists, and nobody would know of a new metric."""
    page = (Path(__file__).parents[3] / "docs/DASHBOARDS.md").read_text()
    for each in METRICS:
        labels = ", ".join(f"`{name}`" for name in each.labels)
        assert f"| `{each.name}` | {each.kind} | {labels} | {each.about.rstrip('.')} |" in page
    named = set(re.findall(r"^\| `(ckptkit_\w+)` \|", page, re.MULTILINE))
    assert named == {each.name for each in METRICS}
