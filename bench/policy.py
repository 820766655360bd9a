"""`python -m bench policy`: the policy that learns its interval, against fixed intervals, on recorded failures.

One durable tier, whose saves cost a share of the trace's MTBF. Three questions for each trace and cost. First: how far
is the policy, after its first 10 failures, from the best fixed interval that hindsight finds on these very failures?
Second: how far if the moments are blurred, so that no interval can fit their accidents? Third: how far from the
interval that was best on the first half of the trace, judged on the second half? A fourth is what it gains by letting
intervals grow with the uptime. Made-up failures, whose law is known, are judged in the same way as the recorded ones.

It also measures how much of that oracle is hindsight. Of many traces of the same length, drawn from the law of the
recorded one, each has its own best fixed interval. The interval that is best for the law, over all of them, is the most
that can be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.environment import environment, store_result
from ckptkit.diagnosis import simulation as sim

SYSTEMS = ("2", "18", "20")  # of the failure log: many failures, at three rates
COST_SHARES = (0.001, 0.01, 0.03)  # of the MTBF
LEARNING = 10  # failures that are not judged
PRIOR_MTBF_S = 6 * 3600.0  # `GoodputOptimal`'s default: nothing is known of the trace
BLUR = 0.25  # gaps are multiplied by 1 +- this
BLURRED_GAPS = 3000  # at least: a short trace is blurred again and again
GAPS_MIN = 3 * LEARNING
DRAWN_GAPS = 12_000  # of a trace's law
DRAWN_MIN = 50  # runs, each a trace of its own
DRAWN_INTERVALS = tuple(2.0 ** (k / 8.0) for k in range(-20, 21))  # times Daly's
MADE_UP = {"exponential": 1.0, "Weibull 0.7": 0.7, "Weibull 0.5": 0.5}  # names and shapes
MADE_UP_GAPS, MADE_UP_MTBF_S, MADE_UP_OUTAGE_S = 3000, 8 * 3600.0, 600.0
COSTLY = 0.01  # of the MTBF: from here on the policy should be better than any fixed interval
BAR = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The policy's goodput over another's, the mean over runs, with half a 95 % confidence interval."""

    ratio: float
    ci: float
    interval_s: float | None = None  # the other's, where it is fixed

    def above(self) -> bool:
        """Whether it is better, and not by chance."""
        return self.ratio - self.ci > 1.0

    def not_below(self, margin: float = 0.0) -> bool:
        """Whether it is better, or no worse than chance explains; `margin`: what the other's own interval adds."""
        return self.ratio + self.ci + margin >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """For traces drawn from a law, relative to the best fixed interval of each in hindsight: the fixed interval that is
    best for the law, and our policy, which knows neither. Also the shares of the traces in which they reach the bar.
    """

    law: Judged
    law_reaches: float
    ours: Judged
    ours_reaches: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace and cost. `goodput` is the hindsight oracle's; `goodput_ci` half its 95 % confidence interval."""

    trace: str
    gaps: int
    mtbf_s: float
    cost_share: float
    hindsight: Hindsight
    goodput: float
    goodput_ci: float
    oracle: Judged
    blurred: Judged
    half: Judged
    growing: Judged  # against itself with intervals that stay, moments blurred

    def verdicts(self) -> dict[str, bool]:
        """Against the bars; that of being better only where saves are costly."""
        found = {
            "at least 99 % of the oracle": self.oracle.ratio >= BAR,
            "at least 99 % of the oracle, moments blurred": self.blurred.ratio >= BAR,
            "within the oracle's interval or above": self.oracle.not_below(self.goodput_ci / self.goodput),
            "within the oracle's interval or above, moments blurred": self.blurred.not_below(),
            "better than the best fixed of the first half": self.half.above(),
        }
        if self.cost_share >= COSTLY:
            found["better than the oracle, where saves are costly"] = self.oracle.above()
            found["better than the oracle, where saves are costly, moments blurred"] = self.blurred.above()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated. `failures`: of one run at most, which of a long trace is a part."""

    runs: int
    failures: int = 300
    seed: int = 0

    def replay(self, trace: sim.FailureTrace, gaps: int | None = None) -> tuple[sim.Failures, float]:
        """Failures from random starts in the trace, and the horizon: as long as `gaps` take (None: all of them)."""
        horizon_s = trace.mtbf_s * min(len(trace.gaps_s) if gaps is None else gaps, self.failures)
        shares = cluster(1.0).shares
        return sim.replay(trace, runs=self.runs, horizon_s=horizon_s, shares=shares, seed=self.seed), horizon_s


def judge(trace: sim.FailureTrace, cost_share: float, size: Size) -> Case:
    """Every question for one trace and cost. Cost: some 200 simulations of a run's failures."""
    cost_s = cost_share * trace.mtbf_s
    middle = len(trace.gaps_s) // 2
    first = sim.FailureTrace(f"{trace.name}, first half", trace.gaps_s[:middle], trace.outages_s[:middle])
    second = sim.FailureTrace(f"{trace.name}, second half", trace.gaps_s[middle:], trace.outages_s[middle:])
    oracle, outcome = _against(trace, cost_s, None, PRIOR_MTBF_S, size)
    before = _best_fixed(first, cost_s, size)
    goodput, goodput_ci = sim.mean_ci(_judged(outcome))
    blurred = _blurred(trace, size.seed)
    stays = sim.Learned(prior_mtbf_s=PRIOR_MTBF_S, ageing=False)
    return Case(
        trace=trace.name,
        gaps=len(trace.gaps_s),
        mtbf_s=trace.mtbf_s,
        cost_share=cost_share,
        hindsight=_hindsight(trace, cost_s, size),
        goodput=goodput,
        goodput_ci=goodput_ci,
        oracle=oracle,
        blurred=_against(blurred, cost_s, None, PRIOR_MTBF_S, size)[0],
        half=_against(second, cost_s, before, first.mtbf_s, size)[0],
        growing=_against(blurred, cost_s, stays, PRIOR_MTBF_S, size)[0],
    )


