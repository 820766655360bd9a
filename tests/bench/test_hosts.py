"""The campaign of lost hosts: its medians, bars and rows, what it counts as wrong bits, and the bits of a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.hosts import Job, digests_of, measure, summary, wrong_bits
from bench.kill_hosts import running_hosts
from bench.readers import _hosts
from bench.resume_phases import Phase
from ckptkit import EventLog, Kind, read_events
from ckptkit.launch import free_port


def row(what: str, ended_s: float, next_step_s: float) -> dict[str, Any]:
    phases = {str(phase): 0.1 for phase in Phase}
    return {
        "what": what,
        "noticed_s": 0.01,
        "ended_s": ended_s,
        "next_step_s": next_step_s,
        "repeated_steps": 1,
        "phases_s": phases,
    }


def test_bars_are_of_lost_hosts_and_of_all_losses() -> None:
    """A slow replacement could hide behind the faster restarts after a lost worker."""
    rows = [row("host", 0.2, 5.0), row("host", 0.2, 4.5), row("worker", 0.4, 1.0), row("worker", 0.6, 1.0)]
    bars = summary(rows)["bars"]
    assert bars["next_step_s"] == {"found": 4.75, "bar": 4.0, "met": False}
    assert bars["ended_s"] == {"found": 0.3, "bar": 0.3, "met": True}
    assert summary([row("host", 0.2, 3.0)])["bars"]["next_step_s"]["met"]
    assert not summary([row("worker", 0.2, 3.0)])["bars"]["next_step_s"]["met"], "no host was lost"
    found = {each.figure: (each.ours, each.samples) for each in _hosts({"hosts": 4, "rows": rows})}
    assert found == {"next_step_s": (4.75, 2), "ended_s": (pytest.approx(0.3), 4)}


def test_step_done_again_with_other_bits_is_wrong(tmp_path: Path) -> None:
    """A spare that goes on from the share of another host would count as a quick recovery."""

    def life(host: int, attempt: int, process: int, proof: list[list[object]]) -> None:
        own = tmp_path / f"host-{host}"
        EventLog(own / "events" / f"attempt-{attempt}-process-{process}.jsonl").emit(Kind.STARTED, attempt=attempt)
        (own / f"proof-{attempt}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in proof) + "[7")

    life(0, 0, 0, [[1, "a"], [2, "b"]])
    life(1, 0, 1, [[1, "c"], [2, "d"]])
    life(4, 1, 1, [[2, "d"], [3, "e"]])
    assert wrong_bits(tmp_path) == 0
    life(0, 1, 0, [[2, "d"]])
    assert wrong_bits(tmp_path) == 1


def ran(home: Path, kills: int, until: int) -> tuple[dict[tuple[str, int], set[str]], int]:
    """The digests of a job of two hosts and a spare that lost so many, and its newest step, `until` or later."""
    (home / "shared").mkdir(parents=True)
    with running_hosts(home, 3) as hosts:
        job = Job(hosts=hosts, port=free_port(""), has_copies=True)
        try:
            if kills:
                measure(job, kills, seed=0, say=print)
            else:
                for number in range(3):
                    job.start(number)
            job.wait(lambda: (job.status().get("step") or 0) >= until, f"step {until}")
            reached = job.status()["step"]
        finally:
            job.close()
    return digests_of(home), reached


@pytest.mark.disk
@pytest.mark.long
def test_spare_goes_on_from_peer_copies_with_the_same_bits(tmp_path: Path) -> None:
    """A spare would take another share, or an older one, and the job end as another training."""
    found, reached = ran(tmp_path / "lost", 2, 0)
    first = [event for log in (tmp_path / "lost").glob("host-*/events/attempt-1-*.jsonl") for event in read_events(log)]
    sources = [event.fields["sources"] for event in first if event.kind == Kind.RESTORED]
    assert len(sources) == 2
    assert [source for source in sources if "peer" in source], sources
    assert not [source for source in sources if "durable" in source], sources
    expected, _ = ran(tmp_path / "undisturbed", 0, reached)
    compared = {key: (found[key], expected[key]) for key in found if key in expected}
    assert {step for _, step in compared} >= set(range(1, reached))
    assert [key for key, (left, right) in compared.items() if left != right] == []
