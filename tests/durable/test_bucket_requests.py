"""The durable tier's requests to a bucket: few, none for known facts, and deletions outside of a save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.listing import latest_step
from ckptkit.model.paths import COMMIT_MARK
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Delay, Fault, FaultPlan, Fixed, Kind, Reset, Status
from tests.states import abstract, assert_same

LEAVES = 600  # of a small transformer with Adam


def state_of(step: int) -> dict[str, jax.Array]:
    return {f"leaf{index}": jnp.full((8, 8), step * 1000.0 + index) for index in range(LEAVES)}


def save(manager: Any, step: int, state: Any = None) -> None:
    assert manager.save(step, args=ocp.args.StandardSave(state or state_of(step)), force=True)  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def requests(server: BucketServer) -> int:
    """How many there were since the last time. One is logged a moment after its answer was sent."""
    count = -1
    while count != (count := len(server.log.entries())):
        time.sleep(0.1)
    server.log.clear()
    return count


def test_saving_and_restoring_600_leaves_takes_few_requests(server: BucketServer) -> None:
    """Buckets throttle by requests, and each costs a round trip: stock Orbax takes 90 to 180."""
    with ckptkit.CheckpointManager("gs://runs/run", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        saves = []
        for step in range(1, 5):
            requests(server)
            save(manager, step)
            saves.append(requests(server))
        assert max(saves) <= 40, saves  # the last two delete a step, one by one: emulators take no batches
        assert saves[1] <= 20, saves
        assert saves[0] <= 26, saves  # which records the run's epoch and looks for what earlier ones have left, too
        found = manager.restore(4, args=ocp.args.StandardRestore(abstract(state_of(4))))  # pyright: ignore[reportCallIssue]
        assert requests(server) <= 20
        assert_same(found, state_of(4))
    with ocp.CheckpointManager("gs://runs/run") as stock:
        assert list(stock.all_steps()) == [3, 4]
        assert_same(stock.restore(4, args=ocp.args.StandardRestore(abstract(state_of(4)))), state_of(4))  # pyright: ignore[reportCallIssue]


def in_a_row(server: BucketServer) -> int:
    """How many answers were waited for, one after the other: the longest chain of requests that begin when the one
    before has ended."""
    count, last_s = 0, 0.0
    spans = [(entry.exchange.started_s, entry.exchange.elapsed_s) for entry in server.log.entries()]
    for began_s, ended_s in sorted(
        [(began_s, began_s + took_s) for began_s, took_s in spans], key=lambda span: span[1]
    ):
        if began_s >= last_s:
            count, last_s = count + 1, ended_s
    return count


def least_in_a_row(server: BucketServer, at_most: int, action: Callable[[int], object]) -> int:
    """The shortest chain of a few repetitions: on a busy machine requests begin late, and chains only grow."""
    chains: list[int] = []
    for repetition in range(5):
        requests(server)
        action(repetition)
        chains.append(in_a_row(server))
        if chains[-1] <= at_most:
            break
    return min(chains)


def test_save_and_restore_have_few_sequential_round_trips(server: BucketServer) -> None:
    """Each is a round trip: 15 and 12 of them took longer than the bytes of a small state."""
    state = {"w": jnp.arange(3000.0)}
    wanted: Any = ocp.args.StandardRestore(abstract(state))  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        save(manager, 1, state)
        manager.restore(1, args=wanted)
        server.faults = FaultPlan(faults=(Fault(effect=Delay(latency=Fixed(seconds=0.3))),))
        assert least_in_a_row(server, 8, lambda repetition: save(manager, 2 + repetition, state)) <= 8
        assert least_in_a_row(server, 6, lambda repetition: manager.restore(2, args=wanted)) <= 6


@pytest.mark.parametrize("harm", ["default/_ckptkit/process-0.json", "default/manifest.ocdbt", "commit_success.txt"])
def test_damaged_newest_step_is_skipped(server: BucketServer, harm: str) -> None:
    """Reading ahead in a damaged step would end the restore."""
    state = {"w": jnp.arange(3000.0)}
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        save(manager, 1, state)
        save(manager, 2, {"w": jnp.zeros(3000)})
    store = open_store("gs://runs/run")
    if harm == "commit_success.txt":
        store.delete(f"2/{harm}")
    else:
        store.put(f"2/{harm}", b"damaged")
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        found = manager.restore(None, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
        assert_same(found, state)


@pytest.mark.long
def test_latest_of_1000_steps_takes_a_small_read_each(server: BucketServer) -> None:
    """The order of saves is in the steps: a script would wait for thousands of requests more than these."""
    store = open_store("gs://runs/long")
    for step in range(1000):
        store.put(f"{step}/default/_METADATA", b"{}")
        store.put(f"{step}/commit_success.txt", b"1")
    store.put("1000/_CHECKPOINT_METADATA", b"{}")  # begun, and never committed
    requests(server)
    assert latest_step("gs://runs/long") == 999
    # Two pages of names, the marks, a look at what is not committed (gcsfs asks twice before it reports that), and at
    # what stock Orbax may have written: its names, its items, its metadata.
    assert requests(server) <= 1000 + 30


def _mark(effect: Status) -> Fault:
    """On the request that commits a step: a copy of its intent."""
    return Fault(effect=effect, objects="run/_ckptkit/intents/*", kinds=(Kind.COPY,), count=1)


def test_next_attempt_removes_objects_of_a_failed_one(server: BucketServer) -> None:
    """Objects of an attempt that failed would be joined to those of the next, or never removed."""
    server.faults = FaultPlan(faults=(_mark(Status(code=403)),))
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        with pytest.raises(ckptkit.SaveFailedError):
            save(manager, 1)
        assert manager.all_steps() == []
        left = set(open_store("gs://runs/run").list_all("1"))
        assert left
        save(manager, 1)
        assert not {name for name in open_store("gs://runs/run").list_all("1") if "/d/" in name} & left
        assert_same(manager.restore(1, args=ocp.args.StandardRestore(abstract(state_of(1)))), state_of(1))  # pyright: ignore[reportCallIssue]


@pytest.mark.long
def test_after_several_failed_saves_old_steps_are_still_pruned(server: BucketServer) -> None:
    """The listing of the first failure would be used at the second: the steps in between would never be removed."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ckptkit.CheckpointManager("gs://runs/run", options=options) as manager:
        for step in range(12):
            if failing := step % 4 == 0:
                server.faults = FaultPlan(faults=(_mark(Status(code=403)),))
                with pytest.raises(ckptkit.SaveFailedError):
                    save(manager, step)
                server.faults = FaultPlan()
            else:
                save(manager, step)
            assert (step in manager.all_steps()) != failing
        assert list(manager.all_steps()) == [10, 11]
    store = open_store("gs://runs/run")
    assert [step for step in range(12) if store.stat(f"{step}/{COMMIT_MARK}") is not None] == [10, 11]


