"""`sharding_report`: how a state of the caller's own lies over its mesh."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ckptkit.inspection.layouts import Layout, ShardingReport, report_layouts
from ckptkit.inspection.words import axes_of


def sharding_report(
    state: Any, mesh: Mesh | AbstractMesh | None = None, *, replica_axes: Collection[str] = ("data",)
) -> ShardingReport:
    """Bytes per device of a state, or abstract state, and what to look at: `print` it, or read `.findings`.

    It finds leaves above 1 MB that are whole on every device, and mesh axes that split none of them. It also finds
    leaves that are split over `replica_axes` (the axes whose devices hold whole replicas), and uneven splits. Leaves
    without a `NamedSharding` count as whole. Nothing is allocated or read. Cost: some microseconds for each leaf.

    Args:
      state: a pytree of arrays or `jax.ShapeDtypeStruct`, as `ckptkit.abstract_state` gives it.
      mesh: the mesh (default: that of the shardings).
      replica_axes: the axes over which every weight has to be whole.

    Raises ValueError where no mesh is given and no leaf has one.
    """
    layouts, meshes = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not hasattr(leaf, "shape"):
            continue
        sharding = getattr(leaf, "sharding", None)
        spec = ()
        if isinstance(sharding, NamedSharding):
            meshes.append(sharding.mesh)
            spec = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in sharding.spec]
        layouts.append(
            Layout(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=tuple(leaf.shape),
                itemsize=_itemsize(leaf.dtype),
                spec=tuple(map(axes_of, spec)),
            )
        )
    if mesh is None and not meshes:
        raise ValueError("sharding_report: no leaf has a NamedSharding; give the mesh that the state is to lie on")
    chosen = meshes[0] if mesh is None else mesh
    return report_layouts(layouts, dict(chosen.shape), replica_axes=replica_axes)


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(np.prod(key.shape)) * key.dtype.itemsize
    return np.dtype(dtype).itemsize
