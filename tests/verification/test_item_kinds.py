"""`verify` right after a save: nothing that a manager can write is called damaged, ours or stock's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.states import make_state

a: Any = ocp.args


class TextHandler(ocp.CheckpointHandler):
    """A caller's own kind of item."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "words.txt").write_text(args.text)

    def restore(self, directory: Any, args: Any = None) -> str:
        return (directory / "words.txt").read_text()


@ocp.args.register_with_handler(TextHandler, for_save=True)
@dataclass
class TextSave(ocp.args.CheckpointArgs):
    text: str


@ocp.args.register_with_handler(TextHandler, for_restore=True)
@dataclass
class TextRestore(ocp.args.CheckpointArgs):
    pass


KINDS: dict[str, Callable[[], Any]] = {
    "standard": lambda: a.StandardSave(make_state(1)),
    "tree": lambda: a.PyTreeSave({"a": jnp.arange(8.0), "n": {"i": 3, "f": 0.5, "b": True, "np": np.ones(3)}}),
    "numpy only": lambda: a.PyTreeSave({"a": np.arange(3)}),
    "text": lambda: a.PyTreeSave({"t": "text", "a": jnp.ones(2)}),
    "text only": lambda: a.PyTreeSave({"t": "text"}),
    "bare text": lambda: a.PyTreeSave("text"),
    "bare array": lambda: a.PyTreeSave(jnp.ones(3)),
    "bare number": lambda: a.PyTreeSave(5),
    "bare key": lambda: a.PyTreeSave(jax.random.key(3)),
    "empty name": lambda: a.PyTreeSave({"": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}),
    "empty names": lambda: a.PyTreeSave({"": {"": jnp.ones(3)}, "b": jnp.ones(2)}),
    "dots and slashes": lambda: a.PyTreeSave({"a.b": jnp.ones(2), "c/d": jnp.ones(2), "..": jnp.ones(1)}),
    "numbers as names": lambda: a.PyTreeSave({"0": jnp.ones(2), "c": {"0": jnp.ones(3)}, "": jnp.ones((2, 2))}),
    "empty nodes": lambda: a.PyTreeSave({"a": {}, "b": [], "c": None, "d": jnp.ones(2)}),
    "json": lambda: a.JsonSave({"x": 1}),
    "array": lambda: a.ArraySave(jnp.ones(4)),
    "jax key": lambda: a.JaxRandomKeySave(jax.random.key(3)),
    "numpy key": lambda: a.NumpyRandomKeySave(np.random.get_state()),
    "handler": lambda: TextSave("words"),
    "items": lambda: a.Composite(
        state=a.StandardSave({"a": jnp.arange(8.0)}),
        position=a.JsonSave([1, 2]),
        array=a.ArraySave(jnp.ones(4)),
        key=a.JaxRandomKeySave(jax.random.key(3)),
        legacy=a.NumpyRandomKeySave(np.random.get_state()),
    ),
    "items and handler": lambda: a.Composite(state=a.StandardSave({"a": jnp.arange(8.0)}), words=TextSave("words")),
    "json items": lambda: a.Composite(one=a.JsonSave({}), two=a.JsonSave(None)),
}
PROVEN = {
    "numpy only",
    "bare number",
    "standard",
    "tree",
    "bare array",
    "bare key",
    "empty name",
    "empty names",
    "empty nodes",
}
PROVEN |= {"dots and slashes", "numbers as names", "text", "text only", "items and handler"}


