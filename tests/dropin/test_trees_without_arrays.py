"""Named trees without jax arrays, saved with a tree that has some: epoch counters, NumPy states, best metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model import paths
from tests.states import assert_same

args: Any = ocp.args
TREES: dict[str, Any] = {
    "numbers": args.StandardSave({"epoch": 7, "lr": 0.5, "done": False}),
    "one number": args.PyTreeSave(3),
    "numpy": args.StandardSave({"rng": np.arange(5, dtype=np.uint32), "best": [np.float64(0.1)]}),
    "numpy scalar": args.PyTreeSave({"best": np.float32(3)}),
    "beside empty nodes": args.StandardSave({"a": {}, "b": None, "c": [5, ()]}),
    "only empty nodes": args.PyTreeSave({"a": {"b": {}}, "c": None, "d": [(), {}]}),
    "text": args.PyTreeSave({"run": "x", "epoch": 7}),
}
STATE = {"w": jnp.arange(16.0)}
TIERS = ("durable", "ram", "ssd", "ram, then lost")


def _manager(base: Path, tier: str) -> Any:
    tiers = {
        "durable": [],
        "ssd": [ckptkit.Tier.ssd(str(base / "ssd"), save=ckptkit.EverySteps(1))],
    }.get(tier, [ckptkit.Tier.ram(str(base / "ram"))])
    return ckptkit.CheckpointManager(base / "run", tiers=tiers, host_id="host")


def _restore_args(save: Any) -> Any:
    return args.StandardRestore() if isinstance(save, args.StandardSave) else args.PyTreeRestore()


def _expected(base: Path, items: Any) -> Any:
    """The items that stock Orbax returns."""
    with ocp.CheckpointManager(base / "stock") as stock:
        stock.save(0, args=items)
    with ocp.CheckpointManager(base / "stock") as stock:
        return dict(stock.restore(0))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", TREES)
def test_tree_without_arrays_is_restored_from_every_tier(tmp_path: Path, tier: str, kind: str) -> None:
    """A run would go on with epoch 0 and another random state, without a message."""
    items = args.Composite(params=args.StandardSave(STATE), meta=TREES[kind])
    expected = _expected(tmp_path, items)
    with _manager(tmp_path, tier) as manager:
        manager.save(0, args=items)
    if tier == "ram, then lost":
        shutil.rmtree(tmp_path / "ram")
    elif tier != "durable" and kind != "text":  # steps with text are in the durable tier alone
        shutil.rmtree(tmp_path / "run" / "0")
    with _manager(tmp_path, tier) as manager:
        for found in (manager.restore(None), manager.restore(0)):
            assert sorted(found.keys()) == ["meta", "params"]
            assert_same(dict(found), expected)
        asked = manager.restore(0, args=args.Composite(meta=_restore_args(TREES[kind])))
        assert_same(asked["meta"], expected["meta"])


def test_tree_without_sidecar_is_restored_as_it_was_saved(tmp_path: Path) -> None:
    """Earlier versions wrote no sidecar for such a tree: their steps would lose it."""
    with _manager(tmp_path, "durable") as manager:
        manager.save(0, args=args.Composite(params=args.StandardSave(STATE), meta=TREES["numbers"]))
    item = tmp_path / "run" / "0" / "meta"
    shutil.rmtree(item / paths.SIDECAR_DIR)
    (item / paths.ARRAY_METADATAS / "process_0").write_text(json.dumps({"array_metadatas": []}))
    with _manager(tmp_path, "durable") as manager:
        for found in (
            manager.restore(0),
            manager.restore(0, args=args.Composite(meta=args.StandardRestore())),
            manager.restore(0, args=args.Composite(meta=args.StandardRestore({"epoch": 0, "lr": 0.0, "done": True}))),
        ):
            assert_same(found["meta"], {"epoch": 7, "lr": 0.5, "done": False})
        assert manager.steps()[0].verified_s is None, "no digest covers all of it"


def test_lost_sidecar_of_tree_without_arrays_is_damage(tmp_path: Path) -> None:
    """An item whose only proof was lost would be returned as good."""
    with _manager(tmp_path, "durable") as manager:
        manager.save(0, args=args.Composite(params=args.StandardSave(STATE), meta=TREES["numpy"]))
    shutil.rmtree(tmp_path / "run" / "0" / "meta" / paths.SIDECAR_DIR)
    with _manager(tmp_path, "durable") as manager, pytest.raises(ckptkit.CorruptCheckpointError, match="sidecars"):
        manager.restore(0)


def test_stock_orbax_reads_tree_without_arrays(tmp_path: Path) -> None:
    """The sidecars must stay invisible to stock Orbax."""
    items = args.Composite(params=args.StandardSave(STATE), meta=TREES["beside empty nodes"])
    expected = _expected(tmp_path, items)
    with _manager(tmp_path, "durable") as manager:
        manager.save(0, args=items)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        assert_same(dict(stock.restore(0)), expected)


def test_v1_checkpointable_of_numbers_is_restored(tmp_path: Path) -> None:
    """The facade of v1 saves each checkpointable as a named tree."""
    from ckptkit.v1 import training

    with training.Checkpointer(tmp_path / "run") as saver:
        saver.save_checkpointables(0, {"state": STATE, "meta": {"epoch": 7}})
    with training.Checkpointer(tmp_path / "run") as loader:
        assert_same(loader.load_checkpointables(0), {"state": STATE, "meta": {"epoch": 7}})


def test_notes_of_a_user_in_a_step_do_not_stop_a_restart(tmp_path: Path) -> None:
    """A directory in a step that holds no item would end `restore(None)` with an error of Orbax."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.Composite(state=args.StandardSave({"w": jnp.ones(2)})))
    (tmp_path / "1" / "evaluation").mkdir()
    (tmp_path / "1" / "evaluation" / "accuracy.json").write_text("{}")
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert list(manager.restore(None).keys()) == ["state"]
