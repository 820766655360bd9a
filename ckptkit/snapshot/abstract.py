"""A state without its bytes: shapes, dtypes and shardings, as a target for restores. Flax is optional."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def abstract_state(model_or_state: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    """The abstract form of a state, with shardings: what `restore` takes as its template.

    Takes an NNX module, optimizer or `nnx.Rngs` (returns its `nnx.State`), an `nnx.State`, or any other pytree (returns
    the same tree). It also takes a function without arguments that makes one of these. The function is evaluated
    abstractly: no device memory is used and no initialiser runs. Arrays become `jax.ShapeDtypeStruct`; NumPy arrays
    stay NumPy (shape and dtype, no memory), Python numbers stay as they are. Typed PRNG keys keep their key dtype.

    Shardings without `mesh` are those of the arrays. A leaf without one gets NNX's `out_sharding` metadata over the
    variable's own mesh or the mesh of `jax.set_mesh`, else none. With `mesh`, every array gets a `NamedSharding` over
    it. Its spec is the first of: its own, if it is already on `mesh`; that of its `out_sharding` metadata (after
    `nnx.logical_axis_rules`); the one that it has on another mesh; replicated.

    A model whose variables have `out_sharding` metadata has to be made in the contexts that Flax asks for; with `mesh`
    a function is evaluated under `jax.set_mesh(mesh)`.

    Cost: about 10 microseconds per leaf, and for a function one abstract evaluation. Raises ValueError naming the leaf
    where a spec does not fit the mesh or the shape.
    """
    tree = state_of(_evaluated(model_or_state, mesh))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    hints = _hints(tree)
    assert len(hints) == len(leaves)
    abstract = [_abstract_leaf(path, leaf, hint, mesh) for (path, leaf), hint in zip(leaves, hints, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, abstract)


def state_of(value: Any) -> Any:
    """The `nnx.State` of an NNX module, optimizer or `nnx.Rngs`; anything else as it is."""
    nnx = _nnx()
    return nnx.state(value) if nnx is not None and _is_graph_node(value) else value


def _evaluated(value: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """`value`, or what it makes where it is a function (modules can be called too, and are none)."""
    if not callable(value) or _is_graph_node(value) or not _is_one_leaf(value):
        return value
    nnx = _nnx()
    evaluate: Callable[[Any], Any] = jax.eval_shape if nnx is None else nnx.eval_shape
    if mesh is None:
        return evaluate(value)
    with jax.set_mesh(mesh):
        return evaluate(value)


def _is_graph_node(value: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Pytree)


def _is_one_leaf(value: Any) -> bool:
    """Whether JAX sees no tree in it: a registered container may well have `__call__`."""
    leaves = jax.tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def _hints(tree: Any) -> list[Any]:
    """For each leaf, the `nnx.Variable` that it is the value of, or None."""
    nnx = _nnx()
    if nnx is None:
        return [None] * len(jax.tree.leaves(tree))
    hints: list[Any] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        of_variable = isinstance(node, nnx.Variable)
        hints += [node] * len(jax.tree.leaves(node)) if of_variable else [None]
    return hints


def _abstract_leaf(path: Any, leaf: Any, variable: Any, mesh: jax.sharding.Mesh | None) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    try:
        sharding = _sharding(leaf, variable, mesh)
        if sharding is not None:
            sharding.shard_shape(tuple(leaf.shape))  # raises where the shape cannot be split so
    except (ValueError, TypeError) as error:
        raise ValueError(f"{jax.tree_util.keystr(path)} cannot be placed on the mesh: {error}") from error
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _sharding(leaf: Any, variable: Any, mesh: jax.sharding.Mesh | None) -> jax.sharding.Sharding | None:
    own = getattr(leaf, "sharding", None)
    named = isinstance(own, NamedSharding)
    if named and isinstance(own.mesh, jax.sharding.AbstractMesh):  # of an abstract evaluation: not yet on devices
        concrete = mesh or _mesh_in_context()
        return None if concrete is None else NamedSharding(concrete, own.spec, memory_kind=own.memory_kind)
    if mesh is None:
        return own if own is not None else _by_metadata(variable, None)
    if named and own.mesh == mesh:
        return own
    by_metadata = _by_metadata(variable, mesh)
    if by_metadata is not None:
        return by_metadata
    return NamedSharding(mesh, own.spec, memory_kind=own.memory_kind) if named else NamedSharding(mesh, PartitionSpec())


def _by_metadata(variable: Any, mesh: jax.sharding.Mesh | None) -> NamedSharding | None:
    """The content of a variable's `out_sharding`: names of axes, logical or the mesh's, or a complete sharding."""
    metadata = variable.get_metadata() if variable is not None else {}
    words = metadata.get("out_sharding")
    if not words:
        return None
    if isinstance(words, NamedSharding):
        return words if mesh is None else NamedSharding(mesh, words.spec, memory_kind=words.memory_kind)
    mesh = mesh or metadata.get("mesh") or _mesh_in_context()
    spec = _nnx().get_partition_spec(variable).get_value()
    return None if mesh is None else NamedSharding(mesh, spec)


def _mesh_in_context() -> jax.sharding.Mesh | None:
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _nnx() -> Any:
    """Flax's NNX where the caller uses it. Nobody has a module or a `State` before it was imported."""
    return sys.modules.get("flax.nnx")
