"""The simulator against one that counts save by save, against the exact formula, and against its inputs."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.diagnosis import simulation as sim
from tests.goodput.exact import overhead

DAY_S = 86400.0


def tier(name: str, stall_s: float, persist_s: float, restore_s: float, *survives: sim.Failure) -> sim.TierModel:
    return sim.TierModel(
        name=name,
        stall_s=stall_s,
        persist_s=persist_s,
        restore_s=restore_s,
        survives=frozenset(survives or sim.FAILURES),
    )


def three_tiers(**changed: float) -> sim.Cluster:
    tiers = (
        tier("ram", 0.3, 1.1, 3.0, "process"),
        tier("peer", 0.7, 9.0, 5.0, "process", "host"),
        tier("durable", 4.0, 61.0, 40.0),
    )
    return sim.Cluster(hosts=10, tiers=tiers, restart_s=changed.get("restart_s", 37.0), step_s=0.5)


def counted(cluster: sim.Cluster, failures: sim.Failures, run: int, times: list[int], work_s: float, horizon_s: float):
    """One run, save by save: (kept work, stall, lost, down, restores per tier)."""
    tiers = cluster.tiers
    every = np.cumprod([1, *times])
    work, resumed, stall, lost, down = 0.0, 0.0, 0.0, 0.0, 0.0
    newest, served = [0.0] * len(tiers), [0] * len(tiers)
    for at_s, kind, outage_s in zip(
        failures.at_s[run], failures.kind[run], failures.outage_s[run], strict=True
    ):  # the last column is infinity
        end = min(at_s, horizon_s)
        if resumed < end:
            clock, saves = resumed, round((work - newest[-1]) / work_s) % int(every[-1])
            while clock < end:
                done = min(work_s, end - clock)
                clock, work = clock + done, work + done
                if done < work_s:
                    break
                saves += 1
                for i, each in enumerate(tiers):
                    if saves % every[i] == 0 and clock < end:
                        stalled = min(each.stall_s, end - clock)
                        clock, stall = clock + stalled, stall + stalled
                        if stalled == each.stall_s and clock + each.persist_s <= end:
                            newest[i] = work
        else:
            down -= resumed - end  # the restart that was under way is cut short
        if at_s >= horizon_s:
            return work, stall, lost, down, served
        failed = sim.FAILURES[kind]
        holds = [failed in each.survives for each in tiers]
        source = max((i for i in range(len(tiers)) if holds[i]), key=lambda i: (newest[i], -i))
        lost, work = lost + work - newest[source], newest[source]
        newest = [newest[i] if holds[i] else 0.0 for i in range(len(tiers))]
        served[source] += 1
        resumed = end + outage_s + cluster.restart_s + tiers[source].restore_s
        down += min(resumed, horizon_s) - end
        resumed = min(resumed, horizon_s)
    raise AssertionError("a run without an end")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    mtbf_s=st.floats(60.0, 20_000.0),
    steps=st.integers(2, 200),
    times=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    outage_s=st.sampled_from([0.0, 100.0]),
)
def test_simulation_matches_counting_save_by_save(
    seed: int, mtbf_s: float, steps: int, times: tuple[int, int], outage_s: float
):
    """Divisions in place of loops: one off-by-one would make every projection a little wrong."""
    cluster, horizon_s = three_tiers(), 20_000.0
    failures = sim.draw(runs=3, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=cluster.shares, outage_s=outage_s, seed=seed)
    work_s = max(steps * cluster.step_s, 1.5)  # the ramdisk's own least interval is 1.1 s, on whole steps
    wanted = (work_s, work_s * times[0], work_s * times[0] * times[1])
    if wanted[1] < 9.0 or wanted[2] < 61.0:
        return  # a tier's next save would wait for the one before: the simulator makes the interval longer
    found = sim.simulate(cluster, failures, sim.FixedIntervals(wanted), horizon_s=horizon_s)
    for run in range(3):
        expected = counted(cluster, failures, run, list(times), work_s, horizon_s)
        parts = (found.work_s[run], found.stall_s[run], found.lost_s[run], found.down_s[run])
        assert parts == pytest.approx(expected[:4], abs=1e-4)
        assert found.from_tier[run].tolist() == expected[4]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), mtbf_s=st.floats(300.0, 1e6), wanted=st.floats(0.1, 1e5))
def test_every_second_is_counted_once(seed: int, mtbf_s: float, wanted: float):
    """Work, stalls, lost work and down time must add up to the wall clock, with failures at any rate."""
    cluster = three_tiers()
    failures = sim.draw(runs=4, horizon_s=DAY_S, mtbf_s=mtbf_s, shares=cluster.shares, shape=0.7, seed=seed)
    for policy in (sim.FixedIntervals((wanted, 2 * wanted, 7 * wanted)), sim.Learned(prior_mtbf_s=mtbf_s)):
        found = sim.simulate(cluster, failures, policy, horizon_s=DAY_S)
        total = found.work_s + found.stall_s + found.lost_s + found.down_s
        assert total == pytest.approx(np.full(4, DAY_S), rel=1e-9)
        assert (found.work_s >= 0).all()
        assert (found.lost_s >= -1e-6).all()


@dataclass(frozen=True, slots=True)
class Growing:
    """Always the same first interval and growth, so that a count save by save knows them."""

    intervals_s: tuple[float, ...]
    growth: float
    name: str = "growing"
    memory: float = np.inf

    def schedule(self, cluster: sim.Cluster, seen: sim.Seen) -> sim.Schedule:
        del cluster
        runs = len(seen.up_s)
        return sim.Schedule(
            np.broadcast_to(self.intervals_s, (runs, len(self.intervals_s))), np.full(runs, self.growth)
        )


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000), mtbf_s=st.floats(200.0, 20_000.0), steps=st.integers(20, 400), growth=st.floats(0.6, 1)
)
def test_growing_intervals_match_counting_save_by_save(seed: int, mtbf_s: float, steps: int, growth: float):
    """One tier; save n ends at n ** (1 / growth) times the first one's end: a drift would favour our own policy."""
    durable = tier("durable", 4.0, 3.0, 40.0)
    cluster, horizon_s = sim.Cluster(hosts=1, tiers=(durable,), restart_s=37.0, step_s=0.5), 30_000.0
    failures = sim.draw(runs=2, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=cluster.shares, seed=seed)
    found = sim.simulate(cluster, failures, Growing((steps * 0.5,), growth), horizon_s=horizon_s)
    first_s = steps * 0.5 + durable.stall_s
    for run in range(2):
        resumed, kept, stalled_s = 0.0, 0.0, 0.0
        for at_s in failures.at_s[run]:
            end = min(at_s, horizon_s)
            last_save = int(((max(end - resumed, 0.0) / first_s) ** growth) * (1 + 1e-12))
            ends = [first_s * n ** (1 / growth) for n in range(1, last_save + 1)]
            stalled_s += durable.stall_s * len(ends)
            following = first_s * (len(ends) + 1) ** (1 / growth)
            stalled_s += max(0.0, max(end - resumed, 0.0) - (following - durable.stall_s))
            if at_s >= horizon_s:
                last = min(max(end - resumed, 0.0), following - durable.stall_s)
                kept += last - durable.stall_s * len(ends)
                break
            whole = [each for each in ends if resumed + each + durable.persist_s <= end]
            kept += whole[-1] - durable.stall_s * len(whole) if whole else 0.0
            resumed = end + cluster.restart_s + durable.restore_s
        assert found.work_s[run] == pytest.approx(kept, abs=1e-3)
        assert found.stall_s[run] == pytest.approx(stalled_s, abs=1e-3)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), growth=st.floats(0.6, 1.0), wanted=st.floats(2.0, 2000.0))
