"""How the stored result of each benchmark becomes rows. Those that are compared with peers are in `bench.rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench import first
from bench.fault_places import OURS as OURS_UNDER_FAULTS
from bench.figures import GPU_FIGURES, median
from bench.row import PEERS, Range, Row, ends_of, measured, spread_of


def _faults(result: Mapping[str, Any]) -> Iterable[Row]:
    found, settings = result["summary"], result["settings"]
    contenders = found["contenders"]
    stock = [name for name in contenders if name.startswith("orbax")]
    if OURS_UNDER_FAULTS not in contenders or not stock:
        return
    best = max(stock, key=lambda name: contenders[name]["goodput"]["median"])
    case = f"{settings['state']}, {settings['mtbf_s']:g} s"
    wanted = {
        "goodput": "kept work over elapsed time",
        "lost_work_s": "work that had to be done again",
        "stall_ms": "how long a save held the loop",
        "resume_s": "from a kill to the next step, mean of the losses of a run; n is the number of losses",
    }
    ours, peer = contenders[OURS_UNDER_FAULTS], contenders[best]
    told = best if len(stock) > 1 else f"only {best}"  # nobody knows whether it is the fastest way
    own = [run for run in result["runs"] if run["contender"] == OURS_UNDER_FAULTS]
    losses = sum(run.get("resumes", run["disruptions"]) for run in own)  # the oldest results count losses alone
    for figure, meaning in wanted.items():
        if ours[figure] is not None:
            yield Row(
                benchmark="faults",
                case=case,
                figure=figure,
                meaning=meaning,
                ours=ours[figure]["median"],
                spread=_ends(ours[figure]),
                peer=peer[figure]["median"] if peer[figure] else None,
                peer_name=told,
                peer_spread=_ends(peer[figure]),
                limit=found["ceiling"]["median"] if figure == "goodput" else None,
                samples=losses if figure == "resume_s" else ours[figure]["n"],
            )
    for figure, meaning in (("wrong", "runs with wrong bits"), ("unfinished", "runs that never finished")):
        yield Row(
            benchmark="faults",
            case=case,
            figure=f"{figure}_runs",
            meaning=meaning,
            ours=ours[figure],
            peer=peer[figure],
            peer_name=told,
            samples=ours["runs"],
        )
    closed = found.get("against", {}).get("gap_closed")
    if closed:
        meaning = "share of the way from the peer's goodput to the limit's"
        yield Row(
            benchmark="faults",
            case=case,
            figure="gap_closed",
            meaning=meaning,
            ours=closed["median"],
            spread=_ends(closed),
            limit=1.0,
            samples=closed["n"],
        )


def _ends(spread: Mapping[str, float] | None) -> Range | None:
    """The least and the greatest of a campaign's runs, of which there are few."""
    return (spread["min"], spread["max"]) if spread and spread["n"] > 1 else None


def _corruption(result: Mapping[str, Any]) -> Iterable[Row]:
    def total(who: str, what: str) -> int:
        return sum(row.get(what, 0) for row in result[who].values())

    yield Row(
        benchmark="corruption",
        case=f"seed {result['seed']}",
        figure="restored_wrong",
        meaning="damaged files (injected) restored as something else, without an error",
        ours=total("ckptkit", "wrong"),
        peer=total("orbax", "wrong"),
        peer_name="orbax_async",
        samples=total("ckptkit", "faults"),
    )
    yield Row(
        benchmark="corruption",
        case=f"seed {result['seed']}",
        figure="recovered_share",
        meaning="restarts that went on with right bits",
        ours=total("ckptkit", "recovered") / total("ckptkit", "faults"),
        samples=total("ckptkit", "faults"),
    )


def _kill(result: Mapping[str, Any]) -> Iterable[Row]:
    case = f"{result['processes']} processes"
    lost, resume = result["lost_steps"], result["resume_s"]["total"]
    told: list[tuple[str, str, float | None, float | None, int]] = [
        ("recovered", "kills after which the job had the newest covered save", result["recovered"], result["kills"], 0),
        ("lost_steps", "steps lost to a kill, median", lost and lost["p50"], None, lost["count"] if lost else 0),
        ("resume_s", "from a kill to the next step, median", resume and resume["p50"], None, result["resumes"]),
    ]
    for figure, meaning, ours, limit, samples in told:
        if ours is not None:
            yield Row(
                benchmark="kill",
                case=case,
                figure=figure,
                meaning=meaning,
                ours=ours,
                limit=limit,
                samples=samples or result["kills"],
            )


