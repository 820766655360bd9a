"""`ckptkit.v1.Checkpointer` and Orbax's own: the same calls, the same answers; and each reads the other's steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as orbax

import ckptkit
import ckptkit.v1
from ckptkit.model.paths import SIDECAR_DIR
from ckptkit.resume import ElasticBatches
from tests.states import abstract, assert_same, make_state

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
OURS, ORBAX = ckptkit.v1.Checkpointer, orbax.training.Checkpointer


@pytest.fixture(params=["ours", "tiers", "orbax"])
def make(request: Any, tmp_path: Path) -> Any:
    """Makes a checkpointer of one of the three kinds over the same root."""
    root, tier = str(tmp_path / "run"), ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(2))
    kinds: dict[str, Any] = {"ours": (OURS, {}), "tiers": (OURS, {"tiers": [tier]}), "orbax": (ORBAX, {})}

    def made(**options: Any) -> Any:
        kind, ours = kinds[request.param]
        return kind(root, **options, **ours)

    return made


def every(steps: int) -> Any:
    return orbax.training.save_decision_policies.FixedIntervalPolicy(steps)


def test_training_loop_of_the_orbax_documentation(make: Any) -> None:
    """The loop of Orbax's own documentation would not run."""
    policies = orbax.training.preservation_policies
    options = {"save_decision_policy": every(2), "preservation_policy": policies.LatestN(2)}
    with make(**options) as checkpointer:
        assert checkpointer.latest is None
        assert checkpointer.checkpoints == []
        for step in range(7):
            assert checkpointer.should_save(step) == (step % 2 == 0)
            assert checkpointer.save(step, make_state(step), metrics={"loss": 1.0 * step}) == (step % 2 == 0)
        # A fast tier may still hold what the durable one has pruned.
        assert [each.step for each in checkpointer.checkpoints][-2:] == [4, 6]
    with make(**options) as checkpointer:
        assert checkpointer.latest.step == 6
        assert checkpointer.latest.metrics == {"loss": 6.0}
        assert checkpointer.latest.path == checkpointer.directory / "6"
        assert checkpointer.latest.commit_timestamp_nsecs > 1.7e18
        assert_same(checkpointer.load(abstract_state=abstract(make_state())), make_state(6))
        assert_same(checkpointer.load(4, abstract(make_state())), make_state(4))
        assert_same(checkpointer.load(checkpointer.checkpoints[-2]), make_state(4))


def test_plain_save_is_in_every_tier_with_digests(tmp_path: Path) -> None:
    """Options that Orbax's module always passes would have Orbax write every step: no ramdisk, and no digests."""
    tier = ckptkit.Tier.ram(str(tmp_path / "ram"))
    with OURS(tmp_path / "run", tiers=[tier]) as checkpointer:
        assert checkpointer.save(1, make_state(1))
        assert checkpointer.save_checkpointables(2, {"model": make_state(2), "meta": {"epoch": 7}})
        assert [step.tiers for step in checkpointer.manager.steps()] == [("durable", "ram")] * 2
    for item in ("1/state", "2/model", "2/meta"):
        assert list((tmp_path / "run" / item / SIDECAR_DIR).iterdir()), item
    assert [step.state for step in ckptkit.verify(str(tmp_path / "run")).steps] == ["proven"] * 2
    for step in ("1", "2"):  # what remains is the ramdisk
        shutil.rmtree(tmp_path / "run" / step)
    with OURS(tmp_path / "run", tiers=[tier]) as checkpointer:
        assert_same(checkpointer.load(1), make_state(1))
        assert_same(checkpointer.load_checkpointables(2), {"model": make_state(2), "meta": {"epoch": 7}})


def test_save_async_returns_a_response(make: Any) -> None:
    """A response would be missing, or done before the step is there."""
    done: list[bool] = []
    with make(save_decision_policy=every(2)) as checkpointer:
        response = checkpointer.save_async(2, make_state(2))
        response.on_complete(done.append)
        assert response.result(timeout=60) is True
        assert checkpointer.save_async(3, make_state(3)) is None
        checkpointer.wait()
        assert not checkpointer.is_saving_in_progress()
        assert_same(checkpointer.load(2, abstract(make_state())), make_state(2))
    assert done == [True]


