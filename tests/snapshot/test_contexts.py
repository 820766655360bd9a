"""Saves and restores in the contexts that training loops set: a mesh, a transfer guard, 64-bit types, NaN checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptkit
from tests.states import abstract, assert_same

STRATEGIES = ["auto", "slot_copy", "device_copy", "pinned_host", "block", "alias", "gate"]


def mesh_of(axis: AxisType) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(axis,) * 2)


@contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "set_mesh, automatic axes": lambda: jax.set_mesh(mesh_of(AxisType.Auto)),
    "set_mesh, explicit axes": lambda: jax.set_mesh(mesh_of(AxisType.Explicit)),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "64-bit types": lambda: setting("jax_enable_x64", True),
    "NaN checks": lambda: setting("jax_debug_nans", True),
}


def state_of(axis: AxisType) -> dict[str, Any]:
    """Leaves over a whole mesh, over a part of it, on one device and on the host, keys among them."""
    mesh = mesh_of(axis)
    stage = Mesh(np.array(jax.devices()[2:]), ("stage",), axis_types=(axis,))

    def put(value: Any, *spec: Any, on: Mesh = mesh) -> Any:
        return jax.device_put(value, NamedSharding(on, PartitionSpec(*spec)))

    return {
        "split": put(np.arange(64.0, dtype=np.float32).reshape(8, 8), "data", "fsdp"),
        "rows": put(np.arange(64, dtype=np.int32).reshape(8, 8), "fsdp"),
        "replicated": put(np.arange(8, dtype=np.float16)),
        "nan": put(np.array([np.nan, 1, 2, 3], np.float32), "data"),
        "half": put(np.arange(8, dtype=jnp.bfloat16), "data"),
        "int4": put(np.arange(8).astype(jnp.int4), "data"),
        "stage": put(np.arange(8.0, dtype=np.float32), "stage", on=stage),
        "one": jax.device_put(np.arange(5), SingleDeviceSharding(jax.devices()[3])),
        "key": put(jax.random.key(3)),
        "keys": put(jax.random.split(jax.random.key(4), 4), "data"),
        "host": np.arange(3),
        "count": 7,
    }


def save_args(state: Any) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
        array=ocp.args.ArraySave(state["one"]),  # pyright: ignore[reportCallIssue]
        spread=ocp.args.ArraySave(state["rows"]),  # pyright: ignore[reportCallIssue]
        random=ocp.args.JaxRandomKeySave(state["key"]),  # pyright: ignore[reportCallIssue]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_state_is_saved_and_restored_in_the_context_of_the_loop(tmp_path: Path, context: str, strategy: Any) -> None:
    """Every save or restore of a training loop that sets such a context would raise."""
    state = state_of(AxisType.Explicit if "explicit" in context else AxisType.Auto)
    template = abstract(state)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3)]
    saving = ckptkit.SaveOptions(staging=strategy)
    with ckptkit.CheckpointManager(tmp_path / "d", tiers=tiers, saving=saving) as manager:
        with CONTEXTS[context]():
            manager.save(1, args=save_args(state))
            manager.wait_until_finished()
            given = manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))  # pyright: ignore[reportCallIssue]
            found = manager.restore(1)
        assert_same(given["state"], state)
        assert_same(found["state"], state)
        assert_same([found["array"], found["spread"], found["random"]], [state["one"], state["rows"], state["key"]])
        for leaf, expected in zip(jax.tree.leaves(given["state"]), jax.tree.leaves(state), strict=True):
            if isinstance(expected, jax.Array):
                assert leaf.sharding.is_equivalent_to(expected.sharding, expected.ndim)
