"""The log lines that an operator reads: one for each start, restore, durable commit, last save, and each problem."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.events import EventLog, Kind
from ckptkit.manager.observers import observe_run

OPTIONS = ocp.CheckpointManagerOptions(save_interval_steps=2)
STATE = {"w": jnp.arange(1000.0)}


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="ckptkit")
    return caplog


def said(lines: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in lines.records if record.levelname == level]


def test_each_state_of_a_run_is_one_line(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Breaks when the log of a restart does not tell what it found, what it restored, and what it committed."""
    for _ in range(2):
        lines.clear()
        with ckptkit.CheckpointManager(tmp_path / "root", options=OPTIONS) as manager:
            if manager.latest_step() is not None:
                manager.restore(None, args=ocp.args.StandardRestore(STATE))
            manager.save((manager.latest_step() or 0) + 2, args=ocp.args.StandardSave(STATE))
    start, restore, commit = said(lines, "INFO")
    assert re.fullmatch(
        r"start: 1 step in \S+/root and the fast tiers, the newest is 2; tiers: durable; ready after [\d.]+ m?s", start
    )
    assert re.match(r"restore: step 2 from durable \(4000 bytes\) in [\d.]+ s; rejected: none", restore)
    assert re.fullmatch(
        r"step 4 is committed to tier durable: 3\.9 KiB of this process, [\d.]+ m?s after staging", commit
    )
    assert said(lines, "WARNING") == []