def test_missing_and_existing_steps_raise_errors_of_orbax(make: Any) -> None:
    """A caller's `except` would not catch what it catches with Orbax."""
    errors = orbax.training.errors
    with make() as checkpointer:
        with pytest.raises(errors.StepNotFoundError):
            checkpointer.load()
        assert checkpointer.save(5, {"w": jnp.ones(2)})
        with pytest.raises(errors.StepAlreadyExistsError, match="Step 5 already exists"):
            checkpointer.save(5, {"w": jnp.ones(2)}, force=True)
        assert not checkpointer.save(3, {"w": jnp.ones(2)})
        assert checkpointer.save(3, {"w": jnp.full(2, 3.0)}, force=True)
        assert [each.step for each in checkpointer.checkpoints] == [3, 5]
        assert checkpointer.save(5, {"w": jnp.full(2, 9.0)}, overwrite=True)
        assert_same(checkpointer.load(5), {"w": jnp.full(2, 9.0)})
        for missing in (checkpointer.load, checkpointer.metadata, checkpointer.delete):
            with pytest.raises(errors.StepNotFoundError, match="No checkpoint found at step 99"):
                missing(99)
        assert checkpointer.delete(99, missing_ok=True) is False
        assert checkpointer.delete(5) is True
        assert [each.step for each in checkpointer.checkpoints] == [3]
        checkpointer.reload()
        assert checkpointer.latest.step == 3
        assert checkpointer.delete_async(3).result() is True
        assert checkpointer.latest is None


def test_several_checkpointables_are_saved_and_loaded(make: Any) -> None:
    """A model and its optimizer could not be saved as one step, or not be loaded one by one."""
    both = {"model": make_state(1), "optimizer": {"m": jnp.ones(3), "count": 4}}
    with make() as checkpointer:
        assert checkpointer.save_checkpointables(1, dict(both), metrics={"loss": 2.0})  # Orbax adds to what it is given
        assert_same(checkpointer.load_checkpointables(1), both)
        asked = {"optimizer": {"m": jax.ShapeDtypeStruct((3,), jnp.float32), "count": 0}}
        assert_same(checkpointer.load_checkpointables(abstract_checkpointables=asked), {"optimizer": both["optimizer"]})
        assert_same(checkpointer.load(1, checkpointable_name="optimizer"), both["optimizer"])
        with pytest.raises(KeyError):
            checkpointer.load(1)
        with pytest.raises(FileNotFoundError):
            checkpointer.delete(1, checkpointable_name="nothing")
        assert checkpointer.delete(1, checkpointable_name="optimizer")
        assert list(checkpointer.load_checkpointables(1)) == ["model"]
        with pytest.raises(ValueError, match="final checkpointable"):
            checkpointer.delete(1, checkpointable_name="model")
        assert_same(checkpointer.load_checkpointables(1)["model"], make_state(1))


def test_metadata_is_available_without_loading(make: Any) -> None:
    """A caller would have to load a step to learn its shapes."""
    with make(custom_metadata={"run": "a"}) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones((2, 3), jnp.bfloat16)}, metrics={"loss": 1.0}, custom_metadata={"x": 2})
        assert checkpointer.root_metadata().custom_metadata == {"run": "a"}
        found = checkpointer.metadata()
        assert (found.step, found.metrics, found.custom_metadata) == (1, {"loss": 1.0}, {"x": 2})
        assert (found.metadata["w"].shape, found.metadata["w"].dtype) == ((2, 3), jnp.bfloat16)
        assert found.commit_timestamp_nsecs >= found.init_timestamp_nsecs
        assert list(checkpointer.checkpointables_metadata(1).metadata) == ["state"]


@pytest.mark.parametrize("bad", [{}, [1], {"": {}}, {"metrics": {"a": 1}}])
def test_invalid_checkpointables_are_refused(make: Any, bad: Any) -> None:
    """They would be written under names that Orbax keeps for itself."""
    with make() as checkpointer:
        with pytest.raises(ValueError):  # noqa: PT011  the words are Orbax's
            checkpointer.save_checkpointables(1, bad)
        with pytest.raises(ValueError, match="Unsupported leaf type"):
            checkpointer.save(1, {"a": object()})


