"""The manager in one process: what is saved comes back, from the fastest tier that still has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.steps import DurableSteps
from tests.manager.runs import Run, restored_step
from tests.states import abstract, assert_same, make_state, put, restore_args, save_args


def refused(*_: Any, **__: Any) -> None:
    """A durable save on a full disk."""
    raise OSError(28, "No space left on device")


def test_each_tier_is_restored_when_faster_ones_are_lost(run: Run) -> None:
    """A lost ramdisk or disk would cost more than the steps that only it had."""
    run.save_steps(range(8))
    assert restored_step(run) == 7
    assert run.sources() == {"ram"}
    shutil.rmtree(run.ram)
    assert restored_step(run) == 6
    assert run.sources() == {"ssd"}
    shutil.rmtree(run.ssd)
    assert restored_step(run) == 4
    assert run.sources() == {"durable"}


def test_restore_without_a_template_returns_the_saved_tree(run: Run) -> None:
    """A person who lost the model's code could not read a checkpoint."""
    run.save_steps(range(1))
    with run.manager() as manager:
        restored = manager.restore(None)
    assert_same(restored["state"], make_state(0))
    assert restored["state"]["x"].sharding == make_state(0)["x"].sharding
    assert restored["data"] == {"step": 0}


def test_default_item_and_context_manager_work(run: Run) -> None:
    """The simplest script, one unnamed state, would not work as with Orbax."""
    with run.manager(tiers=False, save_every=1) as manager:
        assert manager.save(3, args=ocp.args.StandardSave(make_state(3)))  # pyright: ignore[reportCallIssue]
    with run.manager(tiers=False) as manager:
        assert manager.latest_step() == 3
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(abstract(make_state()))), make_state(3))
        assert_same(manager.restore(3), make_state(3))


def test_step_is_saved_once_and_a_forced_repeat_is_refused(run: Run) -> None:
    """Saving a step again would overwrite it, or pass for saved when it was not."""
    with run.manager() as manager:
        assert manager.save(5, args=save_args(make_state(5), 5))
        assert not manager.save(5, args=save_args(make_state(5), 5))
        assert not manager.save(3, args=save_args(make_state(3), 3))
        with pytest.raises(ckptkit.StepAlreadyExistsError, match="step 5 exists already"):
            manager.save(5, args=save_args(make_state(5), 5), force=True)