def test_growing_intervals_over_three_tiers_add_up(seed: int, growth: float, wanted: float):
    """Every second once, and no tier may hold work that was not done."""
    cluster = three_tiers()
    failures = sim.draw(runs=4, horizon_s=DAY_S, mtbf_s=3000.0, shares=cluster.shares, shape=0.6, seed=seed)
    found = sim.simulate(cluster, failures, Growing((wanted, 2 * wanted, 9 * wanted), growth), horizon_s=DAY_S)
    total = found.work_s + found.stall_s + found.lost_s + found.down_s
    assert total == pytest.approx(np.full(4, DAY_S), rel=1e-9)
    assert min(found.work_s.min(), found.stall_s.min(), found.lost_s.min()) >= -1e-6


def test_policies_simulated_together_equal_each_alone():
    """They share failures, not fates: a neighbour's rows must not leak into what a policy learns or does."""
    cluster = three_tiers()
    failures = sim.draw(runs=5, horizon_s=5 * DAY_S, mtbf_s=9000.0, shares=cluster.shares, shape=0.5, seed=4)
    policies = [sim.Learned(prior_mtbf_s=9000.0), sim.levels(cluster, 9000.0), sim.Learned(prior_mtbf_s=500.0)]
    together = sim.simulate_all(cluster, failures, policies, horizon_s=5 * DAY_S, mark=10)
    for policy, found in zip(policies, together, strict=True):
        alone = sim.simulate(cluster, failures, policy, horizon_s=5 * DAY_S, mark=10)
        assert found.work_s.tolist() == alone.work_s.tolist()
        assert found.goodput_after_mark().tolist() == alone.goodput_after_mark().tolist()