def cluster(cost_s: float) -> sim.Cluster:
    """One tier that survives everything, whose saves cost `cost_s`."""
    tier = sim.TierModel(
        name="durable", stall_s=cost_s, persist_s=cost_s, restore_s=30.0, survives=frozenset(sim.FAILURES)
    )
    return sim.Cluster(hosts=1, tiers=(tier,))


def _against(
    trace: sim.FailureTrace, cost_s: float, other: sim.Policy | None, prior_mtbf_s: float, size: Size
) -> tuple[Judged, sim.Outcome]:
    """The policy against `other` (None: the best fixed one on these failures), and what became of the other."""
    job, (failures, horizon_s) = cluster(cost_s), size.replay(trace)
    if other is None:
        other = _best_fixed(trace, cost_s, size)
    learned = sim.Learned(prior_mtbf_s=prior_mtbf_s)
    ours, theirs = sim.simulate_all(job, failures, [learned, other], horizon_s=horizon_s, mark=LEARNING)
    there = np.isfinite(ours.goodput_after_mark())
    ratio, ci = sim.mean_ci(ours.goodput_after_mark()[there] / theirs.goodput_after_mark()[there])
    interval_s = other.fixed_s[0] if isinstance(other, sim.FixedIntervals) else None
    return Judged(ratio=ratio, ci=ci, interval_s=interval_s), theirs


def _best_fixed(trace: sim.FailureTrace, cost_s: float, size: Size) -> sim.FixedIntervals:
    job, (failures, horizon_s) = cluster(cost_s), size.replay(trace)
    return sim.find_oracle(job, failures, horizon_s=horizon_s, begin=sim.levels(job, trace.mtbf_s))


def _judged(outcome: sim.Outcome) -> np.ndarray:
    goodput = outcome.goodput_after_mark()
    return goodput[np.isfinite(goodput)]


def _hindsight(trace: sim.FailureTrace, cost_s: float, size: Size) -> Hindsight:
    job, blurred = cluster(cost_s), _blurred(trace, size.seed, DRAWN_GAPS)
    order = np.random.default_rng(size.seed).permutation(len(blurred.gaps_s))  # no weeks: the law is all there is
    drawn = sim.FailureTrace(f"{trace.name}, drawn", blurred.gaps_s[order], blurred.outages_s[order])
    failures, horizon_s = replace(size, runs=max(size.runs, DRAWN_MIN)).replay(drawn, len(trace.gaps_s))
    middle_s = sim.daly(job, trace.mtbf_s).fixed_s[0]
    policies = [
        sim.Learned(prior_mtbf_s=PRIOR_MTBF_S),
        *(sim.FixedIntervals((middle_s * each,)) for each in DRAWN_INTERVALS),
    ]
    outcomes = sim.simulate_all(job, failures, policies, horizon_s=horizon_s, mark=LEARNING)
    told = np.array([outcome.goodput_after_mark() for outcome in outcomes])
    ours, *fixed = told[:, np.nan_to_num(told[1:].max(axis=0)) > 0]  # of a short one nothing may be left to judge
    tried = np.array(fixed)
    ratios = [each / tried.max(axis=0) for each in (tried[tried.mean(axis=1).argmax()], ours)]
    (law, law_ci), (mean, ci) = map(sim.mean_ci, ratios)
    law_reaches, ours_reaches = (float((each >= BAR).mean()) for each in ratios)
    return Hindsight(
        law=Judged(ratio=law, ci=law_ci),
        law_reaches=law_reaches,
        ours=Judged(ratio=mean, ci=ci),
        ours_reaches=ours_reaches,
    )


