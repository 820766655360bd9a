"""`ckptkit doctor`: each rule on made-up facts, on both sides of its threshold, and all of them on real runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.diagnosis import RULES, Facts, rules
from ckptkit.diagnosis.examining import misplaced
from ckptkit.events import Event, Kind
from ckptkit.goodput import goodput_report
from ckptkit.inspection import Holding, StepEntry
from ckptkit.model.manifest import SaveId
from ckptkit.upkeep import ArenaEntry, Usage
from ckptkit.upkeep.disk_usage import DeadWeight, StepUsage
from tests.cli.conftest import HOST, Ours, Run
from tests.mount import MountedBucket
from tests.mounts import Mounts


def event(kind: Kind, at_s: float, step: int | None = None, tier: str | None = None, **fields: Any) -> Event:
    return Event(kind=kind, at_s=at_s, process=fields.pop("process", 0), step=step, tier=tier, fields=fields)


def spans(seconds: Iterable[int]) -> list[Event]:
    return [event(Kind.SPAN, at + 1.0, at, span="step", duration_s=1.0) for at in seconds]


def saves(at: Iterable[int], tier: str, *, stall_s: float = 0.0, took_s: float = 0.1, **fields: Any) -> list[Event]:
    found = []
    for second in at:
        found.append(event(Kind.STAGED, second, second, stall_s=stall_s, bytes=1, strategy="slot_copy", **fields))
        found.append(event(Kind.COMMITTED, second + took_s, second, tier, bytes=1, duration_s=took_s))
    return found


def logged(*events: Event, launcher: Sequence[Event] = ()) -> Facts:
    """Facts of one attempt per `STARTED` event."""
    logs: list[list[Event]] = [[]]
    for each in events:
        if each.kind == Kind.STARTED:
            logs.append([])
        logs[-1].append(each)
    told = [log for log in [*logs, list(launcher)] if log]
    flat = sorted((each for log in told for each in log), key=lambda each: each.at_s)
    return Facts(usage=used(), report=goodput_report(told), events=flat)


def on_mounts(*events: Event) -> Facts:
    """Of a run whose logs report its mounts, on another host."""
    return Facts(usage=used(), misplaced=misplaced("gs://b/r", (), events, measure=False))


def used(steps: int = 3, dead: Sequence[DeadWeight] = (), arenas: Sequence[ArenaEntry] = ()) -> Usage:
    made = tuple(
        StepUsage(
            step=step,
            path=f"/r/{step}",
            state="committed",
            pinned=False,
            in_use=False,
            stored_bytes=100,
            items={},
            kinds={},
        )
        for step in range(steps)
    )
    return Usage(root="/r", steps=made, arenas=tuple(arenas), unread=tuple(dead), record_bytes=0)


def entry(step: int, *, ours: bool = True, problem: str | None = None) -> StepEntry:
    return StepEntry(
        step=step,
        state="damaged" if problem else "committed",
        save_id=SaveId(1, step, 0) if ours else None,
        items=("state",),
        holdings=(Holding(tier="durable", path=f"/r/{step}", held_bytes=1),),
        problem=problem,
    )


def arena(*, live: bool, size: int = 4096) -> ArenaEntry:
    return ArenaEntry(
        tier="/ram",
        job="job-1",
        host_id="h",
        path="/ram/job-1/h/0",
        live=live,
        saves=(),
        slots=1,
        stored_bytes=size,
        quarantine_bytes=0,
        used_at_s=None,
    )


def dead(size: int, where: str = "/r/9") -> DeadWeight:
    return DeadWeight(kind="abandoned", path=where, stored_bytes=size, remedy="prune")


def restored(at_s: float, **sources: int) -> Event:
    return event(Kind.RESTORED, at_s, 1, sources=sources, duration_s=2.0)


def losses(count: int, every_s: int = 100) -> list[Event]:
    """So many attempts that were lost, and one that goes on."""
    found = []
    for number in range(count + 1):
        begin = number * every_s
        found += [event(Kind.STARTED, begin, attempt=number), *spans(range(begin, begin + every_s - 5))]
    return found


def parts(seconds: dict[int, float], *, count: int = 10, computing_s: float = 0.0) -> list[Event]:
    """Saves to the ramdisk, each process's part of which takes so long."""
    found = []
    for save, (process, own_s) in product(range(0, 10 * count, 10), seconds.items()):
        staged = event(Kind.STAGED, save + computing_s, save, stall_s=0.0, computing_s=computing_s, process=process)
        end_s = save + computing_s + own_s
        found += [
            event(Kind.PHASE, save, save, phase="begun", process=process),
            staged,
            event(Kind.PHASE, end_s, save, "ram", phase="staged", process=process),
        ]
    return found


