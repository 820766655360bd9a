"""Computes the needs of a run from shapes alone: memory per device, bytes per checkpoint, sharding."""

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from rich.console import Console
from rich.table import Table

from ckptkit import Tier
from trainer.config import MESH_AXES, InputError, MeshConfig, ModelConfig, OptimizerConfig
from trainer.sharding import OFFLOADED, axes_of, check_rules, group_of, named_leaves, shard_state
from trainer.step import abstract_train

_FIRST_BLOCK = "/blocks/0/"
IN_FLIGHT = 1  # snapshots in flight at once, the default of `CheckpointManager`
ACTIVATION_SOURCE = "Korthikanti et al. 2022, arXiv:2205.05198, table 2, no sequence parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device at the fullest moment of a step.

    XLA may hold a second copy of the gradients, while it clips or accumulates them: on CPU it does (bench/LOG.md).
    """

    parameters: int
    gradients: int
    optimizer: int  # of offloaded moments those of the largest weight, before and after its update: the least
    gathered: int  # one block's weights in the compute dtype, whole over fsdp
    activations: int  # an estimate; the other numbers follow from shapes
    offloaded: int = 0  # in the host's memory, for this device

    @property
    def total(self) -> int:
        """Sum of all parts on the device."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The same weight of every block."""

    name: str
    count: int
    shape: tuple[int, ...]
    spec: str
    device_bytes: int  # float32, of all `count` weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer, ready to print."""

    mesh: MeshConfig
    parameters: int
    device_bytes: int  # that a device has
    memory: Memory
    checkpoint_bytes: int  # every leaf once
    host_bytes: int  # distinct boxes of one host: what it stages, and what a fast tier holds per step
    offloaded_bytes: int  # moments in one host's memory, between updates
    groups: tuple[Group, ...]
    fitting: tuple[int, Memory] | None  # the smallest fsdp that fits, with the same data and model

    @property
    def fits(self) -> bool:
        """Whether the mesh as given fits its devices."""
        return self.memory.total <= self.device_bytes


