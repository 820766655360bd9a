"""The account of any run: of histories that are drawn, each second is counted once and under the right name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.events import Event, Kind
from ckptkit.goodput import Part, goodput_report
from tests.goodput.test_goodput import at, span

MILLISECONDS = st.integers(1, 5000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A span of process 0: its own time in pieces, with inner spans between them."""

    name: str
    own_ms: int
    inner: list[tuple[Part, int, int]]  # kind, its time, own time after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One attempt: how long it took to come up, from how many steps back it resumed, and what it did."""

    gap_ms: int
    rewind: int
    blocks: list[Block]


INNER = st.tuples(st.sampled_from([Part.DATA_LOADING, Part.CHECKPOINT_SAVE]), MILLISECONDS, MILLISECONDS)
BLOCKS = st.builds(
    Block,
    name=st.sampled_from(["step", "step", "step", "compile", "training_prep", "checkpoint_restore", "lunch"]),
    own_ms=MILLISECONDS,
    inner=st.lists(INNER, max_size=3),
)
LIVES = st.lists(
    st.builds(Life, gap_ms=MILLISECONDS, rewind=st.integers(0, 5), blocks=st.lists(BLOCKS, max_size=8)),
    min_size=1,
    max_size=5,
)


def play(lives: list[Life], *, origin_s: float) -> tuple[list[list[Event]], dict[Part, float]]:
    """The logs that `lives` would write, and, added up along the way, the truth about the time."""
    now_ms, step, truth_ms = 0, 0, dict.fromkeys(Part, 0)
    logs: list[list[Event]] = []
    launcher = [at(Kind.STARTED, origin_s, process=-1, attempt=0)]
    steps: list[tuple[int, int, int]] = []  # attempt, step, own time
    for number, life in enumerate(lives):
        truth_ms[Part.RECOVERY if number else Part.INITIALIZATION] += life.gap_ms
        if number:
            lost_s = origin_s + (now_ms + life.gap_ms / 2) / 1e3
            launcher.append(at(Kind.DISRUPTED, lost_s, process=-1, attempt=number - 1, lost=0, cause="SIGKILL"))
        now_ms += life.gap_ms
        step = max(0, step - life.rewind)
        log = [at(Kind.STARTED, origin_s + now_ms / 1e3, attempt=number)]
        for block in life.blocks:
            start_ms, own_ms = now_ms, block.own_ms
            now_ms += block.own_ms
            for part, inner_ms, after_ms in block.inner:
                log.append(span(part, origin_s + now_ms / 1e3, origin_s + (now_ms + inner_ms) / 1e3))
                now_ms += inner_ms + after_ms
                truth_ms[part] += inner_ms
                own_ms += after_ms
            log.append(span(block.name, origin_s + start_ms / 1e3, origin_s + now_ms / 1e3, step=step))
            if block.name == "step":
                steps.append((number, step, own_ms))
                step += 1
            else:
                truth_ms[Part.CUSTOM if block.name == "lunch" else Part(block.name)] += own_ms
        logs.append(log)
    for number, done, own_ms in steps:
        again = any(later > number and other <= done for later, other, _ in steps)
        truth_ms[Part.WASTED if again else Part.PRODUCTIVE] += own_ms
    return [*logs, launcher], {part: ms / 1e3 for part, ms in truth_ms.items()}


@settings(deadline=None, max_examples=200)
@given(lives=LIVES, origin_s=st.sampled_from([0.0, 1.75e9]))
def test_parts_are_exact_for_any_history(lives: list[Life], origin_s: float) -> None:
    """Breaks when any order of losses, rewinds and nested spans puts a second under a wrong name."""
    logs, truth_s = play(lives, origin_s=origin_s)
    report = goodput_report(logs)
    assert dict(report.parts_s) == pytest.approx(truth_s, abs=1e-4)  # 1.75e9 s has a resolution of 0.2 us
    taken = sum(e.kind == Kind.SPAN and e.fields["span"] == "step" for log in logs for e in log)
    lost = sum(loss.lost_steps for loss in report.disruptions)
    assert report.goodput.distinct_steps + lost == taken  # each repetition is charged to one loss


@settings(deadline=None, max_examples=200)
@given(lives=LIVES, origin_s=st.sampled_from([0.0, 1.75e9]), data=st.data())
def test_the_parts_add_up_under_clock_jitter(lives: list[Life], origin_s: float, data: st.DataObject) -> None:
    """Breaks when spans that overlap because clocks jumped are counted twice, or leave a hole."""
    logs, _ = play(lives, origin_s=origin_s)
    count = sum(map(len, logs))
    jitter = iter(data.draw(st.lists(st.floats(-3.0, 3.0), min_size=count, max_size=count)))
    logs = [[replace(event, at_s=event.at_s + next(jitter)) for event in log] for log in logs]
    report = goodput_report(data.draw(st.permutations(logs)))
    starts_s = [e.at_s - e.fields.get("duration_s", 0.0) for log in logs for e in log]
    ends_s = [e.at_s for log in logs for e in log]
    assert report.wall_s == pytest.approx(max(ends_s) - min(starts_s))
    assert all(seconds >= 0.0 for seconds in report.parts_s.values())
    assert set(report.parts_s) == set(Part)
    assert math.fsum(report.parts_s.values()) == pytest.approx(report.wall_s, rel=1e-3, abs=1e-6)
