"""`python -m bench unchanged`: durable commits of an adapter on a frozen base, and of a state that changes everywhere.

Each of the two states is saved by two managers that take turns in the same process. One writes every byte of every step
(`shared_steps_max=1`); the other takes over the data files of leaves that did not change. The time of a commit is from
`save` to the end of `wait_until_finished`. In a bucket, which is the shipped one on loopback, the bytes are those that
its server received. Times of equal writes differ by more than the search for unchanged leaves takes. So the processor
time of the search is measured by itself, and the calls that write are counted.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import ckptkit
from bench.environment import environment, store_result
from bench.measure import cpu_s
from ckptkit import DurableProfile
from ckptkit.durable.cells.sharing import Sharing
from ckptkit.testing.bucket import BucketServer

_LEAVES = 30
_ADAPTER_SHARE = 0.02  # of the base's bytes: rank 16 of matrices with 1,024 rows has 3 %
_PLACES = ("disk", "bucket")
_WARM_UP = 3  # saves until the files of the base are shared


def _state(megabytes: int, step: int, *, frozen: bool) -> dict[str, jax.Array]:
    rows = megabytes * 1_000_000 // (_LEAVES * 4 * 1000)
    drift = 0.0 if frozen else step * 1e-3
    base = {f"base{n}": jax.random.normal(jax.random.key(n), (rows, 1000)) + drift for n in range(_LEAVES)}
    adapter = jnp.full((int(_LEAVES * rows * _ADAPTER_SHARE), 1000), float(step))
    return jax.block_until_ready({**base, "adapter": adapter})


def measure(root: str, megabytes: int, repeats: int, *, frozen: bool, sent: Any) -> dict[str, Any]:
    """The cost of a durable commit, written whole and with shared files: medians, and all samples. `sent(url, step)` is
    how many bytes a step took."""
    profiles = {"whole": DurableProfile(shared_steps_max=1), "shared": DurableProfile(shared_steps_max=1000)}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in profiles}
    with ExitStack() as stack:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        managers = {
            name: stack.enter_context(ckptkit.CheckpointManager(f"{root}/{name}", options=options, durable=profile))
            for name, profile in profiles.items()
        }
        searched = stack.enter_context(_search_timed())
        for step in range(_WARM_UP + repeats):
            state = _state(megabytes, step, frozen=frozen)
            for name in sorted(managers, reverse=bool(step % 2)):
                sent(None, None)
                before = _used() | {"search_cpu_s": searched[0]}
                managers[name].save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
                managers[name].wait_until_finished()
                after = _used() | {"search_cpu_s": searched[0]}
                used = {"bytes": sent(f"{root}/{name}", step), **{key: after[key] - before[key] for key in before}}
                for key, value in used.items() if step >= _WARM_UP else ():
                    samples[name].setdefault(key, []).append(value)
    medians = {f"{name}_{key}": statistics.median(taken) for name in profiles for key, taken in samples[name].items()}
    return {
        **{name: round(value, 6) for name, value in medians.items()},
        "times_as_fast": round(medians["whole_s"] / medians["shared_s"], 2),
        "search_cpu_share": round(medians["shared_search_cpu_s"] / medians["whole_cpu_s"], 6),
        "samples": samples,
    }


def _used() -> dict[str, float]:
    calls = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["syscw"]
    return {"s": time.monotonic(), "cpu_s": cpu_s(), "write_calls": int(calls)}


@contextmanager
def _search_timed() -> Iterator[list[float]]:
    """The processor time so far of what looks for leaves that did not change, and takes their files over."""
    spent = [0.0]

    def timed(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.thread_time() - began_s

        return call

    with ExitStack() as stack:
        for name in ("begin", "take_over", "wrote", "committed"):
            stack.enter_context(mock.patch.object(Sharing, name, timed(getattr(Sharing, name))))
        yield spent


def _written_on_disk(url: str | None, step: int | None) -> int:
    """Bytes of a step that no other step has."""
    if url is None:
        return 0
    files = [path for path in Path(url, str(step)).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if path.stat().st_nlink == 1)


@contextmanager
def _place(name: str, work: Path) -> Iterator[tuple[str, Any]]:
    """A root in this place, and how many bytes a step took there."""
    if name == "disk":
        yield str(work / "disk"), _written_on_disk
        return
    with BucketServer(dir=work / "bucket", buckets=["bench"]) as server:
        os.environ.update(server.env())

        def received(url: str | None, step: int | None) -> int:
            del url, step
            total = sum(entry.exchange.received_bytes for entry in server.log.entries())
            server.log.clear()
            return total

        yield "gs://bench/run", received


@click.command()
@click.option("--megabytes", type=click.IntRange(min=1), default=300, show_default=True, help="Of the base.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Saves after the warm-up.")
@click.option("--disk", default=tempfile.gettempdir(), show_default=True, help="A directory on a disk.")
@click.option(
    "--place", "places", type=click.Choice(_PLACES), multiple=True, default=_PLACES, help="Only it; repeatable."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(megabytes: int, repeats: int, disk: str, places: tuple[str, ...], json_path: Path | None) -> None:
    """Measures durable commits with and without shared data files, in turns, on the same states."""
    result: dict[str, Any] = {"benchmark": "unchanged", "environment": environment(disk, disk)}
    result |= {"megabytes": megabytes, "repeats": repeats, "places": {}}
    for place in places:
        work = Path(tempfile.mkdtemp(prefix="ckptkit-unchanged-", dir=disk))
        try:
            with _place(place, work) as (root, sent):
                result["places"][place] = {
                    case: measure(f"{root}-{int(frozen)}", megabytes, repeats, frozen=frozen, sent=sent)
                    for case, frozen in (("adapter on a frozen base", True), ("changes everywhere", False))
                }
        finally:
            shutil.rmtree(work)
        for case, found in result["places"][place].items():
            print(f"{place}, {case}: " + ", ".join(f"{k} {v}" for k, v in found.items() if k != "samples"))
    store_result(result, json_path)
