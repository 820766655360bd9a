"""The policy that sets its own intervals: its inputs, its events, and what it never does."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ckptkit.events import Event, EventLog, Kind
from ckptkit.goodput import policy as goodput_policy
from ckptkit.goodput.intervals import daly_s
from ckptkit.goodput.policy import GoodputOptimal, IntervalBounds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(goodput_policy, "monotonic_s", lambda: clock.s)
    return clock


def save(events: EventLog, step: int, tier: str, *, stall_s: float, commit_s: float) -> None:
    events.emit(Kind.STAGED, step=step, strategy="slot_copy", reason="-", bytes=1, tiers=[tier], stall_s=stall_s)
    events.emit(Kind.COMMITTED, step=step, tier=tier, bytes=1, duration_s=commit_s)


def test_one_tier_gets_the_daly_interval_of_cost_and_prior(now: SimpleNamespace) -> None:
    """A wrong factor anywhere between event and formula would always save too often or too seldom."""
    events = EventLog()
    best = GoodputOptimal(events, tiers=("durable",), prior_mtbf_s=7200.0)
    for step in range(20):
        save(events, step, "durable", stall_s=2.0, commit_s=5.0)
    assert best.interval_s("durable") == pytest.approx(float(daly_s(2.0, 7200.0)), rel=1e-6)
    now.s += 72_000.0  # ten MTBFs without a failure: two failures' worth of prior in six times its time
    save(events, 20, "durable", stall_s=2.0, commit_s=5.0)
    assert best.interval_s("durable") == pytest.approx(float(daly_s(2.0, 6 * 7200.0)), rel=1e-6)


def test_each_interval_change_reports_its_reason(now: SimpleNamespace) -> None:
    """An interval that changes without an event is a bug report; a change within the hysteresis is not a change."""
    del now
    events, heard = EventLog(), []
    events.observe(lambda event: heard.append(event) if event.kind == Kind.INTERVAL else None)
    best = GoodputOptimal(events, tiers=("ram", "durable"), prior_mtbf_s=7200.0)
    for step in range(5):
        save(events, step, "ram", stall_s=0.5, commit_s=0.1)
    said = [event for event in heard if event.tier == "ram"]
    assert said[-1].fields["seconds"] == pytest.approx(best.interval_s("ram"), abs=1e-3)
    assert "a save costs 500 ms, committed in 100 ms; 0.0 failures that need ram in" in said[-1].fields["reason"]
    count = len(heard)
    save(events, 9, "ram", stall_s=0.51, commit_s=0.1)
    assert len(heard) == count


def test_slowdown_until_the_commit_counts_as_cost(now: SimpleNamespace) -> None:
    """A save that stalls nothing and slows every step meanwhile would look free."""
    del now
    events = EventLog()
    best = GoodputOptimal(events, tiers=("durable",), prior_mtbf_s=7200.0)
    for _ in range(20):
        events.emit(Kind.SPAN, span="step", duration_s=1.0)
    free_s = best.interval_s("durable")
    events.emit(Kind.STAGED, step=1, tiers=["durable"], stall_s=0.0)
    for _ in range(2):
        events.emit(Kind.SPAN, span="step", duration_s=1.5)
    events.emit(Kind.COMMITTED, step=1, tier="durable", bytes=1, duration_s=4.0)
    events.emit(Kind.SPAN, span="step", duration_s=1.5)  # it began while the save was in flight
    assert best.interval_s("durable") == pytest.approx(float(daly_s(1.5, 7200.0)), rel=1e-6)
    assert best.interval_s("durable") > free_s


def test_interval_is_bounded_and_at_least_the_commit_time(now: SimpleNamespace) -> None:
    """A save due before the last one is committed would only be skipped, at every step."""
    del now
    events = EventLog()
    bounds = IntervalBounds(min_s=5.0, max_s=60.0)
    best = GoodputOptimal(events, tiers=("ram", "durable"), prior_mtbf_s=100.0, bounds=bounds)
    save(events, 1, "ram", stall_s=0.001, commit_s=0.01)
    assert best.interval_s("ram") == 5.0
    save(events, 2, "durable", stall_s=0.001, commit_s=90.0)
    assert best.interval_s("durable") == 90.0
    calm = GoodputOptimal(EventLog(), tiers=("durable",), prior_mtbf_s=1e9, bounds=bounds)
    assert calm.interval_s("durable") == 60.0


def history(directory: Path, *, lives_s: list[float], served: list[str | None]) -> None:
    """Attempts of these lengths, each lost; attempt k restored from `served[k]` (None: it began afresh)."""
    at_s = 1.7e9
    for number, (life_s, tier) in enumerate(zip(lives_s, served, strict=True)):
        lines = [Event(kind=Kind.STARTED, at_s=at_s, process=0, fields={"attempt": number})]
        if tier:
            fields = {"sources": {"ram": 0, tier: 100}, "duration_s": 1.0}
            lines.append(Event(kind=Kind.RESTORED, at_s=at_s + 1, process=0, step=1, fields=fields))
        lines.append(Event(kind=Kind.SPAN, at_s=at_s + life_s, process=0, fields={"span": "step", "duration_s": 1.0}))
        path = directory / f"attempt-{number}-process-0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line.to_json() + "\n" for line in lines))
        at_s += life_s + 60


def test_failure_history_sets_the_rate_of_the_tier_needed(tmp_path: Path, now: SimpleNamespace) -> None:
    """The failure rate of a run is known only over its restarts: forgetting it at each would never learn."""
    del now
    lives_s, served = [600.0] * 12, [None, *["ram"] * 11]
    history(tmp_path, lives_s=lives_s, served=served)
    best = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path, prior_mtbf_s=86_400.0)
    fresh = GoodputOptimal(EventLog(), tiers=("ram", "durable"), prior_mtbf_s=86_400.0)
    assert best.interval_s("ram") < fresh.interval_s("ram") / 2.0
    weights = np.exp(-np.arange(12) / 20.0)
    assert best._failures.sum() == pytest.approx(weights.sum(), rel=1e-6)
    assert best._failures[1] == pytest.approx(weights[0]), "who was lost last has no successor yet: the slowest tier"
    assert best._up_s == pytest.approx(600.0 * weights.sum(), rel=1e-6)


def test_intervals_start_short_after_clustered_failures(tmp_path: Path, now: SimpleNamespace) -> None:
    """Failures follow failures: with the same interval always, the minutes after a restart would be lost again."""
    lives_s = (np.random.default_rng(1).weibull(0.5, 60) * 3600.0 + 1.0).tolist()
    history(tmp_path, lives_s=lives_s, served=[None, *["durable"] * 59])
    events, heard = EventLog(), []
    events.observe(lambda event: heard.append(event) if event.kind == Kind.INTERVAL else None)
    best = GoodputOptimal(events, tiers=("durable",), history=tmp_path)
    save(events, 1, "durable", stall_s=60.0, commit_s=60.0)
    young = best.interval_s("durable")
    steady = daly_s(60.0, (best._up_s + 2 * 6 * 3600.0) / (best._failures.sum() + 2))
    assert young < 0.9 * steady
    now.s += 6 * 3600.0
    save(events, 2, "durable", stall_s=60.0, commit_s=60.0)
    assert best.interval_s("durable") > 1.3 * young
    assert "; failures come in clusters: growth 0." in heard[-1].fields["reason"]
    now.s += 3600.0
    assert best.interval_s("durable") == pytest.approx(heard[-1].fields["seconds"], abs=1e-3), (
        "an interval changes with a save, and with an event"
    )


def test_no_tier_saves_more_often_than_a_faster_one(now: SimpleNamespace) -> None:
    """Where hysteresis keeps one interval and lets the other go, durable saves would stage what no ramdisk keeps."""
    random = np.random.default_rng(5)
    for _ in range(50):
        events = EventLog()
        bounds = IntervalBounds(min_s=1e-3, max_s=3600.0)
        best = GoodputOptimal(events, tiers=("ram", "durable"), prior_mtbf_s=3600.0, bounds=bounds)
        for step in range(40):
            now.s += 1.0
            for tier in ("ram", "durable"):
                save(events, step, tier, stall_s=float(random.uniform(0.001, 0.02)), commit_s=0.01)
                assert best.interval_s("ram") <= best.interval_s("durable")


def test_missing_history_is_accepted(tmp_path: Path, now: SimpleNamespace) -> None:
    """The first attempt of a run finds no logs: it must begin all the same."""
    del now
    best = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path / "not there yet")
    assert best.interval_s("durable") >= best.interval_s("ram")
    events = EventLog(tmp_path / "attempt-0-process-0.jsonl")
    assert GoodputOptimal(events, tiers=("ram",), history=tmp_path).interval_s("ram") > 0, "the log of this very run"
    events.close()


def test_events_of_the_current_run_are_not_failures(tmp_path: Path, now: SimpleNamespace) -> None:
    """A loop that times its start before it makes the policy would add a failure of the slowest tier at each start."""
    del now
    history(tmp_path, lives_s=[600.0] * 3, served=[None, "ram", "ram"])
    before = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path)
    with_start, without = (EventLog(tmp_path / f"attempt-{number}-process-0.jsonl") for number in (3, 4))
    with_start.emit(Kind.STARTED, attempt=3, pid=1)
    for events in (with_start, without):
        events.emit(Kind.SPAN, span="initialization", duration_s=5.0)
        best = GoodputOptimal(events, tiers=("ram", "durable"), history=tmp_path)
        assert best._failures.tolist() == before._failures.tolist()
        assert best._up_s == before._up_s
        events.close()
        (tmp_path / "attempt-3-process-0.jsonl").unlink(missing_ok=True)


def test_only_process_0_reads_the_history(tmp_path: Path, now: SimpleNamespace) -> None:
    """Each of a thousand processes would read the logs of all attempts of all of them at each start, for nothing."""
    del now
    history(tmp_path, lives_s=[600.0] * 3, served=[None, "ram", "ram"])
    other = GoodputOptimal(EventLog(process=1), tiers=("ram", "durable"), history=tmp_path)
    assert other._failures.sum() == 0.0


def test_failures_are_learned_from_logs_without_a_start(tmp_path: Path, now: SimpleNamespace) -> None:
    """The example in docs/GOODPUT.md writes none: its failures would never count, and its intervals stay a guess."""
    del now
    history(tmp_path, lives_s=[600.0] * 3, served=[None, "ram", "ram"])
    expected = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    found = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path)
    assert found._failures.tolist() == expected._failures.tolist()
    assert found._failures.sum() > 2.0


def test_the_slowest_tier_that_any_process_needed_counts(tmp_path: Path, now: SimpleNamespace) -> None:
    """Process 0 keeps its ramdisk when another host is lost: the failure would be one that the ramdisk survives."""
    del now
    history(tmp_path, lives_s=[600.0] * 2, served=[None, "ram"])
    other = EventLog(tmp_path / "attempt-1-process-1.jsonl", process=1)
    other.emit(Kind.STARTED, attempt=1, pid=1)
    other.emit(Kind.RESTORED, step=1, sources={"durable": 100}, duration_s=1.0)
    other.close()
    best = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path)
    assert best._failures[0] == 0.0
    assert best._failures[1] == pytest.approx(1.0 + math.exp(-1 / 20))


def test_preemption_without_lost_steps_is_not_a_failure(tmp_path: Path, now: SimpleNamespace) -> None:
    """A fleet that is preempted all day, with time for a last save, would save for failures that never cost a step."""
    del now
    history(tmp_path, lives_s=[600.0] * 3, served=[None, "durable", "durable"])
    for attempt, (step, tier) in enumerate([(1, "durable"), (7, "ram"), (9, "durable")]):
        fields = {"tiers": [tier], "unfinished": [], "left_out": {}, "spent_s": 1.0, "grace_s": 25.0}
        told = Event(kind=Kind.PREEMPTED, at_s=1.7e9 + 660 * attempt + 600, process=0, step=step, fields=fields)
        with (tmp_path / f"attempt-{attempt}-process-0.jsonl").open("a") as log:
            log.write(told.to_json() + "\n")
    best = GoodputOptimal(EventLog(), tiers=("ram", "durable"), history=tmp_path)
    assert best._failures.tolist() == [0.0, 1.0], "the second one's host went with its ramdisk: step 1 came back"
    assert best._up_s == pytest.approx((600.0 * math.exp(-1 / 20) + 600.0) + 600.0)


def test_damaged_log_does_not_prevent_a_start(
    tmp_path: Path, now: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of telemetry that a power failure took would end every restart with a traceback."""
    del now
    history(tmp_path, lives_s=[600.0] * 3, served=[None, "ram", "ram"])
    path = tmp_path / "attempt-1-process-0.jsonl"
    path.write_text(path.read_text().replace('"step":1', "\0\0\0\0"))
    best = GoodputOptimal(EventLog(), tiers=("ram",), history=tmp_path)
    assert best.interval_s("ram") == GoodputOptimal(EventLog(), tiers=("ram",)).interval_s("ram")
    assert "attempt-1-process-0.jsonl:2" in caplog.text


