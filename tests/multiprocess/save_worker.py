"""One process of a job that saves and restores, and writes down what that sent over the device collectives.

    python -m tests.multiprocess.save_worker --process 0 --coordinator HOST:PORT DIR

Without the two flags JAX finds the others by the variables of srun or mpirun.

Writes DIR/found-{process}.json. The measured part has no training step: any collective would be a save's.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PROCESSES = 2
LIMIT_S = 100.0
STRATEGIES = ("slot_copy", "device_copy")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a collective that not all processes launch hangs
    import jax
    from jax._src import distributed  # the address that JAX found has no public name

    if args.coordinator is None:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(args.coordinator, PROCESSES, args.process)
    process, coordinator = distributed.global_state.process_id, distributed.global_state.coordinator_address
    assert coordinator is not None
    dump = args.dir / f"programs-{process}"
    # The backend reads it at its first use: only now is it known which process this is.
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={dump} --xla_dump_hlo_as_text"
    worker = Worker(args.dir, process, coordinator, dump)
    acts = [worker.count_a_real_collective, *(partial(worker.save_by, each) for each in STRATEGIES)]
    for act in [*acts, worker.restore, worker.veto, worker.replicas, worker.policies]:
        act()
        (args.dir / f"found-{process}.json").write_text(json.dumps(worker.found))
    jax.distributed.shutdown()


class Worker:
    """The acts of the job, in the same order on every process."""

    def __init__(self, root: Path, process: int, coordinator: str, dump: Path):
        self.found: dict[str, Any] = {"collectives": {}}
        self._root, self._process, self._coordinator, self._dump = root, process, coordinator, dump
        self._events: list[Any] = []

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Writes down the bytes sent and the programs with collectives compiled in the block."""
        from tests.multiprocess.collectives import programs_with_collectives, sent_bytes

        sent, programs = sent_bytes(self._coordinator), programs_with_collectives(self._dump)
        for _ in range(100):  # the last words of the collective before may still be in flight
            time.sleep(0.05)
            before, sent = sent, sent_bytes(self._coordinator)
            if sent == before:
                break
        yield
        self.found["collectives"][name] = {
            "sent_bytes": sent_bytes(self._coordinator) - sent,
            "programs": sorted(programs_with_collectives(self._dump) - programs),
        }

    def count_a_real_collective(self) -> None:
        """Shows that the counter counts: first with the connections made, then with a program that is compiled."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        whole = NamedSharding(_mesh(), PartitionSpec())
        total = jax.jit(lambda w: w.sum(), out_shardings=whole)
        with self.counted("sum"):
            total(make_state(1)["w"]).block_until_ready()
        with self.counted("sum again"):
            total(make_state(2)["w"]).block_until_ready()

    def manager(self, staging: Any, *, root: str | None = None, **saving: Any) -> Any:
        import orbax.checkpoint as ocp

        import ckptkit

        log = ckptkit.EventLog(process=self._process)
        log.observe(self._events.append)
        tiers = [
            ckptkit.Tier.ram(str(self._root / "ram"), slots=2),
            ckptkit.Tier.ssd(str(self._root / "ssd"), save=ckptkit.EverySteps(1)),
        ]
        return ckptkit.CheckpointManager(
            self._root / (root or staging),
            options=ocp.CheckpointManagerOptions(save_interval_steps=2),
            tiers=tiers,
            host_id=f"host-{self._process}",
            events=log,
            saving=ckptkit.SaveOptions(staging=staging, **saving),
            processes=ckptkit.ProcessOptions(timeout_s=60),
        )

    def save_by(self, staging: str) -> None:
        """Saves three steps, two of them in every tier, and closes."""
        with self.counted(f"save by {staging}"), self.manager(staging) as manager:
            for step in range(3):
                manager.prepare(save_args(step))
                manager.save(step, args=save_args(step))
                manager.wait_until_finished()
            self.found[f"saved by {staging}"] = [[r.step, sorted(r.tiers)] for r in manager.steps()]

    def restore(self) -> None:
        """Restores in the background, from the fast tiers and then from the durable one."""
        import orbax.checkpoint as ocp

        with self.manager("slot_copy") as manager:
            for step in (2, 0):
                with self.counted(f"restore step {step}"):
                    handle = manager.restore_async(step, args=ocp.args.StandardRestore(make_abstract()))  # pyright: ignore[reportCallIssue]
                    restored = handle.result(timeout=60)
                self.found[f"restored step {step}"] = same_here(restored, make_state(step))
        self.found["sources"] = [sorted(e.fields["sources"]) for e in self._events if e.kind == "restored"]

    def veto(self) -> None:
        """Process 1 has no slot for step 11: the step is dropped everywhere, and the one before is kept."""
        import orbax.checkpoint as ocp

        with self.manager("auto") as manager:
            manager.save(10, args=save_args(10))
            manager.wait_until_finished()
            arena = manager._pipeline._tiers.staging
            taken = []
            while self._process == 1 and (slot := arena.acquire(1)) is not None:
                taken.append(slot)
            answer = manager.save(11, args=save_args(11))
            manager.wait_until_finished()
            self.found["veto"] = {
                "save returned": answer,
                "steps": manager.all_steps(),
                "skipped": [[e.step, e.tier, dict(e.fields)] for e in self._events if e.kind == "save_skipped"],
                "held": [save.step for save in arena.held()],
                "staged": [e.step for e in self._events if e.kind == "staged"][-1],
            }
            for slot in taken:
                arena.release(slot)
            restored = manager.restore(None, args=ocp.args.StandardRestore(make_abstract()))  # pyright: ignore[reportCallIssue]
            self.found["veto"]["restored"] = same_here(restored, make_state(10))
            manager.save(12, args=save_args(12))
            manager.wait_until_finished()
            self.found["veto"]["steps after"] = manager.all_steps()[-1]
            self.found["veto"]["raised"] = self._save_what_is_gone(manager, 13)
            manager.wait_until_finished()
            manager.save(14, args=save_args(14))
            manager.wait_until_finished()
            self.found["veto"]["steps at last"] = [step for step in manager.all_steps() if step >= 12]

    def _save_what_is_gone(self, manager: Any, step: int) -> str:
        """The error of a save whose arrays process 1 has donated before."""
        import jax

        state = make_state(step)
        for leaf in jax.tree.leaves(state) if self._process == 1 else ():
            leaf.delete()
        try:
            manager.save(step, args=standard(state))
        except RuntimeError as error:
            return str(error)
        return ""

    def replicas(self) -> None:
        """Saves replicated leaves of which one, then two, are not the same on both processes."""
        import ckptkit

        policy = ckptkit.ReplicaPolicy(on_difference="keep")
        with (
            self.counted("replicas"),
            self.manager("auto", root="replicas", replicas=policy) as manager,
        ):
            for step, bad in enumerate(([], ["leaf 41"], ["leaf 3", "leaf 69"], [])):
                manager.save(step, args=standard(replicated(self._process, step, bad)))
                manager.wait_until_finished()
            steps = manager.all_steps()
        events = [[e.step, dict(e.fields)] for e in self._events if e.kind == "replicas_differ"]
        self.found["replicas"] = {"steps": steps, "events": events}

    def policies(self) -> None:
        """Saves three steps of which process 0's policy keeps the newest, and process 1's the newest two."""
        import orbax.checkpoint as ocp

        import ckptkit

        known, log = len(self._events), ckptkit.EventLog(process=self._process)
        log.observe(self._events.append)
        options = ocp.CheckpointManagerOptions(preservation_policy=_KeepsNewest(1 + self._process))  # pyright: ignore[reportArgumentType]
        with ckptkit.CheckpointManager(
            self._root / "policies", options=options, events=log, processes=ckptkit.ProcessOptions(timeout_s=10)
        ) as manager:
            for step in (1, 2, 3):
                manager.save(step, args=save_args(step))
                manager.wait_until_finished()
            steps = manager.all_steps()
        reasons = [event.fields["reason"] for event in self._events[known:] if "reason" in event.fields]
        self.found["policies"] = {"steps": steps, "failures": [each for each in reasons if "leases" in each]}


class _KeepsNewest:
    """A policy that goes by something that is not the same on every process: as a clock, or a metric."""

    def __init__(self, count: int):
        self._count = count

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        del context
        return [len(checkpoints) - at <= self._count for at in range(len(checkpoints))]


def replicated(process: int, seed: int, bad: list[str]) -> Any:
    """70 leaves that every device holds; those in `bad` have another value on process 1. And one that is split."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def put(value: Any) -> Any:
        shards = [jax.device_put(value, device) for device in jax.local_devices()]
        return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(_mesh(), PartitionSpec()), shards)

    leaves = {f"leaf {number}": np.full((3, 2), seed + number, np.float32) for number in range(70)}
    for name in bad:
        leaves[name][1, 1] += process
    return {**{name: put(value) for name, value in leaves.items()}, "split": make_state(seed)["w"]}


def make_state(seed: int) -> Any:
    """Global arrays over both processes: split, replicated, a key; different for every seed."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def put(value: Any, *spec: Any) -> Any:
        sharding = NamedSharding(_mesh(), PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {
        "w": put(np.arange(256, dtype=np.float32).reshape(16, 16) + seed, "x"),
        "b": put(np.full(8, seed, np.int32)),
    }


def make_abstract() -> Any:
    import jax

    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), make_state(0))


def save_args(step: int) -> Any:
    return standard(make_state(step))


def standard(state: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.StandardSave(state)  # pyright: ignore[reportCallIssue]


def same_here(found: Any, expected: Any) -> bool:
    """Whether this process's shards of two trees are the same bits; launches nothing across processes."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for left, right in pairs
        for a, b in zip(left.addressable_shards, right.addressable_shards, strict=True)
    )


def _mesh() -> Any:
    import jax

    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


if __name__ == "__main__":
    main()
