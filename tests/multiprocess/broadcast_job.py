"""One process of a job whose data replicas read the durable tier for each other, and in which things go wrong.

    python -m tests.multiprocess.broadcast_job --process 0 --processes 4 --coordinator HOST:PORT DIR

Writes DIR/found-{process}.json: for each act this process's result, its sources, and its events. Two devices each.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
LARGE = (8, 1024, 256)  # leaves of float32: 8 MB, several rounds of the smallest budget
LARGE_BYTES = math.prod(LARGE) * 4
SMALLEST = 1 << 20
ROWS, ROWS_OF_A_CELL = (1003, 256), 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import jax

    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    job = Job(args.dir, args.process)
    acts: list[Callable[[], None]] = [
        job.every_dtype,
        job.whole_replicas,
        job.rows_of_one_leaf,
        job.replicas_inside_a_process,
        job.nothing_in_common,
        job.chosen_by_size,
        job.in_the_background,
        job.the_result_is_never_wanted,
        job.damage_on_the_way,
        job.a_read_that_fails_once,
        job.no_collective_here,
        job.damage_in_the_storage,
        job.a_permission_that_is_missing,
        job.some_have_it_in_memory,
    ]
    for act in acts:
        act()
        (args.dir / f"found-{args.process}.json").write_text(json.dumps(job.found))
    jax.distributed.shutdown()


class Job:
    """The acts, in the same order on every process, each with a durable root of its own."""

    def __init__(self, root: Path, process: int):
        self.found: dict[str, Any] = {}
        self._root, self._process = root, process
        self._events: list[Any] = []
        self._met = 0
        self._read_bytes = ReadBytes()

    def manager(self, root: str, mode: Any = "always", *, peers: bool = True, **options: Any) -> Any:
        import orbax.checkpoint as ocp

        import ckptkit

        log = ckptkit.EventLog(process=self._process)
        log.observe(self._events.append)
        return ckptkit.CheckpointManager(
            self._root / root,
            options=ocp.CheckpointManagerOptions(max_to_keep=5),
            host_id=f"host-{self._process}",
            events=log,
            processes=ckptkit.ProcessOptions(
                timeout_s=60,
                peers=ckptkit.PeerOptions() if peers else None,
                broadcast=ckptkit.BroadcastOptions(mode=mode, device_bytes=SMALLEST, host_bytes=SMALLEST),
            ),
            **options,
        )

    def save(self, root: str, *states: Any, **options: Any) -> None:
        with self.manager(root, **options) as manager:
            for step, state in enumerate(states):
                manager.save(step, args=save_args(state))
                manager.wait_until_finished()

    def restore(
        self,
        act: str,
        root: str,
        state: Any,
        mode: Any = "always",
        *,
        later: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Restores the newest step into `state`'s shape; what came out, and how. `later` is given a handle of a restore
        in the background, and gives its result."""
        import orbax.checkpoint as ocp

        from bench.replica_states import bits_here

        args = ocp.args.StandardRestore(abstract(state))  # pyright: ignore[reportCallIssue]
        with self.manager(root, mode, **options) as manager:
            before, before_bytes = len(self._events), self._read_bytes()
            found: dict[str, Any] = {}
            try:
                if later is None:
                    restored = manager.restore(None, args=args)
                else:
                    restored = later(manager.restore_async(None, args=args))
                found = {"step": manager.restored_save_id.step, "bits": bits_here(restored)}
            except Exception as error:  # noqa: BLE001  what a test looks at
                found = {"error": f"{type(error).__name__}: {error}"}
            events = self._events[before:]
        said = [e.fields for e in events if e.kind == "restored"]
        found |= {
            "read_bytes": self._read_bytes() - before_bytes,
            "expected": bits_here(state),
            "rejected": [[e.tier, e.fields["reason"]] for e in events if e.kind == "restore_rejected"],
            "rounds": sum(e.kind == "span" and e.fields["span"] == "broadcast" for e in events),
            "sources": said[0]["sources"] if said else None,
            "broadcast": said[0]["broadcast"] if said else None,
            "why": said[0]["broadcast_why"] if said else None,
        }
        self.found[act] = found
        return found

    def meet(self) -> None:
        from ckptkit.job.coordination import make_coordinator

        self._met += 1
        make_coordinator().agree(f"meet-{self._met}", None, lambda _: None, timeout_s=60)

    def only(self, process: int, act: Callable[[], Any]) -> None:
        self.meet()
        if self._process == process:
            act()
        self.meet()

    def every_dtype(self) -> None:
        """Two replicas of two processes: every dtype, by everybody for himself and shared."""
        import jax

        from bench.replica_states import every_dtype

        jax.config.update("jax_enable_x64", True)
        state = {**plain(2), **every_dtype(2)}
        self.save("matrix", state)
        self.restore("alone", "matrix", state, "never")
        self.restore("shared", "matrix", state)
        jax.config.update("jax_enable_x64", False)
        small = plain(2)
        self.save("plain", small)
        self.restore("plain", "plain", small)

    def whole_replicas(self) -> None:
        """Four replicas of one process each."""
        state = plain(4)
        self.save("four", state)
        self.restore("four", "four", state)

    def rows_of_one_leaf(self) -> None:
        """A leaf of 1,003 rows that every process holds, in cells of 64 rows: each writes some of them."""
        import jax
        import numpy as np
        import orbax.checkpoint as ocp
        from jax.sharding import NamedSharding, PartitionSpec

        value = np.arange(math.prod(ROWS), dtype=np.float32).reshape(ROWS)
        whole = NamedSharding(jax.make_mesh((jax.device_count(),), ("all",)), PartitionSpec())
        state = {"w": jax.make_array_from_callback(ROWS, whole, lambda index: value[index])}
        chunks = {"w": ocp.SaveArgs(chunk_byte_size=ROWS_OF_A_CELL * ROWS[1] * 4)}
        with self.manager("rows") as manager:
            manager.save(0, args=ocp.args.StandardSave(state, save_args=chunks))  # pyright: ignore[reportCallIssue]
        staged = [event.fields["bytes"] for event in self._events if event.kind == "staged"][-1]
        self.found["rows"] = {"step": str(self._root / "rows" / "0"), "staged": staged}

    def replicas_inside_a_process(self) -> None:
        """Eight replicas: each process has two."""
        state = plain(8)
        self.save("eight", state)
        self.restore("eight", "eight", state)

    def nothing_in_common(self) -> None:
        """One replica over all devices: everybody reads for himself."""
        state = {"large": plain(1)["large"]}
        self.save("one", state)
        self.restore("one", "one", state)

    def chosen_by_size(self) -> None:
        """`auto`: from a directory, and from what it takes for a bucket, below the threshold and above it."""
        from ckptkit.restore import flow
        from ckptkit.restore.broadcast import offer

        properties_of, least_bytes = flow.properties_of, offer.SHARED_BYTES_MIN
        self.restore("directory", "plain", plain(2), "auto")
        flow.properties_of = lambda url: replace(properties_of(url), round_trips=True)
        self.restore("small", "plain", plain(2), "auto")
        offer.SHARED_BYTES_MIN = LARGE_BYTES // 2
        self.restore("enough", "plain", plain(2), "auto")
        self.restore("late", "plain", plain(2), "auto", later=once_done)
        flow.properties_of, offer.SHARED_BYTES_MIN = properties_of, least_bytes

    def in_the_background(self) -> None:
        """The step has collectives of its own meanwhile, and one process asks for the result after the others."""
        from jax.experimental import multihost_utils

        def while_the_step_runs(handle: Any) -> Any:
            for number in range(5):
                multihost_utils.sync_global_devices(f"step {number}")
            if self._process == 1:
                time.sleep(3)
            return handle.result()

        self.restore("later", "plain", plain(2), later=while_the_step_runs)

    def the_result_is_never_wanted(self) -> None:
        """One process closes its manager instead."""

        def leave(handle: Any) -> Any:
            if self._process == 2:
                raise RuntimeError("it leaves")
            return handle.result()

        self.restore("gone", "plain", plain(2), later=leave)

    def damage_on_the_way(self) -> None:
        """The bytes that one process receives in one round have a flipped bit."""
        from ckptkit.restore.broadcast.collective import AllGather

        gather, calls = AllGather.__call__, [0]

        def flipping(self: Any, sent: Any) -> Any:
            received = gather(self, sent)
            calls[0] += 1
            if calls[0] == 2:
                received[:, 100] ^= 4
            return received

        if self._process == 2:
            AllGather.__call__ = flipping
        self.restore("flipped", "plain", plain(2))
        AllGather.__call__ = gather

    def a_read_that_fails_once(self) -> None:
        """One process reads damage in the middle of its stream, and not the next time."""
        from ckptkit.durable.read_step import DurableReader
        from ckptkit.errors import CorruptCheckpointError

        self._fail_read(DurableReader, CorruptCheckpointError("a cell that was damaged once"), process=1)
        self.restore("failing", "plain", plain(2))
        self._mend(DurableReader)

    def no_collective_here(self) -> None:
        """One process has no room for the collective."""
        from ckptkit.restore.broadcast.collective import AllGather

        put = AllGather.put

        def refuse(self: Any, window: Any) -> Any:
            raise MemoryError("RESOURCE_EXHAUSTED")

        if self._process == 3:
            AllGather.put = refuse
        self.restore("no_room", "plain", plain(2))
        AllGather.put = put

    def damage_in_the_storage(self) -> None:
        """A bit of the newest step is flipped in storage: all get the older one."""
        older, newer = plain(2), plain(2, seed=5)
        self.save("damaged", older, newer)
        row = large(seed=5)[3][500].tobytes()

        def flip() -> None:
            found = 0
            for file in (self._root / "damaged" / "1" / "default").glob("**/d/*"):
                data = bytearray(file.read_bytes())
                if (at := data.find(row)) >= 0:
                    data[at + 5] ^= 1
                    file.write_bytes(data)
                    found += 1
            assert found == 1, "the row is stored once"

        self.only(0, flip)
        self.restore("damaged", "damaged", older)

    def a_permission_that_is_missing(self) -> None:
        """An error that is fatal for one is raised by all."""
        from ckptkit.durable.read_step import DurableReader
        from ckptkit.errors import StoreError

        self._fail_read(DurableReader, StoreError("PERMISSION_DENIED"), process=1)
        self.restore("denied", "plain", plain(2))
        self._mend(DurableReader)

    def some_have_it_in_memory(self) -> None:
        """One replica's ramdisks are lost, and peers are not read: nobody reads the durable tier all the same."""
        import ckptkit

        def tiers() -> Any:
            return {"tiers": [ckptkit.Tier.ram(str(self._root / "ram"))], "peers": False}

        state = plain(2)
        self.save("memory", state, **tiers())
        for process in (2, 3):
            self.only(process, lambda: [shutil.rmtree(p) for p in (self._root / "ram").glob(f"*/host-{self._process}")])
        self.restore("memory", "memory", state, **tiers())

    def _fail_read(self, reader: Any, error: Exception, process: int) -> None:
        """A read of one process fails that comes after the first rounds, and no other."""
        self._read, calls = reader.read, [0]
        read = self._read

        def failing(self: Any, item: str, leaf: Any, *rest: Any) -> None:
            calls[0] += 1
            if calls[0] == 7:
                raise error
            read(self, item, leaf, *rest)

        if self._process == process:
            reader.read = failing

    def _mend(self, reader: Any) -> None:
        reader.read = self._read


