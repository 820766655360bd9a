"""One process of `bench broadcast`: one replica. It saves, and then restores by every contender in turn.

    python -m bench.broadcast_worker --process 0 --replicas 2 --coordinator HOST:PORT --root gs://bench --out FILE ...

Process 0 sets the pace of the bucket and writes what was found.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LEAVES = 32
PROGRESS = "progress: "  # begins a line that is for whoever waits
LIMIT_S = 3000.0
_STEP = 0


def main() -> None:
    """Joins the job, measures, leaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    asked = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(asked.coordinator, asked.replicas, asked.process)
    job = Job(asked.process, asked.replicas)
    found = {
        "matrix": job.matrix(asked.out.parent / f"matrix-{asked.replicas}"),
        **job.race(f"{asked.root}/race-{asked.replicas}", asked.megabytes, asked.rates, asked.repeats),
    }
    if asked.process == 0:
        asked.out.write_text(json.dumps(found))
    jax.distributed.shutdown()


class Job:
    """The measurements, in the same order on every process."""

    def __init__(self, process: int, replicas: int):
        from ckptkit.job.coordination import make_coordinator

        self._process, self._replicas = process, replicas
        self._coordinator = make_coordinator()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value; also the barrier before and after the timed part."""
        from ckptkit.job.coordination import gather

        return gather(self._coordinator, "bench", value)

    def matrix(self, root: Path) -> dict[str, dict[str, str]]:
        """By contender and leaf: `exact`, or what the dtype or the bits became on some process."""
        from bench.replica_states import bits_here, every_dtype

        state = every_dtype(self._replicas)
        save(str(root), state)
        expected, found = bits_here(state), {}
        for name in ("broadcast", "orbax", "orbax_broadcast"):
            mine: dict[str, str] = {}
            for part in [state] if name != "orbax_broadcast" else _by_dtype(state):  # what raises takes the rest along
                try:
                    restored = bits_here(contender(name, str(root), part)[0]())
                    mine |= {leaf: _changed(expected[leaf], got) for leaf, got in restored.items()}
                except Exception as error:  # noqa: BLE001  the content of a column
                    mine |= {f"['{leaf}']": f"raises {type(error).__name__}" for leaf in part}
            said = self.gather(mine)
            found[name] = {leaf: next((each[leaf] for each in said if each[leaf] != "exact"), "exact") for leaf in mine}
        return found

    def race(self, root: str, megabytes: float, rates: list[float], repeats: int) -> dict[str, Any]:
        """Seconds and bytes of every contender at every pace, in alternating order after a round to warm up."""
        state = plain(self._replicas, megabytes)
        save(root, state)
        size = sum(leaf.nbytes for leaf in state.values())
        samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for rate in [None, *rates]:
            if self._process == 0:
                pace(None if rate is None else rate * 1e6)
            names = ["read", "broadcast", "auto", "orbax", "orbax_broadcast"]
            for number in range(1 if rate is None else repeats):
                for name in names if number % 2 else reversed(names):
                    sample = self._timed(name, root, state)
                    if rate is not None:
                        samples.setdefault(f"{rate:g}", {}).setdefault(name, []).append(sample)
        return {"state_bytes": size, "samples": samples}

    def _timed(self, name: str, root: str, state: Mapping[str, Any]) -> dict[str, Any]:
        import jax

        from bench.measure import now_s, settle
        from bench.replica_states import bits_here

        restore, said = contender(name, root, state)
        settle()
        before = sum(self.gather(bytes_read()))
        start_s = now_s()
        restored = jax.block_until_ready(restore())
        self.gather(None)
        spent_s = now_s() - start_s
        read = sum(self.gather(bytes_read())) - before
        assert bits_here(restored) == bits_here(state), f"{name} restored other bits"
        if self._process == 0:
            print(f"{PROGRESS}{name} {spent_s:.2f} s", flush=True)
        return {"s": spent_s, "bytes_read": read, **said()}


def _by_dtype(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for leaf, value in state.items():
        parts.setdefault(str(value.dtype), {})[leaf] = value
    return list(parts.values())


def _changed(expected: list[str], found: list[str]) -> str:
    """`exact`, or what became of a leaf: another dtype, or other bits."""
    if found == expected:
        return "exact"
    return "other bits" if found[0] == expected[0] else f"becomes {found[0]}"


def contender(name: str, root: str, state: Any) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """How a contender restores the step at `root`, opened before it is timed; and its report."""
    import orbax.checkpoint as ocp

    import ckptkit

    target = ckptkit.abstract_state(state)
    if name == "orbax":
        manager = ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True))
        return lambda: manager.restore(_STEP, args=ocp.args.StandardRestore(target)), dict  # pyright: ignore[reportCallIssue]
    if name == "orbax_broadcast":
        return lambda: _orbax_broadcast(f"{root}/{_STEP}/default", target), dict
    mode: Any = {"read": "never", "broadcast": "always", "auto": "auto"}[name]
    log, events = ckptkit.EventLog(), []
    log.observe(events.append)
    ours = ckptkit.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(read_only=True),
        events=log,
        processes=ckptkit.ProcessOptions(broadcast=ckptkit.BroadcastOptions(mode=mode)),
    )

    def said() -> dict[str, Any]:
        restored = next(event.fields for event in reversed(events) if event.kind == ckptkit.Kind.RESTORED)
        ours.close()
        sent_s = [event.fields["duration_s"] for event in events if event.kind == ckptkit.Kind.SPAN]
        return {"broadcast": restored["broadcast"], "why": restored["broadcast_why"], "rounds_s": sent_s}

    return lambda: ours.restore(_STEP, args=ocp.args.StandardRestore(target)), said  # pyright: ignore[reportCallIssue]


def _orbax_broadcast(item: str, target: Any) -> Any:
    """Stock Orbax's own: the first replica reads, and the others get what it has summed over zeros."""
    import jax
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (jax.Array, handlers.SingleReplicaArrayHandler(replica_axis_index=0, primary_replica_id=0))
    )
    restore_args = jax.tree.map(
        lambda leaf: handlers.SingleReplicaArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        target,
    )
    wanted = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)  # pyright: ignore[reportCallIssue]
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
    return checkpointer.restore(item, args=wanted)


def plain(replicas: int, megabytes: float) -> dict[str, Any]:
    """As many MB of weights, the same on every replica."""
    import numpy as np

    from bench.replica_states import put

    rng = np.random.default_rng(0)
    rows = max(1, round(megabytes * 1e6 / LEAVES / 4096))
    return {f"leaf_{i:02}": put(rng.standard_normal((rows, 1024)).astype(np.float32), replicas) for i in range(LEAVES)}


def save(root: str, state: Any) -> None:
    """One durable step."""
    import orbax.checkpoint as ocp

    import ckptkit

    with ckptkit.CheckpointManager(root) as manager:
        manager.save(_STEP, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]


def bytes_read() -> int:
    """The bytes that TensorStore has read in this process, from files and buckets."""
    import tensorstore as ts

    found = 0
    for driver in ("file", "gcs"):
        for metric in ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/{driver}/bytes_read"):
            found += sum(int(value["value"]) for value in metric["values"])
    return found


def pace(bytes_per_s: float | None) -> None:
    """Sets the one token bucket through which everything that the fake bucket sends has to pass."""
    from ckptkit.testing.bucket import FaultPlan

    plan = FaultPlan(download_bytes_per_s=bytes_per_s).as_json()
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/_ckptkit/faults"
    request = urllib.request.Request(url, data=json.dumps(plan).encode(), method="POST")
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    main()
