"""`python -m bench policy`: the policy that learns its interval, against fixed intervals, on recorded failures.

One durable tier, whose saves cost a share of the trace's MTBF. Three questions for each trace and cost: how far is the
policy, after its first 10 failures, from the best fixed interval that hindsight finds on these very failures; how far
where the moments are blurred, so that no interval can fit their accidents; and, honestly for both, how far from
the interval that was best on the first half of the trace, judged on the second half.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ckptkit import simulation as sim

SYSTEMS = ("2", "18", "20")  # of the failure log: many failures, at three rates
COST_SHARES = (0.001, 0.01, 0.03)  # of the MTBF
LEARNING = 10  # failures that are not judged
PRIOR_MTBF_S = 6 * 3600.0  # `GoodputOptimal`'s default: nothing is known of the trace
BLUR = 0.25  # gaps are multiplied by 1 +- this
BLURRED_COPIES = 20
GAPS_MIN = 3 * LEARNING
FAILURES_MAX = 300  # of one run: a part of a long trace
BAR = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The policy's goodput over another's, the mean over runs, with half a 95 % confidence interval."""

    ratio: float
    ci: float
    interval_s: float  # the other's


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace and cost. `goodput` is the hindsight oracle's; `goodput_ci` half its 95 % confidence interval."""

    trace: str
    gaps: int
    mtbf_s: float
    cost_share: float
    goodput: float
    goodput_ci: float
    oracle: Judged
    blurred: Judged
    half: Judged

    def verdicts(self) -> dict[str, bool]:
        """Against the bars."""
        return {
            "at least 99 % of the oracle": self.oracle.ratio >= BAR,
            "at least 99 % of the oracle, moments blurred": self.blurred.ratio >= BAR,
            "within the best fixed policy's interval": abs(1.0 - self.oracle.ratio) * self.goodput
            <= self.goodput_ci + self.oracle.ci,
            "better than the best fixed of the first half": self.half.ratio - self.half.ci > 1.0,
        }


def judge(trace: sim.Trace, cost_share: float, *, runs: int, seed: int = 0) -> Case:
    """Every question for one trace and cost. Cost: some 100 simulations of at most 300 failures each."""
    cost_s = cost_share * trace.mtbf_s
    middle = len(trace.gaps_s) // 2
    first = sim.Trace(f"{trace.name}, first half", trace.gaps_s[:middle], trace.outages_s[:middle])
    second = sim.Trace(f"{trace.name}, second half", trace.gaps_s[middle:], trace.outages_s[middle:])
    oracle, outcome = _against(trace, cost_s, None, PRIOR_MTBF_S, runs=runs, seed=seed)
    before = _best_fixed(first, cost_s, runs=runs, seed=seed)
    goodput, goodput_ci = sim.mean_ci(_judged(outcome))
    return Case(
        trace=trace.name,
        gaps=len(trace.gaps_s),
        mtbf_s=trace.mtbf_s,
        cost_share=cost_share,
        goodput=goodput,
        goodput_ci=goodput_ci,
        oracle=oracle,
        blurred=_against(_blurred(trace, seed), cost_s, None, PRIOR_MTBF_S, runs=runs, seed=seed)[0],
        half=_against(second, cost_s, before, first.mtbf_s, runs=runs, seed=seed)[0],
    )


def cluster(cost_s: float) -> sim.Cluster:
    """One tier that survives everything, whose saves cost `cost_s`."""
    tier = sim.TierModel(
        name="durable", stall_s=cost_s, persist_s=cost_s, restore_s=30.0, survives=frozenset(sim.FAILURES)
    )
    return sim.Cluster(hosts=1, tiers=(tier,))


def _against(
    trace: sim.Trace, cost_s: float, other: sim.Fixed | None, prior_mtbf_s: float, *, runs: int, seed: int
) -> tuple[Judged, sim.Outcome]:
    """The policy against `other` (None: the best fixed one on these failures), and what became of the other."""
    job, horizon_s = cluster(cost_s), _horizon_s(trace)
    failures = sim.replay(trace, runs=runs, horizon_s=horizon_s, shares=job.shares, seed=seed)
    if other is None:
        other = sim.find_oracle(job, failures, horizon_s=horizon_s, begin=sim.levels(job, trace.mtbf_s))
    learned = sim.Learned(prior_mtbf_s=prior_mtbf_s)
    ours, theirs = (
        sim.simulate(job, failures, policy, horizon_s=horizon_s, mark=LEARNING) for policy in (learned, other)
    )
    there = np.isfinite(ours.goodput_after_mark())
    ratio, ci = sim.mean_ci(ours.goodput_after_mark()[there] / theirs.goodput_after_mark()[there])
    return Judged(ratio=ratio, ci=ci, interval_s=other.fixed_s[0]), theirs


