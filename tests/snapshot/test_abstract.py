"""`abstract_state`: what a restore is asked for has the shardings that the model has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptkit
from tests.nnx_models import RULES, Net, Train
from tests.states import make_state, mesh, put


def specs(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): getattr(leaf.sharding, "spec", None) for path, leaf in leaves}


def test_arrays_keep_shape_dtype_and_sharding() -> None:
    """A restore would place everything on one device, and run out of memory there."""
    state = make_state(3)
    abstract = ckptkit.abstract_state(state)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for found, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        if isinstance(leaf, jax.Array):
            assert isinstance(found, jax.ShapeDtypeStruct)
            assert (found.shape, found.dtype, found.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    assert abstract["host"].dtype == state["host"].dtype
    assert isinstance(abstract["host"], np.ndarray)
    assert (abstract["count"], type(abstract["rate"])) == (3, float)


def test_model_and_its_factory_give_the_same_state() -> None:
    """A restart, which never makes the model, would ask for another tree or another sharding than was saved."""

    def make() -> Train:
        return Train(0, named=True)

    with nnx.logical_axis_rules(RULES):
        with jax.set_mesh(mesh()):
            concrete = ckptkit.abstract_state(make(), mesh())
        abstract = ckptkit.abstract_state(make, mesh())
    assert jax.tree.structure(concrete) == jax.tree.structure(abstract)
    assert jax.tree.leaves(concrete) == jax.tree.leaves(abstract)
    found = specs(abstract)
    kernels = [name for name in found if "first" in name and "kernel" in name]
    assert len(kernels) == 3  # the parameter, and Adam's two moments
    assert {found[name] for name in kernels} == {PartitionSpec(None, "fsdp")}
    assert {found[name] for name in found if name not in kernels} == {PartitionSpec()}


def test_function_is_traced_not_run() -> None:
    """A model that is larger than a device could not be restored."""
    ran = []

    def make() -> dict[str, Any]:
        jax.debug.callback(lambda: ran.append(1))
        return {"w": jnp.zeros((1 << 20, 1 << 20))}

    abstract = ckptkit.abstract_state(make)
    assert abstract["w"].shape == (1 << 20, 1 << 20)
    assert not ran


def test_optimizer_and_random_streams_are_states() -> None:
    """They would be trees of another structure than `nnx.state` gives, and `nnx.update` would refuse them."""
    net = Net(0)
    for node in (nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), nnx.Rngs(params=0, dropout=1)):
        abstract = ckptkit.abstract_state(node)
        assert isinstance(abstract, nnx.State)
        assert jax.tree.structure(abstract) == jax.tree.structure(nnx.state(node))
    assert ckptkit.abstract_state(nnx.Rngs(7))["default"]["key"].get_value().dtype == jax.random.key(0).dtype


def test_filtered_state_keeps_its_structure() -> None:
    """Saving parameters alone would not match what is asked for at the restore."""
    parameters = nnx.state(Net(0), nnx.Param)
    assert jax.tree.structure(ckptkit.abstract_state(parameters)) == jax.tree.structure(parameters)


def test_a_state_is_moved_to_another_mesh_by_its_specs() -> None:
    """A restart on other devices would need every sharding written by hand."""
    other = jax.make_mesh((1, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    abstract = ckptkit.abstract_state(make_state(), other)
    assert abstract["w"].sharding == NamedSharding(other, PartitionSpec("fsdp"))
    assert ckptkit.abstract_state({"w": jnp.zeros(4)}, other)["w"].sharding == NamedSharding(other, PartitionSpec())
    assert isinstance(ckptkit.abstract_state({"w": jnp.zeros(4)})["w"].sharding, SingleDeviceSharding)


def test_mesh_of_the_context_is_used() -> None:
    """A model made abstractly in Flax's own way would lose its shardings."""
    with nnx.logical_axis_rules(RULES), jax.set_mesh(mesh()):
        abstract = ckptkit.abstract_state(lambda: Net(0, named=True))
    assert abstract["first"]["kernel"].get_value().sharding == NamedSharding(mesh(), PartitionSpec(None, "fsdp"))


def test_a_spec_that_does_not_fit_names_the_leaf() -> None:
    """The error would come from the middle of a restore, without a name."""
    leaf = put(jnp.zeros((4, 4)), "fsdp")
    lacking = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"\['a'\]\['w'\] cannot be placed on the mesh: .*fsdp"):
        ckptkit.abstract_state({"a": {"w": leaf}}, lacking)
    uneven = jax.make_mesh((1, 3), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:3])
    with pytest.raises(ValueError, match=r"\['w'\] cannot be placed on the mesh"):
        ckptkit.abstract_state({"w": leaf}, uneven)