def test_save_is_a_snapshot_of_the_state_at_return(run: Run) -> None:
    """A donating step right after `save` would change the checkpoint (or raise 'Array has been deleted')."""
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"a": put(np.zeros((64, 64), np.float32), "data", "fsdp"), "b": put(np.zeros(8, np.float32))}
    with run.manager() as manager:
        for number in range(12):
            assert manager.save(number, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            state = step(state)
        manager.wait_until_finished()
        for number in manager.all_steps():
            for leaf in jax.tree.leaves(manager.restore(number)):
                assert (np.asarray(leaf) == number).all()


def test_metrics_are_copied_at_the_call_of_save(run: Run) -> None:
    """A dict that is used again would give every step the metrics of the last one: the best step would be pruned."""
    metrics, custom = {"loss": 0.0}, {"of": ["step 0"]}
    options = {"best_fn": lambda found: found["loss"], "best_mode": "min", "max_to_keep": 1}
    with run.manager(save_every=1, **options) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            metrics["loss"] = loss
            custom["of"][0] = f"step {step}"
            assert manager.save(step, args=save_args(make_state(step), step), metrics=metrics, custom_metadata=custom)
        metrics["loss"] = 7.0
        assert manager.best_step() == 1
        manager.wait_until_finished()
        assert [record.step for record in manager.steps() if "durable" in record.tiers] == [1, 2], (
            "the best, and the newest"
        )
        assert manager.metrics(1) == {"loss": 1.0}
        assert manager.metadata(1).custom_metadata == {"of": ["step 1"]}


def test_restored_arrays_survive_the_reuse_of_every_slot(run: Run) -> None:
    """A restored array that aliased a slot would change with the next saves."""
    run.save_steps(range(3))
    with run.manager() as manager:
        restored = manager.restore(None, args=restore_args(abstract(make_state())))
        for step in range(3, 10):
            manager.save(step, args=save_args(make_state(step), step))
        manager.wait_until_finished()
        assert_same(restored["state"], make_state(2))


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_a_flipped_bit_in_a_slot_is_never_restored(run: Run, tier: str) -> None:
    """Damaged bytes would come back as weights."""
    run.save_steps(range(5))
    flip_slots(run.ram)
    if tier == "ssd":
        flip_slots(run.ssd)
    assert restored_step(run) == 4
    assert run.sources() == ({"ssd"} if tier == "ram" else {"durable"})


def test_a_flipped_bit_in_the_durable_tier_is_never_restored(run: Run) -> None:
    """Damaged bytes would come back as weights; stock Orbax does that 60 times out of 60."""
    weights = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
    with run.manager(tiers=False, save_every=1) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.StandardSave({"w": put(weights[step], "fsdp")}))  # pyright: ignore[reportCallIssue]
    flipped = 0
    for path in (run.durable / "1").rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = data.find(weights[1].tobytes()[:64])
        if at >= 0:
            data[at + 7] ^= 4
            path.write_bytes(data)
            flipped += 1
    assert flipped == 1
    with ocp.CheckpointManager(run.durable) as stock:
        wrong = stock.restore(1, args=ocp.args.StandardRestore())["w"]  # pyright: ignore[reportCallIssue]
        assert not np.array_equal(np.asarray(wrong), weights[1])  # restored without a message
    with run.manager(tiers=False) as manager:
        assert_same(manager.restore(None), {"w": put(weights[0], "fsdp")})
        rejected = run.of_kind(ckptkit.Kind.REJECTED)[-1]
        assert rejected.step == 1
        assert "leaf w, cell (0, 0) to (32, 64) has digest" in rejected.fields["reason"]
        with pytest.raises(
            ckptkit.CorruptCheckpointError, match="step 1 in durable: process 0: CorruptCheckpointError"
        ):
            manager.restore(1)


def flip_slots(root: Path) -> None:
    for slot in root.rglob("slot-*.bin"):
        data = bytearray(slot.read_bytes())
        for at in range(0, len(data), 4096):  # boxes are page-aligned: the first byte of each
            data[at] ^= 1
        slot.write_bytes(data)


def test_every_difference_of_the_trees_is_named(run: Run) -> None:
    """A person would mend one leaf at a time."""
    run.save_steps(range(1))
    target = abstract(make_state())
    target["w"] = jax.ShapeDtypeStruct((16, 8), "bfloat16", sharding=target["w"].sharding)
    target["more"] = target.pop("b")
    with run.manager() as manager, pytest.raises(ckptkit.TreeMismatchError) as caught:
        manager.restore(None, args=restore_args(target))
    assert caught.value.differences == (
        "state:b is bfloat16[4] on disk, but not in abstract_state",
        "state:more is bfloat16[4] in abstract_state, but not on disk",
        "state:w is float32[8,8] on disk, bfloat16[16,8] in abstract_state",
    )


def test_nothing_to_restore_error_names_the_places_searched(run: Run) -> None:
    """An empty directory would look like a corrupt one."""
    with run.manager() as manager:
        assert manager.latest_step() is None
        with pytest.raises(ckptkit.StepNotFoundError, match="no step was found in"):
            manager.restore(None)
        assert manager.save(1, args=save_args(make_state(1), 1))
        with pytest.raises(FileNotFoundError, match="step 9 was not found in"):
            manager.restore(9)


