"""`ckptkit simulate`: flags to a cluster and failures, policies side by side, a table or JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import named_number
from ckptkit.cli.prices import PRICE
from ckptkit.cli.progress import counting_bar
from ckptkit.cli.text import print_json, print_line, print_part, print_table, size_text
from ckptkit.diagnosis import simulation as sim
from ckptkit.diagnosis.simulation.cluster import TIER_ASSUMPTIONS
from ckptkit.goodput.prices import JobPrice, Price
from ckptkit.util.clock import time_text
from ckptkit.util.words import count_text

_DAY_S = 86400.0
_PROJECT_MAX = 1_000_000  # hosts, as for --hosts
_DEFAULT = sim.Preset(
    hosts=1000,
    days=30,
    mtbf_host_h=6000.0,
    state_bytes=1e12,
    shares={"process": 0.5, "host": 0.45, "job": 0.05},
    outage_s=0.0,
    source="No preset: 6,000 h between failures of a host, about what Llama 3's training saw.",
)
_POLICIES = ("learned", "levels", "daly", "young", "continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The values of the flags: the cluster, its failures, and the numbers that the policies start from."""

    cluster: sim.Cluster
    failures: sim.Failures
    horizon_s: float
    mtbf_s: float
    described: Mapping[str, Any]


@click.command()
@click.option(
    "--preset",
    type=click.Choice(sorted(sim.PRESETS)),
    help="Start from a published job; flags override [default: none].",
)
@click.option("--hosts", type=click.IntRange(1, 1_000_000), help="Hosts of the job [default: 1000].")
@click.option("--days", type=click.FloatRange(min=0.01, max=3650), help="Length of a run [default: 30].")
@click.option("--runs", type=click.IntRange(2, 100_000), default=200, show_default=True, help="Runs to simulate.")
@click.option(
    "--mtbf-host-h", type=click.FloatRange(min=0.001), help="Hours between failures of a host [default: 6000]."
)
@click.option(
    "--shape", type=click.FloatRange(0.1, 10), default=1.0, show_default=True, help="Weibull shape; 1: exponential."
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    help="Replay a failure log or spot availability [default: failures are drawn].",
)
@click.option("--system", help="Which system of the failure log [default: the one with most failures].")
@click.option(
    "--trace-hosts",
    type=click.IntRange(min=1),
    help="Hosts behind the trace: scales its gaps to --hosts [default: gaps as they are].",
)
@click.option("--tiers", default="ram,peer,durable", show_default=True, help="Fast to slow; durable is the last.")
@click.option("--state-bytes", type=click.FloatRange(min=1), help="State of the whole job [default: 1e12].")
@click.option(
    "--stall",
    "stalls",
    type=named_number("TIER=SECONDS"),
    multiple=True,
    help="TIER=SECONDS a save takes from the loop [default: 10 ms; ram and durable also a tenth of the copy].",
)
@click.option(
    "--persist",
    "persists",
    type=named_number("TIER=SECONDS"),
    multiple=True,
    help="TIER=SECONDS until a save is committed [default: a host's share of the state at 8 (ram), 2 (ssd), 5 (peer) "
    "or 0.5 GB/s (durable, 200 for all hosts)].",
)
@click.option(
    "--restore",
    "restores",
    type=named_number("TIER=SECONDS"),
    multiple=True,
    help="TIER=SECONDS to read the state back [default: the same, and 2 s].",
)
@click.option(
    "--restart-s",
    type=click.FloatRange(min=0),
    default=180.0,
    show_default=True,
    help="From a failure to the start of the restore.",
)
@click.option("--step-s", type=click.FloatRange(min=1e-3), default=5.0, show_default=True, help="One training step.")
@click.option(
    "--policy",
    "policies",
    type=click.Choice(_POLICIES),
    multiple=True,
    help="Only these; repeatable [default: all, or none with --fixed].",
)
@click.option(
    "--fixed",
    multiple=True,
    metavar="S,S,...",
    help="Also fixed intervals of work, one per tier; repeatable [default: none].",
)
@click.option(
    "--prior-mtbf-h",
    type=click.FloatRange(min=0.001),
    help="MTBF that `learned` expects [default: the true one].",
)
@click.option(
    "--project",
    metavar="HOSTS,...",
    help="Also the goodput of the same state and rate per host on so many hosts [default: none].",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same failures.")
@PRICE
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON document on stdout (docs/GOODPUT.md has its shape) [default: tables].",
)
def simulate(**flags: Any) -> int:
    """Estimate a job's goodput under policies for the save interval, over many simulated runs.

    Failures stop the whole job; it restarts, and restores the newest save that survived. Every policy gets the
    same failures. `oracle` is the best fixed choice in hindsight; intervals are seconds of work, one per tier.
    """
    try:
        job = _job(flags)
        begin = sim.levels(job.cluster, job.mtbf_s)
        with counting_bar() as progress:
            results = sim.compare(
                job.cluster,
                job.failures,
                _policies(flags, job),
                horizon_s=job.horizon_s,
                begin=begin,
                progress=progress,
            )
        projected = [_projected(flags, hosts) for hosts in _project_hosts(flags)]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if flags["as_json"]:
        found: dict[str, Any] = {**job.described, "policies": _with_costs(flags["price"], job, results)}
        print_json({**found, "projection": projected} if flags["project"] else found)
    else:
        _show(job, results)
        if flags["price"] is not None:
            _show_costs(flags["price"], job, results)
        if projected:
            _show_projection(projected)
    sys.stdout.flush()
    return Exit.OK


