"""On eight devices: saves with stock Orbax on (8,), reshards by the command, restores with stock Orbax on another mesh.

Prints as JSON: amplification by plan and by TensorStore's own counters, before and after, and wrong results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from ckptkit.cli import main
from tests.states import raw

_AUTO = jax.sharding.AxisType.Auto
RULES = """
[[rule]]
leaf = "rows"
spec = ["data", "model"]
[[rule]]
leaf = "columns"
spec = ["", ["model", "data"]]
[[rule]]
leaf = "key*"
spec = ["model"]
[[rule]]
leaf = "**"
spec = []
"""
SPECS: dict[str, tuple[Any, ...]] = {
    "rows": ("data", "model"),
    "columns": (None, ("model", "data")),
    "keys": ("model",),
}


def state() -> dict[str, Any]:
    """Split by rows on (8,), as a fully sharded job is; all kinds of leaf."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(_AUTO,))

    def put(value: Any, *spec: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 21, dtype=np.uint32)
    return {
        "rows": put(jnp.asarray(bits.view(np.float32).reshape(2048, 1024)), "fsdp"),
        "columns": put(jnp.asarray(bits[: 1 << 20].view(jnp.bfloat16).reshape(4096, 512)), "fsdp"),
        "keys": put(jax.random.split(jax.random.key(3), 8), "fsdp"),
        "count": 12,
        "host": np.arange(5),
        "nothing": None,
        "empty": {},
        "list": [put(jnp.float32(-0.0)), (put(jnp.arange(3)),)],
    }


def abstract_on(saved: Any, mesh: jax.sharding.Mesh) -> Any:
    """The target for stock Orbax's restore on the mesh."""

    def of(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding = NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ())))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of, saved)


def read_bytes() -> int:
    """The bytes that TensorStore has read from files so far."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


def restore(root: Path, saved: Any, mesh: jax.sharding.Mesh) -> tuple[Any, float]:
    """Stock Orbax's result on the mesh, and bytes read over bytes of all distinct boxes."""
    target = abstract_on(saved, mesh)
    before = read_bytes()
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(5, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
    needed = sum(
        len(set(map(str, leaf.sharding.devices_indices_map(leaf.shape).values())))
        * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        * (8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(target)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )
    return found["state"], (read_bytes() - before) / needed


def read_by_devices(step: Path, saved: Any, mesh: jax.sharding.Mesh) -> float:
    """Bytes that TensorStore reads over those needed, when each device's box is read by a process of its own."""
    read = needed = 0
    for name in ("rows", "columns"):
        sharding = NamedSharding(mesh, PartitionSpec(*SPECS[name]))
        for index in sharding.devices_indices_map(saved[name].shape).values():
            kvstore = {"driver": "ocdbt", "base": f"file://{step}/state/", "path": f"{name}/"}
            array = ts.open({"driver": "zarr", "kvstore": kvstore}, context=ts.Context(), read=True).result()
            before = read_bytes()
            needed += array[index].read().result().nbytes
            read += read_bytes() - before
    return read / needed


def run(home: Path) -> dict[str, Any]:
    """The whole story, for (2,4) and for (4,2)."""
    saved = state()
    with ocp.CheckpointManager(home / "stock") as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave(saved), data=ocp.args.JsonSave({"at": 1})))
        manager.wait_until_finished()
    (home / "rules.toml").write_text(RULES)
    said = {}
    for data, model in ((2, 4), (4, 2)):
        words = f"data={data},model={model}"
        root = home / f"root-{data}-{model}"
        root.mkdir()
        arguments = [str(home / "stock/5"), str(root / "5"), "--mesh", words, "--rules", str(home / "rules.toml")]
        code = main(["reshard", *arguments, "--memory", "24MB", "--chunk-bytes", "512KiB"])
        mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(_AUTO, _AUTO))
        _, before = restore(home / "stock", saved, mesh)
        found, after = restore(root, saved, mesh)
        with ocp.CheckpointManager(root) as manager:
            # Without a template: the shardings that the reshard has written.
            untold = manager.restore(
                5, args=ocp.args.Composite(state=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
            )
        wrong = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(saved)[0]:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            for answer in (found, untold["state"]):
                there = answer
                for key in path:
                    there = there[getattr(key, "key", getattr(key, "idx", None))]
                if raw(there) != raw(leaf):
                    wrong.append(name)
            if name in SPECS and untold["state"][name].sharding.spec != PartitionSpec(*SPECS[name]):
                wrong.append(f"sharding of {name}")
        apart = {
            "before_by_device": read_by_devices(home / "stock/5", saved, mesh),
            "after_by_device": read_by_devices(root / "5", saved, mesh),
        }
        said[words] = {"code": code, "before": before, "after": after, "wrong": wrong, "data": untold["data"], **apart}
    return said


if __name__ == "__main__":
    result = run(Path(sys.argv[1]))
    sys.stderr.flush()
    sys.stdout.write("\n" + json.dumps(result) + "\n")
