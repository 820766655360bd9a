"""Leaves without elements, random keys, NumPy scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import ckptkit
import ckptkit.direct
from ckptkit.cli import main
from tests.reports.managers import args, on_devices, over, restored, saved
from tests.reports.reported import reported
from tests.states import abstract, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def _adapters() -> dict[str, Any]:
    """Adapters of rank 0 next to one of rank 2."""
    return {
        "layer_0": {"a": jnp.zeros((4, 0), jnp.bfloat16), "b": jnp.zeros((0, 4))},
        "layer_1": {"a": on_devices(jnp.zeros((4, 0)), 4), "b": on_devices(jnp.ones((4, 2)), 4)},
        "buffer": np.zeros((2, 0, 3), np.int8),
        "keys": jax.random.split(jax.random.key(0), 0),
    }


@reported("google/orbax/issues/2587", "An adapter of rank 0 is a valid array, and is saved like any other.")
@pytest.mark.parametrize("lost", ["nothing", "ramdisk", "durable root"])
def test_arrays_without_elements_are_restored_from_each_tier(tmp_path: Path, lost: str) -> None:
    root, tree = tmp_path / "run", _adapters()
    saved(root, tree, ram=lost != "ramdisk", save_interval_steps=1 if lost != "durable root" else 1000)
    with over(root, ram=True) as manager:
        assert_same(manager.restore(None, args=args.StandardRestore(abstract(tree))), tree)
        assert_same(manager.restore(None), tree)
    assert main(["verify", str(root)]) == 0
    if lost != "durable root":
        with ocp.CheckpointManager(root) as stock:
            assert_same(stock.restore(0, args=args.StandardRestore(abstract(tree))), tree)


@reported("google/orbax/issues/1309", "A directory with an array without elements is a whole checkpoint.")
def test_directory_with_an_array_without_elements_is_restored(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(3), "z": jnp.zeros((0,))}
    ckptkit.direct.save(tmp_path / "here", tree)
    assert_same(ckptkit.direct.load(tmp_path / "here"), tree)
    with ocp.StandardCheckpointer() as stock:
        assert_same(stock.restore(tmp_path / "here"), tree)


def _dropout() -> nnx.Dropout:
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@reported("google/orbax/issues/2540", "A model with random keys is restored into its abstract state.")
def test_model_with_random_keys_is_restored_into_its_abstract_state(tmp_path: Path) -> None:
    state = nnx.state(_dropout())
    saved(tmp_path, state)
    _, wanted = nnx.split(nnx.eval_shape(_dropout))
    assert_same(restored(tmp_path, wanted), state)


@reported("google/flax/issues/4231", "Keys of the old kind (uint32) and of the new one are kept apart.")
def test_random_keys_of_both_kinds_keep_their_kind(tmp_path: Path) -> None:
    tree = {"old": jax.random.PRNGKey(1), "new": jax.random.key(1), "rbg": jax.random.key(1, impl="rbg")}
    saved(tmp_path, tree)
    for found in (restored(tmp_path), restored(tmp_path, abstract(tree))):
        assert_same(found, tree)
        assert {name: key.dtype for name, key in found.items()} == {name: key.dtype for name, key in tree.items()}


@reported("google/flax/pull/586", "NumPy scalars are leaves too.")
def test_numpy_scalars_are_restored(tmp_path: Path) -> None:
    tree = {"loss": np.float32(0.1), "seen": np.int64(1 << 40), "done": np.bool_(True)}
    saved(tmp_path, tree)
    for found in (restored(tmp_path), restored(tmp_path, tree)):
        assert {name: (value.dtype, value.item()) for name, value in found.items()} == {
            name: (value.dtype, value.item()) for name, value in tree.items()
        }


@reported("metatensor/metatrain/issues/272", "A checkpoint keeps the dtype that was saved.")
def test_small_dtypes_are_kept(tmp_path: Path) -> None:
    names = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "int8", "uint8", "bool")
    tree = {name: jnp.ones(4, name) for name in names}
    saved(tmp_path, tree)
    assert_same(restored(tmp_path), tree)
