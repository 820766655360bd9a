"""Parts of an array item that stock Orbax wrote, and whole ones on devices that are not those of the save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

Path = tuple[str, ...]


def anywhere() -> jax.sharding.Sharding:
    """Where an array goes whose stored placement does not exist today: the first device, or, in a job of several
    processes, all devices, whole on each."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())


def on_every_process(sharding: jax.sharding.Sharding) -> bool:
    """Whether every process of the job has a device in it."""
    return len({device.process_index for device in sharding.device_set}) == jax.process_count()


def read_leaves(item_url: str, wanted: Mapping[Path, Any]) -> dict[Path, Any]:
    """The leaves of `wanted` from the item directory of stock Orbax; nothing else of it is read.

    `wanted` has, by path, a `ShapeDtypeStruct`, a NumPy array or a number: what the leaf is to become, in its stored
    dtype. Launches no barrier. Raises what Orbax raises.
    """
    directory = epath.Path(item_url)
    handler = ocp.PyTreeCheckpointHandler()
    stored = _tree(handler.metadata(directory))
    picked = jax.tree_util.tree_map_with_path(lambda path, _: wanted.get(names_in(path), ocp.PLACEHOLDER), stored)
    restore_args = jax.tree.map(_restore_args, picked)
    found = handler.restore(directory, args=ocp.args.PyTreeRestore(item=picked, restore_args=restore_args))
    flat, _ = jax.tree_util.tree_flatten_with_path(found)
    return {names_in(path): leaf for path, leaf in flat if leaf is not ocp.PLACEHOLDER}


def read_item(item_url: str, args: ocp.args.PyTreeRestore | None) -> Any:
    """A complete item of stock Orbax, as it was saved or as `args` ask. Launches no barrier. Raises Orbax's errors."""
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(item_url), args=args or ocp.args.PyTreeRestore())  # pyright: ignore[reportCallIssue]


def elsewhere(item_url: str) -> ocp.args.PyTreeRestore | None:
    """How to restore an item of stock Orbax whose placement today's devices cannot form; None where they can."""
    stored = _tree(ocp.PyTreeCheckpointHandler().metadata(epath.Path(item_url)))
    shardings = [_sharding_today(leaf) for leaf in jax.tree.leaves(stored)]
    if all(sharding is not None for sharding in shardings):
        return None
    restore_args = [_placed(sharding) for sharding in shardings]
    return ocp.args.PyTreeRestore(restore_args=jax.tree.unflatten(jax.tree.structure(stored), restore_args))


def _tree(metadata: Any) -> Any:
    return getattr(metadata, "tree", metadata)


def names_in(keypath: Any) -> Path:
    """The names of a key path, as Orbax writes them."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keypath)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=leaf.sharding or anywhere())
    return ocp.RestoreArgs() if leaf is ocp.PLACEHOLDER else ocp.RestoreArgs(restore_type=type(leaf))


def _sharding_today(leaf: Any) -> Any:
    """A leaf's stored sharding on today's devices; None where they cannot form it, True for a leaf in host memory."""
    words = getattr(leaf, "sharding", None)
    if words is None:
        return True
    try:
        sharding = words.to_jax_sharding()
    except (ValueError, KeyError, RuntimeError, AttributeError, IndexError):
        return None
    return sharding if on_every_process(sharding) else None


def _placed(sharding: Any) -> ocp.RestoreArgs:
    if sharding is True:
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding or anywhere())
