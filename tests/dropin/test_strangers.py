"""Edge cases of scripts that were written for stock Orbax, compared with stock Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
args: Any = ocp.args
KINDS = ("orbax", "durable", "ram")


@pytest.fixture(params=KINDS)
def make(request: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes managers of one of the three kinds over the same root."""

    def made(*given: Any, **options: Any) -> Any:
        settings = ocp.CheckpointManagerOptions(**options)
        if request.param == "orbax":
            return ocp.CheckpointManager(tmp_path / "run", *given, options=settings)
        tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if request.param == "ram" else []
        return ckptkit.CheckpointManager(tmp_path / "run", *given, options=settings, tiers=tiers, host_id="h")

    return made


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(3.0) + step, "n": step}


@pytest.mark.parametrize("step", [np.int64(3), np.int32(3), np.uint64(3), np.array(3), jnp.int32(3), 3.0], ids=repr)
def test_any_integer_type_is_accepted_as_step(make: Callable[..., Any], step: Any) -> None:
    """A loop whose counter is an array would lose every step in the background."""
    with make() as manager:
        assert manager.save(0, args=args.StandardSave(state(0)))
        assert manager.should_save(step)
        assert manager.save(step, args=args.StandardSave(state(1)))
        manager.wait_until_finished()
        assert not manager.should_save(step)
        assert manager.all_steps() == [0, 3]
        assert manager.latest_step() == 3
        assert manager.restore(step)["n"] == 1
        assert manager.metadata(step) is not None
        assert manager.item_metadata(step) is not None
        assert not manager.metrics(step)
        manager.delete(step)
        assert manager.all_steps() == [0]


def test_invalid_step_is_refused_by_save(tmp_path: Path) -> None:
    """The save would be taken, and lost in the background."""
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        with pytest.raises(TypeError, match="step '3' is not a whole number"):
            manager.save("3", args=args.StandardSave(state(0)))  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"step 2.5 is not a whole number"):
            manager.save(2.5, args=args.StandardSave(state(0)))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="step -1 cannot be saved: steps are 0 or more"):
            manager.save(-1, args=args.StandardSave(state(0)))
        assert manager.save(0, args=args.StandardSave(state(0)))
        assert not manager.should_save(-1)
        assert not manager.save(-1, args=args.StandardSave(state(0)))
        assert manager.all_steps() == [0]


def test_tree_metadata_after_restore_without_arguments(make: Callable[..., Any]) -> None:
    """A script that looks at shapes after its restore would find nothing."""
    with make() as manager:
        both = args.Composite(s=args.StandardSave(state(1)), p=args.PyTreeSave(state(2)), j=args.JsonSave({"a": 1}))
        manager.save(1, args=both)
    with make() as manager:
        manager.restore(1)
        found = manager.item_metadata(1)
        assert found["s"]["w"].shape == found["p"]["w"].shape == (3,)
        assert found["j"] is None


def test_unnamed_tree_metadata_after_restore_without_arguments(make: Callable[..., Any]) -> None:
    """The same for the commonest kind of step."""
    with make() as manager:
        manager.save(1, args=args.StandardSave(state(1)))
    with make() as manager:
        assert manager.restore(1)["n"] == 1
        assert manager.item_metadata(1)["w"].shape == (3,)


def test_save_with_unorderable_metrics_is_refused(tmp_path: Path) -> None:
    """Orbax raises at each later save, because the bad metrics stay; ours would prune by the rest, without a
    message."""

    def best(metrics: Any) -> Any:
        return metrics["loss"]

    for name, tiers in (("durable", []), ("ram", [ckptkit.Tier.ram(str(tmp_path / "tier"))])):
        options = ocp.CheckpointManagerOptions(best_fn=best, max_to_keep=2)
        with ckptkit.CheckpointManager(tmp_path / name, options=options, tiers=tiers) as manager:
            assert manager.save(0, args=args.StandardSave(state(0)), metrics={"loss": 1.0})
            with pytest.raises(KeyError, match="loss"):
                manager.save(1, args=args.StandardSave(state(1)), metrics={"other": 1.0})
            with pytest.raises(TypeError, match="must return a number"):
                manager.save(1, args=args.StandardSave(state(1)), metrics={"loss": None})
            assert manager.save(1, args=args.StandardSave(state(1)), metrics={"loss": 2.0})
            manager.wait_until_finished()
            assert manager.all_steps() == [0, 1]
            assert manager.best_step() == 1
        with ckptkit.CheckpointManager(
            tmp_path / f"{name}-all", options=ocp.CheckpointManagerOptions(best_fn=best)
        ) as manager:
            assert manager.save(0, args=args.StandardSave(state(0)), metrics={"other": 1.0}), "nothing is pruned"