def test_no_fixed_policy_beats_the_oracle():
    """An oracle that was searched on a part of the failures must not be worse than its comparison."""
    cluster = three_tiers()
    failures = sim.draw(runs=150, horizon_s=4 * DAY_S, mtbf_s=1200.0, shares=cluster.shares, seed=8)
    policies = [sim.levels(cluster, 1200.0), sim.daly(cluster, 1200.0), sim.continuous(cluster)]
    heard: list[tuple[int, int]] = []
    results = sim.compare(
        cluster,
        failures,
        policies,
        horizon_s=4 * DAY_S,
        begin=policies[0],
        progress=lambda done, total: heard.append((done, total)),
    )
    assert [each.policy for each in results] == ["oracle", "levels", "daly", "continuous"]
    assert all(each.behind_oracle >= 0 for each in results)
    assert heard[0] == (0, failures.at_s.shape[1])


def test_exponential_failures_match_the_exact_formula():
    """Against theory, not against itself: one level, no restart, goodput is 1 - overhead within the interval."""
    cluster = sim.Cluster(hosts=1, tiers=(tier("durable", 30.0, 0.0, 0.0),), restart_s=0.0, step_s=1.0)
    failures = sim.draw(runs=400, horizon_s=30 * DAY_S, mtbf_s=7200.0, shares=cluster.shares, seed=3)
    found = sim.simulate(cluster, failures, sim.FixedIntervals((600.0,)), horizon_s=30 * DAY_S)
    mean, half = sim.mean_ci(found.goodput)
    assert mean == pytest.approx(1 - float(overhead(600.0, 30.0, 7200.0)), abs=2 * half)
    assert half < 0.001


@pytest.mark.parametrize(("shape", "wrong"), [(1.0, 5.0), (0.7, 0.2)])
def test_learned_policy_reaches_the_oracle_after_ten_failures(shape: float, wrong: float):
    """A prior that is wrong by a factor of 5 must be forgotten: 99 % of the best fixed choice is the bar."""
    cluster, horizon_s, mtbf_s = three_tiers(), 12 * DAY_S, 20_000.0
    failures = sim.draw(runs=20, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=cluster.shares, shape=shape, seed=5)
    learned = sim.Learned(prior_mtbf_s=mtbf_s * wrong)
    begin = sim.levels(cluster, mtbf_s)
    oracle, result = sim.compare(cluster, failures, [learned], horizon_s=horizon_s, begin=begin)
    assert oracle.policy == "oracle"
    assert result.after_learning is not None
    assert result.after_learning > 0.99


def test_default_bounds_allow_saves_of_an_hour():
    """A default bound below the best interval would be a fixed policy, and the worse the more a save costs."""
    durable = tier("durable", 3600.0, 3600.0, 600.0)
    cluster, horizon_s, mtbf_s = sim.Cluster(hosts=1, tiers=(durable,)), 600 * DAY_S, 100 * 3600.0
    failures = sim.draw(runs=20, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=cluster.shares, seed=2)
    learned, begin = sim.Learned(prior_mtbf_s=mtbf_s), sim.levels(cluster, mtbf_s)
    _, result = sim.compare(cluster, failures, [learned], horizon_s=horizon_s, begin=begin)
    assert begin.fixed_s[0] > 6 * 3600.0
    assert result.after_learning is not None
    assert result.after_learning > 0.985


def test_policies_with_equal_steps_share_one_simulation():
    """Names may differ, rows may be shared: what is asked for must come back, in its order."""
    cluster = three_tiers()
    failures = sim.draw(runs=3, horizon_s=DAY_S, mtbf_s=3000.0, shares=cluster.shares, seed=6)
    asked = [
        sim.FixedIntervals((10.0, 20.0, 80.0)),
        sim.Learned(prior_mtbf_s=3000.0),
        sim.FixedIntervals((10.1, 20.0, 80.0), "alike"),
    ]
    asked.append(sim.FixedIntervals((11.0, 22.0, 88.0)))
    found = sim.simulate_all(cluster, failures, asked, horizon_s=DAY_S)
    alone = [sim.simulate(cluster, failures, policy, horizon_s=DAY_S) for policy in asked]
    assert [each.work_s.tolist() for each in found] == [each.work_s.tolist() for each in alone]
    assert found[0].work_s.tolist() == found[2].work_s.tolist() != found[3].work_s.tolist()


def test_a_tier_never_saves_before_its_last_save_is_committed():
    """Rounding to whole steps must not put two saves of a tier on the way at a time: that would be free goodput."""
    durable = tier("durable", 0.1, 7.4, 40.0)
    cluster = sim.Cluster(hosts=1, tiers=(durable,), restart_s=10.0, step_s=5.0)
    failures = sim.Failures(np.array([[200.0, np.inf]]), np.zeros((1, 2), np.int8), np.zeros((1, 2)))
    found = sim.simulate(cluster, failures, sim.continuous(cluster), horizon_s=1000.0)
    # Every 10 s of work, not 5: 19 saves by 191.9 s, the last of them committed by 199.3 s.
    assert found.lost_s[0] == pytest.approx(200.0 - 19 * 10.1)


