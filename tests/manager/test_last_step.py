"""The last step of a run that was killed in its durable upload: a restart with nothing left to do flushes it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grain
import grain.checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptkit
from ckptkit.durable.commit import DiskAttempt
from ckptkit.manager.opening import epoch_records
from ckptkit.model.manifest import SaveId, new_id

DURABLE_STEP, LAST = 1, 2


def state(step: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    return {
        "w": jax.device_put(jnp.arange(4096.0).reshape(64, 64) * step, NamedSharding(mesh, PartitionSpec("x", "y"))),
        "b": [jnp.full(7, step, jnp.bfloat16), np.arange(5) + step],
        "keys": {"10": jax.random.key(step), "9": ()},
        "step": step,
    }


def standard(step: int) -> Any:
    return ocp.args.StandardSave(state(step))  # pyright: ignore[reportCallIssue]


def composite(step: int) -> Any:
    return ocp.args.Composite(
        params=ocp.args.PyTreeSave(state(step)),  # pyright: ignore[reportCallIssue]
        notes=ocp.args.JsonSave({"step": step}),  # pyright: ignore[reportCallIssue]
        key=ocp.args.JaxRandomKeySave(jax.random.key(step)),  # pyright: ignore[reportCallIssue]
        data=grain.checkpoint.CheckpointSave(iterator_at(step)),  # pyright: ignore[reportCallIssue]
    )


def iterator_at(step: int) -> Any:
    found = iter(grain.MapDataset.range(10).to_iter_dataset())
    for _ in range(step):
        next(found)
    return found


def make_manager(home: Path, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(
        home / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1, **options),
        tiers=[ckptkit.Tier.ram(str(home / "ram"))],
        host_id="host",
        saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=0)),
        processes=ckptkit.ProcessOptions(timeout_s=60),
    )


def killed_run(home: Path, saved: Any = standard, metadata: Any = None, **options: Any) -> Path:
    """A run that was killed before its last step was in the durable tier; returns that step as it would have been."""
    with make_manager(home, **options) as manager:
        for step in (DURABLE_STEP, LAST):
            assert manager.save(step, args=saved(step), custom_metadata=metadata, metrics={"loss": step})
            manager.wait_until_finished()
    return (home / "durable" / str(LAST)).rename(home / "as it would have been")


def restored_step(home: Path) -> Path:
    """The durable step, after a restart that restores the last step and closes."""
    with make_manager(home) as manager:
        manager.restore(None)
    return home / "durable" / str(LAST)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "is only in tier ram" in (text := record.getMessage())]


def described(step: Path) -> dict[str, Any]:
    """The files that describe a step: of those of Orbax and of ours, all that hold no times, sizes or bytes."""
    names = ("_METADATA", "_sharding", "process-*.json", "process_0", "metadata", "metrics")
    found = {
        str(path.relative_to(step)): path.read_bytes() for name in names for path in step.rglob(name) if path.is_file()
    }
    handlers = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
    return {**found, "handlers": handlers["item_handlers"], "custom": handlers["custom_metadata"]}


def test_restored_last_step_is_flushed_at_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run would end as finished, and a reboot would lose its last step."""
    expected = killed_run(tmp_path)
    with caplog.at_level(logging.INFO, "ckptkit"):
        step = restored_step(tmp_path)
    assert "close: step 2 is flushed from its slots to the durable tier" in caplog.messages
    assert warnings(caplog) == []
    assert described(step) == described(expected)
    assert {proof.step: proof.state for proof in ckptkit.verify(str(step.parent)).steps} == {1: "proven", 2: "proven"}
    with ocp.CheckpointManager(step.parent) as stock:
        found = stock.restore(LAST, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(bits, each) for each in (found, state(LAST))))
    with make_manager(tmp_path) as manager:
        manager.restore(None)
        assert {each.step: each.tiers for each in manager.steps()} == {1: ("durable", "ram"), 2: ("durable", "ram")}
    assert warnings(caplog) == []


