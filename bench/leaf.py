"""`python -m bench leaf`: one replicated leaf, written by all of its holders, against process 0 alone.

A job of several processes on one host saves one replicated leaf to the durable tier. In turns each process writes its
part, and process 0 writes all of it as earlier versions did. Three places: one disk without a limit; the same disk with
a rate for each process (`write_bytes_per_s`), as of a link of its own; the shipped bucket, 20 ms for each answer. The
bar of the time is for the second place: without a limit one disk, or the bucket's process, takes the same bytes whoever
writes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import click

from bench.broadcast_worker import Job
from bench.durable import FakeBucket
from bench.environment import environment, store_result
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers

TIMES_MAX = 0.35  # of the time in which process 0 alone writes, where each process has a rate of its own
CELL_BYTES = 64 << 20  # at most (docs/FORMAT.md): a process writes whole cells
_LIMITED = "disk, a rate for each"


class LeafJob(Job):
    """The measurements, in the same order on every process."""

    def measure(self, root: str, megabytes: float, repeats: int, rate: float | None) -> dict[str, Any]:
        """Seconds of each commit, and the bytes that each process wrote of it, by who writes."""
        import numpy as np
        import orbax.checkpoint as ocp

        import ckptkit
        from bench.measure import now_s, settle
        from bench.replica_states import put

        value = np.random.default_rng(0).standard_normal((round(megabytes * 1e6 / 1024), 256)).astype(np.float32)
        state = {"leaf": put(value, self._replicas)}
        profile = ckptkit.DurableProfile(write_bytes_per_s=rate, shared_steps_max=1)
        found: dict[str, Any] = {"alone": {"s": [], "bytes": []}, "all": {"s": [], "bytes": []}}
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        with ExitStack() as stack:
            managers = {
                name: stack.enter_context(ckptkit.CheckpointManager(f"{root}/{name}", options=options, durable=profile))
                for name in found
            }
            for number in range(1 + repeats):
                for name in sorted(found, reverse=bool(number % 2)):
                    with _only_first() if name == "alone" else nullcontext():
                        settle()
                        before = self.gather(_bytes_written())
                        began_s = now_s()
                        args = ocp.args.StandardSave(state)  # pyright: ignore[reportCallIssue]
                        managers[name].save(number, args=args)
                        managers[name].wait_until_finished()
                        after = self.gather(_bytes_written())
                    if number:  # the first one warms up: host memory, connections
                        found[name]["s"].append(now_s() - began_s)
                        found[name]["bytes"].append([b - a for a, b in zip(before, after, strict=True)])
        return {"leaf_bytes": value.nbytes, **found}


def _only_first() -> Any:
    return mock.patch("ckptkit.durable.orbax.host_shards.choose_writers", _first_writes_all)


def _first_writes_all(holders: Any, *_: Any) -> list[dict[Any, list[tuple[Any, int]]]]:
    return [{box: [(box, min(who))] for box, who in leaf.items()} for leaf in holders]


def _bytes_written() -> int:
    import tensorstore as ts

    names = [f"/tensorstore/kvstore/{driver}/bytes_written" for driver in ("file", "gcs")]
    found = [
        value
        for name in names
        for metric in ts.experimental_collect_matching_metrics(name)
        for value in metric["values"]
    ]
    return sum(int(value["value"]) for value in found)


def worker(
    process: str, processes: str, coordinator: str, out: str, megabytes: str, repeats: str, *places: str
) -> None:
    """One process of the job. `places` are a name, a root and a rate each."""
    import jax

    jax.distributed.initialize(coordinator, int(processes), int(process))
    job = LeafJob(int(process), int(processes))
    found = {
        name: job.measure(root, float(megabytes), int(repeats), float(rate) or None)
        for name, root, rate in zip(places[::3], places[1::3], places[2::3], strict=True)
    }
    if process == "0":
        Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@click.command(context_settings={"max_content_width": 120})
@click.option("--processes", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--megabytes", type=float, default=1000.0, show_default=True, help="Of the leaf.")
@click.option("--rate", type=float, default=100.0, show_default=True, help="MB/s of each process, in the second place.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="After one to warm up.")
@click.option("--disk", default=tempfile.gettempdir(), show_default=True, help="A directory on a disk.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(processes: int, megabytes: float, rate: float, repeats: int, disk: str, json_path: Path | None) -> None:
    """Measures durable commits of one replicated leaf, written by all processes and by process 0 alone."""
    home = Path(tempfile.mkdtemp(prefix="ckptkit-leaf-", dir=disk))
    output: list[str] = []
    bucket = FakeBucket(home / "bucket")
    try:
        places = ("disk", str(home / "disk"), "0", _LIMITED, str(home / "limited"), str(rate * 1e6))
        words = [str(processes), "{coordinator}", str(home / "found.json"), str(megabytes), str(repeats), *places]
        command = [sys.executable, "-m", "bench.leaf", "{process}", *words, "bucket", bucket.root, "0"]
        launcher = Launcher(
            Workers(command, processes=processes, devices_per_process=1, env=bucket.env()),
            policy=RestartPolicy(restarts=0),
            hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
        )
        if launcher.run() != ExitCode.OK:
            raise click.ClickException("the job failed:\n" + "\n".join(output[-60:]))
        found = json.loads((home / "found.json").read_text())
    finally:
        bucket.close()
        shutil.rmtree(home, ignore_errors=True)
    result: dict[str, Any] = {"benchmark": "leaf", "environment": environment(disk, disk), "processes": processes}
    result |= {"megabytes": megabytes, "rate": rate, "repeats": repeats, "places": found}
    for name, place in found.items():
        seconds = {who: statistics.median(place[who]["s"]) for who in ("alone", "all")}
        most = max(max(each) for each in place["all"]["bytes"])
        place |= {"times": seconds["all"] / seconds["alone"], "most_bytes_of_a_process": most}
        place["bytes_met"] = most <= place["leaf_bytes"] / processes + CELL_BYTES
        spent = f"process 0 alone {seconds['alone']:.2f} s, all {seconds['all']:.2f} s ({place['times']:.2f} of it)"
        print(f"{name}: {spent}; one process wrote {most / 1e6:.0f} of {place['leaf_bytes'] / 1e6:.0f} MB at most")
    met = found[_LIMITED]["times"] <= TIMES_MAX and all(place["bytes_met"] for place in found.values())
    store_result(result | {"times_max": TIMES_MAX, "met": met}, json_path)
    print(f"{_LIMITED}: at most {TIMES_MAX} of the time of process 0 alone: {'met' if met else 'NOT met'}")


if __name__ == "__main__":
    worker(*sys.argv[1:])