def waits(seconds: dict[int, float], *, count: int = 10) -> list[Event]:
    return [
        event(Kind.STAGED, save, save, stall_s=0.0, computing_s=waited_s, process=process)
        for save, (process, waited_s) in product(range(count), seconds.items())
    ]


Case = tuple[Callable[[Facts], Any], Facts, Facts, str]
RUN = spans(range(100))

CASES: list[Case] = [
    (
        rules.stalls,
        logged(*RUN, *saves(range(0, 100, 10), "ram", stall_s=0.5)),
        logged(*RUN, *saves(range(0, 100, 10), "ram", stall_s=0.3)),
        "10 saves held the step loop for 5.0% of the run (p50 500 ms, p99 500 ms)",
    ),
    (
        rules.waits,
        logged(*RUN, *saves(range(0, 100, 10), "durable", stall_s=2, waited_s=1.9, policy="wait")),
        logged(*RUN, *saves(range(0, 100, 10), "durable", stall_s=1, waited_s=0.9, policy="wait")),
        "10 saves waited for the durable tier to finish the one before, up to 1.9 s",
    ),
    (
        rules.staging,
        logged(*RUN, event(Kind.STAGED, 3, 3, stall_s=1.0, strategy="block", reason="device memory is full")),
        logged(*RUN, *saves([3], "ram")),
        "1 save stopped the step loop for the whole copy: device memory is full",
    ),
    (
        rules.commits,
        logged(*RUN, *saves(range(0, 90, 10), "durable", took_s=9.5)),
        logged(*RUN, *saves(range(0, 90, 10), "durable", took_s=5)),
        "a durable step takes 9.5 s to commit, and one is begun every 10 s",
    ),
    (
        rules.interval,
        logged(
            *losses(4), *saves(range(400, 495, 50), "ram", stall_s=0.01), *saves(range(5, 350, 50), "ram", stall_s=0.01)
        ),
        logged(*losses(4), *saves(range(1, 480, 2), "ram", stall_s=0.01)),
        "ram is saved to every 50 s; with a loss every 2.06 min and a stall of 10 ms, every 1.57 s would",
    ),
    (
        rules.restores,
        logged(*losses(1), *saves(range(5, 90, 10), "ram"), restored(101, durable=600, ram=400)),
        logged(*losses(1), *saves(range(5, 90, 10), "ram"), restored(101, durable=400, ram=600)),
        "restores read 600 B of 1000 B from the durable tier, in up to 2 s",
    ),
    (
        rules.skipped,
        logged(*RUN, *saves(range(9), "ram"), event(Kind.SKIPPED, 9, 9, "ram", policy="skip", reason="still busy")),
        logged(*RUN, *saves(range(10), "ram"), event(Kind.SKIPPED, 10, 10, "ram", policy="skip", reason="busy")),
        "1 save was skipped, 9 were done; mostly: still busy",
    ),
    (
        rules.failing,
        logged(*RUN, *saves([1], "durable"), event(Kind.FAILED, 9, 9, "durable", reason="403")),
        logged(*RUN, event(Kind.FAILED, 1, 1, "durable", reason="403"), *saves([9], "durable")),
        "tier durable failed last, 1 save failed in all: 403",
    ),
    (
        rules.durable_age,
        logged(*RUN, *saves(range(0, 50, 10), "durable")),
        logged(*RUN, *saves(range(0, 80, 10), "durable")),
        "no durable commit happened for 59.9 s at the end of the log, and usually something is every 10 s",
    ),
    (
        rules.damaged,
        Facts(usage=used(), steps=[entry(1), entry(2, problem="/r/2: torn")]),
        Facts(usage=used(), steps=[entry(1)]),
        "1 save is damaged: /r/2: torn",
    ),
    (
        rules.not_durable,
        logged(*RUN, *saves([1], "durable"), *saves([2], "ram"), event(Kind.CLOSED, 60)),
        logged(*RUN, *saves([1, 2], "durable"), *saves([2], "ram"), event(Kind.CLOSED, 60)),
        "the run ended at step 2, which is only in tier ram: the durable tier has step 1",
    ),
    (
        rules.full,
        Facts(usage=used(2), durable_room=(1000, 99)),
        Facts(usage=used(2), durable_room=(1000, 100)),
        "the disk of /r is full: 99 B of 1000 B are free, and a step takes up to 100 B",
    ),
    (
        rules.full,
        Facts(usage=used(0), durable_room=(1000, 9)),
        Facts(usage=used(0), durable_room=(1000, 10)),
        "the disk of /r is nearly full: 9 B of 1000 B are free",
    ),
    (rules.one_step, Facts(usage=used(1)), Facts(usage=used(2)), "step 0 is the only durable step"),
    (
        rules.unproven,
        Facts(usage=used(), steps=[entry(1), entry(2, ours=False)]),
        Facts(usage=used(), steps=[entry(1)]),
        "1 durable step has no digests (2)",
    ),
    (
        rules.replicas,
        logged(*RUN, event(Kind.REPLICAS_DIFFER, 5, 5, leaf="w", suspects=["host h3 device 2"])),
        logged(*RUN),
        "data replicas differed in 1 save, from step 5 on; suspected: host h3 device 2",
    ),
    (
        rules.rejected,
        logged(*RUN, event(Kind.REJECTED, 5, 8, "durable", reason="a cell does not match")),
        logged(*RUN),
        "once a restore or an inspection skipped something; last: durable, step 8: a cell does not match",
    ),
    (
        rules.mounts,
        on_mounts(event(Kind.MOUNTED, 1, None, "ram", path="/r", file_system="ext4", problem="no", rate_bytes_s=2048)),
        on_mounts(event(Kind.MOUNTED, 1, None, "durable", path="/nfs", file_system="nfs4", problem="")),
        "tier ram, /r, is on ext4; it took 2.0 KiB a second",
    ),
    (
        rules.slow_processes,
        logged(*RUN, *parts({0: 0.5, 1: 0.4, 2: 1.5, 3: 0.5}, computing_s=1.0)),
        logged(*RUN, *parts({0: 0.5, 1: 0.4, 2: 0.7, 3: 0.5}, computing_s=1.0)),
        "process 2 takes 1.5 s for its part of a save to ram, the others 500 ms (p50 of 10)",
    ),
    (
        rules.late_process,
        logged(*RUN, *waits({0: 0.4, 1: 0.1, 2: 0.5})),
        logged(*RUN, *waits({0: 0.4, 1: 0.3, 2: 0.5})),
        "process 1 is the last to start its steps: at saves the others wait 400 ms or more for the devices",
    ),
    (
        rules.dead_weight,
        Facts(usage=used(2, dead=[dead(30)])),
        Facts(usage=used(10, dead=[dead(30), dead(10_000, "/ram/x/_quarantine")])),
        "30 B of 200 B are dead weight: abandoned 30 B",
    ),
    (rules.many_steps, Facts(usage=used(51)), Facts(usage=used(50)), "51 durable steps are kept, 5.0 KiB"),
    (
        rules.idle_arenas,
        Facts(usage=used(arenas=[arena(live=False)])),
        Facts(usage=used(arenas=[arena(live=False), arena(live=True)])),
        "no process of the job runs here, and its slots hold 4.0 KiB in 1 directory",
    ),
]


