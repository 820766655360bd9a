"""The saved states: three shapes on one device or on eight that share them (data=2, model=4).

The number of devices is fixed when JAX is imported, so a process measures one case: see `bench.worker`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench.cases import CaseName
from bench.model import Gpt2Size, Tree, gpt2_program

_MESH = {"data": 2, "model": 4}
_TOKENS = 32  # of one row: enough to keep both cores in matmuls, few enough that a step with Adam takes about a second
_BURN_WIDTH = 1024  # of the matmuls that replace the model in `many` and `one`

Step = Callable[[Tree], tuple[Tree, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A state to measure. `step` donates what it is given and keeps every core busy."""

    name: CaseName
    abstract: Tree
    state_bytes: int
    leaves: int
    make: Callable[[], Tree]  # the state, ready, in buffers that XLA owns; the same values every time
    step: Step


def make_case(name: CaseName, scale: float = 1.0) -> Case:
    """The case of a name; `scale` shrinks it for tests. Nothing is allocated until `make`."""
    shapes, step = _gpt2(scale) if name.state == "125m" else _plain(name.state, scale)
    shardings = jax.tree.map(lambda leaf: _sharding(leaf.shape, name.devices), shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    leaves = jax.tree.leaves(abstract)
    return Case(
        name=name,
        abstract=abstract,
        state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        leaves=len(leaves),
        make=lambda: _filled(abstract),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)),
    )


@functools.partial(jax.jit, donate_argnums=0)
def changed(tree: Tree) -> Tree:
    """Another tree of the same form: no byte of it was saved, so a save cannot share what an earlier one wrote."""
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), tree)


def host_copy(tree: Tree) -> Tree:
    """The leaves as NumPy arrays of their own memory."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def assert_same_bits(found: Tree, expected: Tree, who: str) -> None:
    """Raises AssertionError naming the first leaf that differs in shape, dtype or any bit."""
    found_flat, found_tree = jax.tree_util.tree_flatten_with_path(found)
    expected_flat, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    if found_tree != expected_tree:
        raise AssertionError(f"{who} restored another tree: {found_tree}, expected {expected_tree}")
    for (keypath, leaf), (_, wanted) in zip(found_flat, expected_flat, strict=True):
        a, b = np.asarray(leaf), np.asarray(wanted)
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not np.array_equal(_bits(a), _bits(b)):
            raise AssertionError(f"{who} restored other bits in {jax.tree_util.keystr(keypath)}")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"u{array.dtype.itemsize}"))


def _gpt2(scale: float) -> tuple[Tree, Step]:
    program = gpt2_program(Gpt2Size().scaled(scale))

    def step(state: Tree) -> tuple[Tree, jax.Array]:
        vocab = state["model"]["token"]["embedding"].shape[0]
        tokens = (jnp.arange(_TOKENS + 1) * 37 + state["optimizer"]["step"].astype(jnp.int32)) % vocab
        return program.step(state, tokens[None])

    return program.shapes, step


def _plain(name: str, scale: float) -> tuple[Tree, Step]:
    """4,000 leaves of 16 KB, or one of 1 GB; the step is matmuls, then an update of every leaf in place."""
    if name == "many":
        count = max(8, round(4000 * scale))
        shapes = {f"leaf_{i:04}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(count)}
    else:
        rows = max(64, round(65_536 * scale) // 64 * 64)
        shapes = {"leaf": jax.ShapeDtypeStruct((rows, 4096), jnp.float32)}
    repeats = max(1, round(32 * scale))

    def step(state: Tree) -> tuple[Tree, jax.Array]:
        burn = jnp.full((_BURN_WIDTH, _BURN_WIDTH), 1e-3) + next(iter(state.values()))[0, 0]
        burn = jax.lax.fori_loop(0, repeats, lambda _, x: jnp.tanh(x @ x), burn)
        return {key: leaf * 0.999 + 1e-4 for key, leaf in state.items()}, burn.sum()

    return shapes, step


def _sharding(shape: tuple[int, ...], devices: int) -> jax.sharding.Sharding:
    """One device, or split over both axes of the mesh where they divide; vectors over `model` alone."""
    if devices == 1:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if jax.device_count() != math.prod(_MESH.values()):
        raise RuntimeError(f"{jax.device_count()} devices, {devices} wanted: set XLA_FLAGS before JAX is imported")
    mesh = jax.make_mesh(tuple(_MESH.values()), tuple(_MESH), axis_types=(jax.sharding.AxisType.Auto,) * len(_MESH))
    axes = ("model",) if len(shape) == 1 else ("data", "model")
    spec = [axis if size % _MESH[axis] == 0 else None for axis, size in zip(axes, shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _filled(abstract: Tree) -> Tree:
    """Normal noise of deviation 0.02, as weights have it: zstd makes it 8 % smaller. Second moments are squares."""
    random = np.random.default_rng(0)

    def fill(keypath: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding).copy()
        values = 0.02 * random.standard_normal(leaf.shape, np.float32)
        if any(getattr(key, "key", None) == "nu" for key in keypath):
            values = values * values
        # device_put may alias NumPy's memory on CPU, and aliased memory is not donated: hence the copy.
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding).copy().block_until_ready()

    return jax.tree_util.tree_map_with_path(fill, abstract)
