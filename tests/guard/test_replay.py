"""A replay proves that saves follow from each other, and finds the one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from ckptkit.guard import Certificate, NewSave, ReplayPlan, replay, replay_new

MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
WHOLE, ROWS = NamedSharding(MESH, PartitionSpec()), NamedSharding(MESH, PartitionSpec("data"))
EVERY, STEPS = 3, 12


def fresh() -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.linspace(-1, 1, 8, dtype=jnp.float32), WHOLE),
        "count": jax.device_put(jnp.uint32(0), WHOLE),
    }


def batches(first: int) -> Iterator[jax.Array]:
    """Row r of the batch of a step is on device r."""
    step = first
    while True:
        yield jax.device_put(np.random.default_rng(step).normal(size=(2, 8)).astype(np.float32), ROWS)
        step += 1


@jax.jit
def gradients_of(state: dict[str, Any], batch: jax.Array) -> jax.Array:
    """A row for each device, before they are summed."""
    return batch * jnp.tanh(state["w"])


@jax.jit
def apply(state: dict[str, Any], rows: jax.Array) -> dict[str, Any]:
    return {"w": state["w"] - 0.01 * rows.sum(axis=0), "count": state["count"] + 1}


def flip(rows: jax.Array, device: int) -> jax.Array:
    """The gradient with one bit of one device's part flipped."""
    parts = [np.array(shard.data) for shard in rows.addressable_shards]
    parts[device].view(np.uint32)[0, 3] ^= 1 << 20
    placed = [jax.device_put(part, MESH.devices[place]) for place, part in enumerate(parts)]
    return jax.make_array_from_single_device_arrays(rows.shape, ROWS, placed)


def train(root: Path, *, bad_step: int | None = None) -> None:
    state, data = fresh(), batches(0)
    with ckptkit.CheckpointManager(root) as manager:
        for step in range(STEPS):
            rows = gradients_of(state, next(data))
            state = apply(state, flip(rows, device=1) if step == bad_step else rows)
            if (step + 1) % EVERY == 0:
                args = ocp.args.Composite(
                    state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"step": step + 1})
                )
                manager.save(step + 1, args=args)
                manager.wait_until_finished()


def wanted() -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardRestore(ckptkit.abstract_state(fresh())), data=ocp.args.JsonRestore()
    )


def certify(root: Path, *, first: int | None = None, last: int | None = None, record: bool = False) -> Certificate:
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ckptkit.CheckpointManager(root, options=options) as manager:
        return replay(
            manager,
            lambda: lambda state, batch: apply(state, gradients_of(state, batch)),
            lambda step, restored: batches(restored["data"]["step"]),
            args=wanted(),
            first=first,
            last=last,
            record=record,
        )


def test_deterministic_run_is_certified(tmp_path: Path) -> None:
    """A sound run would be called corrupt."""
    train(tmp_path)
    assert certify(tmp_path) == Certificate(steps=(9, 12), steps_replayed=3)
    assert certify(tmp_path, first=3) == Certificate(steps=(3, 6, 9, 12), steps_replayed=9)
    assert certify(tmp_path, first=3, last=6).is_certified


@pytest.mark.parametrize("bad_step", [3, 7, 8])
def test_flipped_bit_is_placed_between_two_saves(tmp_path: Path, bad_step: int) -> None:
    """A device that computes something else would spoil every later save, and nobody would know."""
    train(tmp_path, bad_step=bad_step)
    found = certify(tmp_path, first=3)
    assert not found.is_certified
    assert found.difference is not None
    assert found.difference.after_step <= bad_step < found.difference.step
    assert found.steps_replayed == found.difference.step - 3
    assert {leaf.split(" on ")[0] for leaf in found.difference.leaves} == {"w"}  # not the count
    assert certify(tmp_path, first=found.difference.step).is_certified if found.difference.step < STEPS else True
    assert f"to save {found.difference.step} differ from their replay" in str(found.difference)


def test_replay_needs_a_manager_of_its_own_and_two_saves(tmp_path: Path) -> None:
    """A replay would move the run that it looks at."""
    train(tmp_path)
    with ckptkit.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="read_only=True"):
        replay(manager, lambda: lambda state, batch: state, lambda step, restored: [])
    with pytest.raises(ValueError, match="give two saves"):
        certify(tmp_path, last=3)
    with pytest.raises(ckptkit.StepNotFoundError, match=r"step 4 was not found; saved are \[3, 6, 9, 12\]"):
        certify(tmp_path, first=4)


def test_restore_takes_the_newest_certified_step(tmp_path: Path) -> None:
    """A run that a bad device has spoiled would continue from the spoiled save."""
    train(tmp_path, bad_step=7)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ckptkit.StepNotFoundError, match=r"has no certified step; `ckptkit certify"):
            manager.restore(None, args=wanted(), certified=True)
        with pytest.raises(ValueError, match="give step=None, no directory"):
            manager.restore(6, args=wanted(), certified=True)
    found = certify(tmp_path, first=3, record=True)
    assert found.difference is not None
    assert found.difference.step == 9
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=wanted(), certified=True)["data"] == {"step": 6}
        assert manager.latest_step() == 6, "the run continues from there"


def test_damaged_certified_step_is_skipped_for_the_next_older(tmp_path: Path) -> None:
    """One flipped bit on the disk would leave a run without any certified step."""
    train(tmp_path)
    assert certify(tmp_path, first=3, record=True).steps == (3, 6, 9, 12)
    for path in (tmp_path / "12" / "state").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=wanted(), certified=True)["data"] == {"step": 9}