def _hosts(result: Mapping[str, Any]) -> Iterable[Row]:
    told = (
        ("next_step_s", "from the loss of a host to the next step, with a spare host", ("host",)),
        ("ended_s", "from a loss until no worker of any host runs", ("host", "worker")),
    )
    for figure, meaning, kinds in told:
        samples = [row[figure] for row in result["rows"] if row["what"] in kinds]
        if samples:
            yield Row(
                benchmark="hosts",
                case=f"{result['hosts']} hosts + 1",
                figure=figure,
                meaning=meaning,
                **measured(samples),
            )


def _unchanged(result: Mapping[str, Any]) -> Iterable[Row]:
    told = (
        ("commit_s", "durable commit that takes over the files of leaves that did not change", "shared_s"),
        ("whole_commit_s", "the same with every file written", "whole_s"),
        ("bytes", "bytes written by such a commit", "shared_bytes"),
        ("search_cpu_share", "processor time of the search for such leaves, of a whole commit's", "search_cpu_share"),
    )
    cases = [(place, *each) for place, cases in result["places"].items() for each in cases.items()]
    for place, case, found in cases:
        for figure, meaning, key in told:
            yield Row(
                benchmark="unchanged",
                case=f"{case}, {result['megabytes']} MB, {place}",
                figure=figure,
                meaning=meaning,
                ours=found[key],
                samples=len(found["samples"]["shared"]["s"]),
            )


def _leaf(result: Mapping[str, Any]) -> Iterable[Row]:
    for place, found in result["places"].items():
        for figure, meaning, value in (
            ("times", "durable commit by all holders, of the time of process 0 alone", found["times"]),
            ("most_bytes", "bytes of it that one process wrote, at most", found["most_bytes_of_a_process"]),
        ):
            yield Row(
                benchmark="leaf",
                case=f"one replicated leaf of {result['megabytes']:g} MB, {result['processes']} processes, {place}",
                figure=figure,
                meaning=meaning,
                ours=value,
                samples=len(found["all"]["s"]),
            )


def _herd(result: Mapping[str, Any]) -> Iterable[Row]:
    for kind, simulated in result["sidecars"].items():
        for limits, found in simulated["cases"].items():
            yield Row(
                benchmark="herd",
                case=f"{result['hosts']} hosts, sidecars {kind}, limits: {limits}",
                figure="last_restore_s",
                meaning="end of the last restore, simulated",
                ours=found["last_restore_s"],
            )


def _crashpoints(result: Mapping[str, Any]) -> Iterable[Row]:
    yield Row(
        benchmark="crashpoints",
        case="every point" if result["full"] else "some points",
        figure="violations",
        meaning="committed steps lost or changed by a crash after a storage operation",
        ours=len(result["violations"]),
        samples=sum(row.get("points", 0) for row in result["rows"].values()),
    )


def _proof(result: Mapping[str, Any]) -> Iterable[Row]:
    for setting, samples in result["settings"].items():
        pairs = zip(samples["with"]["cpu_s_per_gb"], samples["without"]["cpu_s_per_gb"], strict=True)
        more = [with_s - without_s for with_s, without_s in pairs]
        yield Row(
            benchmark="proof",
            case=f"from {setting}",
            figure="digest_cpu_s_per_gb",
            meaning="processor time of digests in a durable commit",
            **measured(more),
        )


def _gather(result: Mapping[str, Any]) -> Iterable[Row]:
    yield Row(
        benchmark="gather",
        case=f"{result['processes']} processes",
        figure="gather_s",
        meaning="process 0 collects all inventories, ranks them, answers",
        ours=result["gather_s"],
        samples=result["repeats"],
    )


def _broadcast(result: Mapping[str, Any]) -> Iterable[Row]:
    for count, found in result["replicas"].items():
        read = {
            name: median(
                [
                    sample["bytes_read"] / found["state_bytes"]
                    for rounds in found["samples"].values()
                    for sample in rounds[name]
                ]
            )
            for name in ("broadcast", "orbax")
        }
        yield Row(
            benchmark="broadcast",
            case=f"{count} replicas",
            figure="read_ratio",
            meaning="bytes read from storage over the state's, by all together",
            ours=read["broadcast"] or 0.0,
            peer=read["orbax"],
            peer_name="orbax",
            limit=1.0,
            samples=sum(len(rounds["broadcast"]) for rounds in found["samples"].values()),
        )
    yield from _choices(result)