def _blurred(trace: sim.FailureTrace, seed: int, gaps: int = BLURRED_GAPS) -> sim.FailureTrace:
    """The same good and bad weeks, with other moments in them."""
    rng = np.random.default_rng(seed)
    copies = -(-gaps // len(trace.gaps_s))
    gaps_s = np.tile(trace.gaps_s, copies)
    factors = rng.uniform(1.0 - BLUR, 1.0 + BLUR, gaps_s.shape)
    outages_s = np.tile(trace.outages_s, copies)
    return sim.FailureTrace(f"{trace.name}, blurred", gaps_s * factors, outages_s)


def made_up(seed: int = 0) -> list[sim.FailureTrace]:
    """Failures by known laws, as traces."""
    rng, found = np.random.default_rng(seed), []
    for name, shape in MADE_UP.items():
        gaps_s = rng.weibull(shape, MADE_UP_GAPS)
        outages_s = np.full(MADE_UP_GAPS, MADE_UP_OUTAGE_S)
        found.append(sim.FailureTrace(name, gaps_s * (MADE_UP_MTBF_S / gaps_s.mean()) + MADE_UP_OUTAGE_S, outages_s))
    return found


def read_traces(directory: Path, systems: Sequence[str]) -> tuple[list[sim.FailureTrace], list[str]]:
    """Every trace below `directory` with enough failures, and why others are left out."""
    found, left_out = [], []
    for path in sorted(directory.rglob("*")):
        is_log = path.name.endswith((".csv", ".csv.xz"))
        for system in systems if is_log else (None,) if path.suffix == ".json" else ():
            try:
                trace = sim.read_trace(path, system=system)
            except ValueError as error:
                left_out.append(
                    str(error).replace(str(path), path.name)
                )  # a result does not record the place of traces
                continue
            if len(trace.gaps_s) < GAPS_MIN:
                left_out.append(f"{trace.name}: {len(trace.gaps_s)} gaps, {GAPS_MIN} are needed")
            else:
                found.append(trace)
    return found, left_out


def show(cases: Sequence[Case], console: Console) -> None:
    """A line per trace and cost, and how many reach each bar."""
    ratios = ("ours / oracle", "ours / oracle, blurred", "ours / half", "ours / ours that stays")
    table = Table("trace", "MTBF h", "save / MTBF", "oracle", *ratios, "law / hindsight")
    for case in cases:
        pairs = (case.oracle, case.blurred, case.half, case.growing, case.hindsight.law)
        table.add_row(
            case.trace,
            f"{case.mtbf_s / 3600:.1f}",
            f"{case.cost_share:.1%}",
            f"{case.goodput:.1%} +- {case.goodput_ci:.1%}",
            *(f"{each.ratio:.4f} +- {each.ci:.4f}" for each in pairs),
        )
    console.print(table)
    for name in dict.fromkeys(name for case in cases for name in case.verdicts()):
        reached = [case.verdicts()[name] for case in cases if name in case.verdicts()]
        console.print(f"{name}: {sum(reached)} of {len(reached)}", markup=False)
    of_the_law, ours = (sum(each) for each in zip(*(_reached(case) for case in cases), strict=True))
    console.print(
        f"at least 99 % of the hindsight's on a trace drawn anew, on average: the interval that is best for the law "
        f"{of_the_law:.1f}, ours {ours:.1f} of {len(cases)}",
        markup=False,
    )


def _reached(case: Case) -> tuple[float, float]:
    return case.hindsight.law_reaches, case.hindsight.ours_reaches


@click.command(context_settings={"max_content_width": 120})
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory with failure logs (.csv, .csv.xz) and spot availability (.json), in the shapes of `simulate`.",
)
@click.option("--system", "systems", multiple=True, default=SYSTEMS, show_default=True, help="Of a log; repeatable.")
@click.option("--runs", type=click.IntRange(2), default=100, show_default=True, help="Starts at random in the trace.")
@click.option(
    "--failures", type=click.IntRange(2 * LEARNING), default=300, show_default=True, help="Of a run, at most."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every case, as JSON.")
def main(traces: Path | None, systems: Sequence[str], runs: int, failures: int, json_path: Path | None) -> None:
    """Judges the learned save interval on made-up failures and, with --traces, on recorded ones, against fixed ones."""
    console = Console()
    if not console.is_terminal:
        console.width = 170
    found, left_out = read_traces(traces, systems) if traces else ([], [])
    for why in left_out:
        console.print(f"left out: {why}", markup=False)
    if traces and not found:
        raise click.UsageError(f"--traces {traces}: no trace with {GAPS_MIN} gaps between failures")
    size = Size(runs=runs, failures=failures)
    result: dict[str, Any] = {"benchmark": "policy", "environment": environment(), **asdict(size), "left_out": left_out}
    for name, kind in (("made_up", made_up()), ("cases", found)):
        cases = [judge(trace, share, size) for trace in kind for share in COST_SHARES]
        result[name] = [{**asdict(case), "verdicts": case.verdicts()} for case in cases]
        if cases:
            show(cases, console)
    store_result(result, json_path)