def _best_fixed(trace: sim.Trace, cost_s: float, *, runs: int, seed: int) -> sim.Fixed:
    job, horizon_s = cluster(cost_s), _horizon_s(trace)
    failures = sim.replay(trace, runs=runs, horizon_s=horizon_s, shares=job.shares, seed=seed)
    return sim.find_oracle(job, failures, horizon_s=horizon_s, begin=sim.levels(job, trace.mtbf_s))


def _judged(outcome: sim.Outcome) -> np.ndarray:
    goodput = outcome.goodput_after_mark()
    return goodput[np.isfinite(goodput)]


def _horizon_s(trace: sim.Trace) -> float:
    return trace.mtbf_s * min(len(trace.gaps_s), FAILURES_MAX)


def _blurred(trace: sim.Trace, seed: int) -> sim.Trace:
    """The same good and bad weeks, with other moments in them."""
    rng = np.random.default_rng(seed)
    gaps_s = np.tile(trace.gaps_s, BLURRED_COPIES)
    factors = rng.uniform(1.0 - BLUR, 1.0 + BLUR, gaps_s.shape)
    outages_s = np.tile(trace.outages_s, BLURRED_COPIES)
    return sim.Trace(f"{trace.name}, blurred", gaps_s * factors, outages_s)


def read_traces(directory: Path, systems: Sequence[str]) -> tuple[list[sim.Trace], list[str]]:
    """Every trace below `directory` with enough failures, and why others are left out."""
    found, left_out = [], []
    for path in sorted(directory.rglob("*")):
        is_log = path.name.endswith((".csv", ".csv.xz"))
        for system in systems if is_log else (None,) if path.suffix == ".json" else ():
            try:
                trace = sim.read_trace(path, system=system)
            except ValueError as error:
                left_out.append(str(error))
                continue
            if len(trace.gaps_s) < GAPS_MIN:
                left_out.append(f"{trace.name}: {len(trace.gaps_s)} gaps, {GAPS_MIN} are needed")
            else:
                found.append(trace)
    return found, left_out


def show(cases: Sequence[Case], console: Console) -> None:
    """A line per trace and cost, and how many reach each bar."""
    table = Table("trace", "MTBF h", "save / MTBF", "oracle", "ours / oracle", "ours / oracle, blurred", "ours / half")
    for case in cases:
        pairs = (case.oracle, case.blurred, case.half)
        table.add_row(
            case.trace,
            f"{case.mtbf_s / 3600:.1f}",
            f"{case.cost_share:.1%}",
            f"{case.goodput:.1%} +- {case.goodput_ci:.1%}",
            *(f"{each.ratio:.4f} +- {each.ci:.4f}" for each in pairs),
        )
    console.print(table)
    for name in cases[0].verdicts():
        reached = [case.verdicts()[name] for case in cases]
        console.print(f"{name}: {sum(reached)} of {len(reached)}", markup=False)


@click.command(context_settings={"max_content_width": 120})
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A directory with failure logs (.csv, .csv.xz) and spot availability (.json), in the shapes of `simulate`.",
)
@click.option("--system", "systems", multiple=True, default=SYSTEMS, show_default=True, help="Of a log; repeatable.")
@click.option("--runs", type=click.IntRange(2), default=60, show_default=True, help="Starts at random in the trace.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every case, as JSON.")
def main(traces: Path, systems: Sequence[str], runs: int, json_path: Path | None) -> None:
    """Judges the learned save interval on recorded failures, against fixed ones."""
    console = Console()
    if not console.is_terminal:
        console.width = 150
    found, left_out = read_traces(traces, systems)
    for why in left_out:
        console.print(f"left out: {why}", markup=False)
    if not found:
        raise click.UsageError(f"--traces {traces}: no trace with {GAPS_MIN} gaps between failures")
    cases = [judge(trace, share, runs=runs) for trace in found for share in COST_SHARES]
    show(cases, console)
    if json_path is not None:
        result: dict[str, Any] = {"benchmark": "policy", "runs": runs, "left_out": left_out}
        result["cases"] = [{**asdict(case), "verdicts": case.verdicts()} for case in cases]
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
