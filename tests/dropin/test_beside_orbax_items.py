"""Trees without jax arrays in steps that Orbax's composite handler writes, because of an item that only it holds."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain.checkpoint import CheckpointSave

import ckptkit

args = ocp.args
BESIDE: dict[str, Callable[[], Any]] = {
    "key": lambda: args.JaxRandomKeySave(jax.random.key(3)),  # pyright: ignore[reportCallIssue]
    "array": lambda: args.ArraySave(np.arange(4)),  # pyright: ignore[reportCallIssue]
    "grain": lambda: CheckpointSave(iter(grain.MapDataset.range(100).batch(4).to_iter_dataset())),
}
TREES: dict[str, Any] = {
    "text": {"run": "x"},
    "text and number": {"run": "x", "n": 1},
    "empty node": {"n": {}},
    "array and empty node": {"i": np.ones(2), "e": {}},
    "array and None": {"i": np.ones(2), "e": None},
    "array": {"i": np.arange(4000.0)},
    "number": {"n": 1},
}


def saved(root: Path, tree: Any, beside: str, steps: int = 1) -> None:
    with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=5)) as manager:
        for step in range(1, steps + 1):
            items = {
                "model": args.StandardSave({"w": jnp.full(3, float(step))}),  # pyright: ignore[reportCallIssue]
                "tree": args.PyTreeSave(tree),  # pyright: ignore[reportCallIssue]
                "beside": BESIDE[beside](),
            }
            assert manager.save(step, args=args.Composite(**items))


def wanted() -> Any:
    return args.Composite(model=args.StandardRestore(), tree=args.PyTreeRestore())


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_comes_back_and_stock_orbax_reads_it(tmp_path: Path, tree: str, beside: str) -> None:
    """The item would be in no list of the restore: all newer steps would be rejected, and then deleted."""
    saved(tmp_path / "run", TREES[tree], beside)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        expected = stock.restore(1, args=wanted())
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        found = manager.restore(None, args=wanted())
    jax.tree.map(np.testing.assert_array_equal, dict(found.items()), dict(expected.items()))
    assert jax.tree.structure(found["tree"]) == jax.tree.structure(TREES[tree])
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        if beside != "grain":  # Orbax asks for the arguments of an iterator
            assert set(manager.restore(1).keys()) == {"model", "tree", "beside"}


@pytest.mark.parametrize("tree", ["text", "empty node", "array and None", "array"])
def test_step_of_an_earlier_version_without_that_sidecar_comes_back(tmp_path: Path, tree: str) -> None:
    """Steps that were written before such trees had sidecars would stay lost."""
    saved(tmp_path, TREES[tree], "key", steps=3)
    for step in (1, 2, 3):
        for name in ("_ckptkit", "array_metadatas"):
            shutil.rmtree(tmp_path / str(step) / "tree" / name)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        found = manager.restore(None, args=wanted())
    np.testing.assert_array_equal(found["model"]["w"], np.full(3, 3.0))
    jax.tree.map(np.testing.assert_array_equal, found["tree"], TREES[tree])


@pytest.mark.parametrize("beside", BESIDE)
def test_flipped_bit_of_a_numpy_tree_is_found(tmp_path: Path, beside: str) -> None:
    """Statistics, or a replay buffer, would come back with wrong values, and without a message."""
    saved(tmp_path, TREES["array"], beside, steps=2)
    data = max((path for path in (tmp_path / "2" / "tree").rglob("d/*")), key=lambda path: path.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 0x10
    data.write_bytes(flipped)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=wanted())["model"]["w"][0] == 1.0
        with pytest.raises(ckptkit.CorruptCheckpointError):
            manager.restore(2, args=wanted())


def with_ema(root: Path, steps: set[int], ram: Path | None = None) -> Any:
    tiers = () if ram is None else (ckptkit.Tier.ram(str(ram)),)
    manager = ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=3), tiers=tiers)
    for step in range(1, 5):
        items = {"model": args.StandardSave({"w": jnp.full(3, float(step))})}  # pyright: ignore[reportCallIssue]
        if step in steps:
            items["ema"] = args.StandardSave({"w": jnp.zeros(3)})  # pyright: ignore[reportCallIssue]
        assert manager.save(step, args=args.Composite(**items))
        manager.wait_until_finished()
    return manager


@pytest.mark.parametrize("has_ram", [False, True])
def test_newest_step_without_an_asked_item_is_not_passed_over(tmp_path: Path, has_ram: bool) -> None:
    """A typo would send the run back, and the next save would delete the steps between."""
    ram = tmp_path / "ram" if has_ram else None
    with with_ema(tmp_path / "run", {2}, ram) as manager:
        with pytest.raises(ckptkit.ItemNotFoundError, match=r"Step 4 is the newest that can be restored, and intact"):
            manager.restore(None, args=args.Composite(model=args.StandardRestore(), ema=args.StandardRestore()))
        assert manager.restore(None, args=args.Composite(model=args.StandardRestore()))["model"]["w"][0] == 4.0


def test_step_that_lost_the_directory_of_an_item_is_damaged(tmp_path: Path) -> None:
    """A job would not start again, though an older step has everything."""
    with_ema(tmp_path, {1, 2, 3, 4}).close()
    shutil.rmtree(tmp_path / "4" / "ema")
    both = args.Composite(model=args.StandardRestore(), ema=args.StandardRestore())
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=both)["model"]["w"][0] == 3.0
        with pytest.raises(ckptkit.CorruptCheckpointError, match="item ema is missing"):
            manager.restore(4, args=both)


def test_saves_of_two_threads_are_all_kept(tmp_path: Path) -> None:
    """`save` would return True, and the step be dropped: nobody would know."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        taken: list[int] = []

        def save(first: int) -> None:
            for step in range(first, 12, 2):
                if manager.save(step, args=args.StandardSave({"w": jnp.arange(8.0) + step})):  # pyright: ignore[reportCallIssue]
                    taken.append(step)

        threads = [threading.Thread(target=save, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        manager.wait_until_finished()
        assert manager.all_steps() == sorted(taken)
        assert len(taken) >= 6, "one thread's at least"
        for step in taken:
            np.testing.assert_array_equal(manager.restore(step)["w"], np.arange(8.0) + step)


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node without keys of its own."""

    def __init__(self, one: Any, two: Any):
        self.one, self.two = one, two

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.one, self.two), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> Pair:
        return cls(*children)


def test_node_without_keys_comes_back_as_a_list_as_in_orbax(tmp_path: Path) -> None:
    """`Pair(*restored)` would get the names '0' and '1'."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.StandardSave({"pair": Pair(jnp.arange(8.0), jnp.ones(2))}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        found = manager.restore(1)
    with ocp.CheckpointManager(tmp_path) as stock:
        expected = stock.restore(1)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