def test_save_that_replaces_a_certified_one_is_not_certified(tmp_path: Path) -> None:
    """A run that went back and was spoiled would be called certified by the save that it replaced."""
    train(tmp_path)
    certify(tmp_path, first=3, record=True)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(6, args=wanted())
        for step in (9, 12):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(restored["state"]), data=ocp.args.JsonSave({"step": step})
            )
            manager.save(step, args=args)
        manager.wait_until_finished()
    assert [entry.step for entry in ckptkit.list_steps(str(tmp_path), host_id="").steps if entry.certified] == [6]
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=wanted(), certified=True)["data"] == {"step": 6}


def test_steps_of_stock_orbax_cannot_be_recorded(tmp_path: Path) -> None:
    """A certificate would be taken for that of any other step with the same number."""
    state = fresh()
    with ocp.CheckpointManager(tmp_path) as stock:
        for step in (3, 6):
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"step": step}))
            stock.save(step, args=args)
    with pytest.raises(ValueError, match="step 6 was written by stock Orbax, and has no identity to certify"):
        certify(tmp_path, record=True)


def test_batches_that_end_too_early_are_named(tmp_path: Path) -> None:
    """The save would be called corrupt because its last batches are missing."""
    train(tmp_path)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        few = [next(batches(9))]
        with pytest.raises(ValueError, match="gives no batch for step 10, and save 12 needs it"):
            replay(manager, lambda: lambda state, batch: state, lambda step, restored: few, args=wanted())


def test_state_without_leaves_certifies_nothing(tmp_path: Path) -> None:
    """Every save would be certified, a spoiled one too, because nothing was compared."""
    train(tmp_path, bad_step=7)
    plan = ReplayPlan(
        make_step=lambda: lambda state, batch: state,
        make_batches=lambda step, restored: batches(step),
        args=wanted(),
        state_of=lambda restored: {},
    )
    options = ocp.CheckpointManagerOptions(read_only=True)
    with (
        ckptkit.CheckpointManager(tmp_path, options=options) as manager,
        pytest.raises(ValueError, match="state_of returned dict without leaves for step 12, so there is nothing"),
    ):
        replay(manager, plan.make_step, plan.make_batches, args=plan.args, state_of=plan.state_of, record=True)
    with pytest.raises(ValueError, match="state_of returned dict without leaves for step 12"):
        next(replay_new(tmp_path, plan, steps_max=4))
    assert certified_steps(tmp_path) == []


class Job:
    """A running job: each call of `save` is some steps and a save, and only the newest save is kept."""

    def __init__(self, root: Path):
        self.root = root
        self.step, self.state, self.data = 0, fresh(), batches(0)
        self.manager = self._manager()

    def _manager(self) -> ckptkit.CheckpointManager:
        return ckptkit.CheckpointManager(self.root, options=ocp.CheckpointManagerOptions(max_to_keep=1))

    def restart(self) -> None:
        self.manager.close()
        self.manager = self._manager()
        self.manager.restore(None, args=wanted())

    def save(self, steps: int, *, spoiled: bool = False) -> None:
        for _ in range(steps):
            rows = gradients_of(self.state, next(self.data))
            self.state = apply(self.state, flip(rows, device=1) if spoiled else rows)
        self.step += steps
        args = ocp.args.Composite(state=ocp.args.StandardSave(self.state), data=ocp.args.JsonSave({"step": self.step}))
        self.manager.save(self.step, args=args)
        self.manager.wait_until_finished()


def watched(root: Path, **more: Any) -> Iterator[NewSave]:
    plan = ReplayPlan(
        make_step=lambda: lambda state, batch: apply(state, gradients_of(state, batch)),
        make_batches=lambda step, restored: batches(restored["data"]["step"]),
        args=wanted(),
    )
    return replay_new(root, plan, steps_max=4, poll_s=0.01, idle_timeout_s=0.1, **more)


def certified_steps(root: Path) -> list[int]:
    return [entry.step for entry in ckptkit.list_steps(str(root), host_id="").steps if entry.certified]


def test_new_saves_of_a_running_job_are_certified(tmp_path: Path) -> None:
    """The watch would need saves that the job has deleted, or certify steps that it has not replayed."""
    job = Job(tmp_path)
    job.save(2)
    new = watched(tmp_path)
    assert next(new) == NewSave(step=2, reason="the first save")
    job.save(3)
    assert next(new) == NewSave(step=5, certificate=Certificate(steps=(2, 5), steps_replayed=3))
    assert certified_steps(tmp_path) == [5]
    job.save(1)
    job.save(3)  # the watch takes the newest of the two
    assert next(new) == NewSave(step=9, certificate=Certificate(steps=(5, 9), steps_replayed=4))
    job.save(5)
    assert next(new) == NewSave(step=14, reason="5 steps after save 9, and 4 are the most")
    assert certified_steps(tmp_path) == [9]  # a lease keeps it while the watch is there
    job.restart()
    job.save(1)
    assert next(new) == NewSave(step=15, reason="the job was restarted or went back")
    job.save(2)
    assert next(new) == NewSave(step=17, certificate=Certificate(steps=(15, 17), steps_replayed=2))
    job.manager.close()
    assert next(new, None) is None  # no further save


def test_watch_ends_at_the_first_spoiled_save(tmp_path: Path) -> None:
    """A spoiled save would be certified, or the one after it because the replay goes on from the spoiled state."""
    job = Job(tmp_path)
    job.save(1)
    new = watched(tmp_path, record=False)
    assert next(new).certificate is None
    job.save(2)
    (found,) = (next(new).certificate,)
    assert found is not None
    assert found.is_certified
    job.save(2, spoiled=True)
    found = next(new).certificate
    assert found is not None
    assert found.difference is not None
    assert (found.difference.after_step, found.difference.step) == (3, 5)
    job.manager.close()
    assert next(new, None) is None
    assert certified_steps(tmp_path) == []