def _choices(result: Mapping[str, Any]) -> Iterable[Row]:
    for count, found in result["replicas"].items():
        for rate, rounds in found["samples"].items():
            yield Row(
                benchmark="broadcast",
                case=f"{count} replicas, {rate} MB/s",
                figure="choice_ratio",
                meaning="seconds of the side that `auto` chose, over those of the faster one",
                ours=found["bars"][f"choice_at_{rate}"]["ratio"],
                limit=1.1,
                samples=len(rounds["auto"]),
            )


def _simulator(result: Mapping[str, Any]) -> Iterable[Row]:
    predicted = [row for row in result["rows"] if not row["fitted"]]
    yield Row(
        benchmark="simulator",
        case=f"{len(predicted)} runs with failures",
        figure="points_apart",
        meaning="predicted and measured goodput, percentage points apart on average",
        ours=result["difference_points_mean"],
        samples=len(predicted),
    )


def _policy(result: Mapping[str, Any]) -> Iterable[Row]:
    meaning = "goodput over that of the best fixed interval in hindsight, least of the traces"
    told = {"oracle": ("", meaning), "blurred": ("_blurred", f"{meaning}, with the moments of failures blurred")}
    for share in sorted({case["cost_share"] for case in result["cases"]}):
        for against, (suffix, meaning) in told.items():
            ratios = [case[against]["ratio"] for case in result["cases"] if case["cost_share"] == share]
            yield Row(
                benchmark="policy",
                case=f"a save costs {share:.1%} of the MTBF",
                figure=f"goodput_of_oracle{suffix}",
                meaning=meaning,
                ours=min(ratios),
                samples=len(ratios),
            )
        drawn = [case["hindsight"] for case in result["cases"] if case["cost_share"] == share]
        worst = min(drawn, key=lambda each: each["ours"]["ratio"])
        yield Row(
            benchmark="policy",
            case=f"a save costs {share:.1%} of the MTBF",
            figure="goodput_of_oracle_drawn",
            meaning="the same on traces drawn from each trace's law; the limit is the fixed interval that knows it",
            ours=worst["ours"]["ratio"],
            limit=max(worst["law"]["ratio"], worst["ours"]["ratio"]),
            limit_name="ckptkit" if worst["ours"]["ratio"] > worst["law"]["ratio"] else "",
            samples=len(drawn),
        )


def _simulate(result: Mapping[str, Any]) -> Iterable[Row]:
    case = f"{result['hosts']:,} hosts x {result['days']:g} days x {result['runs']:,} runs, every policy"
    told = {"wall_s": ("simulate_s", "the whole command"), "cpu_s": ("simulate_cpu_s", "its processor time")}
    for name, (figure, meaning) in told.items():
        yield Row(
            benchmark="simulate",
            case=case,
            figure=figure,
            meaning=meaning,
            **measured([each[name] for each in result["samples"]]),
        )


def _inspect(result: Mapping[str, Any]) -> Iterable[Row]:
    for case, samples in result["cases"].items():
        yield Row(
            benchmark="inspect",
            case=f"{result['leaves']:,} leaves, {case}",
            figure="inspect_s",
            meaning="`ckptkit inspect`, from its start to its end; for Orbax its metadata call alone",
            **measured([each["wall_s"] for each in samples["ckptkit"]]),
            peer=median([each["call_s"] for each in samples.get("orbax", ())]),
            peer_name="orbax_call" if "orbax" in samples else "",
            peer_spread=spread_of([each["call_s"] for each in samples.get("orbax", ())]),
            peer_ends=ends_of([each["call_s"] for each in samples.get("orbax", ())]),
        )
        yield Row(
            benchmark="inspect",
            case=f"{result['leaves']:,} leaves, {case}",
            figure="inspect_cpu_s",
            meaning="processor time of `ckptkit inspect`, imports included",
            **measured([each["cpu_s"] for each in samples["ckptkit"]]),
            peer=median([each["cpu_s"] for each in samples.get("orbax", ())]),
            peer_name="orbax_call" if "orbax" in samples else "",
            peer_spread=spread_of([each["cpu_s"] for each in samples.get("orbax", ())]),
            peer_ends=ends_of([each["cpu_s"] for each in samples.get("orbax", ())]),
        )


