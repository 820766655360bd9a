"""The phases of a resume: every second from a loss to the next step is counted once."""

from __future__ import annotations

import math

import pytest

from bench.resume_phases import Phase, resumes
from ckptkit.events import Kind
from ckptkit.goodput import goodput_report
from tests.goodput.test_goodput import at, span, two_attempts


def test_resume_phases_add_up_when_restore_overlaps_compile() -> None:
    """Breaks when a restore in the background is charged twice, or the time until a loss was noticed not at all."""
    logs = two_attempts()
    logs[2] = [
        at(Kind.STARTED, 24.0, attempt=1),
        span("initialization", 24.0, 25.0),
        span("training_prep", 25.0, 25.5),
        span("checkpoint_restore", 25.5, 25.75),
        at(Kind.PLANNED, 26.0, step=3),  # while it compiles
        span("compile", 25.75, 27.0),
        at(Kind.RESTORED, 28.0, step=3, sources={}, duration_s=2.4),
        span("checkpoint_restore", 27.0, 28.25),
        span("broadcast", 27.5, 28.0),  # inside
        span("data_loading", 28.25, 28.5, step=3),
        span("step", 28.5, 29.0, step=3),
        span("step", 29.0, 31.0, step=4),
    ]
    lost = {"attempt": 0, "lost": 1, "cause": "SIGKILL", "wiped": [], "detect_s": 0.5}
    logs[-1][1] = at(Kind.DISRUPTED, 20.0, process=-1, **lost)
    (loss,) = resumes(logs)
    assert loss.total_s == pytest.approx(9.5)
    assert {phase: s for phase, s in loss.phases_s.items() if s} == {
        Phase.DETECT: 0.5,
        Phase.RELAUNCH: 4.0,
        Phase.INITIALIZE: 1.0,
        Phase.PREPARE: 0.5,
        Phase.PLAN: 0.25,
        Phase.COMPILE: 1.25,
        Phase.READ: 0.75,
        Phase.BROADCAST: 0.5,
        Phase.FIRST_STEP: 0.75,
    }
    assert math.fsum(loss.phases_s.values()) == pytest.approx(9.5)
    (disruption,) = goodput_report(logs).disruptions
    assert disruption.resume_s == pytest.approx(9.5), "from the kill, as the launcher counts it"
    assert math.fsum(disruption.resume_parts_s.values()) == pytest.approx(9.5)