def test_durable_step_missed_by_a_crash_is_saved_after_restart(run: Run, monkeypatch: Any) -> None:
    """Two losses in a row would fall back two intervals: the second finds what the first one left undone."""
    run.save_steps(range(4))
    with monkeypatch.context() as patched:
        patched.setattr(DurableSteps, "save", refused)
        manager = run.manager()
        manager.save(4, args=save_args(make_state(4), 4))
        with pytest.raises(ckptkit.SaveFailedError):
            manager.close()
    with run.manager() as manager:
        assert manager.restore(None, args=restore_args(abstract(make_state())))["data"]["step"] == 4
        assert manager.save(5, args=save_args(make_state(5), 5))  # not due in the durable tier by itself
        assert manager.save(6, args=save_args(make_state(6), 6))
    shutil.rmtree(run.ram)
    shutil.rmtree(run.ssd)
    assert restored_step(run) == 5


def test_failed_durable_save_is_reported_once_and_keeps_steps(run: Run, monkeypatch: Any) -> None:
    """A full disk would end training, or (as with stock Orbax) make good steps vanish without a message."""
    run.save_steps(range(4), save_every=2)
    with run.manager(save_every=2) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(DurableSteps, "save", refused)
            assert manager.save(4, args=save_args(make_state(4), 4))
            with pytest.raises(ckptkit.SaveFailedError, match="step 4 was not committed to tier durable"):
                manager.wait_until_finished()
        manager.check_for_errors()
        assert manager.all_steps() == [0, 2, 3, 4]  # 4 is in the fast tiers
        assert manager.save(6, args=save_args(make_state(6), 6))
        manager.wait_until_finished()
        assert {r.step for r in manager.steps() if "durable" in r.tiers} >= {0, 2, 6}


def test_step_without_a_free_slot_is_skipped_and_reported(run: Run, monkeypatch: Any) -> None:
    """The step loop would wait for a slow bucket, or overwrite a slot that is being uploaded."""
    with run.manager(save_every=100) as manager:
        assert manager.save(0, args=save_args(make_state(0), 0))  # Orbax's first save is always durable
        manager.wait_until_finished()
        arena = manager._pipeline._targets.staging
        held = [slot for _ in range(3) if (slot := arena.acquire(4096)) is not None]
        assert len(held) == 2  # the third holds step 0, the newest committed one
        assert manager.save(1, args=save_args(make_state(1), 1))
        manager.wait_until_finished()
        (skipped,) = run.of_kind(ckptkit.Kind.SKIPPED)
        assert "no free slot" in skipped.fields["reason"]
        assert manager.latest_step() == 0
        for slot in held:
            arena.release(slot)
        assert manager.save(2, args=save_args(make_state(2), 2))
        manager.wait_until_finished()
        assert manager.latest_step() == 2


def test_slots_are_made_before_the_first_save(run: Run) -> None:
    """The first saves would pay for the first touch of their memory, seconds for a large state."""
    with run.manager() as manager:
        manager.prepare(save_args(make_state(0), 0))
    sizes = {path.name: path.stat().st_size for path in run.ram.rglob("slot-*.bin")}
    assert set(sizes) == {"slot-0.bin", "slot-1.bin", "slot-2.bin"}
    assert len(set(sizes.values())) == 1
    assert len(list(run.ssd.rglob("slot-*.bin"))) == 2
    with run.manager() as manager:
        manager.save(0, args=save_args(make_state(0), 0))
    assert {path.stat().st_size for path in run.ram.rglob("slot-*.bin")} == set(sizes.values())


def test_slots_from_abstract_and_real_state_have_equal_size(run: Run, tmp_path: Path) -> None:
    """Room would be refused, or found missing, only when minutes have gone into making the state."""
    sizes = []
    for number, state in enumerate((make_state(0), abstract(make_state(0)))):
        other = Run(tmp_path / str(number))
        with other.manager() as manager:
            manager.prepare(save_args(state, 0))
        sizes.append({path.name: path.stat().st_size for path in other.ram.rglob("slot-*.bin")})
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 3