def _job(flags: Mapping[str, Any]) -> _Job:
    start = sim.PRESETS.get(flags["preset"], _DEFAULT)
    given = {name: flags[name] for name in ("hosts", "days", "mtbf_host_h", "state_bytes") if flags[name] is not None}
    start = replace(start, **given)
    cluster = sim.Cluster(
        hosts=start.hosts,
        tiers=_tiers(flags, start),
        restart_s=flags["restart_s"],
        step_s=flags["step_s"],
        shares=start.shares,
    )
    horizon_s, runs, seed = start.days * _DAY_S, flags["runs"], flags["seed"]
    if flags["trace"]:
        if flags["mtbf_host_h"] is not None or flags["shape"] != 1.0:
            raise ValueError("--trace brings its own failures: leave --mtbf-host-h and --shape out")
        if not Path(flags["trace"]).is_file():
            raise ValueError(f"{flags['trace']} is not a regular file")
        trace = sim.read_trace(flags["trace"], system=flags["system"])
        scale = 1.0 if flags["trace_hosts"] is None else flags["trace_hosts"] / start.hosts
        mtbf_s, source = trace.mtbf_s * scale, f"Failures as in {trace.name}, gaps times {scale:g}."
        failures = sim.replay(trace, runs=runs, horizon_s=horizon_s, shares=start.shares, scale=scale, seed=seed)
    else:
        if flags["system"] or flags["trace_hosts"]:
            raise ValueError("--system and --trace-hosts belong to --trace")
        mtbf_s, source = 3600.0 * start.mtbf_host_h / start.hosts, start.source
        if flags["mtbf_host_h"] is not None:
            source = f"{flags['preset'] or 'No preset'}: {start.mtbf_host_h:,g} h between failures of a host, as given."
        failures = sim.draw(
            runs=runs, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=start.shares, shape=flags["shape"],
            outage_s=start.outage_s, seed=seed,
        )  # fmt: skip
    described = {
        "hosts": start.hosts,
        "days": start.days,
        "runs": runs,
        "seed": seed,
        "mtbf_s": mtbf_s,
        "shape": flags["shape"],
        "state_bytes": start.state_bytes,
        "restart_s": cluster.restart_s,
        "step_s": cluster.step_s,
        "outage_s": start.outage_s,
        "shares": dict(start.shares),
        "source": source,
        "tiers": [
            {"name": t.name, "stall_s": t.stall_s, "persist_s": t.persist_s, "restore_s": t.restore_s,
             "survives": sorted(t.survives)}
            for t in cluster.tiers
        ],
    }  # fmt: skip
    return _Job(cluster=cluster, failures=failures, horizon_s=horizon_s, mtbf_s=mtbf_s, described=described)


def _tiers(flags: Mapping[str, Any], start: sim.Preset) -> tuple[sim.TierModel, ...]:
    names = [name.strip() for name in flags["tiers"].split(",")]
    unknown = [name for name in names if name not in sim.TIER_NAMES]
    if unknown or len(set(names)) != len(names):
        raise ValueError(f"--tiers {flags['tiers']}: choose among {', '.join(sim.TIER_NAMES)}, each once")
    made = {
        name: sim.default_tier(name, hosts=start.hosts, state_bytes=start.state_bytes)
        for name in sim.TIER_NAMES
        if name in names
    }
    for field, given in (("stall_s", "stalls"), ("persist_s", "persists"), ("restore_s", "restores")):
        for name, seconds in flags[given]:
            if name not in made:
                raise ValueError(f"{name}={seconds:g}: {name} is not one of --tiers {flags['tiers']}")
            made[name] = replace(made[name], **{field: seconds})
    return tuple(made[name] for name in names)


def _policies(flags: Mapping[str, Any], job: _Job) -> list[sim.Policy]:
    prior_s = job.mtbf_s if flags["prior_mtbf_h"] is None else 3600.0 * flags["prior_mtbf_h"]
    known: dict[str, sim.Policy] = {
        "learned": sim.Learned(prior_mtbf_s=prior_s),
        "levels": sim.levels(job.cluster, job.mtbf_s),
        "daly": sim.daly(job.cluster, job.mtbf_s),
        "young": sim.young(job.cluster, job.mtbf_s),
        "continuous": sim.continuous(job.cluster),
    }
    chosen = [known[name] for name in flags["policies"] or (() if flags["fixed"] else _POLICIES)]
    return [*chosen, *(_fixed(text, job.cluster) for text in flags["fixed"])]