@pytest.mark.parametrize(("rule", "ill", "well", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_each_rule_fires_exactly_in_its_case(rule: Callable[[Facts], Any], ill: Facts, well: Facts, words: str) -> None:
    """A rule would be silent where it should speak, or the reverse."""
    (found,) = rule(ill)
    assert words in found.what
    assert (found.rule, bool(found.advice)) == (rule.__name__, True)
    assert not found.what.endswith(".")
    assert rule(well) == []


@pytest.mark.parametrize("span", ["data_loading", "evaluation"])
def test_process_with_slow_spans_is_named(span: str) -> None:
    """A host that loads its data slowly would hide among those that wait for it."""
    loads = [
        event(Kind.SPAN, at + 0.5, at, span=span, duration_s=0.9 if process == 3 else 0.1, process=process)
        for at, process in product(range(20), range(4))
    ]
    (found,) = rules.slow_processes(logged(*loads))
    assert found.what == f"process 3 takes 900 ms for `{span}`, the others 100 ms (p50 of 20)"


def test_save_that_only_does_not_fit_is_not_sent_to_repair() -> None:
    """A person would repair checkpoints, and put some aside, because a job has another number of processes."""
    unsuited = event(Kind.REJECTED, 5, 8, "durable", reason="saved by 4 processes", causes=["unsuited"])
    damaged = event(Kind.REJECTED, 6, 8, "ram", reason="CorruptCheckpointError: a cell does not match")
    (said,) = rules.rejected(logged(*RUN, unsuited))
    assert "nothing is damaged" in said.advice
    (said,) = rules.rejected(logged(*RUN, unsuited, damaged))
    assert "--repair" in said.advice


def test_process_that_was_slow_a_few_times_is_not_named() -> None:
    """A host would be replaced for one slow save."""
    times = [*parts({0: 0.1, 1: 0.1}, count=8), *parts({0: 0.1, 1: 3.0}, count=2)]
    assert rules.slow_processes(logged(*RUN, *times)) == []
    assert rules.slow_processes(logged(*RUN, *parts({0: 0.1, 1: 3.0}, count=7))) == [], "too few samples"


def test_every_rule_has_a_case_and_a_source() -> None:
    """A rule nobody tests, or whose threshold comes from nowhere."""
    assert {case[0] for case in CASES} == set(RULES)
    assert all(len((rule.__doc__ or "").split()) > 8 for rule in RULES)
    nothing = Facts(usage=used())
    assert [each for rule in RULES for each in rule(nothing)] == []


@pytest.mark.disk
def test_healthy_run_has_no_findings(ckpt: Run, tmp_path: Path) -> None:
    """A doctor who always finds something is not believed."""
    root, logs = tmp_path / "run", tmp_path / "events"
    events = ckptkit.EventLog(logs / "attempt-0-process-0.jsonl")
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=3)
    with ckptkit.CheckpointManager(root, options=options, events=events) as manager:
        manager.prepare(args=ocp.args.StandardSave({"w": jnp.zeros(8)}))  # pyright: ignore[reportCallIssue]
        events.emit(Kind.STARTED, attempt=0, pid=1)
        for step in range(8):
            with events.span("step", step):
                pass
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.zeros(8)}))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
        events.emit(Kind.FINISHED)
    said = json.loads(ckpt("doctor", root, "--events", logs, "--json").out)
    # On a busy machine steps of no length are all stall.
    assert [each["rule"] for each in said["advice"] if each["rule"] not in ("stalls", "commits", "waits")] == []
    assert "no event logs were given" in ckpt("doctor", root).out