def _convert(result: Mapping[str, Any]) -> Iterable[Row]:
    case, memory = f"{result['size_bytes'] / 2**30:g} GiB", f"{result['memory_bytes'] >> 20} MiB of memory"
    for what, samples in result["jobs"].items():
        if what.startswith("obvious"):
            continue
        yield Row(
            benchmark="convert",
            case=f"{case}, {what}",
            figure="of_copy_rate",
            meaning=f"rate over that of `cp` and fsync of the same files, in the same run, within {memory}",
            **measured([each["copy_s"] / each["work_s"] for each in samples]),
        )
        yield Row(
            benchmark="convert",
            case=f"{case}, {what}",
            figure="peak_bytes",
            meaning="resident memory, with imports, the most of all samples",
            ours=max(each["peak"] for each in samples),
            spread=spread_of([each["peak"] for each in samples]),
            samples=len(samples),
        )


def _gpu(result: Mapping[str, Any]) -> Iterable[Row]:
    """Virtual devices have rows of their own: they are not figures of a GPU."""
    for case, state in result["states"].items():
        found = {name: _known(samples) for name, samples in state["contenders"].items()}
        mine = [name for name in found if name.startswith("ckptkit")]
        if not mine:
            continue
        for meaning, (figure, _) in GPU_FIGURES.items():
            peers = {
                name: median(each[figure]) or 0.0 for name, each in found.items() if name in PEERS and each[figure]
            }
            best = min(peers, key=lambda name: peers[name]) if peers else ""
            ours = "ckptkit" if "ckptkit" in found else mine[0]
            if found[ours][figure]:
                limit = _transfer_s(state, _LINK.get(figure))
                yield Row(
                    benchmark="gpu_on_cpu" if result["platform"] == "cpu" else "gpu",
                    case=_gpu_case(case, state),
                    figure=figure,
                    meaning=f"{ours}: {meaning.rpartition(',')[0]}",
                    **measured(found[ours][figure]),
                    peer=peers.get(best),
                    peer_name=best,
                    peer_spread=spread_of(found[best][figure]) if best else None,
                    peer_ends=ends_of(found[best][figure]) if best else None,
                    limit=limit,
                    limit_name="" if limit is None else "one transfer of pinned memory",
                )


_LINK = {"committed_s": "d2h_pinned", "restore_s": "h2d_pinned"}  # whose speed limits a figure


def _transfer_s(state: Mapping[str, Any], link: str | None) -> float | None:
    """The time of the whole state over a link, at the speed of one large buffer."""
    rates = state.get("limits", {}).get(link)
    return state["state_bytes"] / median(rates) if rates else None


def _gpu_case(case: str, state: Mapping[str, Any]) -> str:
    if "device" not in state:
        return case
    count, kind = state["device"]["count"], state["device"]["kind"]
    return f"{state['state_bytes'] / 1e9:.3g} GB, {count} x {kind}"


def _known(samples: Mapping[str, Iterable[float | None]]) -> dict[str, list[float]]:
    """By figure; empty where nothing was measured."""
    known = {figure: [each for each in values if each is not None] for figure, values in samples.items()}
    return {figure: known.get(figure, []) for figure, _ in GPU_FIGURES.values()}


def _first(result: Mapping[str, Any]) -> Iterable[Row]:
    found = {name: first.figures(samples) for name, samples in result["samples"].items()}
    ways = {"ckptkit": "a ramdisk", "ckptkit_prepared": "a ramdisk, after `prepare`", "ckptkit_durable": "no tiers"}
    for name, way in ways.items():
        for figure, (_, _, _, meaning) in first.FIGURES.items() if name in found else ():
            peers = {who: median(each[figure]) or 0.0 for who, each in found.items() if who in PEERS}
            best = min(peers, key=lambda who: peers[who]) if peers else ""
            yield Row(
                benchmark="first",
                case=f"{result['gb']:g} GB, {way}",
                figure=figure,
                meaning=meaning,
                **measured(found[name][figure]),
                peer=peers.get(best),
                peer_name=best,
                peer_spread=spread_of(found[best][figure]) if best else None,
                peer_ends=ends_of(found[best][figure]) if best else None,
                torch=median(found.get("torch_dcp", {}).get(figure)),
            )


READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[Row]]] = {
    "faults": _faults,
    "corruption": _corruption,
    "crashpoints": _crashpoints,
    "first": _first,
    "kill": _kill,
    "hosts": _hosts,
    "unchanged": _unchanged,
    "leaf": _leaf,
    "herd": _herd,
    "proof": _proof,
    "gather": _gather,
    "broadcast": _broadcast,
    "simulator": _simulator,
    "policy": _policy,
    "simulate": _simulate,
    "inspect": _inspect,
    "convert": _convert,
    "gpu": _gpu,
}