@pytest.mark.parametrize("stage", ["before", "after"])
def test_lost_marker_response_commits_once(server: BucketServer, stage: Any) -> None:
    """The retry would find its own marker and call a step that is there a failure."""
    server.faults = FaultPlan(faults=(_mark(Status(code=503, stage=stage)),))
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        save(manager, 1)
        assert manager.all_steps() == [1]
        assert server.fired() == [1]


def test_failed_deletion_does_not_fail_the_save(server: BucketServer) -> None:
    """A permission that is missing for deletions would stop all checkpoints."""
    with ckptkit.CheckpointManager("gs://runs/run", options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        save(manager, 1)
        server.faults = FaultPlan(faults=(Fault(effect=Status(code=403), kinds=(Kind.DELETE,), objects="run/1/*"),))
        save(manager, 2)
        assert latest_step("gs://runs/run") == 2
        assert open_store("gs://runs/run").list_all("1")
        server.faults = FaultPlan()
        save(manager, 3)
        assert open_store("gs://runs/run").list_all("1") == []
        assert open_store("gs://runs/run").list_all("2") == []


SAVES = [8, pytest.param(100, marks=pytest.mark.slow)]
FIVE_PERCENT = FaultPlan(
    seed=8,
    faults=tuple(
        Fault(effect=effect, probability=0.01)
        for effect in (
            Status(code=503),
            Status(code=503, stage="after"),
            Status(code=429),
            Reset(),
            Reset(stage="after"),
        )
    ),
)


@pytest.mark.parametrize("saves", SAVES)
def test_five_percent_request_faults_lose_nothing(
    server: BucketServer, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket on a bad day would commit half a step, or leave objects that nobody sees and somebody pays for."""
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", _no_sleep)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    failed: list[int] = []
    with ckptkit.CheckpointManager("gs://runs/run", options=options) as manager:
        server.faults = FIVE_PERCENT
        for step in range(saves):
            try:
                save(manager, step, {"w": jnp.full((64, 64), float(step)), "b": jnp.arange(3.0) + step})
            except ckptkit.SaveFailedError:
                failed.append(step)
            assert (step in manager.all_steps()) != (step in failed)
        assert sum(server.fired()) > 0
        server.faults = FaultPlan()
        final = {"w": jnp.full((64, 64), -1.0), "b": jnp.zeros(3)}
        save(manager, saves, final)
        kept = list(manager.all_steps())
        for step in kept:
            wanted = final if step == saves else {"w": jnp.full((64, 64), float(step)), "b": jnp.arange(3.0) + step}
            assert_same(manager.restore(step, args=ocp.args.StandardRestore(abstract(wanted))), wanted)  # pyright: ignore[reportCallIssue]
    left = {name.partition("/")[0] for name in open_store("gs://runs/run").list_all("")} - {"_ckptkit"}
    print(f"{len(failed)} of {saves} saves failed")
    assert left <= {str(step) for step in (*kept, *failed)}, "pruned and dropped steps are deleted"


async def _no_sleep(_: float) -> None:
    """Retries at once."""