@pytest.mark.parametrize(("writer", "reader"), [(OURS, ORBAX), (ORBAX, OURS)])
def test_ckptkit_and_orbax_read_each_other(tmp_path: Path, writer: Any, reader: Any) -> None:
    """Changing the import in the middle of a run would lose it."""
    with writer(str(tmp_path), custom_metadata={"run": "a"}) as checkpointer:
        checkpointer.save(3, make_state(3), metrics={"loss": 3.0})
        checkpointer.save_checkpointables(4, {"model": make_state(4), "n": {"at": 7}}, custom_metadata={"x": 1})
    with reader(str(tmp_path)) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [3, 4]
        assert_same(checkpointer.load(3, abstract(make_state())), make_state(3))
        assert_same(checkpointer.load(3), make_state(3))
        assert_same(checkpointer.load_checkpointables(), {"model": make_state(4), "n": {"at": 7}})
        assert checkpointer.metadata(3).metrics == {"loss": 3.0}
        assert checkpointer.checkpointables_metadata(4).custom_metadata == {"x": 1}
        assert checkpointer.root_metadata().custom_metadata == {"run": "a"}
        checkpointer.save(5, make_state(5))
    with writer(str(tmp_path)) as checkpointer:
        assert_same(checkpointer.load(), make_state(5))


@pytest.mark.parametrize("kind", ["Grain's", "ElasticBatches"])
@pytest.mark.parametrize(("writer", "reader"), [(OURS, OURS), (OURS, ORBAX), (ORBAX, OURS)])
def test_grain_iterator_resumes(tmp_path: Path, writer: Any, reader: Any, kind: str) -> None:
    """The data would begin anew, or skip ahead."""

    def iterator() -> Any:
        data = grain.MapDataset.range(100).seed(3).shuffle()
        return iter(data.to_iter_dataset()) if kind == "Grain's" else ElasticBatches(data, 1, batch_fn=list)

    walked = iterator()
    for _ in range(5):
        next(walked)
    with writer(str(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(5, {"state": {"w": jnp.ones(2)}, "data": walked})
    expected = [next(walked) for _ in range(5)]
    resumed = iterator()
    with reader(str(tmp_path)) as checkpointer:
        checkpointer.load_checkpointables(5, {"data": resumed})
    assert [next(resumed) for _ in range(5)] == expected


def test_manager_restores_steps_of_the_v1_api(tmp_path: Path) -> None:
    """They would be unreadable without naming every item."""
    with ORBAX(str(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(1, {"model": make_state(1), "n": {"at": 7}}, metrics={"loss": 1.0})
    with ckptkit.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(None)
        assert_same(restored["model"], make_state(1))
        asked = ocp.args.Composite(model=ocp.args.StandardRestore(abstract(make_state())))
        assert_same(manager.restore(1, args=asked)["model"], make_state(1))


def test_load_async_returns_the_state(tmp_path: Path) -> None:
    """Orbax promises it and raises; ours would raise, too."""
    with OURS(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(1))
        assert_same(checkpointer.load_async(1, abstract(make_state())).result(), make_state(1))
        assert_same(checkpointer.load_checkpointables_async().result()["state"], make_state(1))
        with pytest.raises(orbax.training.errors.StepNotFoundError):
            checkpointer.load_async(2).result()
        checkpointer.cancel(1)
        assert checkpointer.latest is None


def test_older_names_still_work(tmp_path: Path) -> None:
    """A loop of last year would not run."""
    with OURS(tmp_path) as checkpointer:
        with pytest.warns(DeprecationWarning, match="Use `save` instead"):
            assert checkpointer.save_pytree(1, {"w": jnp.ones(2)})
        with pytest.warns(DeprecationWarning, match="Use `load` instead"):
            assert_same(checkpointer.load_pytree(1), {"w": jnp.ones(2)})
        with pytest.warns(DeprecationWarning, match="Use `metadata` instead"):
            assert checkpointer.pytree_metadata(1).step == 1


def test_damaged_newest_step_is_skipped_and_no_longer_the_latest(tmp_path: Path) -> None:
    """A loop that begins at `latest` would skip the steps since the one that was loaded."""
    with OURS(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.full(4, step)})
    for chunk in (tmp_path / "2" / "state" / "d").iterdir():
        chunk.write_bytes(bytes(reversed(chunk.read_bytes())))
    with OURS(tmp_path) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 2, "nothing was read yet"
        assert_same(checkpointer.load(), {"w": jnp.full(4, 1)})
        assert checkpointer.latest.step == 1
        assert [each.step for each in checkpointer.checkpoints] == [1]
        assert checkpointer.save(2, {"w": jnp.full(4, 9)})
        assert_same(checkpointer.load(2), {"w": jnp.full(4, 9)})
