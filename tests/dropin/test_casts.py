"""Templates of another dtype or kind: cast as stock Orbax does, from whichever tier the bytes come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.states import put

args: Any = ocp.args
MANAGERS = ("orbax", "durable", "ram")


def state() -> dict[str, Any]:
    return {
        "f32": put(jnp.linspace(-3.7, 9.9, 8), "data"),
        "bf16": put(jnp.linspace(-300.0, 900.0, 8).astype(jnp.bfloat16), "fsdp"),
        "i32": put(jnp.arange(-4, 4, dtype=jnp.int32)),
        "bool": put(jnp.arange(8) % 3 == 0, "data"),
        "f64": np.linspace(0.1, 0.9, 4),
        "i64": np.arange(4) - 2,
        "int": 3,
        "float": 2.75,
        "truth": True,
        "gone": put(jnp.ones(4)),
    }


def on_devices(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=put(jnp.zeros(8), *spec).sharding)


CASTS: list[tuple[str, Callable[[], Any]]] = [
    *[("f32", lambda t=t: on_devices((8,), t, "fsdp")) for t in (jnp.bfloat16, jnp.float16, jnp.int32)],
    ("f32", lambda: jnp.zeros(8, jnp.bfloat16)),
    ("f32", lambda: np.zeros(8, np.float64)),
    ("f32", lambda: jax.ShapeDtypeStruct((8,), jnp.bfloat16)),
    *[("bf16", lambda t=t: on_devices((8,), t)) for t in (jnp.float32, jnp.float16)],
    *[("i32", lambda t=t: on_devices((8,), t, "data")) for t in (jnp.float32, jnp.uint8, jnp.bool_)],
    ("bool", lambda: on_devices((8,), jnp.float32, "data")),
    ("f64", lambda: np.zeros(4, np.float32)),
    ("f64", lambda: on_devices((4,), jnp.float32)),
    ("f64", lambda: jax.ShapeDtypeStruct((4,), jnp.float32)),
    ("f64", lambda: jax.ShapeDtypeStruct((4,), np.float64)),
    ("i64", lambda: on_devices((4,), jnp.int32, "data")),
    ("int", lambda: 1.0),
    ("int", lambda: True),
    ("int", lambda: jnp.float32(0)),
    ("int", lambda: on_devices((), jnp.float32)),
    ("float", lambda: 1),
    ("float", lambda: np.zeros((), np.float32)),
    ("truth", lambda: 1),
    ("gone", lambda: None),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    root = tmp_path_factory.mktemp("casts")

    def manager(kind: str) -> Any:
        if kind == "orbax":
            return ocp.CheckpointManager(root / kind)
        tiers = [ckptkit.Tier.ram(str(root / "fast"))] if kind == "ram" else []
        return ckptkit.CheckpointManager(root / kind, tiers=tiers, host_id="h")

    for kind in MANAGERS:
        with manager(kind) as each:
            each.save(0, args=args.StandardSave(state()))
    return manager


def told(leaf: Any) -> Any:
    """Everything that a caller can see of a leaf."""
    return type(leaf), getattr(leaf, "dtype", None), getattr(leaf, "sharding", None), np.asarray(leaf).tolist()


@pytest.mark.parametrize(("name", "template"), CASTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASTS)])
def test_a_template_casts_as_orbax_does(saved: Any, name: str, template: Callable[[], Any]) -> None:
    """A script that restores float32 weights as bfloat16 would stop, or get other values from the ramdisk."""
    found = []
    for kind in MANAGERS:
        with saved(kind) as manager:
            found.append(manager.restore(0, args=args.StandardRestore({**state(), name: template()})))
    expected = {leaf: told(value) for leaf, value in found[0].items()}
    for each in found[1:]:
        assert {leaf: told(value) for leaf, value in each.items()} == expected


def test_donated_replica_of_a_cast_array_changes_no_other(saved: Any) -> None:
    """A step that donates one replica would change the others, where devices take over the same host memory."""
    with saved("ram") as manager:
        wanted = {**state(), "f64": on_devices((4,), jnp.float32)}
        array = manager.restore(0, args=args.StandardRestore(wanted))["f64"]
    first, *others = [shard.data for shard in array.addressable_shards]
    before = np.array(first)
    donating = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    np.testing.assert_array_equal(donating(first), before * 2 + 1)
    assert len(others) == 3
    for other in others:
        np.testing.assert_array_equal(other, before)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("f32", on_devices((5,), jnp.float32)),
        ("f32", on_devices((2, 4), jnp.bfloat16)),
        ("f32", 1.0),
        ("f32", ...),
        ("f32", int),
    ],
)
def test_impossible_cast_is_refused_by_every_tier(saved: Any, name: str, template: Any) -> None:
    """A shape would be cut or padded without a message, or one tier would answer what another refuses. (Orbax raises
    ValueError for each of these too, and leaves readers behind that nobody awaits.)"""
    for kind in MANAGERS[1:]:
        with saved(kind) as manager, pytest.raises(ValueError, match=r"is not the tree|Unsupported type"):
            manager.restore(0, args=args.StandardRestore({**state(), name: template}))


def test_a_numpy_template_of_another_shape_is_refused(saved: Any) -> None:
    """Orbax gives the stored shape, whatever was asked for: the caller's next line would fail instead."""
    wanted = {**state(), "f64": np.zeros(9)}
    with saved("orbax") as stock:
        assert stock.restore(0, args=args.StandardRestore(wanted))["f64"].shape == (4,)
    for kind in MANAGERS[1:]:
        with saved(kind) as manager, pytest.raises(ckptkit.TreeMismatchError, match=r"f64 is float64\[4\] on disk"):
            manager.restore(0, args=args.StandardRestore(wanted))