def test_mounts_of_root_and_tiers_are_looked_at(
    ckpt: Run, mine: Ours, mounted_bucket: MountedBucket, tmp_path: Path
) -> None:
    """A run without logs would learn nothing of its mounts; a look that writes would fill a tier."""
    root, ssd = mounted_bucket.path / "run", mounted_bucket.path / "ssd"
    shutil.copytree(mine.root, root)
    ssd.mkdir()
    before = mounted_bucket.changes()

    def found(*words: str) -> dict[str, str]:
        told = json.loads(ckpt("doctor", root, "--tier", ssd, "--host-id", HOST, *words, "--json").out)
        return {each["what"]: each["advice"] for each in told["advice"] if each["rule"] == "mounts"}

    by_what = found()
    assert f"tier durable, {root}, is on fuse.gcsfuse" in ckpt("doctor", f"file://{root}").out
    assert mounted_bucket.changes() == before
    assert "Give gs://bucket instead" in by_what.pop(f"tier durable, {root}, is on fuse.gcsfuse")
    ((what, advice),) = by_what.items()
    assert (what, "neither memory nor a disk" in advice) == (f"tier {ssd} is on fuse.gcsfuse", True)
    assert any(re.search(r"is on fuse.gcsfuse; it took [\d.]+ [KMG]iB a second", each) for each in found("--measure"))
    assert list(ssd.iterdir()) == [], "the measurement leaves nothing"

    log = tmp_path / "logs" / "attempt-0-process-0.jsonl"
    log.parent.mkdir()
    opened = event(Kind.OPENED, 1, places={"ssd": str(ssd)})
    rate = event(Kind.MOUNTED, 2, None, "ssd", path=str(ssd), file_system="nfs4", problem="slow", rate_bytes_s=2048)
    log.write_text(f"{opened.to_json()}\n{rate.to_json()}\n")
    (line,) = (each for each in found("--events", str(log.parent)) if "ssd" in each)
    assert line == f"tier ssd, {ssd}, is on fuse.gcsfuse; it took 2.0 KiB a second", "as it is now, once"


