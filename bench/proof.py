"""`python -m bench proof`: what the digests of a durable commit cost, with and without them in turns on one manager.

No option saves without digests: the benchmark takes the digest out of the copy, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click

from bench.environment import environment, store_result

_IN_WORKER = "CKPTKIT_BENCH_WORKER"
RATIO_MAX, CPU_S_PER_GB_MAX = 1.12, 0.15
PAIRS = 11
SETTINGS = ("memory", "ramdisk")  # what the durable tier is written from; the ramdisk's digests are its own too


@click.command(context_settings={"max_content_width": 120})
@click.option("--pairs", type=click.IntRange(min=1), default=PAIRS, show_default=True, help="After one to warm up.")
@click.option("--megabytes", type=click.IntRange(min=1), default=400, show_default=True, help="Of the state.")
@click.option("--place", default="/dev/shm", show_default=True, help="Of every tier: a fast one hides nothing.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(pairs: int, megabytes: int, place: str, json_path: Path | None) -> None:
    """Compares durable commits with digests and without, in pairs whose order alternates."""
    if _IN_WORKER not in os.environ:
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", _IN_WORKER: "1"}
        command = [sys.executable, "-m", "bench", "proof", "--pairs", str(pairs), "--megabytes", str(megabytes)]
        command += ["--place", place, *(["--json", str(json_path.absolute())] if json_path is not None else [])]
        raise SystemExit(subprocess.run(command, env=environ, cwd=Path(__file__).parent.parent).returncode)
    found = {
        "benchmark": "proof",
        "environment": environment(place, place),
        "pairs": pairs,
        "megabytes": megabytes,
        "settings": {setting: measure(setting, pairs, megabytes, place) for setting in SETTINGS},
    }
    for setting, samples in found["settings"].items():
        verdict = judge(samples)
        samples["verdict"] = verdict
        print(
            f"written from {setting}: {verdict['ratio']:.3f} of the time without digests (bar {RATIO_MAX}), "
            f"{verdict['cpu_s_per_gb']:+.3f} CPU s per GB (bar {CPU_S_PER_GB_MAX}): "
            f"{'met' if verdict['met'] else 'NOT met'}; medians of {pairs} pairs, "
            f"{statistics.median(samples['with']['s']):.3f} s with, "
            f"{statistics.median(samples['without']['s']):.3f} s without"
        )
    store_result(found, json_path)


def judge(samples: dict[str, Any]) -> dict[str, Any]:
    """The medians of the pairs against the bars, of which one is enough."""
    pairs = list(zip(samples["with"]["s"], samples["without"]["s"], strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    cpu_pairs = zip(samples["with"]["cpu_s_per_gb"], samples["without"]["cpu_s_per_gb"], strict=True)
    cpu_s = statistics.median(a - b for a, b in cpu_pairs)
    return {"ratio": ratio, "cpu_s_per_gb": cpu_s, "met": ratio <= RATIO_MAX or cpu_s <= CPU_S_PER_GB_MAX}


def measure(setting: str, pairs: int, megabytes: int, place: str) -> dict[str, dict[str, list[float]]]:
    """Seconds from `save` to the durable commit, and CPU seconds per GB, of each save of each pair."""
    import jax
    import jax.numpy as jnp

    samples: dict[str, dict[str, list[float]]] = {how: {"s": [], "cpu_s_per_gb": []} for how in ("with", "without")}
    leaves = 64
    rows = max(1, megabytes * 1_000_000 // leaves // 4096)
    key = jax.random.key(0)
    keys = jax.random.split(key, leaves)
    state = {f"leaf {i}": jax.random.normal(keys[i], (rows, 1024), jnp.float32) for i in range(leaves)}
    jax.block_until_ready(state)
    gigabytes = sum(leaf.nbytes for leaf in state.values()) / 1e9
    home = Path(tempfile.mkdtemp(prefix="ckptkit-proof-", dir=place))
    try:
        with _saver(home, setting) as saver:
            for number in range(pairs + 1):
                order = ("with", "without") if number % 2 else ("without", "with")
                for how in order:
                    took_s, used_s = saver(state, digests=how == "with")
                    if number:  # the first pair makes slots and compiles
                        samples[how]["s"].append(took_s)
                        samples[how]["cpu_s_per_gb"].append(used_s / gigabytes)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return samples


@contextmanager
def _saver(home: Path, setting: str) -> Iterator[Any]:
    import orbax.checkpoint as ocp

    import ckptkit
    from bench.measure import cpu_s, now_s, settle

    committed: dict[int, float] = {}
    log = ckptkit.EventLog()
    log.observe(
        lambda event: (
            committed.update({event.step or 0: now_s()})
            if (event.kind, event.tier) == (ckptkit.Kind.COMMITTED, "durable")
            else None
        )
    )
    tiers = [ckptkit.Tier.ram(str(home / "ram"))] if setting == "ramdisk" else []
    options = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=1)
    with ckptkit.CheckpointManager(home / "root", options=options, tiers=tiers, events=log) as manager:
        steps = iter(range(1_000_000))

        def save(state: Any, *, digests: bool) -> tuple[float, float]:
            step = next(steps)
            settle()
            with _without_digests(not digests):
                used_s, start_s = cpu_s(), now_s()
                manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
                manager.wait_until_finished()
                return committed[step] - start_s, cpu_s() - used_s

        yield save


@contextmanager
def _without_digests(without: bool) -> Iterator[None]:
    """The copy as it is, less the digest of what was copied."""
    if not without:
        yield
        return

    def copied(source: Any, target: Any) -> str:
        target[:] = source
        return "0" * 32

    with mock.patch("ckptkit.snapshot.copying.copy_digested", copied):
        yield