def bits(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_small_items_and_metrics_are_flushed_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step would lack its iterator, or a restore of it would begin with the wrong batch."""
    options: dict[str, Any] = {"best_fn": lambda metrics: metrics["loss"]}
    killed_run(tmp_path, composite, **options)
    with make_manager(tmp_path, **options) as manager:
        manager.restore(None, args=ocp.args.Composite(params=ocp.args.PyTreeRestore()))  # pyright: ignore[reportCallIssue]
    assert warnings(caplog) == []
    step = tmp_path / "durable" / str(LAST)
    assert described(step) == described(tmp_path / "as it would have been")
    states = [proof.state for proof in ckptkit.verify(str(step.parent)).steps]
    assert states == ["unproven"] * 2, "in each, Orbax's file of the key has no digests"
    with ocp.CheckpointManager(step.parent, options=ocp.CheckpointManagerOptions(**options)) as stock:
        restore = grain.checkpoint.CheckpointRestore(iterator_at(0))  # pyright: ignore[reportCallIssue]
        found = stock.restore(LAST, args=ocp.args.Composite(data=restore, notes=ocp.args.JsonRestore()))
        assert stock.metrics(LAST) == {"loss": LAST}
    assert (next(found["data"]), found["notes"]) == (LAST, {"step": LAST})


def test_durable_failure_at_close_is_a_warning_and_the_next_restart_flushes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that does not answer would end a restart with an error, or half a step would be left as one."""
    killed_run(tmp_path)

    def fail(self: DiskAttempt) -> None:
        raise OSError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(DiskAttempt, "commit", fail)
        assert not restored_step(tmp_path).exists()
    (warning,) = warnings(caplog)
    assert warning.startswith("step 2 is only in tier ram: the durable tier has step 1.")
    assert any("no answer" in text for text in caplog.messages)
    assert restored_step(tmp_path).exists()
    assert len(warnings(caplog)) == 1


def test_step_that_slots_do_not_hold_as_it_was_saved_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A durable step without its metadata, or with a flipped bit, would pass for the one that was saved."""
    killed_run(tmp_path / "metadata", metadata={"by": "hand"})
    assert not restored_step(tmp_path / "metadata").exists()
    killed_run(tmp_path / "item", lambda step: ocp.args.StandardSave(state(step), custom_metadata={"a": 1}))
    assert not restored_step(tmp_path / "item").exists()
    killed_run(tmp_path / "damaged")
    with make_manager(tmp_path / "damaged") as manager:
        manager.restore(None)
        for slot in (tmp_path / "damaged" / "ram").rglob("slot-*.bin"):
            slot.write_bytes(bytes(slot.stat().st_size))
    assert not (tmp_path / "damaged" / "durable" / str(LAST)).exists()
    metadata, item, damaged = warnings(caplog)
    assert "It was not flushed from its slots: process 0: " in metadata
    assert "it was saved with custom metadata, which slots do not hold" in metadata
    assert "it was saved with custom metadata, which slots do not hold" in item
    assert "CorruptCheckpointError" in damaged
    assert "call save(2, ..., force=True) with the restored state before close()" in metadata
    with make_manager(tmp_path / "metadata") as manager:
        manager.save(LAST, args=ocp.args.StandardSave(manager.restore(None)), force=True)  # pyright: ignore[reportCallIssue]
    assert (tmp_path / "metadata" / "durable" / str(LAST)).is_dir()
    assert len(warnings(caplog)) == 3


def later_run(tmp_path: Path, base: int) -> None:
    """Another run begins from a step, and does not save."""
    records = epoch_records(str(tmp_path / "durable"), ckptkit.EventLog())
    before = records.read()
    records.write(before.begin(2, SaveId(1, base, base), new_id()))


def test_step_is_not_flushed_once_a_later_run_has_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that hung for hours would add a step to the branch of the run that replaced it."""
    killed_run(tmp_path)
    with make_manager(tmp_path) as manager:
        manager.restore(None)
        later_run(tmp_path, DURABLE_STEP)
    assert "a later run has begun epoch 2" in warnings(caplog)[0]
    assert not (tmp_path / "durable" / str(LAST)).exists()


def test_run_that_ends_with_an_error_flushes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of several processes would wait in its close for those that still train."""

    def fail() -> None:
        with make_manager(tmp_path) as manager:
            manager.restore(None)
            raise RuntimeError("of the loop")

    killed_run(tmp_path)
    with pytest.raises(RuntimeError, match="of the loop"):
        fail()
    assert "the run ends with an error" in warnings(caplog)[0]
    assert not (tmp_path / "durable" / str(LAST)).exists()


def test_step_of_an_earlier_epoch_than_the_newest_record_is_flushed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second kill, after the restart had recorded its epoch and before it had saved, would leave the step where it
    is."""
    killed_run(tmp_path)
    later_run(tmp_path, LAST)
    assert restored_step(tmp_path).exists()
    assert warnings(caplog) == []
