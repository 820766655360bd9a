"""Checkpointables besides trees of arrays: text, types and `...`, objects that save themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as orbax

import ckptkit
import ckptkit.v1
from tests.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
OURS, ORBAX = ckptkit.v1.Checkpointer, orbax.training.Checkpointer
EACH_OTHER = [(OURS, OURS), (OURS, ORBAX), (ORBAX, OURS)]


class Position:
    """A data iterator that saves itself: an `ocp.StatefulCheckpointable`."""

    def __init__(self, at: int = 0):
        self.at = at

    async def save(self, directory: Any) -> Any:
        text = str(self.at)

        async def write() -> None:
            (await directory.await_creation() / "at.txt").write_text(text)

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.at = int((directory / "at.txt").read_text())

        return read()


class PositionHandler:
    """A handler of the caller's own for plain `Position`s, under the name `place`."""

    async def save(self, directory: Any, checkpointable: Position) -> Any:
        return await checkpointable.save(directory)

    async def load(self, directory: Any, abstract_checkpointable: None = None) -> Any:
        async def read() -> Position:
            return Position(int((directory / "at.txt").read_text()))

        return read()

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Position)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return abstract_checkpointable is None


@pytest.mark.parametrize(("writer", "reader"), EACH_OTHER)
@pytest.mark.parametrize(
    "value", [{"config": "text"}, {"meta": {"run": "x", "lr": 0.5, "w": np.arange(3.0)}}, ["a", "b"], "text", 7]
)
def test_text_is_given_back_as_by_orbax(tmp_path: Path, writer: Any, reader: Any, value: Any) -> None:
    """Keras saves the model's configuration as text: its training would end at the first save."""
    with writer(str(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(1, {"state": {"w": jnp.arange(4.0)}, "config": value})
        checkpointer.save(2, value)
    with reader(str(tmp_path)) as checkpointer:
        found = checkpointer.load_checkpointables(1)
        assert_same(found["state"], {"w": jnp.arange(4.0)})
        for each in (found["config"], checkpointer.load_checkpointables(1, {"config": None})["config"]):
            assert jax.tree.all(jax.tree.map(np.array_equal, each, value))
            assert jax.tree.structure(each) == jax.tree.structure(value)
        template = jax.tree.map(lambda leaf: type(leaf) if isinstance(leaf, str | int | float) else leaf, value)
        assert jax.tree.all(jax.tree.map(np.array_equal, checkpointer.load(2, template), value))
        assert jax.tree.all(jax.tree.map(np.array_equal, checkpointer.load(), value))


@pytest.mark.parametrize("kind", ["durable", "ram", "orbax"])
def test_abstract_leaves_may_be_types_and_placeholders(tmp_path: Path, kind: str) -> None:
    """A template that Orbax's newer API takes would be refused."""
    stored = {"w": jnp.arange(6.0), "n": np.arange(3), "step": 7, "rate": 0.5, "count": 3, "rest": jnp.ones(2)}
    tiers: Any = {"tiers": [ckptkit.Tier.ram(str(tmp_path / "ram"))]} if kind == "ram" else {}
    with (ORBAX if kind == "orbax" else OURS)(str(tmp_path / "root"), **tiers) as checkpointer:
        checkpointer.save(1, stored)
    abstract = {"w": jax.Array, "n": np.ndarray, "step": int, "rate": float, "count": int, "rest": ...}
    with OURS(str(tmp_path / "root"), **tiers) as checkpointer:
        found = checkpointer.load(1, abstract)
        assert found.pop("rest") is ...
        assert {name: type(leaf) for name, leaf in found.items() if name in ("step", "rate", "count", "n")} == {
            "step": int,
            "rate": float,
            "count": int,
            "n": np.ndarray,
        }
        assert isinstance(found["w"], jax.Array)
        assert_same({**found, "rest": stored["rest"]}, stored)
        assert checkpointer.load(1, {**abstract, "step": float, "rest": jax.ShapeDtypeStruct})["step"] == 7.0
        with pytest.raises(ValueError, match="missing"):
            checkpointer.load(1, {**abstract, "missing": int})


@pytest.mark.parametrize("other", [jax.ShapeDtypeStruct((), jnp.int32), int, jax.Array])
def test_text_is_not_loaded_as_an_array(tmp_path: Path, other: Any) -> None:
    """A template of another model would be filled with text."""
    with OURS(tmp_path) as checkpointer:
        checkpointer.save(1, {"run": "a", "w": jnp.ones(2)})
        with pytest.raises(ValueError, match=r"state:run is text on disk, [\w.]+ in abstract_state"):
            checkpointer.load(1, {"run": other, "w": jax.Array})


@pytest.mark.parametrize(("writer", "reader"), EACH_OTHER)
def test_stateful_checkpointable_is_saved_and_loaded(tmp_path: Path, writer: Any, reader: Any) -> None:
    """MaxText's data iterator would be refused, and its data begin anew."""
    with writer(str(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {"items": {"w": jnp.full(4, step)}, "iter": Position(step)})
    with reader(str(tmp_path)) as checkpointer:
        position = Position()
        found = checkpointer.load_checkpointables(2, {"items": None, "iter": position})
        assert position.at == 2
        assert found["iter"] is position
        assert_same(found["items"], {"w": jnp.full(4, 2)})
        if reader is OURS:  # Orbax's leaves a coroutine behind
            with pytest.raises(ValueError, match="must pass an instance"):
                checkpointer.load_checkpointables(2)


@pytest.mark.parametrize(("writer", "reader"), EACH_OTHER)
def test_registered_handler_saves_and_loads(tmp_path: Path, writer: Any, reader: Any) -> None:
    """A handler of the caller's own would not be called."""
    registry = orbax.handlers.local_registry()
    registry.add(PositionHandler, checkpointable_name="place")
    context = orbax.Context()
    context.checkpointables.registry = registry
    with writer(str(tmp_path), context=context) as checkpointer:
        checkpointer.save_checkpointables(1, {"state": {"w": jnp.ones(2)}, "place": Position(5)})
    with reader(str(tmp_path), context=context) as checkpointer:
        for abstract in (None, {"place": None}):
            assert checkpointer.load_checkpointables(1, abstract)["place"].at == 5


def test_object_without_handler_is_refused_by_name(tmp_path: Path) -> None:
    """The caller would not know what to do."""
    with OURS(tmp_path) as checkpointer, pytest.raises((KeyError, ValueError)) as caught:
        checkpointer.save_checkpointables(1, {"odd": object()})
    assert "checkpointable 'odd' is a object; give a tree" in "".join(caught.value.__notes__)


def test_item_may_change_between_arrays_and_text(tmp_path: Path) -> None:
    """The handler of the first save would refuse the later ones."""
    values: list[Any] = [{"a": jnp.ones(2)}, {"a": "text"}, {"a": jnp.zeros(2)}, {"a": "b"}]
    with OURS(tmp_path) as checkpointer:
        for step, value in enumerate(values):
            assert checkpointer.save(step, value)
        for step, value in enumerate(values):
            assert jax.tree.all(jax.tree.map(np.array_equal, checkpointer.load(step), value))
    with ORBAX(str(tmp_path)) as checkpointer:
        for step, value in enumerate(values):
            assert jax.tree.all(jax.tree.map(np.array_equal, checkpointer.load(step), value))


@pytest.mark.parametrize("left", ["ram", "durable"])
def test_text_is_held_by_each_tier(left: str, tmp_path: Path) -> None:
    """Keras saves its configuration as text next to the weights: no save of it reached the ramdisk."""
    value = {"state": {"w": jnp.arange(4.0)}, "meta": {"config": "a text", "epoch": 2}}

    def opened() -> Any:
        return OURS(tmp_path / "run", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), slots=2)])

    with opened() as checkpointer:
        checkpointer.save_checkpointables(1, value)
    shutil.rmtree(tmp_path / "ram") if left == "durable" else shutil.rmtree(tmp_path / "run/1")
    with opened() as checkpointer:
        found = checkpointer.load_checkpointables(1)
    assert found["meta"] == value["meta"]
    assert (found["state"]["w"] == value["state"]["w"]).all()