def make_plan(
    model: ModelConfig,
    mesh: MeshConfig,
    *,
    microbatch_rows: int,
    device_bytes: int,
    devices_per_host: int,
    offload: bool = False,
) -> Plan:
    """Plan a run without devices.

    Args:
        model: what would be trained.
        mesh: over how many devices and how.
        microbatch_rows: rows that one device works on at a time; accumulation makes up the rest of the batch.
        device_bytes: memory of one device.
        devices_per_host: neighbours in mesh order that share a host.
        offload: whether moments are in the host's pinned memory between updates.

    Raises:
        InputError: the mesh does not fit the model.
    """
    abstract = _one_block(model)
    _check(named_leaves(abstract["model"]), mesh)
    leaves = sharded_leaves(abstract, model, mesh, offload=offload)
    memory = device_memory(leaves, model, mesh, microbatch_rows)
    hosts = max(1, mesh.devices // devices_per_host)
    return Plan(
        mesh=mesh,
        parameters=sum(math.prod(leaf.shape) for path, leaf in leaves.items() if path.startswith("model/")),
        device_bytes=device_bytes,
        memory=memory,
        checkpoint_bytes=sum(_bytes(leaf.shape, leaf) for leaf in leaves.values()),
        # The first few hosts: mesh order repeats itself.
        host_bytes=max(_host_bytes(leaves, mesh, host, devices_per_host) for host in range(min(hosts, 8))),
        offloaded_bytes=memory.offloaded * min(devices_per_host, mesh.devices),
        groups=_groups(leaves),
        fitting=_smallest_fsdp(abstract, model, mesh, microbatch_rows, device_bytes, offload=offload),
    )


def _one_block(model: ModelConfig) -> nnx.State:
    """The abstract state of the model with its first block alone: tracing all 96 took 4 of 6 seconds."""
    return abstract_train(replace(model, size=replace(model.size, layers=1)), OptimizerConfig())[1]


def sharded_leaves(
    abstract: nnx.State, model: ModelConfig, mesh: MeshConfig, *, offload: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf of the whole model by name, with its sharding; `abstract` has the first block, which all are like."""
    leaves: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in named_leaves(shard_state(abstract, _abstract_mesh(mesh), offload=offload)).items():
        blocks = range(model.size.layers) if _FIRST_BLOCK in path else (0,)
        leaves |= {path.replace(_FIRST_BLOCK, f"/blocks/{block}/"): leaf for block in blocks}
    return leaves


def device_memory(
    leaves: dict[str, jax.ShapeDtypeStruct], model: ModelConfig, mesh: MeshConfig, microbatch_rows: int
) -> Memory:
    """Bytes on one device: float32 weights, gradients and two moments, the gathered block, activations."""
    shards = {path: _bytes(leaf.sharding.shard_shape(leaf.shape), leaf) for path, leaf in leaves.items()}
    parameters = sum(size for path, size in shards.items() if path.startswith("model/"))
    split = {path for path, leaf in leaves.items() if "fsdp" in axes_of(leaf.sharding.spec)}
    block = sum(size for path, size in shards.items() if path in split and path.startswith("model/blocks/0/"))
    width = np.dtype(model.compute_dtype).itemsize
    moments = {path: size for path, size in shards.items() if path.startswith("optimizer/")}
    offloaded = {path: size for path, size in moments.items() if leaves[path].sharding.memory_kind == OFFLOADED}
    fetched = Counter[str]()  # by weight, which is the same name in each kind of moment
    for path, size in offloaded.items():
        fetched[re.sub(r"^.*?/(mu|nu)/", "", path)] += size
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=sum(moments.values()) - sum(offloaded.values()) + 2 * max(fetched.values(), default=0),
        gathered=block * mesh.fsdp * width // 4 if mesh.fsdp > 1 else 0,
        activations=activation_bytes(model, microbatch_rows, mesh.model),
        offloaded=sum(offloaded.values()),
    )


def activation_bytes(model: ModelConfig, rows: int, model_ways: int) -> int:
    """Estimate the activations one device keeps for the backward pass, in bytes.

    Per layer s b h (10 + 24/t + 5 a s / (h t)) bytes at 16 bits; 2 s b h when blocks are recomputed, plus one block at
    work. Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2, for a GELU MLP of 4 h and full attention heads.
    s tokens, b rows, h width, a heads, t ways of model parallelism. Twice that at 32 bits. Added: float32 logits and
    their gradient, 8 s b v / t.
    """
    size = model.size
    s, b, h, a, t = size.seq_len, rows, size.d_model, size.heads, model_ways
    width = np.dtype(model.compute_dtype).itemsize / 2
    block = s * b * h * (10 + 24 / t + 5 * a * s / (h * t)) * width
    kept = size.layers * 2 * s * b * h * width + block if model.remat else size.layers * block
    return int(kept + 8 * s * b * size.vocab / t)


def _check(params: dict[str, jax.ShapeDtypeStruct], mesh: MeshConfig) -> None:
    check_rules(params, mesh, global_batch=mesh.data * mesh.fsdp)


def _abstract_mesh(mesh: MeshConfig) -> AbstractMesh:
    return AbstractMesh(tuple(mesh.sizes.values()), MESH_AXES)


def _smallest_fsdp(
    abstract: nnx.State, model: ModelConfig, mesh: MeshConfig, microbatch_rows: int, device_bytes: int, *, offload: bool
) -> tuple[int, Memory] | None:
    """The first fsdp that divides the model and fits; d_model bounds the search, as every rule splits it."""
    params = named_leaves(abstract["model"])
    for fsdp in (n for n in range(1, model.size.d_model + 1) if model.size.d_model % n == 0):
        candidate = replace(mesh, fsdp=fsdp)
        try:
            _check(params, candidate)
        except InputError:
            continue
        leaves = sharded_leaves(abstract, model, candidate, offload=offload)
        memory = device_memory(leaves, model, candidate, microbatch_rows)
        if memory.total <= device_bytes:
            return fsdp, memory
    return None


def _groups(leaves: dict[str, jax.ShapeDtypeStruct]) -> tuple[Group, ...]:
    members: dict[str, list[jax.ShapeDtypeStruct]] = {}
    for path, leaf in leaves.items():
        if path.startswith("model/"):
            members.setdefault(group_of(path.removeprefix("model/")), []).append(leaf)
    return tuple(
        Group(
            name=name,
            count=len(same),
            shape=same[0].shape,
            spec=_spec_text(same[0].sharding),
            device_bytes=len(same) * _bytes(same[0].sharding.shard_shape(same[0].shape), same[0]),
        )
        for name, same in members.items()
    )


def _host_bytes(leaves: Mapping[str, jax.ShapeDtypeStruct], mesh: MeshConfig, host: int, devices_per_host: int) -> int:
    """Bytes of the different boxes of all leaves on one host: replicas within the host count once."""
    devices = np.arange(host * devices_per_host, min((host + 1) * devices_per_host, mesh.devices))
    coordinates: dict[Any, np.ndarray] = dict(
        zip(MESH_AXES, np.unravel_index(devices, tuple(mesh.sizes.values())), strict=True)
    )
    boxes: dict[tuple[str, ...], int] = {}  # by the axes that split a leaf
    total = 0
    for leaf in leaves.values():
        axes = axes_of(leaf.sharding.spec)
        if axes not in boxes:
            boxes[axes] = len({tuple(int(coordinates[axis][i]) for axis in axes) for i in range(len(devices))})
        total += boxes[axes] * _bytes(leaf.sharding.shard_shape(leaf.shape), leaf)
    return total


def _bytes(shape: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> int:
    # A typed key is two uint32 in a checkpoint (threefry); numpy does not know its dtype.
    width = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize
    return math.prod(shape) * width


def _spec_text(sharding: NamedSharding) -> str:
    return ", ".join("-" if entry is None else str(entry) for entry in sharding.spec) or "whole"


def print_plan(plan: Plan, *, keep: int, devices_per_host: int, console: Console | None = None) -> None:
    """Print the plan: three tables and the verdict. `keep` is the number of durable steps."""
    console = console or Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"{plan.parameters / 1e9:.2f} B parameters on mesh {plan.mesh}: {plan.mesh.devices} devices, "
        f"hosts of {devices_per_host} devices"
    )
    console.print(_sharding_table(plan))
    console.print(_memory_table(plan))
    console.print(
        f"Activations are an estimate after {ACTIVATION_SOURCE}. Not counted: a second copy of the gradients "
        f"({_gb(plan.memory.gradients)}), which XLA may hold while it clips or accumulates them."
    )
    if plan.offloaded_bytes:
        console.print(
            f"Offloaded moments take {_gb(plan.offloaded_bytes)} of pinned memory on a host. The optimizer's memory on "
            "a device is the least, one weight's moments at a time: XLA may fetch more of them at once."
        )
    console.print(_checkpoint_table(plan, keep))
    console.print(verdict(plan), style="bold")


def verdict(plan: Plan) -> str:
    """Whether it fits, and the smallest fsdp that does."""
    need = f"{_gb(plan.memory.total)} of {_gb(plan.device_bytes)} per device"
    if plan.fits:
        return f"Fits: {need}."
    if plan.fitting is None:
        return f"Does not fit: {need}, and no fsdp does with model={plan.mesh.model}; choose a larger model axis."
    fsdp, memory = plan.fitting
    mesh = replace(plan.mesh, fsdp=fsdp)
    return (
        f"Does not fit: {need}. The smallest fsdp that does is {fsdp}: {_gb(memory.total)} per device "
        f"on {mesh}, {mesh.devices} devices."
    )


def _sharding_table(plan: Plan) -> Table:
    table = Table(title="Sharding (moments follow)")
    for column in ("weight", "count", "shape", "split over", "per device"):
        table.add_column(column, no_wrap=True)
    for group in plan.groups:
        shape = " x ".join(map(str, group.shape))
        table.add_row(group.name, str(group.count), shape, group.spec, _gb(group.device_bytes))
    return table


def _memory_table(plan: Plan) -> Table:
    columns = [(f"fsdp={plan.mesh.fsdp}", plan.memory)]
    if plan.fitting and not plan.fits:
        columns.append((f"fsdp={plan.fitting[0]}", plan.fitting[1]))
    table = Table("memory per device", *(name for name, _ in columns))
    for part in ("parameters", "gradients", "optimizer", "gathered", "activations", "total"):
        table.add_row(part, *(_gb(getattr(memory, part)) for _, memory in columns))
    return table


def _checkpoint_table(plan: Plan, keep: int) -> Table:
    table = Table("checkpoint", "bytes", "what it is")
    table.add_row("one step", _gb(plan.checkpoint_bytes), "every leaf once: weights, moments, counters")
    table.add_row("per host", _gb(plan.host_bytes), "its distinct boxes: what one save stages")
    ram, ssd = (tier.slots_for(plan.host_bytes, IN_FLIGHT) for tier in (Tier.ram("ram"), Tier.ssd("ssd")))
    written = "committed, being written, read by slower tiers"
    table.add_row("ramdisk, per host", _gb(ram * plan.host_bytes), f"{ram} slots: {written}")
    table.add_row("SSD, per host", _gb(ssd * plan.host_bytes), f"{ssd} slots: committed and being written")
    durable = f"{keep} steps kept and one being written, each by one replica"
    table.add_row("durable, in all", _gb((keep + 1) * plan.checkpoint_bytes), durable)
    return table


def _gb(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.3f} MB"