@pytest.mark.parametrize("manager_of", [ckptkit.CheckpointManager, ocp.CheckpointManager], ids=["ours", "stock"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_item_is_called_damaged(tmp_path: Path, kind: str, manager_of: Any) -> None:
    """`scrub --repair` would put good steps aside, and a restart would find none."""
    ours = manager_of is ckptkit.CheckpointManager
    with manager_of(tmp_path) as manager:
        manager.save(1, args=KINDS[kind]())
        manager.wait_until_finished()
    for path in (tmp_path, tmp_path / "1"):
        (proof,) = ckptkit.verify(str(path)).steps
        assert proof.state == ("proven" if ours and kind in PROVEN else "unproven"), proof.findings
    seen = ckptkit.inspect(str(tmp_path / "1"))
    assert seen.problems == ()
    (listed,) = ckptkit.list_steps(str(tmp_path), host_id="h").steps
    assert (listed.state, listed.problem) == ("committed", None)


@pytest.mark.parametrize("manager_of", [ckptkit.CheckpointManager, ocp.CheckpointManager], ids=["ours", "stock"])
def test_random_keys_are_read_to_the_last_chunk(tmp_path: Path, manager_of: Any) -> None:
    """A random key without its array would be called readable."""
    with manager_of(tmp_path) as manager:
        manager.save(1, args=KINDS["items"]())
        manager.wait_until_finished()
    (chunk,) = (tmp_path / "1/key/jax_random_key/checkpoint").glob("[0-9]*")
    chunk.unlink()
    (proof,) = ckptkit.verify(str(tmp_path)).steps
    assert (proof.state, proof.findings[0].item) == ("corrupt", "key/jax_random_key")


def test_item_of_an_unknown_handler_is_noted(tmp_path: Path) -> None:
    """Nobody would know why a step is not proven."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=KINDS["items and handler"]())
    found = ckptkit.verify(str(tmp_path))
    assert found.steps[0].state == "unproven"
    assert found.notes == (
        f"{tmp_path}/1/words: not understood (of tests.verification.test_item_kinds.TextHandler), and so unproven",
    )


@pytest.mark.parametrize("kind", ["bare array", "bare key", "empty name", "numbers as names"])
def test_unnamed_arrays_are_stored_as_orbax_does(tmp_path: Path, kind: str) -> None:
    """Stock Orbax could not restore our step, or we its."""
    args = KINDS[kind]()
    for writer, reader in ((ckptkit, ocp), (ocp, ckptkit), (ckptkit, ckptkit)):
        root = tmp_path / f"{writer.__name__}-{reader.__name__}"
        with writer.CheckpointManager(root) as manager:
            manager.save(1, args=args)
            manager.wait_until_finished()
        with reader.CheckpointManager(root) as manager, warnings.catch_warnings(action="ignore"):  # of shardings
            found = manager.restore(1)
        assert jax.tree.structure(found) == jax.tree.structure(args.item)
        for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(args.item), strict=True):
            assert (left == right).all()


@pytest.mark.parametrize("writer", [ckptkit, ocp])
def test_lost_item_of_a_step_is_reported(tmp_path: Path, writer: Any) -> None:
    """A step that lost the directory of an item would be called proven. Orbax's newer API deletes items."""
    with writer.CheckpointManager(tmp_path) as manager:
        manager.save(
            1, args=a.Composite(one=a.StandardSave({"a": jnp.ones(2)}), two=a.StandardSave({"a": jnp.ones(2)}))
        )
    (tmp_path / "1/two").rename(tmp_path / "two")
    (proof,) = ckptkit.verify(str(tmp_path / "1")).steps
    if writer is ckptkit:
        assert proof.state == "corrupt"
        assert "item two is missing" in str(proof.findings[0])
    else:
        assert proof.state == "unproven"
        assert "the step names two, which does not exist" in str(proof.reason)


@pytest.mark.parametrize("handler", [ocp.JsonCheckpointHandler, TextHandler])
def test_item_that_was_saved_without_a_manager(tmp_path: Path, handler: Any) -> None:
    """A good directory of a checkpointer would be called a step without any item."""
    args = a.JsonSave({"x": 1}) if handler is ocp.JsonCheckpointHandler else TextSave("words")
    with ocp.Checkpointer(handler()) as checkpointer:
        checkpointer.save(tmp_path / "item", args=args)
    (proof,) = ckptkit.verify(str(tmp_path / "item")).steps
    assert proof.state == "unproven", proof.findings