def test_orbax_policy_saves_first_step_preemption_and_by_clock(now: SimpleNamespace) -> None:
    """The durable tier is ruled by Orbax's protocol: a missed preemption or a first step not taken loses work."""
    del now
    best = GoodputOptimal(EventLog(), tiers=("durable",), bounds=IntervalBounds(min_s=100.0, max_s=100.0))
    policy = best.every("durable")
    calm, leaving = (SimpleNamespace(reached_preemption=each) for each in (False, True))

    def step(number: int, ago_s: float = 0.0) -> SimpleNamespace:
        time = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
        return SimpleNamespace(step=number, time=time)

    assert policy.should_save(step(1), [], context=calm)
    assert not policy.should_save(step(2), [step(1, ago_s=50.0)], context=calm)
    assert policy.should_save(step(2), [step(1, ago_s=150.0)], context=calm)
    assert policy.should_save(step(2), [step(1, ago_s=50.0)], context=leaving)
    assert repr(policy) == "OptimalInterval('durable', 100 s)"


def test_clock_set_back_does_not_delay_a_save(now: SimpleNamespace) -> None:
    """A host whose clock ran ahead saved last, or time is set back by a day: no durable save for a day."""
    bounds = IntervalBounds(min_s=100.0, max_s=100.0)
    policy = GoodputOptimal(EventLog(), tiers=("durable",), bounds=bounds).every("durable")
    calm = SimpleNamespace(reached_preemption=False)
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    saved = [SimpleNamespace(step=1, time=tomorrow)]
    assert not policy.should_save(SimpleNamespace(step=2), saved, context=calm)
    now.s += 99.0
    assert not policy.should_save(SimpleNamespace(step=3), saved, context=calm)
    now.s += 1.0
    assert policy.should_save(SimpleNamespace(step=4), saved, context=calm)
    saved.append(SimpleNamespace(step=4, time=tomorrow))
    assert not policy.should_save(SimpleNamespace(step=5), saved, context=calm)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"tiers": ()}, "name each tier that saves once"),
        ({"tiers": ("ram", "ram")}, "name each tier that saves once"),
        ({"tiers": ("ram",), "prior_mtbf_s": math.inf}, "give the seconds between two failures"),
    ],
)
def test_invalid_options_are_refused(named: dict, message: str) -> None:
    """A slip in the declaration must not show as a run that never saves."""
    with pytest.raises(ValueError, match=message):
        GoodputOptimal(EventLog(), **named)
    with pytest.raises(ValueError, match="is none of tiers"):
        GoodputOptimal(EventLog(), tiers=("ram",)).every("durable")
    with pytest.raises(ValueError, match="min_s <= max_s"):
        IntervalBounds(min_s=10.0, max_s=1.0)