def test_lines_that_the_docs_quote_are_those_of_a_run(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Breaks when a person searches a log for what docs/FIRST_HOUR.md shows, and the lines have other words."""
    page = (Path(__file__).parents[2] / "docs" / "FIRST_HOUR.md").read_text()
    quoted = re.findall(r"^[\d-]+ [\d:,]+ INFO ckptkit: (.*)$", page, re.M)
    assert len(quoted) == 3
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1)), ckptkit.Tier.ssd(str(tmp_path / "s"))]
    for _ in range(2):
        lines.clear()
        with ckptkit.CheckpointManager(tmp_path / "root", options=OPTIONS, tiers=tiers) as manager:
            if manager.latest_step() is not None:
                manager.restore(None, args=ocp.args.StandardRestore(STATE))
            first = (manager.latest_step() or 0) + 1
            for step in range(first, first + 5):
                manager.save(step, args=ocp.args.StandardSave(STATE))
                manager.wait_until_finished()
    told = {without_numbers(line) for line in said(lines, "INFO")}
    assert {without_numbers(line) for line in quoted} <= told


def without_numbers(line: str) -> str:
    return re.sub(r"/\S+|\d[\d.]*( (B|[KMG]iB|bytes|ms|s|steps?)\b)?", "#", line)


def test_rejected_candidate_and_fallback_are_warnings(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Breaks when a run goes back by steps, and its log has no reason."""
    with ckptkit.CheckpointManager(tmp_path / "root", options=OPTIONS) as manager:
        for step in (2, 4):
            manager.save(step, args=ocp.args.StandardSave(STATE))
            manager.wait_until_finished()
    for path in (tmp_path / "root" / "4").rglob("d/*"):
        data = np.fromfile(path, np.uint8)
        data[len(data) // 2 :] ^= 1
        data.tofile(path)
    lines.clear()
    with ckptkit.CheckpointManager(tmp_path / "root", options=OPTIONS) as manager:
        manager.restore(None, args=ocp.args.StandardRestore(STATE))
    warnings = said(lines, "WARNING")
    assert any(re.match(r"restore: step 4 in durable was rejected: ", line) for line in warnings), warnings
    assert any("the run continues from step 2" in line for line in warnings), warnings


def test_refused_save_is_a_warning(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Breaks when a loop that saves nothing is not told."""
    with ckptkit.CheckpointManager(tmp_path / "root", options=OPTIONS) as manager:
        manager.save(4, args=ocp.args.StandardSave(STATE))
        assert not manager.save(2, args=ocp.args.StandardSave(STATE))
    (warning,) = said(lines, "WARNING")
    assert warning.startswith("step 2 is not saved: step 4 is saved already")


@pytest.mark.parametrize(
    ("kind", "fields", "level", "line"),
    [
        (
            Kind.DEGRADED,
            {"step": 7, "tier": "ssd", "reason": "no space"},
            "WARNING",
            "tier ssd is degraded: no space",
        ),
        (
            Kind.RECOVERED,
            {"step": 7, "tier": "durable", "failures": 3, "failed_s": 90.0},
            "INFO",
            "tier durable works again, after 3 failed saves in 90 s",
        ),
        (
            Kind.RETRIED,
            {"step": 7, "tier": "durable", "reason": "503", "delay_s": 2.0},
            "INFO",
            "step 7: the save to tier durable is tried again in 2 s: 503",
        ),
        (
            Kind.SKIPPED,
            {"step": 7, "tier": "ram", "policy": "skip", "reason": "too early"},
            "WARNING",
            "step 7 was not saved to tier ram: too early",
        ),
        (
            Kind.FAILED,
            {"step": 7, "tier": "durable", "reason": "403"},
            "WARNING",
            "step 7 was not committed to tier durable: 403",
        ),
        (
            Kind.PREEMPTED,
            {
                "step": 9,
                "tiers": ("ram",),
                "unfinished": ("durable",),
                "left_out": {"ssd": "it needs 9 s"},
                "spent_s": 1.0,
                "grace_s": 30.0,
            },
            "INFO",
            "last save: step 9 is in ram; not finished: durable; ssd is left out: it needs 9 s; "
            "1 s of 30 s had passed before it",
        ),
        (
            Kind.REPLICAS_DIFFER,
            {
                "step": 9,
                "item": "default",
                "leaf": "w",
                "holders": [{"process": 0, "host": "a", "device": "gpu:1"}, {"process": 1, "host": "b", "device": "x"}],
            },
            "WARNING",
            "step 9: replicas of default:w differ: process 0 on a (gpu:1), process 1 on b (x)",
        ),
    ],
)
def test_event_has_its_line(
    kind: Kind, fields: dict[str, object], level: str, line: str, lines: pytest.LogCaptureFixture
) -> None:
    """Breaks when an operator is not told what happened, or told it twice."""
    events = EventLog()
    observe_run(events, 0, "/root", asynchronous=True)
    observe_run(events, 0, "/other", asynchronous=True)  # a second manager over the same log
    events.emit(kind, **fields)  # pyright: ignore[reportArgumentType]
    assert [(record.levelname, record.getMessage()) for record in lines.records] == [(level, line)]


def test_news_are_logged_once_in_a_job_and_warnings_once_a_minute(lines: pytest.LogCaptureFixture) -> None:
    """Breaks when a thousand processes log each commit, or a tier that fails in every step fills the log."""
    events = EventLog(process=1)
    observe_run(events, 1, "/root", asynchronous=True)
    events.emit(Kind.COMMITTED, step=1, tier="durable", bytes=1, duration_s=1.0)
    for step in range(50):
        events.emit(Kind.SKIPPED, step=step, tier="ram", policy="skip", reason="too early")
    for step in range(3):
        events.emit(Kind.REJECTED, step=step, tier="ram", reason="x" * 1000)
    texts = [record.getMessage() for record in lines.records]
    assert texts[0] == "step 0 was not saved to tier ram: too early"
    assert [text[:30] for text in texts[1:]] == [f"restore: step {step} in ram was rej"[:30] for step in range(3)]
    assert all(len(text) < 500 for text in texts)


def test_problem_of_a_kind_never_seen_is_logged(lines: pytest.LogCaptureFixture) -> None:
    """Breaks when the same tier is degraded for a second reason, and the first hides it."""
    events = EventLog()
    observe_run(events, 0, "/root", asynchronous=True)
    for reason in ("no space", "no space", "read only"):
        events.emit(Kind.DEGRADED, tier="ssd", reason=reason)
    assert [record.getMessage().rsplit(": ")[-1] for record in lines.records] == ["no space", "read only"]
