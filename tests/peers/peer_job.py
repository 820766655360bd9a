"""One process of a job whose hosts lose, swap or get back what their fast tiers hold, and restore it from each other.

    python -m tests.peers.peer_job --process 0 --processes 2 --coordinator HOST:PORT WHAT DIR

Writes DIR/WHAT-{process}.json. A new manager is a new run; each process is a host of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointError
from tests.jobs import job_of
from tests.states import abstract

LIMIT_S = 200.0
ROWS = 12  # over four devices, or six


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("what", choices=["lose", "grow"])
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import jax

    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    job = Job(args.dir, args.process)
    acts: dict[str, list[Callable[[], None]]] = {
        "lose": [
            job.lose_a_ramdisk,
            job.lose_a_shard,
            job.end_between_commits,
            job.swap_hosts,
            job.damage_a_slot,
            job.return_with_an_old_ramdisk,
            job.outlive_a_zombie,
            job.make_the_root_again,
            job.save_unrecorded,
            job.save_a_step_again,
            job.go_without_peers,
            job.keep_copies,
            job.lose_both,
            job.go_on_after_a_loss,
            job.save_last,
            job.save_last_beside_a_slow_peer,
            job.scrub,
            job.save_to_grow,
        ],
        "grow": [job.grow],
    }
    for act in acts[args.what]:
        act()
        (args.dir / f"{args.what}-{args.process}.json").write_text(json.dumps(job.found))
    jax.distributed.shutdown()


class Job:
    """The acts, in the same order on every process. Each has a durable root of its own, and so tiers of its own."""

    def __init__(self, root: Path, process: int):
        self.found: dict[str, Any] = {}
        self._root, self._process = root, process
        self._events: list[Any] = []
        self._met = 0

    def manager(self, act: str, host: int | None = None, more: Any = (), *, peers: bool = True, **options: Any) -> Any:
        import orbax.checkpoint as ocp

        import ckptkit

        log = ckptkit.EventLog(process=self._process)
        log.observe(self._events.append)
        return ckptkit.CheckpointManager(
            self._root / act,
            options=ocp.CheckpointManagerOptions(save_interval_steps=100),
            tiers=[ckptkit.Tier.ram(str(self._root / "ram"), slots=3), *more],
            host_id=f"host-{self._process if host is None else host}",
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=60, peers=ckptkit.PeerOptions() if peers else None),
            **options,
        )

    def saved(self, act: str, steps: range, split: bool, **options: Any) -> None:
        with self.manager(act, **options) as manager:
            for step in steps:
                manager.save(step, args=save_args(make_state(step, split)))
                manager.wait_until_finished()

    def restored(
        self, act: str, step: int | None, expected: int, split: bool, then: range = range(0), **options: Any
    ) -> dict[str, Any]:
        """The step that a new run finds, and whether it equals the save at `expected`; it saves the steps of `then`."""
        import orbax.checkpoint as ocp

        with self.manager(act, **options) as manager:
            before = len(self._events)
            restored = manager.restore(step, args=ocp.args.StandardRestore(abstract(make_state(0, split))))  # pyright: ignore[reportCallIssue]
            events, latest = self._events[before:], manager.latest_step()
            found_step = manager.restored_save_id
            for more in then:
                manager.save(more, args=save_args(make_state(more, split)))
                manager.wait_until_finished()
            return {
                "latest": latest,
                "step": found_step.step,
                "epoch": found_step.epoch,
                "same": same_here(restored, make_state(expected, split)),
                "sources": {
                    tier: size for e in events if e.kind == "restored" for tier, size in e.fields["sources"].items()
                },
                "planned": [dict(e.fields) for e in events if e.kind == "restore_planned"],
                "rejected": [e.fields["reason"] for e in events if e.kind == "restore_rejected"],
                "rejected_in": sorted({e.tier for e in events if e.kind == "restore_rejected"}),
                "incomplete": [e.fields["reason"] for e in events if e.kind == "restore_incomplete"],
            }

    def meet(self) -> None:
        """Everybody has come here: what one of them changes is changed for all."""
        from ckptkit.job.coordination import make_coordinator

        self._met += 1
        make_coordinator().agree(f"meet-{self._met}", None, lambda _: None, timeout_s=60)

    def slots(self, act: str, process: int) -> Path:
        return self._root / "ram" / job_of(self._root / act) / f"host-{process}"

    def only(self, process: int, act: Callable[[], Any]) -> None:
        self.meet()
        if self._process == process:
            act()
        self.meet()

    def lose_a_ramdisk(self) -> None:
        """Data replicas: host 1 comes back empty, and has everything from host 0."""
        self.saved("lost", range(2), split=False)
        self.only(1, lambda: shutil.rmtree(self.slots("lost", 1)))
        shutil.rmtree(self._root / "lost" / "0", ignore_errors=True)
        self.found["lose_a_ramdisk"] = self.restored("lost", None, 1, split=False)

    def lose_a_shard(self) -> None:
        """Fully sharded and no copy anywhere: back to the durable step, on both."""
        self.saved("shard", range(2), split=True)
        self.only(1, lambda: shutil.rmtree(self.slots("shard", 1)))
        self.found["lose_a_shard"] = self.restored("shard", None, 0, split=True)

    def end_between_commits(self) -> None:
        """Fully sharded, and killed when one process of two had committed its part of the last step."""
        self.saved("between", range(2), split=True)

        def take_back() -> None:
            for name in ("newest.json", "step-000000000001-*.json"):
                for path in self.slots("between", 1).glob(f"0/{name}"):
                    path.unlink()

        self.only(1, take_back)
        self.found["end_between_commits"] = self.restored("between", None, 0, split=True)

    def swap_hosts(self) -> None:
        """The scheduler gave each process the other's host: what it wants is there."""
        self.saved("swap", range(2), split=True)
        self.meet()
        self.found["swap_hosts"] = self.restored("swap", None, 1, split=True, host=1 - self._process)

    def damage_a_slot(self) -> None:
        """A flipped bit in one ramdisk is had from the other host; the durable tier does not have the step."""
        self.saved("damage", range(2), split=False)

        def flip() -> None:
            for slot in self.slots("damage", 1).glob("0/slot-*.bin"):
                with slot.open("r+b") as file:
                    data = bytearray(file.read())
                    file.seek(0)
                    file.write(bytes(byte ^ 1 for byte in data))

        self.only(1, flip)
        self.found["damage_a_slot"] = self.restored("damage", 1, 1, split=False)

    def return_with_an_old_ramdisk(self) -> None:
        """Steps 2 and 3 of epoch 1 were abandoned for a step 2 of epoch 2, and host 1 comes back with its old slots
        and its old copies of host 0's."""
        import orbax.checkpoint as ocp

        self.saved("old", range(4), split=False, **self.copying())
        old, kept = self.slots("old", 1), self._root / "kept"
        self.only(1, lambda: shutil.copytree(old, kept))
        with self.manager("old", **self.copying()) as manager:
            manager.restore(1, args=ocp.args.StandardRestore(abstract(make_state(0, False))))  # pyright: ignore[reportCallIssue]
            manager.save(2, args=save_args(make_state(22, False)))
            manager.wait_until_finished()

        def put_back() -> None:
            shutil.rmtree(old)
            kept.rename(old)

        self.only(1, put_back)
        self.found["return_with_an_old_ramdisk"] = self.restored("old", None, 22, split=False, **self.copying())

    def outlive_a_zombie(self) -> None:
        """The run before has not died: it saves a higher step, and sends copies of it, while the new one has continued
        from step 1. Then host 1 is lost: half of the new run's step is only in a copy."""
        import orbax.checkpoint as ocp

        with self.manager("zombie", **self.copying()) as zombie:
            for step in range(2):
                zombie.save(step, args=save_args(make_state(step, True)))
                zombie.wait_until_finished()
            with self.manager("zombie", **self.copying()) as manager:
                manager.restore(None, args=ocp.args.StandardRestore(abstract(make_state(0, True))))  # pyright: ignore[reportCallIssue]
                manager.save(2, args=save_args(make_state(22, True)))
                manager.wait_until_finished()
                zombie.save(5, args=save_args(make_state(5, True)))
                zombie.wait_until_finished()
        self.only(1, lambda: shutil.rmtree(self.slots("zombie", 1)))
        self.found["outlive_a_zombie"] = self.restored("zombie", None, 22, split=True, **self.copying())

    def saved_as(self, act: str, values: dict[int, int], *, host: int, **options: Any) -> None:
        """Continues from the newest step, and saves steps of these values."""
        import orbax.checkpoint as ocp

        with self.manager(act, host, **options) as manager:
            if manager.latest_step() is not None:
                manager.restore(None, args=ocp.args.StandardRestore(abstract(make_state(0, True))))  # pyright: ignore[reportCallIssue]
            for step, value in values.items():
                manager.save(step, args=save_args(make_state(value, True)), force=True)
                manager.wait_until_finished()

    def make_the_root_again(self) -> None:
        """A run ends on hosts 0 and 1, its root is removed, another run ends on hosts 2 and 3. A third one starts with
        a host of each: both hold a half of a step of the same numbers."""
        own = self._process
        self.saved_as("anew", {0: 0, 1: 1, 2: 2}, host=own)
        self.only(0, lambda: shutil.rmtree(self._root / "anew"))
        self.saved_as("anew", {0: 100, 1: 101, 2: 102}, host=2 + own)
        self.only(0, lambda: [shutil.rmtree(self._root / "anew" / str(step)) for step in (1, 2)])
        self.found["make_the_root_again"] = self.restored("anew", None, 100, split=True, host=3 * own)
        self.found["the_removed_run_alone"] = self.restored("anew", None, 100, split=True, host=own)

    def save_unrecorded(self) -> None:
        """A run on hosts 0 and 1 cannot record its epoch, and commits to ramdisks. Another one on hosts 2 and 3 takes
        the same epoch, and saves the same steps."""
        from unittest import mock

        from ckptkit.durable.lifecycle.epochs import EpochRecords
        from ckptkit.errors import TransientStoreError

        own = self._process
        self.saved_as("unrecorded", {0: 0}, host=own)

        def away(*_: Any) -> None:
            raise TransientStoreError("503 (of the test)")

        with mock.patch.object(EpochRecords, "write", away), suppress(CheckpointError):
            self.ram_only("unrecorded", {1: 11, 2: 12}, host=own)
        self.found["continue_unrecorded"] = self.restored("unrecorded", None, 12, split=True, host=own)
        self.ram_only("unrecorded", {1: 21, 2: 22}, host=2 + own)
        self.found["mix_unrecorded"] = self.restored("unrecorded", None, 0, split=True, host=3 * own)
        self.found["unrecorded_too_late"] = self.restored("unrecorded", None, 0, split=True, host=own)

    def ram_only(self, act: str, values: dict[int, int], *, host: int) -> None:
        """As `saved_as`, for steps that are not due in the durable tier."""
        import orbax.checkpoint as ocp

        with self.manager(act, host) as manager:
            manager.restore(None, args=ocp.args.StandardRestore(abstract(make_state(0, True))))  # pyright: ignore[reportCallIssue]
            for step, value in values.items():
                manager.save(step, args=save_args(make_state(value, True)))
                manager.wait_until_finished()

    def save_a_step_again(self) -> None:
        """A lower step is deleted and saved once more, after others: barriers of its first save may not decide it."""
        with self.manager("repeat") as manager:
            for step, value in ((110, 1), (120, 2), (121, 3), (110, 4), (122, 5), (110, 6)):
                if step in manager.all_steps():
                    manager.delete(step)
                taken = manager.save(step, args=save_args(make_state(value, True)), force=step == 110)
                manager.wait_until_finished()
            books = [[str(record.save_id), list(record.tiers)] for record in manager.steps()]
        self.found["save_a_step_again"] = {
            **self.restored("repeat", None, 6, split=True),
            "taken": taken,
            "books": books,
        }

    def go_without_peers(self) -> None:
        """Without peers a host that lost its ramdisk falls back, and takes everybody with it."""
        self.saved("without", range(2), split=False, peers=False)
        self.only(1, lambda: shutil.rmtree(self.slots("without", 1)))
        self.found["go_without_peers"] = self.restored("without", None, 0, split=False, peers=False)

    def copying(self) -> dict[str, Any]:
        """The options of a manager with copies on the other host."""
        import ckptkit

        return {"more": [ckptkit.Tier.peer()]}

    def keep_copies(self) -> None:
        """Fully sharded, one host lost with everything: its share is had from the host that kept the copy."""
        before = len(self._events)
        self.saved("copies", range(3), split=True, **self.copying())
        committed = [[e.step, e.tier] for e in self._events[before:] if e.kind == "committed" and e.tier == "peer"]
        self.only(1, lambda: shutil.rmtree(self.slots("copies", 1)))
        self.found["keep_copies"] = self.restored("copies", None, 2, split=True, **self.copying())
        self.found["keep_copies"]["committed"] = committed

    def lose_both(self) -> None:
        """Both hosts lost: nothing but the durable step is left."""
        self.saved("both", range(2), split=True, **self.copying())
        for process in (0, 1):
            self.only(process, lambda: shutil.rmtree(self.slots("both", self._process)))
        self.found["lose_both"] = self.restored("both", None, 0, split=True, **self.copying())

    def go_on_after_a_loss(self) -> None:
        """A loss, more saves, and the loss of the other host: copies are made again after the first."""
        self.saved("again", range(2), split=True, **self.copying())
        self.only(1, lambda: shutil.rmtree(self.slots("again", 1)))
        first = self.restored("again", None, 1, split=True, then=range(2, 7), **self.copying())
        self.only(0, lambda: shutil.rmtree(self.slots("again", 0)))
        self.found["go_on_after_a_loss"] = self.restored("again", None, 6, split=True, **self.copying())
        self.found["go_on_after_a_loss"]["first"] = first

    def save_last(self) -> None:
        """A preemption while the copy of the step before is still in flight, and time enough for all tiers."""
        with self.manager("last", **self.copying()) as manager, slow_copies(lambda: time.sleep(0.5)):
            manager.save(1, args=save_args(make_state(1, True)))
            last = manager.save_last(2, save_args(make_state(2, True)), grace_s=120.0)
        self.found["save_last"] = {"tiers": last.tiers, "unfinished": last.unfinished, "left_out": dict(last.left_out)}
        self.only(1, lambda: shutil.rmtree(self.slots("last", 1)))
        self.found["restore_last"] = self.restored("last", None, 2, split=True, **self.copying())

    def save_last_beside_a_slow_peer(self) -> None:
        """A peer that takes nothing costs the last save neither its other tiers nor the grace; its rate is heeded."""
        go_on = threading.Event()
        with self.manager("slow", **self.copying()) as manager:
            with slow_copies(lambda: go_on.wait(60)):
                last = manager.save_last(1, save_args(make_state(1, True)), grace_s=9.0)
                go_on.set()
                manager.wait_until_finished()
            then = manager.save_last(2, save_args(make_state(2, True)), grace_s=4.0)
            manager.wait_until_finished()
        self.found["save_last_beside_a_slow_peer"] = {
            "tiers": last.tiers,
            "unfinished": last.unfinished,
            "then": then.tiers[:2],
            "then_left_out": sorted(then.left_out),
        }

    def scrub(self) -> None:
        """Host 1's slot and its copy of host 0's are damaged while the job runs."""
        with self.manager("scrub", **self.copying()) as manager:
            own, copy = self.slots("scrub", 1) / "0", self.slots("scrub", 1) / "buddy-0-0"
            for step in range(2):
                manager.save(step, args=save_args(make_state(step, True)))
                manager.wait_until_finished()
            self.only(1, lambda: (flip(own, 1), flip(copy, 1)))
            before = len(self._events)
            found: dict[str, Any] = {"found": told(manager.scrub())}
            found["events"] = [e.step for e in self._events[before:] if e.kind == "scrubbed"]
            for step in range(2, 5):  # every slot is written again
                manager.save(step, args=save_args(make_state(step, True)))
                manager.wait_until_finished()
            found["then"] = told(manager.scrub())
        self.found["scrub"] = found
        self.found["restore_scrubbed"] = self.restored("scrub", 4, 4, split=True, **self.copying())

    def save_to_grow(self) -> None:
        self.saved("grow", range(2), split=True)

    def grow(self) -> None:
        """Three processes restore what two have saved: each box lies in parts of theirs."""
        self.found["grow"] = self.restored("grow", None, 1, split=True)


