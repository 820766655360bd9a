"""Names of leaves, and the kinds of nodes of a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tests.reports.managers import restored, saved
from tests.reports.reported import reported
from tests.states import abstract, assert_same


def _there_and_back(root: Path, tree: Any) -> None:
    """A template of the same tree gives the same tree: classes of nodes, keys and bits."""
    saved(root, tree)
    assert_same(restored(root, abstract(tree)), tree)


@reported("google/orbax/issues/2561", "Integer keys of a dictionary are integers again.")
def test_integer_keys_come_back_as_integers(tmp_path: Path) -> None:
    _there_and_back(tmp_path, {"layers": {0: {"w": jnp.ones(2)}, 10: {"w": jnp.zeros(2)}}})


@reported("google/flax/issues/4308", "A list of NNX layers is restored into an abstract model.")
def test_list_of_nnx_layers_is_restored_into_an_abstract_model(tmp_path: Path) -> None:
    def make() -> Any:
        return nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in range(3)])

    state = nnx.state(make())
    saved(tmp_path, state)
    graph, wanted = nnx.split(nnx.eval_shape(make))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: leaf.update(sharding=device), wanted)
    model = nnx.merge(graph, restored(tmp_path, wanted))
    assert_same(nnx.state(model), state)


@reported("google/orbax/issues/422", "A key may have a slash.")
def test_key_with_a_slash_is_saved(tmp_path: Path) -> None:
    _there_and_back(tmp_path, {"test/test": jnp.full(2, 42.0), "test": {"other": jnp.ones(1)}})


@reported("google/orbax/issues/339", "Parameters of Haiku have names such as `mlp/~/linear_0`.")
def test_names_of_haiku_are_saved(tmp_path: Path) -> None:
    layers = {f"mlp/~/linear_{at}": {"w": jnp.full((2, 2), at), "b": jnp.zeros(2)} for at in range(2)}
    _there_and_back(tmp_path, layers)


@reported("google/orbax/issues/720", "A tree may have empty dictionaries.")
def test_empty_dictionary_within_a_tree_is_saved(tmp_path: Path) -> None:
    _there_and_back(tmp_path, {"a": 0, "b": {}})
    assert restored(tmp_path) == {"a": 0, "b": {}}


class _Options(dict[str, Any]):
    """A dictionary that is a node of its own."""


jax.tree_util.register_pytree_node(
    _Options,
    lambda node: (tuple(node.values()), tuple(node)),
    lambda keys, values: _Options(zip(keys, values, strict=True)),
)


@reported("google/orbax/issues/818", "An empty node of a class of one's own, within a tree or as the whole item.")
@pytest.mark.parametrize("tree", [{"a": _Options(), "w": 1.0}, _Options(), {}], ids=["within", "own class", "plain"])
def test_empty_node_is_saved_within_a_tree_and_as_an_item(tmp_path: Path, tree: Any) -> None:
    _there_and_back(tmp_path, tree)


class _Nothing(NamedTuple):
    """A state without fields."""


@reported("google/orbax/pull/65", "A named tuple without fields is a part of many optimizer states.")
def test_named_tuple_without_fields_is_restored(tmp_path: Path) -> None:
    _there_and_back(tmp_path, {"test": _Nothing(), "w": jnp.ones(1)})


@reported("google-deepmind/optax/issues/1139", "Empty states within a sequence do not move what follows them.")
def test_empty_state_within_a_sequence_keeps_its_place(tmp_path: Path) -> None:
    _there_and_back(tmp_path, (jnp.zeros(1), optax.EmptyState(), jnp.ones(1)))
    first, empty, last = restored(tmp_path)
    assert (first.item(), empty, last.item()) == (0.0, None, 1.0)


@reported("google-deepmind/ferminet/pull/105", "The state of Adam is tuples again, and the next update takes it.")
def test_restored_optimizer_state_takes_an_update(tmp_path: Path) -> None:
    params = {"w": jnp.ones(2)}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(0.1))
    state = optimizer.init(params)
    _there_and_back(tmp_path, state)
    found = restored(tmp_path, abstract(state))
    assert_same(optimizer.update(params, found), optimizer.update(params, state))
