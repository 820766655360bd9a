"""Restores on other devices than those of the save."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.reports.managers import args, on_devices, over, restored, saved
from tests.reports.reported import reported

VALUES = np.arange(32.0, dtype=np.float32).reshape(8, 4)


@reported("google/orbax/issues/648", "An array that 64 devices shared is restored on few, or as NumPy array.")
@pytest.mark.parametrize("count", [1, 2])
def test_array_of_four_devices_is_restored_on_fewer(tmp_path: Path, count: int) -> None:
    saved(tmp_path, {"w": on_devices(VALUES, 4)})
    found = restored(tmp_path, {"w": on_devices(np.zeros_like(VALUES), count)})["w"]
    assert len(found.sharding.device_set) == count
    assert np.asarray(found).tobytes() == VALUES.tobytes()
    assert restored(tmp_path, {"w": np.zeros_like(VALUES)})["w"].tobytes() == VALUES.tobytes()


@reported("google/orbax/issues/332", "A checkpoint of two devices is restored on four, split another way.")
def test_array_is_restored_with_another_split(tmp_path: Path) -> None:
    saved(tmp_path, {"w": on_devices(VALUES, 2)})
    wanted = on_devices(np.zeros_like(VALUES), 4, None, "x")
    found = restored(tmp_path, {"w": wanted})["w"]
    assert found.sharding == wanted.sharding
    assert np.asarray(found).tobytes() == VALUES.tobytes()


def _on_another_machine(root: Path) -> None:
    """The step's shardings name a device that this machine lacks."""
    (file,) = root.rglob("_sharding")
    text = file.read_text()
    assert "cpu:0" in text
    file.write_text(text.replace("cpu:0", "cuda:0"))


@reported("google/orbax/issues/2473", "A checkpoint of a GPU machine is restored on a machine without GPU.")
@pytest.mark.parametrize("library", [ocp, ckptkit], ids=["stock", "ours"])
def test_step_of_devices_that_are_not_here_is_restored(tmp_path: Path, library: object) -> None:
    with library.CheckpointManager(tmp_path) as manager:  # pyright: ignore[reportAttributeAccessIssue]
        manager.save(0, args=args.StandardSave({"w": jax.numpy.asarray(VALUES)}))
    _on_another_machine(tmp_path)
    template = {"w": jax.numpy.zeros_like(VALUES)}
    with over(tmp_path) as manager:
        wishes = args.StandardRestore(), args.StandardRestore(template)
        for found in (manager.restore(0), *(manager.restore(0, args=wish) for wish in wishes)):
            assert np.asarray(found["w"]).tobytes() == VALUES.tobytes()
    with over(tmp_path) as manager:
        assert np.asarray(manager.restore(0, args=args.PyTreeRestore())["w"]).tobytes() == VALUES.tobytes()


@reported("google/orbax/issues/986", "A tree whose structure nobody knows beforehand is restored.")
def test_tree_is_restored_without_knowing_its_structure(tmp_path: Path) -> None:
    tree = {"w": on_devices(VALUES, 4), "deep": [{"v": on_devices(VALUES[:4], 4)}]}
    with over(tmp_path) as manager:
        manager.save(0, args=args.Composite(configuration=args.StandardSave(tree), hparams=args.JsonSave({"lr": 1})))
    with over(tmp_path) as manager:
        found = manager.restore(0)
    assert jax.tree.structure(found["configuration"]) == jax.tree.structure(tree)
    assert np.asarray(found["configuration"]["w"]).tobytes() == VALUES.tobytes()
    assert found["hparams"] == {"lr": 1}


@reported("google/orbax/issues/683", "The structure of a checkpoint is read without its devices and its arrays.")
def test_structure_is_read_without_arrays(tmp_path: Path) -> None:
    saved(tmp_path, {"w": on_devices(VALUES, 4)})
    for file in tmp_path.glob("0/*/d/*"):
        if file.stat().st_size == VALUES.nbytes:
            file.unlink()
    (leaf,) = ckptkit.inspect(str(tmp_path / "0")).items[0].leaves
    assert (leaf.name, leaf.shape, leaf.dtype) == ("w", (8, 4), "float32")