def _fixed(text: str, cluster: sim.Cluster) -> sim.FixedIntervals:
    try:
        wanted = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--fixed {text}: write seconds, separated by commas") from error
    if len(wanted) != len(cluster.tiers) or not all(0 < each < float("inf") for each in wanted):
        raise ValueError(f"--fixed {text}: give {len(cluster.tiers)} of more than 0 s, one per tier")
    return sim.FixedIntervals(wanted, f"fixed {text}")


def _project_hosts(flags: Mapping[str, Any]) -> list[int]:
    text = flags["project"]
    if text is None:
        return []
    if flags["trace"] and flags["trace_hosts"] is None:
        raise ValueError("--project scales failures with hosts: give the trace's hosts with --trace-hosts")
    sizes = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(sizes) != len(text.split(",")) or not all(1 <= hosts <= _PROJECT_MAX for hosts in sizes):
        raise ValueError(f"--project {text}: give numbers of hosts from 1 to {_PROJECT_MAX:,}, separated by commas")
    return sizes


def _projected(flags: Mapping[str, Any], hosts: int) -> dict[str, Any]:
    """The job on `hosts` hosts, by the first of the policies: means with half a 95 % confidence interval."""
    job = _job({**flags, "hosts": hosts})
    policy = _policies(flags, job)[0]
    outcome = sim.simulate(job.cluster, job.failures, policy, horizon_s=job.horizon_s)
    goodput, goodput_ci = sim.mean_ci(outcome.goodput)
    shares = {name: float(getattr(outcome, f"{name}_s").mean() / job.horizon_s) for name in ("stall", "lost", "down")}
    said = {"hosts": hosts, "mtbf_s": job.mtbf_s, "policy": policy.name, "goodput": goodput, "goodput_ci": goodput_ci}
    return {**said, **shares, "failures": float(outcome.failures.mean())}


def _show_projection(projected: Sequence[Mapping[str, Any]]) -> None:
    print_line()
    head = ["hosts", "a failure every", "policy", "goodput", "95 % +-", "stall", "lost", "down"]
    print_table(
        [(title, title != "policy") for title in head],
        [
            [f"{row['hosts']:,}", time_text(row["mtbf_s"]), row["policy"]]
            + [_percent(row[name]) for name in ("goodput", "goodput_ci", "stall", "lost", "down")]
            for row in projected
        ],
    )


def _with_costs(price: Price | None, job: _Job, results: Sequence[sim.Result]) -> list[dict[str, Any]]:
    """The results as plain values; with a price also the cost of the time without new work."""
    if price is None:
        return [asdict(each) for each in results]
    whole = _price_of(price, job).cost(job.horizon_s)
    return [{**asdict(each), "badput_cost": (1.0 - each.goodput) * whole} for each in results]


def _days(job: _Job) -> str:
    days = job.described["days"]
    return "1 day" if days == 1 else f"{days:g} days"


def _price_of(price: Price, job: _Job) -> JobPrice:
    return JobPrice(host_h=price, hosts=job.described["hosts"])


def _show_costs(price: Price, job: _Job, results: Sequence[sim.Result]) -> None:
    of_job = _price_of(price, job)
    whole = of_job.cost(job.horizon_s)
    best = max(each.goodput for each in results)
    print_line()
    print_line(f"cost of a run: {of_job.rate_text}; {_days(job)} = {price.text(whole)}")
    print_part(
        [("policy", False), ("not new work", True), ("its cost", True), ("more than the best", True)],
        [
            [
                each.policy,
                _percent(1.0 - each.goodput),
                price.text((1.0 - each.goodput) * whole),
                price.text((best - each.goodput) * whole),
            ]
            for each in results
        ],
    )


def _show(job: _Job, results: Sequence[sim.Result]) -> None:
    told = job.described
    print_line(
        f"{count_text(told['hosts'], 'host')}, {_days(job)}, {count_text(told['runs'], 'run')}; a failure of the job "
        f"every {time_text(job.mtbf_s)}; state {size_text(int(told['state_bytes']))}"
    )
    print_line(told["source"])
    print_line()
    names = [tier.name for tier in job.cluster.tiers]
    head = ["tier", "save stalls", "committed in", "restored in", "survives"]
    print_table(
        [(title, title not in ("tier", "survives")) for title in head],
        [
            [t.name, *map(time_text, (t.stall_s, t.persist_s, t.restore_s)), ", ".join(sorted(t.survives))]
            for t in job.cluster.tiers
        ],
    )
    print_line(TIER_ASSUMPTIONS)
    print_line()
    head = ["policy", "goodput", "95 % +-", "oracle less it", "95 % +-", "stall", "lost", "down"]
    print_table(
        [(title, title != "policy") for title in [*head, f"interval {'/'.join(names)}"]],
        [
            [
                each.policy,
                _percent(each.goodput), _percent(each.goodput_ci),
                _percent(each.behind_oracle), _percent(each.behind_oracle_ci),
                _percent(each.stall), _percent(each.lost), _percent(each.down),
                "learned" if each.intervals_s is None else "/".join(map(_interval, each.intervals_s)),
            ]
            for each in results
        ],
    )  # fmt: skip


def _interval(seconds: float) -> str:
    return "never" if seconds > 1e5 * _DAY_S else time_text(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
