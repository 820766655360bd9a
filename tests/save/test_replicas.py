"""Data replicas that differ: found at the save, named, and never made the step that is restored where that is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind, ReplicaPolicy
from ckptkit.snapshot.replicas import LocalReplica, Rotation, minority
from tests.states import make_state, put


def with_bad_copy(array: jax.Array, device: int) -> jax.Array:
    """The same array, but one bit of one device's buffer is another."""
    shards = []
    for shard in array.addressable_shards:
        block = np.array(shard.data)
        if shard.device.id == device:
            block.reshape(-1).view(np.uint8)[3] ^= 1
        shards.append(jax.device_put(block, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


class Job:
    def __init__(self, home: Path, **options: Any):
        self.events: list[ckptkit.Event] = []
        log = ckptkit.EventLog()
        log.observe(self.events.append)
        self.manager = ckptkit.CheckpointManager(
            home / "root",
            options=ocp.CheckpointManagerOptions(save_interval_steps=1),
            tiers=[ckptkit.Tier.ram(str(home / "ram"))],
            host_id="h0",
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=60),
            **options,
        )

    def save(self, step: int, state: Any) -> None:
        self.manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]

    def differing(self) -> list[ckptkit.Event]:
        return [event for event in self.events if event.kind == Kind.REPLICAS_DIFFER]


def damaged_state() -> Any:
    state = make_state(3)
    # Two replicas of each half of `w`, four copies of `b`.
    return {**state, "w": with_bad_copy(state["w"], 1), "b": with_bad_copy(state["b"], 2)}


@pytest.mark.parametrize("staging", ["slot_copy", "device_copy"])
def test_every_replica_difference_is_reported(tmp_path: Path, staging: Any) -> None:
    """A device that computes wrong numbers would go into every later step of the run, and nobody would know."""
    job = Job(tmp_path, saving=ckptkit.SaveOptions(staging=staging))
    with job.manager as manager:
        job.save(0, make_state(3))
        manager.wait_until_finished()
        assert job.differing() == []
        job.save(1, damaged_state())
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1], "it is reported, no more"
    found = {event.fields["leaf"]: event.fields for event in job.differing()}
    assert {event.step for event in job.differing()} == {1}
    assert set(found) == {"w", "b"}
    assert found["w"]["item"] == "default"
    assert found["w"]["policy"] == "report"
    holders = found["w"]["holders"]
    assert (1 in [each["device"] for each in holders], len(holders)) == (True, 2)
    assert {each["host"] for each in holders} == {"h0"}
    assert len({each["digest"] for each in holders}) == 2
    assert len(found["w"]["suspects"]) == 2, "of two, nobody knows which one is right"
    assert found["b"]["suspects"] == ["device 2 of h0"], "of four, three agree"
    assert found["b"]["box"] == [[0], [4]]
    json.dumps([dict(event.fields) for event in job.differing()])


def test_last_step_with_equal_replicas_is_kept(tmp_path: Path) -> None:
    """The step to which a run goes back would hold what one of its devices got wrong."""
    job = Job(tmp_path, saving=ckptkit.SaveOptions(replicas=ReplicaPolicy(on_difference="keep")))
    with job.manager as manager:
        job.save(0, make_state(0))
        job.save(1, damaged_state())
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
        job.save(2, make_state(2))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2], "training goes on"
    (skipped,) = [event for event in job.events if event.kind == Kind.SKIPPED]
    assert (skipped.step, skipped.fields["policy"]) == (1, "veto")
    assert skipped.fields["reason"].startswith("replicas differ: leaf default:b, box (0,) to (4,): process 0 on h0")
    assert not list((tmp_path / "ram").rglob("step-000000000001-*")), "no manifest of it was ever written"
    assert not [e for e in job.events if e.step == 1 and e.fields.get("phase") == "committed_here"]


def test_on_difference_stop_ends_the_run(tmp_path: Path) -> None:
    """A run that was told to stop would train on a broken device for days."""
    job = Job(tmp_path, saving=ckptkit.SaveOptions(replicas=ReplicaPolicy(on_difference="stop")))
    manager = job.manager
    job.save(0, make_state(0))
    manager.wait_until_finished()
    job.save(1, damaged_state())
    with pytest.raises(ckptkit.ReplicaMismatchError, match=r"leaf default:b, box \(0,\) to \(4,\): .*device") as raised:
        manager.wait_until_finished()
    assert raised.value.step == 1
    assert len(raised.value.differences) == 2
    for _ in range(2):
        with pytest.raises(ckptkit.ReplicaMismatchError, match="step 1: data replicas differ"):
            job.save(2, make_state(2))
    with pytest.raises(ckptkit.ReplicaMismatchError):
        manager.check_for_errors()
    assert manager.all_steps() == [0]
    restored = manager.restore(None)
    assert int(restored["count"]) == 0
    job.save(2, make_state(2))
    manager.close()
    assert manager.all_steps() == [0, 2], "a restore puts it behind the run"


