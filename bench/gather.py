"""`python -m bench gather`: what it costs process 0 of a large job to hear what all processes hold, and to rank it.

The coordination service is JAX's own, on loopback; the other processes' words are put there beforehand, so what is
measured is process 0's part: it reads them one by one, ranks, and gives its verdict. All of a real job's processes
would write at the same time.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import jax

from ckptkit.job import coordination
from ckptkit.job.coordination import JaxCoordinator
from ckptkit.model.manifest import SaveId
from ckptkit.restore.inventory import Held, holders_of, to_runs
from ckptkit.restore.plan import rank_candidates
from ckptkit.util import clock

_SAVES = [SaveId(3, 1000 + step, step) for step in range(5)]  # as many as three ramdisk and two disk slots hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """One simulated gather. Bytes are of JSON."""

    processes: int
    bytes_per_process_and_save_max: int
    gathered_bytes: int
    told_bytes: int  # who holds what of the chosen save, if every process is where it was
    told_shuffled_bytes: int  # the same if the scheduler has shuffled all hosts
    gather_s: float  # process 0: read all, parse, rank, answer


def measure(processes: int, *, repeats: int = 5) -> Gathering:
    """Gathers `processes` reports of five saves, one of whose hosts is lost. Initialises `jax.distributed` once."""
    coordinator = _coordinator(processes)
    rng = random.Random(7)
    shuffled = rng.sample(range(processes), processes)
    reports = [_report(process, process) for process in range(processes)]
    texts = [json.dumps(report) for report in reports]
    spent_s = []
    told: dict[str, int] = {}

    def rank(values: list[Any]) -> list[str]:
        heard = [[Held.from_json(entry) for entry in report] for report in values]
        fast = [{held.save_id: held.refusal for held in report} for report in heard]
        ranked = rank_candidates(fast, [], lambda _: False, linked=True)
        told["bytes"] = len(json.dumps(to_runs(holders_of(heard, ranked[0].save_id))))
        return [str(candidate.save_id) for candidate in ranked]

    for meeting in range(repeats):
        for process in range(1, processes):
            place = coordination._place(f"{coordinator._prefix}/gather/{meeting}", process)
            coordinator._ask("key_value_set", place, texts[process])
        began_s = clock.monotonic_s()
        ranked = coordinator.agree("gather", reports[0], rank, timeout_s=600)
        spent_s.append(clock.monotonic_s() - began_s)
        assert ranked == [str(save) for save in reversed(_SAVES)]
    moved = [[Held.from_json(entry) for entry in _report(process, shuffled[process])] for process in range(processes)]
    return Gathering(
        processes=processes,
        bytes_per_process_and_save_max=max(len(json.dumps(entry)) for report in reports for entry in report),
        gathered_bytes=sum(map(len, texts)),
        told_bytes=told["bytes"],
        told_shuffled_bytes=len(json.dumps(to_runs(holders_of(moved, _SAVES[-1])))),
        gather_s=statistics.median(spent_s),
    )


def _report(process: int, share: int) -> list[list[Any]]:
    lost = 17  # a host that came back empty
    return [
        Held(
            save_id=save,
            count=10**4,
            shares=((share, f"{share:016x}"),),
            tiers=("ram", "ssd"),
            refusal=None if save == _SAVES[-1] else "CorruptCheckpointError: nothing covers leaf state:params.h0.w",
        ).to_json()
        for save in _SAVES
        if process != lost
    ]


def _coordinator(processes: int) -> JaxCoordinator:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    jax.distributed.initialize(address, 1, 0)
    coordinator = JaxCoordinator()
    coordinator.count = processes
    return coordinator


@click.command()
@click.option("--processes", type=click.IntRange(min=20), default=10_000, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="The same, as JSON.")
def main(processes: int, repeats: int, json_path: Path | None) -> None:
    """Simulates the gather at a restart and prints its size and time."""
    found = measure(processes, repeats=repeats)
    for name in Gathering.__dataclass_fields__:
        print(f"{name}: {getattr(found, name):.3f}" if name == "gather_s" else f"{name}: {getattr(found, name)}")
    print(f"load: {os.getloadavg()[0]:.1f}")
    jax.distributed.shutdown()
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"benchmark": "gather", "repeats": repeats, **asdict(found)}, indent=1) + "\n")