@contextmanager
def slow_copies(wait: Callable[[], Any]) -> Iterator[None]:
    """Every copy to another host waits first."""
    from ckptkit.peers.client import PeerClient

    send = PeerClient.send_copy

    def slowly(self: Any, *args: Any) -> Any:
        wait()
        yield from send(self, *args)

    PeerClient.send_copy = slowly  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        PeerClient.send_copy = send  # pyright: ignore[reportAttributeAccessIssue]


def told(scrubbed: Any) -> dict[str, Any]:
    """A scrub as JSON, without paths."""
    return {"checked": scrubbed.checked, "damaged": [each.save_id.step for each in scrubbed.damaged]}


def slot_of(directory: Path, step: int) -> tuple[Path, Any]:
    """The file that holds a step in a slot directory, and its manifest."""
    from ckptkit.slots.reader import read_manifest

    (path,) = directory.glob(f"step-{step:012d}-*.json")
    manifest = read_manifest(path)
    return directory / manifest.slot, manifest


def flip(directory: Path, step: int) -> None:
    """Flips a bit of each box of a step in a slot directory."""
    path, manifest = slot_of(directory, step)
    with path.open("r+b") as file:
        for leaf in (leaf for leaves in manifest.arrays.values() for leaf in leaves):
            for record in leaf.boxes:
                file.seek(record.offset)
                first = file.read(1)[0]
                file.seek(record.offset)
                file.write(bytes([first ^ 1]))


def make_state(seed: int, split: bool) -> Any:
    """Global arrays: `w` over all devices if `split`, else whole on every process; a replicated one; a number."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh(
        (jax.process_count(), jax.device_count() // jax.process_count()),
        ("data", "fsdp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )

    def put(value: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    rows = (("data", "fsdp"),) if split else ("fsdp",)
    return {
        "w": put(np.arange(ROWS * 1024, dtype=np.float32).reshape(ROWS, 1024) + seed, *rows),
        "b": put(np.full(8, seed, np.int8)),
        "seen": seed,
    }


def save_args(state: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.StandardSave(state)  # pyright: ignore[reportCallIssue]


def same_here(found: Any, expected: Any) -> bool:
    """Whether numbers are equal, and this process's shards of the arrays the same bits."""
    from tests.multiprocess.save_worker import same_here as same_shards

    arrays = [{name: tree[name] for name in ("w", "b")} for tree in (found, expected)]
    return found["seen"] == expected["seen"] and same_shards(*arrays)


if __name__ == "__main__":
    main()