def test_disabled_comparison_reads_nothing(tmp_path: Path) -> None:
    """A copy of the whole state could be read at each save though nobody wants it."""
    for replicas in (None, ReplicaPolicy(local_bytes_max=0)):
        job = Job(tmp_path, saving=ckptkit.SaveOptions(replicas=replicas))
        with job.manager:
            job.save(0 if replicas is None else 1, damaged_state())
        assert job.differing() == []


def test_comparison_rotates_over_the_copies(tmp_path: Path) -> None:
    """Copies beyond the limit would never be looked at."""
    bad = damaged_state()
    job = Job(tmp_path, saving=ckptkit.SaveOptions(replicas=ReplicaPolicy(local_bytes_max=64)))
    saves = 30
    with job.manager as manager:
        for step in range(saves):
            job.save(step, bad)
            manager.wait_until_finished()
    said = [(event.step, event.fields["leaf"]) for event in job.differing()]
    assert {leaf for _, leaf in said} == {"w", "b"}
    assert len(said) < saves, "not all at every save"


def test_many_differences_are_those_of_nondeterministic_kernels(tmp_path: Path) -> None:
    """A run on GPUs would report every save, and nobody would see the broken device among them."""
    few = {name: put(np.full((4, 4), number, np.float32)) for number, name in enumerate("abcdef")}
    many = {name: with_bad_copy(array, 1) for name, array in few.items()}
    job = Job(tmp_path, saving=ckptkit.SaveOptions(replicas=ReplicaPolicy(reported_max=3)))
    with job.manager as manager:
        for step, state in enumerate((many, {**few, "a": many["a"]})):
            job.save(step, state)
            manager.wait_until_finished()
    assert [(event.step, event.fields["leaf"]) for event in job.differing()] == [(1, "a")]


@pytest.mark.parametrize(
    "fields", [{"reported_max": 0}, {"reported_max": 8}, {"reported_max": 3, "on_difference": "stop"}]
)
def test_threshold_that_cannot_be_applied_is_refused(fields: Any) -> None:
    """A save would be refused for differences that the policy expects, or nothing would ever be left out."""
    with pytest.raises(ValueError, match=r"reported_max"):
        ReplicaPolicy(**fields)


def test_rotation_compares_each_copy_before_any_repeats() -> None:
    """Some copies would be compared all the time, others never."""

    def local_replica(number: int, nbytes: int) -> LocalReplica:
        return LocalReplica(number=number, item="i", leaf=0, record=None, box=None, device=None, nbytes=nbytes)  # pyright: ignore[reportArgumentType]

    sizes = [3, 1, 9, 2, 2, 4]
    local_replicas = tuple(map(local_replica, range(len(sizes)), sizes))
    rotation = Rotation(ReplicaPolicy(local_bytes_max=5))
    chosen = [rotation.choose(local_replicas) for _ in range(5)]
    assert all(sum(each.nbytes for each in some) <= 5 or len(some) == 1 for some in chosen)
    assert [each.number for some in chosen for each in some][:6] == [0, 1, 2, 3, 4, 5]
    assert Rotation(ReplicaPolicy(local_bytes_max=None)).choose(local_replicas) == local_replicas
    assert Rotation(ReplicaPolicy(local_bytes_max=0)).choose(local_replicas) == ()
    assert Rotation(ReplicaPolicy()).choose(()) == ()
    assert rotation.choose(local_replicas[:1]) == local_replicas[:1], "another state, with fewer of them"


def test_minority_is_suspected() -> None:
    """A host would be taken out that is the only one that is right."""
    assert minority({0: "a", 1: "b"}) == [0, 1]
    assert minority({0: "a", 1: "b", 2: "a"}) == [1]
    assert minority({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 1, 2, 3]
    assert minority({0: "a", 1: "b", 2: "c"}) == [0, 1, 2]


@pytest.mark.parametrize(("words", "value"), [("on_difference", "warn"), ("local_bytes_max", -1)])
def test_bad_settings_are_refused(words: str, value: Any) -> None:
    """A mistyped policy would compare nothing."""
    with pytest.raises(ValueError, match=words):
        ReplicaPolicy(**{words: value})


def test_replicas_of_scalars_and_keys_are_compared(tmp_path: Path) -> None:
    """Leaves without extent, or behind a typed key, would be skipped."""
    key = jax.random.key(4)
    bad_data = with_bad_copy(put(jax.random.key_data(key)), 3)
    state = {"key": jax.random.wrap_key_data(bad_data), "one": with_bad_copy(put(jnp.float32(2)), 0)}
    job = Job(tmp_path)
    with job.manager:
        job.save(0, state)
    assert {event.fields["leaf"] for event in job.differing()} == {"key", "one"}
    suspects = {event.fields["leaf"]: event.fields["suspects"] for event in job.differing()}
    assert suspects == {"key": ["device 3 of h0"], "one": ["device 0 of h0"]}