def test_several_levels_beat_one_if_fast_tiers_survive():
    """The reason for tiers at all: the same failures, with and without them."""
    cluster = three_tiers()
    durable_only = sim.Cluster(hosts=10, tiers=cluster.tiers[-1:], restart_s=37.0, step_s=0.5)
    failures = sim.draw(runs=50, horizon_s=10 * DAY_S, mtbf_s=5000.0, shares=cluster.shares, seed=1)
    goodputs = [
        sim.simulate(each, failures, sim.levels(each, 5000.0), horizon_s=10 * DAY_S).goodput.mean()
        for each in (cluster, durable_only)
    ]
    assert goodputs[0] > goodputs[1] + 0.02


def write_log(path: Path, *rows: str) -> Path:
    path.write_text("System,Prob Started,Down Time\n" + "\n".join(rows) + "\n")
    return path


def test_failure_log_gives_gaps_and_outages_of_one_system(tmp_path: Path):
    """Lines out of order, of other systems, of the same minute, or without a date must not make failures."""
    path = write_log(
        tmp_path / "log.csv",
        "20,6/21/2005 11:00,30",
        "20,6/21/2005 10:00,6",
        "20,6/21/2005 11:00,9",
        "20,not a date,9",
        "20,6/21/2005 13:00,60",
        "20,6/22/2005 13:00,",
        "7,6/21/2005 12:00,1",
    )
    trace = sim.read_trace(path)
    assert trace.gaps_s.tolist() == [3600.0, 7200.0, 86400.0]
    assert trace.outages_s.tolist()[1:] == [3600.0, 0.0]
    with pytest.raises(ValueError, match="no system '9'; it has 20, 7"):
        sim.read_trace(path, system="9")


def test_spot_trace_has_one_failure_per_drop_below_the_need(tmp_path: Path):
    """A fall that leaves enough machines is not a failure, and a failure lasts until enough are back."""
    path = tmp_path / "spot.json"
    counts = [4, 4, 3, 4, 4, 2, 2, 4, 4, 4, 0, 4, 4, 1, 1, 1]
    path.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": counts}))
    trace = sim.read_trace(path)
    assert trace.gaps_s.tolist() == [180.0, 300.0, 180.0]
    assert trace.outages_s.tolist() == [120.0, 60.0, 180.0]
    with pytest.raises(ValueError, match="1 gaps between failures: 3 at least"):
        sim.read_trace(path, need=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not"),
        ('{"metadata": {"gap_seconds": -1}, "data": [1]}', "out of range"),
        ('{"metadata": {"gap_seconds": 1}, "data": ["x"]}', "is not"),
        ("a,b\n1,2\n", "neither JSON nor a table"),
        ("", "neither JSON nor a table"),
    ],
)
def test_invalid_trace_file_is_refused(tmp_path: Path, text: str, message: str):
    """Garbage must give one sentence, not a plot of nothing."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        sim.read_trace(path)


def test_trace_is_replayed_exactly():
    """Every gap of a run must be a gap of the trace, in its order, times the scale."""
    trace = sim.FailureTrace("t", np.array([10.0, 20.0, 40.0]), np.array([1.0, 2.0, 3.0]))
    failures = sim.replay(trace, runs=20, horizon_s=1000.0, shares={"host": 1.0}, scale=2.0, seed=0)
    for at_s in failures.at_s:
        gaps = np.diff(at_s[np.isfinite(at_s)])
        ring = {20.0: 40.0, 40.0: 80.0, 80.0: 20.0}
        assert all(ring[a] == b for a, b in itertools.pairwise(gaps))
    assert {sim.FAILURES[kind] for kind in np.unique(failures.kind)} == {"host"}


def test_cluster_without_a_surviving_tier_is_refused():
    """Without a tier that survives every failure a run could never end; the error names the missing tier."""
    with pytest.raises(ValueError, match="must survive every failure"):
        sim.Cluster(hosts=1, tiers=(tier("ram", 0.1, 0.1, 0.1, "process"),))
    with pytest.raises(ValueError, match="must be in order"):
        sim.Cluster(hosts=1, tiers=three_tiers().tiers[1::-1] + three_tiers().tiers[2:])


def test_a_simulation_beyond_memory_is_refused():
    """A slip of the finger in --days must not take the machine's memory."""
    with pytest.raises(ValueError, match="fewer runs or days"):
        sim.draw(runs=100_000, horizon_s=3650 * DAY_S, mtbf_s=60.0, shares={"host": 1.0})