def once_done(handle: Any) -> Any:
    """The result of a restore that nothing was asked of before it was done."""
    while not handle.done():
        time.sleep(0.05)
    return handle.result()


def large(seed: int) -> Any:
    """Random bits: NaN payloads and -0.0 among them."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 2**32, LARGE, np.uint32).view(np.float32)


def plain(replicas: int, seed: int = 0) -> Any:
    """Several rounds of large leaves, small ones, a key, host leaves."""
    import jax
    import numpy as np

    from bench.replica_states import put

    key = put(np.arange(2, dtype=np.uint32) + seed, replicas)
    return {
        "large": [put(block, replicas, "fsdp") for block in large(seed)],
        "small": [put(np.full(8, seed - 3, np.int8), replicas), put(np.array(-0.0, np.float32), replicas)],
        "key": jax.random.wrap_key_data(key),
        "host": np.arange(5.0) + seed,
        "count": 7 + seed,
    }


def abstract(state: Any) -> Any:
    import ckptkit

    return ckptkit.abstract_state(state)


def save_args(state: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.StandardSave(state)  # pyright: ignore[reportCallIssue]


class ReadBytes:
    """The bytes that this process has read from files so far: TensorStore, and ckptkit past it."""

    def __init__(self) -> None:
        from ckptkit.util.disk_file import FileReads

        self._filled: list[int] = []
        real = FileReads.fill

        def fill(reads: Any, target: Any, start: int) -> None:
            real(reads, target, start)
            self._filled.append(target.nbytes)

        FileReads.fill = fill  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self) -> int:
        import tensorstore as ts

        metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(self._filled) + sum(int(value["value"]) for metric in metrics for value in metric["values"])


if __name__ == "__main__":
    main()