def test_a_ramdisk_that_is_too_small_is_refused_with_numbers(run: Run, monkeypatch: Any) -> None:
    """The job would find out in the middle of a save, slot by slot."""
    monkeypatch.setattr("ckptkit.slots.host_memory._mount_bytes", lambda _: (1 << 30, 8192))
    said = r"needs .* more for 3 slots of .*, 8.0 KiB are free"
    with run.manager() as manager, pytest.raises(ckptkit.StoreFullError, match=said):
        manager.prepare(save_args(make_state(0), 0))


def test_unsupported_items_and_leaves_are_refused_by_name(run: Run) -> None:
    """A typo would be found at the restart, when the run is lost."""
    with run.manager() as manager:
        with pytest.raises(ValueError, match=r"Unsupported type: <class 'str'> for key: \('name',\)"):
            manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave({"name": "x"})))  # pyright: ignore[reportCallIssue]
        with pytest.raises(ValueError, match="Must provide `args` of type `Composite`"):
            manager.save(1, args=ocp.args.StandardSave(make_state(1)))  # pyright: ignore[reportCallIssue]
        assert manager.all_steps() == []
        assert manager.save(1, args=save_args(make_state(1), 1))


def test_unwritable_tier_is_refused_at_construction(tmp_path: Path) -> None:
    """The job would find out at its first save that it has no tier."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ckptkit.TierUnusableError, match="cannot be used: Not a directory; give a directory"):
        ckptkit.CheckpointManager(tmp_path / "d", tiers=[ckptkit.Tier.ram(str(tmp_path / "file" / "ram"))])


def test_only_directories_of_the_own_host_are_opened(run: Run, tmp_path: Path) -> None:
    """On shared mounts one host's slots would pass for another's."""
    run.save_steps(range(4), host_id="host-b")
    with run.manager(host_id="host-a", save_every=100) as manager:
        restored = manager.restore(None, args=restore_args(abstract(make_state())))
        assert restored["data"]["step"] == 0
        assert run.sources() == {"durable"}


def test_donated_state_raises_and_releases_its_slot(run: Run) -> None:
    """Two such calls would take both slots for good, and every later save be dropped without a message."""
    with run.manager(save_every=100) as manager:
        manager.save(0, args=save_args(make_state(0), 0))
        manager.wait_until_finished()
        for step in range(1, 6):
            state = make_state(step)
            state["w"].delete()
            with pytest.raises(RuntimeError, match="deleted"):
                manager.save(step, args=save_args(state, step))
        assert manager.save(6, args=save_args(make_state(6), 6))
        manager.wait_until_finished()
        assert manager.latest_step() == 6


def test_array_without_elements_is_saved_to_each_tier(run: Run) -> None:
    """The durable save of an empty adapter would fail, step after step."""
    state = {"w": put(np.zeros((0, 8), np.float32)), "v": put(np.ones(4, np.float32))}
    with run.manager(save_every=2) as manager:
        for step in range(3):
            assert manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
            assert_same(manager.restore(step), state)


def test_events_are_complete_and_json(run: Run, tmp_path: Path) -> None:
    """Goodput would be computed from holes."""
    log = ckptkit.EventLog(tmp_path / "events.jsonl")
    with ckptkit.CheckpointManager(run.durable, tiers=[ckptkit.Tier.ram(str(run.ram))], events=log) as manager:
        manager.save(1, args=save_args(make_state(1), 1))
        manager.wait_until_finished()
    log.close()
    events = ckptkit.read_events(tmp_path / "events.jsonl")
    assert [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        event.kind for event in events
    ]
    assert {(e.kind, e.tier) for e in events if e.kind == ckptkit.Kind.COMMITTED} == {
        (ckptkit.Kind.COMMITTED, "ram"),
        (ckptkit.Kind.COMMITTED, "durable"),
    }
    staged = next(event for event in events if event.kind == ckptkit.Kind.STAGED)
    assert staged.fields["strategy"] == "slot_copy"
    assert staged.fields["stall_s"] > 0
