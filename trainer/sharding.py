"""How the state is laid out over the mesh: one table, and the check that it makes sense.

`data` holds whole replicas, `fsdp` splits weights that are gathered for use (and batches, too), `model` splits the
work of one row. The check exists for two silent mistakes: replicas that drift apart, and devices that repeat each
other's work.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.config import MESH_AXES, InputError, MeshConfig

P = PartitionSpec
Rules = Sequence[tuple[str, PartitionSpec]]
Shapes = Mapping[str, jax.ShapeDtypeStruct]

# Parameter path to spec; the first pattern that is found wins. Megatron's layout (Shoeybi et al. 2019): split what
# comes out of the first matrix and what goes into the second, so one all-reduce ends each half block.
RULES: Rules = (
    (r"^embed$", P("model", "fsdp")),  # [V, D]
    (r"^head$", P("fsdp", "model")),  # [D, V]
    (r"attention/query$", P("fsdp", "model", None)),  # [D, N, H]
    (r"attention/key_value$", P("fsdp", None, "model", None)),  # [D, 2, K, H]
    (r"attention/out$", P("model", None, "fsdp")),  # [N, H, D]
    (r"mlp/up$", P("fsdp", None, "model")),  # [D, 2, F]
    (r"mlp/down$", P("model", "fsdp")),  # [F, D]
    (r"norm/scale$", P()),  # [D]: small, so every device holds it
)
BATCH_SPEC = P(("data", "fsdp"))  # rows of the global batch
USE_SPECS = {  # where they are used, rather than stored
    "stream": BATCH_SPEC,  # [B, T, D]
    "table": P("model", None),  # [V, D], gathered over fsdp: else XLA replicates the looked-up rows to move them
}
OFFLOADED = "pinned_host"  # the memory kind of moments with --offload optimizer
LARGE_BYTES = 1_000_000  # a weight above this must not be the only thing that an axis leaves whole


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices of the job; refuses one of another size, naming both."""
    count = jax.device_count()
    if config.devices != count:
        raise InputError(
            f"--mesh {config} needs {config.devices} devices, this job has {count} "
            f"({jax.process_count()} processes); choose sizes whose product is {count}"
        )
    sizes = tuple(config.sizes.values())
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def check_offload() -> None:
    """Refuse to offload to memory that the devices do not have."""
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if OFFLOADED not in kinds:
        raise InputError(
            f"--offload optimizer: {device.device_kind} has no {OFFLOADED} memory, only {', '.join(kinds)}"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch, int32[global batch, T + 1], over the devices."""
    return NamedSharding(mesh, BATCH_SPEC)


def leaf_path(key_path: tuple[Any, ...]) -> str:
    """A leaf's name: `model/blocks/0/mlp/up`. NNX's own last part, `value`, is redundant and is dropped."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/").removesuffix("/value")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Every leaf of a pytree by its name, in tree order."""
    return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def group_of(path: str) -> str:
    """The name that all blocks share: `blocks/*/mlp/up`."""
    return re.sub(r"/\d+/", "/*/", path)


def spec_of(path: str, rules: Rules = RULES) -> PartitionSpec | None:
    """The spec of one parameter, or None where no rule speaks of it."""
    return next((spec for pattern, spec in rules if re.search(pattern, path)), None)


def shard_state(abstract_state: nnx.State, mesh: Mesh | AbstractMesh, *, offload: bool = False) -> nnx.State:
    """The same abstract state with a `NamedSharding` on every leaf.

    Parameters follow the table. An optimizer moment follows its parameter: the leaf whose path ends in the parameter's
    and whose shape is the same. All else (counters, keys) is on every device. `offload`: moments are in the host's
    pinned memory.
    """
    params = {
        path.removeprefix("model/"): leaf.shape
        for path, leaf in named_leaves(abstract_state).items()
        if path.startswith("model/")
    }

    def place(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        parts = leaf_path(key_path).split("/")
        suffixes = ("/".join(parts[i:]) for i in range(1, len(parts)))
        param = next((s for s in suffixes if params.get(s) == leaf.shape), None)
        sharding = NamedSharding(mesh, (param and spec_of(param)) or P())
        if offload and param and parts[0] == "optimizer":
            sharding = sharding.with_memory_kind(OFFLOADED)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def check_rules(
    params: Shapes,
    mesh: MeshConfig,
    *,
    global_batch: int,
    accumulate: int = 1,
    rules: Rules = RULES,
    batch_spec: PartitionSpec = BATCH_SPEC,
) -> None:
    """Refuse a layout that would train wrongly or waste devices, naming every fault at once.

    Args:
        params: path to shape and dtype of each weight, without the leading `model/`.
        mesh: axis sizes.
        global_batch: rows per step over all processes.
        accumulate: microbatches that each device splits its rows into.
        rules: the table.
        batch_spec: how the rows are split.

    Raises:
        InputError: one line per fault: the parameter, the axis, the remedy.
    """
    faults = {fault for path, leaf in params.items() for fault in _weight_faults(path, leaf, mesh.sizes, rules)}
    faults |= set(_batch_faults(mesh.sizes, global_batch, accumulate, batch_spec))
    faults |= set(_idle_axes(params, mesh.sizes, rules, batch_spec))
    if faults:
        raise InputError(f"--mesh {mesh} does not fit this model:\n  " + "\n  ".join(sorted(faults)))


def _weight_faults(path: str, leaf: jax.ShapeDtypeStruct, sizes: Mapping[str, int], rules: Rules) -> Iterable[str]:
    name, spec = group_of(path), spec_of(path, rules)
    tensor = f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
    if spec is None:
        yield f"{name}: no rule matches it; add one to RULES in trainer/sharding.py"
        return
    if "data" in axes_of(spec):
        yield f"{name}: {spec} splits it over data, where every replica must be whole; split over fsdp instead"
    if len(spec) > len(leaf.shape):
        yield f"{name}: {spec} names {len(spec)} dimensions, {tensor} has {len(leaf.shape)}; shorten the spec"
        return
    for dimension, (entry, size) in enumerate(zip(spec, leaf.shape, strict=False)):
        axes = _entry_axes(entry)
        if unknown := [axis for axis in axes if axis not in sizes]:
            yield f"{name}: the mesh has no axis {unknown[0]}; use {', '.join(sizes)}"
        elif size % (ways := math.prod(sizes[axis] for axis in axes)):
            yield (
                f"{name}: {'x'.join(axes)}={ways} does not divide dimension {dimension} of {tensor}; "
                f"choose a size that divides {size}"
            )


def _batch_faults(
    sizes: Mapping[str, int], global_batch: int, accumulate: int, batch_spec: PartitionSpec
) -> Iterable[str]:
    axes = axes_of(batch_spec)
    if "model" in axes:
        yield (
            f"batch: {batch_spec} splits rows over model, whose devices share the work of the same row; "
            "split over data and fsdp"
        )
    ways = math.prod(sizes[axis] for axis in axes) * accumulate
    if global_batch % ways:
        yield (
            f"batch: {'x'.join(axes)} and {accumulate} microbatches need a multiple of {ways} rows, "
            f"--global-batch is {global_batch}; choose {max(1, global_batch // ways) * ways}"
        )


def _idle_axes(params: Shapes, sizes: Mapping[str, int], rules: Rules, batch_spec: PartitionSpec) -> Iterable[str]:
    used = set(axes_of(batch_spec))
    for path, leaf in params.items():
        if _bytes(leaf) > LARGE_BYTES:
            used |= set(axes_of(spec_of(path, rules) or P()))
    for axis, size in sizes.items():
        if size > 1 and axis not in used:
            yield (
                f"axis {axis}: {size} devices, but it splits neither the batch nor a weight above 1 MB, so they would "
                f"repeat each other's work; set {axis}=1 or name {axis} in a rule"
            )


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec names, in order."""
    return tuple(axis for entry in spec for axis in _entry_axes(entry))


def _entry_axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
