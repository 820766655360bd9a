"""Saves and restores in the contexts that training loops set: a mesh, a transfer guard, 64-bit types, NaN checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptkit
from ckptkit.guard import Guard
from ckptkit.restore import place
from ckptkit.snapshot import copying, describe
from ckptkit.snapshot.shards import has_pinned
from tests.cases import long_except
from tests.contexts import CONTEXTS, mesh_of
from tests.states import abstract, assert_same

_OF_CPUS = ["auto", "slot_copy", "device_copy", "pinned_host", "block"]
_OF_ACCELERATORS = ["auto", "device_copy", "block"]
_STRATEGIES = [*(f"cpu, {each}" for each in _OF_CPUS), *(f"accelerator, {each}" for each in _OF_ACCELERATORS)]
STRATEGIES = long_except(["cpu, auto", "cpu, slot_copy", "accelerator, device_copy"], _STRATEGIES)


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
        "mapped": jax.shard_map(
            lambda rows: rows + 1, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
        )(put(np.arange(8, dtype=np.float32), "data")),
        "key": put(jax.random.key(3)),
        "keys": put(jax.random.split(jax.random.key(4), 4), "data"),
        "host": np.arange(3),
        "count": 7,
    }


SMALL = {"array": "one", "spread": "rows", "copied": "int4", "random": "key"}  # items, and the leaves that they are


def save_args(state: Any) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
        array=ocp.args.ArraySave(state["one"]),  # pyright: ignore[reportCallIssue]
        spread=ocp.args.ArraySave(state["rows"]),  # pyright: ignore[reportCallIssue]
        copied=ocp.args.ArraySave(state["int4"]),  # pyright: ignore[reportCallIssue]
        random=ocp.args.JaxRandomKeySave(state["key"]),  # pyright: ignore[reportCallIssue]
    )


@pytest.fixture
def passing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Devices that pass for accelerators, if the parameter asks for it; and the strategy that it names."""
    device, _, strategy = request.param.partition(", ")
    if device == "accelerator":
        monkeypatch.setattr(describe, "is_accelerator", lambda device: True)
        monkeypatch.setattr(copying, "is_read_from_pinned", has_pinned)  # as on a GPU
    place._local_devices.cache_clear()
    yield strategy
    place._local_devices.cache_clear()


@pytest.mark.parametrize("passing", STRATEGIES, indirect=True)
@pytest.mark.parametrize("context", CONTEXTS)
def test_state_is_saved_and_restored_in_the_context_of_the_loop(tmp_path: Path, context: str, passing: Any) -> None:
    """Every save or restore of a training loop that sets such a context would raise."""
    state = state_of(AxisType.Explicit if "explicit" in context else AxisType.Auto)
    template = abstract(state)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3)]
    saving = ckptkit.SaveOptions(staging=passing)
    with ckptkit.CheckpointManager(tmp_path / "d", tiers=tiers, saving=saving) as manager:
        with CONTEXTS[context]():
            manager.save(1, args=save_args(state))
            manager.wait_until_finished()
            given = manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))  # pyright: ignore[reportCallIssue]
            found = manager.restore(1)
        assert_same(given["state"], state)
        assert_same(found["state"], state)
        assert_same([found[name] for name in SMALL], [state[leaf] for leaf in SMALL.values()])
        for leaf, expected in zip(jax.tree.leaves(given["state"]), jax.tree.leaves(state), strict=True):
            if isinstance(expected, jax.Array):
                assert leaf.sharding.is_equivalent_to(expected.sharding, expected.ndim)


def plain(args: type, *values: Any, **named: Any) -> Any:
    """Arguments of Orbax, whose classes the type checker does not know as such."""
    return args(*values, **named)


@pytest.mark.parametrize("context", CONTEXTS)
def test_casts_run_in_the_context_of_the_loop(tmp_path: Path, context: str) -> None:
    """A program of ours would run in the loop's mesh, and raise for a leaf on other devices, or for its NaNs."""
    state = state_of(AxisType.Explicit if "explicit" in context else AxisType.Auto)
    names = ("split", "replicated", "nan", "stage", "one")
    state = {name: state[name] for name in names}
    narrow = jax.tree.map(lambda leaf: ocp.SaveArgs(dtype=jnp.bfloat16), state)
    wide = jax.tree.map(lambda leaf: leaf.update(dtype=np.float32), abstract(state))
    wishes = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=np.dtype("float32")), state)
    with ckptkit.CheckpointManager(tmp_path / "d") as manager, CONTEXTS[context]():
        saves = [plain(kind, state, save_args=narrow) for kind in (ocp.args.StandardSave, ocp.args.PyTreeSave)]
        manager.save(1, args=ocp.args.Composite(a=saves[0], b=saves[1]))
        manager.wait_until_finished()
        asked = plain(ocp.args.StandardRestore, wide), plain(ocp.args.PyTreeRestore, state, restore_args=wishes)
        found = manager.restore(1, args=ocp.args.Composite(a=asked[0], b=asked[1])).values()
    expected = {name: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32) for name, leaf in state.items()}
    for each in found:
        assert_same(each, expected)
        for name, leaf in state.items():
            assert each[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name


def test_digests_and_alarms_pass_a_transfer_guard() -> None:
    """A loop that guards against transfers of its own would end in what it asked of us."""
    value = jax.device_put(np.array(3, "int4"))  # which a CPU copies, as an accelerator does with all
    guard = Guard()
    with jax.transfer_guard("disallow"):
        found = ckptkit.state_digest({"value": value})
        assert guard.watch(1, loss=value, grad_norm=value) is None
        recorded = guard.to_json()
    assert found == ckptkit.state_digest({"value": value})
    assert {name: readings[0][1] for name, readings in recorded["readings"].items()} == {"loss": 3.0, "grad_norm": 3.0}
