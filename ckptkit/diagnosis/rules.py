"""The rules of a diagnosis: each a pure function of the facts, with its threshold and where that is from.

A rule with too little data reports nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

from ckptkit.diagnosis.records import Advice, AdviceKind, Facts
from ckptkit.errors import Reason
from ckptkit.events import Event, Kind
from ckptkit.goodput.better_interval import LOSSES_MIN, better_interval
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.util import clock
from ckptkit.util.clock import time_text
from ckptkit.util.stragglers import late, slow
from ckptkit.util.words import command_line, count_text, on_each_host, own_host_id, repair_command, size_text

DiagnosisRule = Callable[[Facts], list[Advice]]

STALL_SHARE_MAX = 0.035
SKIPPED_SHARE_MAX = 0.1
WAITED_S_MIN = 1.0
WASTE_GAIN_MIN = 0.01
DURABLE_AGE_TIMES = 3.0
DEAD_SHARE_MAX = 0.1
FREE_SHARE_MIN = 0.01
STEPS_MAX = 50
_OWN_PART_ENDS = {SSD: "copied", DURABLE: "written", PEER: "committed_here"}  # what follows waits for others


def _said(
    rule: str, kind: AdviceKind, what: str, advice: str, *, of_run: float | None = None, stored_bytes: int | None = None
) -> list[Advice]:
    return [Advice(rule=rule, kind=kind, what=what, advice=advice, of_run=of_run, stored_bytes=stored_bytes)]


def stalls(facts: Facts) -> list[Advice]:
    """Saves held the step loop for more than 3.5 % of the run.

    CheckFreq tunes its frequency to that overhead (J. Mohan et al., FAST 2021, section 4.3).
    """
    if facts.report is None or not facts.report.saves.saves or facts.report.wall_s <= 0:
        return []
    by_save: dict[int | None, float] = defaultdict(float)
    for event in facts.of(Kind.STAGED):  # of the processes that save together, the slowest counts
        by_save[event.step] = max(by_save[event.step], float(event.fields.get("stall_s", 0.0)))
    share = sum(by_save.values()) / facts.report.wall_s
    if share <= STALL_SHARE_MAX:
        return []
    saves = facts.report.saves
    what = (
        f"{count_text(saves.saves, 'save')} held the step loop for {share:.1%} of the run (p50 "
        f"{saves.stall_ms_p50:.0f} ms, p99 "
        f"{saves.stall_ms_p99:.0f} ms)"
    )
    advice = "save less often (`Tier.ram(save=EverySteps(n))`), or let `GoodputOptimal` choose; docs/TUNING.md"
    return _said("stalls", "slow", what, advice, of_run=share)


def waits(facts: Facts) -> list[Advice]:
    """A tenth of the durable saves or more held the loop for a second or more until the one before was done.

    From what `wait`, the default of `durable_busy`, does; a second is what a person notices.
    """
    staged = [event for event in facts.of(Kind.STAGED) if event.process == 0]
    waited = [event for event in staged if float(event.fields.get("waited_s", 0.0)) >= WAITED_S_MIN]
    durable = len({event.step for event in facts.of(Kind.COMMITTED, DURABLE)})
    if not waited or len(waited) < SKIPPED_SHARE_MAX * max(1, durable):
        return []
    longest = max(float(event.fields["waited_s"]) for event in waited)
    saves = count_text(len(waited), "save")
    what = f"{saves} waited for the durable tier to finish the one before, up to {clock.time_text(longest)}"
    advice = "raise `save_interval_steps`, or leave such saves out: `SaveOptions(durable_busy='skip')`"
    total_s = sum(float(event.fields["waited_s"]) for event in waited)
    of_run = total_s / facts.report.wall_s if facts.report is not None and facts.report.wall_s > 0 else None
    return _said("waits", "slow", what, advice, of_run=of_run)


def staging(facts: Facts) -> list[Advice]:
    """Saves stop the device until it is copied (`block`), which every other strategy avoids (snapshot/staging.py)."""
    blocked = [event for event in facts.of(Kind.STAGED) if event.fields.get("strategy") == "block"]
    if not blocked:
        return []
    reason = str(blocked[-1].fields.get("reason", "nobody says why"))
    what = f"{count_text(len(blocked), 'save')} stopped the step loop for the whole copy: {reason}"
    return _said("staging", "slow", what, "leave device memory for a copy of the state")


def commits(facts: Facts) -> list[Advice]:
    """The durable tier takes longer to commit a step than passes between two that it is asked for."""
    if facts.report is None:
        return []
    took_s = facts.report.saves.commit_s_p50.get(DURABLE)
    times = sorted({event.step: event.at_s for event in facts.of(Kind.COMMITTED, DURABLE)}.values())
    gaps = [after - before for before, after in pairwise(times)]
    if took_s is None or len(gaps) < LOSSES_MIN or took_s < 0.9 * median(gaps):
        return []
    usual = clock.time_text(median(gaps))
    what = f"a durable step takes {clock.time_text(took_s)} to commit, and one is begun every {usual}"
    return _said("commits", "slow", what, "raise `save_interval_steps`, or look at the bandwidth (`DurableProfile`)")


def interval(facts: Facts) -> list[Advice]:
    """Another interval of saves would gain 1 % of the run or more (`better_interval`)."""
    found = None if facts.report is None else better_interval(facts.report, facts.events)
    if found is None or found.gain < WASTE_GAIN_MIN:
        return []
    every, mtbf, stall, best = map(clock.time_text, (found.every_s, found.mtbf_s, found.stall_s, found.best_s))
    what = (
        f"{found.tier} is saved to every {every}; with a loss every {mtbf} and a stall of {stall}, every {best} would "
        f"give back {found.gain:.1%} of the run"
    )
    advice = "`GoodputOptimal` keeps the interval there (docs/GOODPUT.md)"
    return _said("interval", "slow", what, advice, of_run=found.gain)


def restores(facts: Facts) -> list[Advice]:
    """Most bytes of the restores after losses came from the durable tier, though there are faster ones.

    More than half: then the fast tiers did not survive what is lost (decision 5: coverage decides).
    """
    if facts.report is None or not facts.report.restores or not facts.report.disruptions:
        return []
    read = Counter[str]()
    for each in facts.report.restores:
        read.update(each.source_bytes)
    durable = sum(size for tier, size in read.items() if tier.startswith(DURABLE))
    if not facts.tiers - {DURABLE} or durable * 2 <= sum(read.values()):
        return []
    slowest = max(each.restore_s for each in facts.report.restores)
    what = f"restores read {size_text(durable)} of {size_text(sum(read.values()))} from the durable tier, in up to "
    what += clock.time_text(slowest)
    advice = "`Tier.peer()` keeps copies on other hosts, and `Tier.ssd(path)` survives a lost process"
    return _said("restores", "slow", what, advice)


def skipped(facts: Facts) -> list[Advice]:
    """A tenth of the saves or more were left out because the one before was still in flight.

    A tenth: the optimum of the interval is flat (Daly's waste changes by 0.5 % of itself there), beyond it is not.
    """
    left = {(e.step, e.tier) for e in facts.of(Kind.SKIPPED) if e.fields.get("policy") in ("skip", "veto")}
    taken = {event.step for event in facts.of(Kind.STAGED)}
    if not left or len(left) < SKIPPED_SHARE_MAX * (len(left) + len(taken)):
        return []
    reason = Counter(str(e.fields.get("reason", "")) for e in facts.of(Kind.SKIPPED)).most_common(1)[0][0]
    saves = count_text(len(left), "save was", "saves were")
    what = f"{saves} skipped, {len(taken)} were done; mostly: {reason}"
    return _said("skipped", "at risk", what, "save less often, or allow two at a time: `SaveOptions(in_flight_max=2)`")


def failing(facts: Facts) -> list[Advice]:
    """The last event of a tier is a failure. No threshold: the save that it would hold does not exist."""
    found = []
    for tier in sorted({e.tier for e in facts.events if e.tier is not None}):
        kinds = (Kind.COMMITTED, Kind.FAILED, Kind.DEGRADED)
        last = max((e for e in facts.events if e.tier == tier and e.kind in kinds), key=_at, default=None)
        if last is not None and last.kind != Kind.COMMITTED:
            count = len({(e.step, e.kind) for e in facts.events if e.tier == tier and e.kind == Kind.FAILED})
            failed = f", {count_text(count, 'save')} failed in all" * (count > 0)
            what = f"tier {tier} failed last{failed}: {last.fields.get('reason', '')}"
            advice = "repair the named cause; `FailurePolicy(max_age_s=...)` ends a run without this tier"
            found += _said("failing", "at risk", what, advice)
    return found


def durable_age(facts: Facts) -> list[Advice]:
    """The newest durable step is older, at the end of the log, than three times what usually lies between two.

    Three: two saves may fail and be reported (`FailurePolicy.retries`) before a person is woken.
    """
    times = sorted({event.step: event.at_s for event in facts.of(Kind.COMMITTED, DURABLE)}.values())
    gaps = [after - before for before, after in pairwise(times)]
    if len(gaps) < LOSSES_MIN or any(event.kind == Kind.FINISHED for event in facts.events):
        return []
    age_s = max(map(_at, facts.events)) - times[-1]
    if age_s <= DURABLE_AGE_TIMES * median(gaps):
        return []
    what = (
        f"no durable commit happened for {clock.time_text(age_s)} at the end of the log, and usually something is "
        f"every {clock.time_text(median(gaps))}"
    )
    return _said("durable_age", "at risk", what, "look at the events of its saves: `save_failed`, `save_skipped`")


def not_durable(facts: Facts) -> list[Advice]:
    """The run ended in the normal way, and its newest step is in fast tiers alone. No threshold: nothing saves it
    later, and a reboot or a lost host loses it."""
    known = [event for event in facts.events if event.kind in (Kind.COMMITTED, Kind.RESTORED, Kind.CLOSED)]
    fast = [event for event in known if event.kind == Kind.RESTORED or event.tier not in (None, DURABLE)]
    if not fast or known[-1].kind != Kind.CLOSED or known[-1].fields.get("failed"):
        return []
    last = max(fast, key=_at)
    durable = {event.step for event in facts.of(Kind.COMMITTED, DURABLE)} | {
        event.step
        for event in facts.of(Kind.RESTORED)
        if any(name.startswith(DURABLE) for name in event.fields["sources"])
    }
    if last.step in durable:
        return []
    tiers = sorted({str(e.tier) for e in facts.of(Kind.COMMITTED) if e.step == last.step}) or sorted(
        last.fields["sources"]
    )
    there = f"has step {max(filter(None, durable), default=0)}" if durable else "has no step"
    what = f"the run ended at step {last.step}, which is only in tier {' and '.join(tiers)}: the durable tier {there}"
    advice = f"start it again, and call `save({last.step}, ..., force=True)` with the restored state before `close()`"
    return _said("not_durable", "at risk", what, advice)


def full(facts: Facts) -> list[Advice]:
    """The file system of the durable root has no room for another step, or less than a hundredth of it is free.

    A step: the next one is committed before an old one is deleted. A hundredth: file systems become slow at that.
    """
    if facts.durable_room is None:
        return []
    total_bytes, free_bytes = facts.durable_room
    step_bytes = max((each.stored_bytes for each in facts.usage.steps if each.state == "committed"), default=0)
    if free_bytes >= max(step_bytes, total_bytes * FREE_SHARE_MIN):
        return []
    step = f", and a step takes up to {size_text(step_bytes)}" * (step_bytes > 0)
    state = "full" if free_bytes <= step_bytes else "nearly full"
    what = (
        f"the disk of {facts.usage.root} is {state}: {size_text(free_bytes)} of {size_text(total_bytes)} are free{step}"
    )
    commands = command_line("du", facts.usage.root), command_line("prune", facts.usage.root, "--keep", "newest=2")
    advice = f"free some space: `{commands[0]}` shows what takes it, `{commands[1]} --dry-run` which steps would go"
    return _said("full", "at risk", what, advice)


def damaged(facts: Facts) -> list[Advice]:
    """Steps whose records cannot be read, or whose shares are not whole: no restart takes them. And those that only
    lack Orbax's metadata: stock Orbax may not restore them."""
    steps = [entry for entry in facts.steps if entry.problem is not None and entry.state in ("damaged", "committed")]
    if not steps:
        return []
    shown = "; ".join(str(entry.problem) for entry in steps[:3])
    what = f"{count_text(len(steps), 'save is', 'saves are')} damaged: {shown}"
    return _said("damaged", "at risk", what, f"`{_repair_command(facts)}` mends what a copy still has")


def one_step(facts: Facts) -> list[Advice]:
    """One durable step is all there is to fall back to: damage to it is the loss of the run.

    Two, because a restore falls back to the next older one (decision 4).
    """
    whole = [each for each in facts.usage.steps if each.state == "committed"]
    if len(whole) != 1 or len({e.step for e in facts.of(Kind.COMMITTED, DURABLE)}) == 1:
        return []
    what = f"step {whole[0].step} is the only durable step: if it is damaged, no older step can replace it"
    return _said("one_step", "at risk", what, "`max_to_keep=2` or more, or `ckptkit copy` to another place")


def unproven(facts: Facts) -> list[Advice]:
    """Stock Orbax's steps have no digests: a changed bit is restored unseen (FACTS 5: 60 of 60)."""
    steps = [entry.step for entry in facts.steps if entry.state == "committed" and entry.save_id is None]
    if not steps:
        return []
    shown = ", ".join(map(str, steps[-5:]))
    have = count_text(len(steps), "durable step has", "durable steps have")
    what = f"{have} no digests ({shown}): a changed bit there is restored without notice"
    return _said("unproven", "at risk", what, "save with `ckptkit.CheckpointManager`; `ckptkit verify` checks the rest")


def replicas(facts: Facts) -> list[Advice]:
    """Data replicas held different bits: a device or host computes wrongly. No threshold: they are equal by design."""
    events = facts.of(Kind.REPLICAS_DIFFER)
    if not events:
        return []
    suspects = Counter(str(each) for event in events for each in event.fields.get("suspects", ()))
    who = ", ".join(name for name, _ in suspects.most_common(3)) or "nobody in particular"
    first = min(event.step or 0 for event in events)
    saves = count_text(len({e.step for e in events}), "save")
    what = f"data replicas differed in {saves}, from step {first} on; suspected: {who}"
    return _said("replicas", "at risk", what, "restore a step before that, without what is suspected")


def rejected(facts: Facts) -> list[Advice]:
    """A restore passed a candidate over: what was read instead is older, or slower. No threshold."""
    events = facts.of(Kind.REJECTED)
    if not events:
        return []
    last = max(events, key=_at)
    where = f"{last.tier or 'a tier'}, step {last.step}" if last.step is not None else f"{last.tier or 'a tier'}"
    why = last.fields.get("reason")
    times = "once" if len(events) == 1 else f"{len(events)} times"
    what = f"{times} a restore or an inspection skipped something; last: {where}: {why}"
    if all(Reason("", tuple(event.fields.get("causes", ()))).is_intact for event in events):
        return _said("rejected", "at risk", what, "nothing is damaged: give the restore what the reason names")
    return _said("rejected", "at risk", what, on_each_host(_repair_command(facts)))


def _repair_command(facts: Facts) -> str:
    """With the fast tiers of this host, as the run's last manager or the listing of slots names them."""
    opened = facts.of(Kind.OPENED)
    listed = {each.tier for each in facts.usage.arenas}
    tiers = sorted(opened[-1].fields.get("places", {}).values()) if opened else sorted(listed)
    return repair_command(facts.usage.root, tiers, [facts.host_id] if tiers and facts.host_id else ())


def mounts(facts: Facts) -> list[Advice]:
    """A tier is on a mount that is slower, or loses more, than the tier is for. No threshold: the type decides."""
    found = []
    for each in sorted(facts.misplaced, key=lambda each: (each.tier or "", each.path)):
        rate = "" if each.rate_bytes_s is None else f"; it took {size_text(int(each.rate_bytes_s))} a second"
        what = f"tier {each.tier}, {each.path}," if each.tier else f"tier {each.path}"
        found += _said("mounts", "slow", f"{what} is on {each.file_system}{rate}", each.problem)
    return found


def dead_weight(facts: Facts) -> list[Advice]:
    """More than a tenth of the durable bytes are read by no restart.

    A tenth is what a person would not tidy up for; every kind has its own remedy in `du`.
    """
    usage = facts.usage
    inside = [each for each in usage.dead if each.path.startswith(f"{usage.root}/")]
    dead = sum(each.stored_bytes for each in inside)
    if dead <= DEAD_SHARE_MAX * usage.stored_bytes:
        return []
    kinds = Counter[str]()
    for each in inside:
        kinds[each.kind] += each.stored_bytes
    shown = ", ".join(f"{kind} {size_text(size)}" for kind, size in kinds.most_common())
    what = f"{size_text(dead)} of {size_text(usage.stored_bytes)} are dead weight: {shown}"
    advice = f"`{command_line('du', usage.root)}` shows how to remove each"
    return _said("dead_weight", "wasteful", what, advice, stored_bytes=dead)


def many_steps(facts: Facts) -> list[Advice]:
    """More than 50 durable steps: no restart falls back so far, and every start lists them.

    50: at 1,000 steps a look at a bucket takes a request for each (durable/lifecycle/listing.py);
    restores look at 8 first.
    """
    whole = [each for each in facts.usage.steps if each.state == "committed"]
    if len(whole) <= STEPS_MAX:
        return []
    size = sum(each.stored_bytes for each in whole)
    what = f"{len(whole)} durable steps are kept, {size_text(size)}"
    advice = "`max_to_keep=n` with `keep_period=m` for the long run; `ckptkit prune --keep newest=n --keep every=m`"
    return _said("many_steps", "wasteful", what, advice)


def idle_arenas(facts: Facts) -> list[Advice]:
    """Slots that no process holds take memory or disk here. No threshold: only the user knows if it is restarted."""
    idle = [each for each in facts.usage.arenas if not each.live and each.stored_bytes]
    if not idle or any(each.live for each in facts.usage.arenas):
        return []
    size = sum(each.stored_bytes for each in idle)
    where = count_text(len(idle), "directory", "directories")
    what = f"no process of the job runs here, and its slots hold {size_text(size)} in {where}"
    words = ["tiers", "clean", *sorted({each.tier for each in idle}), "--root", facts.usage.root]
    command = command_line(*words, *own_host_id(facts.host_id))
    here = [each.step for each in facts.steps if each.state in ("committed", "partial")]
    durable = [each.step for each in facts.usage.steps if each.state == "committed"]
    newest = here[-1] if here else None  # they are in the order of their saves
    if newest is not None and newest not in durable:
        what += f", which alone hold the newest step, {newest}"
        return _said("idle_arenas", "at risk", what, f"start the job again; `{command}` would lose that step")
    return _said("idle_arenas", "wasteful", what, f"where it is not started again: `{command}`")


def _at(event: Event) -> float:
    return event.at_s


def slow_processes(facts: Facts) -> list[Advice]:
    """One process takes longer than the others for its part of a save, or for a span that the loop measures.

    Each process's times are of its own clock, and of work that waits for no other process.
    """
    found = []
    for what, times in sorted(_own_times(facts).items()):
        for each in slow(times):
            text = f"process {each.process} takes {time_text(each.own_s)} for {what}, the others "
            text += f"{time_text(each.others_s)} (p50 of {len(times[each.process])})"
            advice = "look at its host: disk, memory, clock rate of the processors, other jobs"
            found.append(Advice(rule="slow_processes", kind="slow", what=text, advice=advice))
    return found


def late_process(facts: Facts) -> list[Advice]:
    """At saves, the others wait longer for their step than one process does: its host reaches the step last.

    A step with collectives ends on all devices at the same time, so the one that waits least came last.
    """
    waits: defaultdict[int, list[float]] = defaultdict(list)
    for event in facts.of(Kind.STAGED):
        waits[event.process].append(float(event.fields.get("computing_s", 0.0)))
    if (found := late(waits)) is None:
        return []
    text = f"process {found.process} is the last to start its steps: at saves the others wait "
    text += f"{time_text(found.others_s)} or more for the devices, and it waits {time_text(found.own_s)}"
    advice = "look at what its host does between steps: loading data, logging, garbage collection"
    return [Advice(rule="late_process", kind="slow", what=text, advice=advice)]


def _own_times(facts: Facts) -> Mapping[str, Mapping[int, list[float]]]:
    """Seconds by what was done and by process, of work that every process does by itself."""
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    begun: dict[tuple[int, int | None, str | None], float] = {}
    computing: dict[tuple[int, int | None], float] = {}
    for event in facts.events:
        process, step, tier = event.process, event.step, event.tier
        phase = event.fields.get("phase") if event.kind == Kind.PHASE else None
        if event.kind == Kind.SPAN and event.fields.get("span", "step") != "step":
            found[f"`{event.fields['span']}`"][process].append(float(event.fields.get("duration_s", 0.0)))
        elif event.kind == Kind.STAGED:
            computing[process, step] = float(event.fields.get("computing_s", 0.0))
        elif phase == "begun":
            begun[process, step, tier] = event.at_s
        elif phase == "staged":
            if (start_s := begun.pop((process, step, None), None)) is not None:
                own_s = event.at_s - start_s - computing.pop((process, step), 0.0)
                found[f"its part of a save to {tier}"][process].append(max(0.0, own_s))
        elif phase is not None and phase == _OWN_PART_ENDS.get(str(tier)) and (process, step, tier) in begun:
            found[f"its part of a save to {tier}"][process].append(event.at_s - begun.pop((process, step, tier)))
    return found


RULES: tuple[DiagnosisRule, ...] = (
    failing,
    full,
    not_durable,
    damaged,
    replicas,
    durable_age,
    one_step,
    rejected,
    skipped,
    unproven,
    stalls,
    waits,
    staging,
    commits,
    interval,
    restores,
    mounts,
    slow_processes,
    late_process,
    dead_weight,
    many_steps,
    idle_arenas,
)