def test_full_disk_of_the_root_is_reported(ckpt: Run, tmp_path: Path, mounts: Mounts) -> None:
    """`doctor` reported nothing of a durable root in which no other step has room."""
    root = mounts.small(tmp_path / "disk", "1m") / "run"
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.arange(150_000)}))  # pyright: ignore[reportCallIssue]
    said = ckpt("doctor", root).out
    assert re.search(rf"the disk of {root} is full: .* of 1.0 MiB are free, and a step takes up to", said), said


def test_costs_of_findings_and_of_storage(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """A team would not know which finding is worth a day of work."""
    told = [*saves(range(0, 50, 5), "durable", stall_s=1.0), *spans(range(50))]
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / "attempt-0-process-0.jsonl"
    log.write_text("".join(f"{each.to_json()}\n" for each in sorted(told, key=lambda each: each.at_s)))
    words = ("doctor", mine.root, "--events", tmp_path / "run", "--price", "3600", "--storage-price", "$100")
    told = json.loads(ckpt(*words, "--json").out)
    assert told["cost"]["total"] == pytest.approx(told["cost"]["parts"]["productive"] + told["cost"]["badput"])
    assert told["storage_cost_month"] == pytest.approx(100 * told["stored_bytes"] / 1e9)
    said = ckpt(*words)
    assert "at 1 x 3,600.00 = 3,600.00 an hour = 10.00" in said.out  # ten stalls of a second
    assert re.search(r"storage: \d+\.\d+ GB x \$100\.00 = \$\d+\.\d\d a month", said.out)
    assert ckpt("doctor", mine.root, "--price", "1").code == 2


def test_damaged_run_is_diagnosed(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """The faults of a real run would not be found in its files."""
    logs = tmp_path / "events"
    events = ckptkit.EventLog(logs / "attempt-0-process-0.jsonl")
    (mine.root / "8/state/d").chmod(0o700)
    for path in (mine.root / "4/state/_ckptkit").iterdir():
        path.write_text("{")
    tiers = [ckptkit.Tier.ram(str(mine.ram))]
    reading = ocp.CheckpointManagerOptions(read_only=True)  # it flushes nothing at its end
    with ckptkit.CheckpointManager(mine.root, options=reading, tiers=tiers, host_id=HOST, events=events) as manager:
        manager.restore(None)
    said = ckpt("doctor", mine.root, "--events", logs, "--tier", mine.ram, "--host-id", HOST)
    assert said.code == 11
    for line in (
        "At risk",
        "1 save is damaged: ",
        "Wasteful",
        "are dead weight: abandoned",
        "-> `ckptkit du",
        "no process of the job runs here",
        "which alone hold the newest step, 5",
        "-> start the job again; `ckptkit tiers clean",
    ):
        assert line in said.out, said.out
    assert said.out.count(f" --host-id {HOST}") == 2, "of both commands: they would find no slots"


def test_unreadable_logs_are_reported(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A damaged log would end in a traceback, a missing one pass for a quiet run."""
    said = ckpt("doctor", ours.root, "--events", tmp_path)
    assert (said.code, "no event logs in" in said.err) == (10, True)
    log = tmp_path / "attempt-0-process-0.jsonl"
    for text in (
        "{}\n{}\n",
        '{"kind":"staged","at_s":1,"process":0}\n\n',
        "\0\0\n",
        '{"kind":"span","at_s":1,"process":0}\n',
        "[" * 9000,
    ):
        log.write_text(text + "\n")
        assert ckpt("doctor", ours.root, "--events", tmp_path).code in (0, 11)
    assert ckpt("doctor", tmp_path / "none").code == 10
