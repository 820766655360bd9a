"""`ckptkit.direct.save`, `ckptkit.direct.load` and Orbax's checkpointers with digests, compared with the stock ones."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints, orbax_utils

import ckptkit
from ckptkit import direct
from ckptkit.errors import ProgramChangedError
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from ckptkit.util import unproven
from tests.states import abstract, assert_same, make_state

ARGS: Any = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def flip_bit(directory: Path) -> None:
    """Changes one bit in the largest file of data."""
    data = max((file for file in directory.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def big() -> dict[str, Any]:
    """One array that fills the data file, so that a flipped bit is in its cells."""
    return {"w": jnp.arange(1 << 16, dtype=jnp.float32), "step": 3}


def test_saved_tree_has_the_same_bits_in_both_libraries(tmp_path: Path) -> None:
    """A user who goes back to stock Orbax would lose leaves, or get others."""
    state = make_state(5)
    direct.save(tmp_path / "x", state)
    assert_same(direct.load(tmp_path / "x", abstract(state)), state)
    with ocp.StandardCheckpointer() as stock:
        assert_same(stock.restore(tmp_path / "x", abstract(state)), state)
    assert_same(direct.load(tmp_path / "x"), state)


def test_one_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """Stock Orbax returns another number."""
    direct.save(tmp_path / "x", big())
    flip_bit(tmp_path / "x")
    for abstract_tree in (None, big()):
        with pytest.raises(ckptkit.CorruptCheckpointError, match=r"cannot be loaded: process 0.*digest"):
            direct.load(tmp_path / "x", abstract_tree)
    with pytest.raises(ckptkit.CorruptCheckpointError, match="digest"):  # only Orbax gives it back so
        direct.PyTreeCheckpointer().restore(tmp_path / "x", item=big(), transforms={})


def test_lost_sidecars_are_an_error(tmp_path: Path) -> None:
    """A directory whose digests are lost would pass as one that never had any."""
    for name, tree in {"arrays": big(), "numbers": {"n": np.arange(3), "epoch": 7}}.items():
        direct.save(tmp_path / name, tree)
        shutil.rmtree(tmp_path / name / "_ckptkit")
        with pytest.raises(ckptkit.CorruptCheckpointError, match="lost its sidecars"):
            direct.load(tmp_path / name)


def test_tree_without_jax_arrays_has_digests(tmp_path: Path) -> None:
    """Counters and NumPy arrays would not be verified."""
    tree = {"n": np.arange(1 << 16), "epoch": 7, "rate": 0.5, "done": True}
    direct.save(tmp_path / "x", tree)
    found = direct.load(tmp_path / "x")
    assert_same(found, tree)
    assert [type(found[name]) for name in sorted(tree)] == [type(tree[name]) for name in sorted(tree)]
    assert ckptkit.verify(str(tmp_path / "x")).steps[0].state == "proven"
    flip_bit(tmp_path / "x")
    with pytest.raises(ckptkit.CorruptCheckpointError, match="digest"):
        direct.load(tmp_path / "x")


def test_directory_can_be_renamed(tmp_path: Path) -> None:
    """`mv best-so-far best` would make a checkpoint a damaged one."""
    direct.save(tmp_path / "x", {**big(), "empty": {}})
    (tmp_path / "x").rename(tmp_path / "y")
    assert_same(direct.load(tmp_path / "y"), {**big(), "empty": {}})
    assert ckptkit.verify(str(tmp_path / "y")).steps[0].state == "proven"


def test_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax fails in a thread, after it has made directories."""
    monkeypatch.chdir(tmp_path)
    direct.save("x", big())
    assert_same(direct.load("x/"), big())


def test_stock_directory_loads_with_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints from before the change of the import could not be loaded, or would pass as verified."""
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "x", big())
    with caplog.at_level(logging.INFO, "ckptkit"):
        assert_same(direct.load(tmp_path / "x", big()), big())
    assert "was saved without digests" in caplog.text
    assert "not verified" in caplog.text


def test_item_of_a_step_loads_verified(tmp_path: Path) -> None:
    """Users restore `ROOT/5/default` by a checkpointer: to fine-tune, to publish."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ARGS.StandardSave(big()))
    assert_same(direct.load(tmp_path / "5" / "default"), big())
    flip_bit(tmp_path / "5" / "default")
    with pytest.raises(ckptkit.CorruptCheckpointError, match="digest"):
        direct.load(tmp_path / "5" / "default")


def test_directory_of_a_step_or_root_names_what_can_be_loaded(tmp_path: Path) -> None:
    """If it failed, who gives a manager's step or root would read of a missing `_METADATA`, and take it for lost."""
    with ocp.CheckpointManager(tmp_path) as manager:
        items = {"state": ocp.args.StandardSave({"w": jnp.ones(4)}), "notes": ocp.args.JsonSave({"run": 1})}
        manager.save(3, args=ocp.args.Composite(**items))
    with pytest.raises(FileNotFoundError, match=rf"is a step .* one of its items \({tmp_path}/3/state\)$"):
        direct.load(tmp_path / "3")
    with pytest.raises(FileNotFoundError, match=f"of an item, {tmp_path}/STEP/ITEM .`ckptkit steps {tmp_path}`"):
        direct.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="not found"):
        direct.load(tmp_path / "nowhere")


@pytest.mark.parametrize("manager_of", [ckptkit.CheckpointManager, ocp.CheckpointManager])
def test_manager_that_is_given_a_checkpointer_keeps_its_own_steps(tmp_path: Path, manager_of: Any) -> None:
    """Older code gives checkpointers to managers: a step with sidecars of a lone tree would be a damaged one."""
    with manager_of(tmp_path, {"state": direct.PyTreeCheckpointer()}) as manager:
        manager.save(5, {"state": big()})
        manager.wait_until_finished()
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(5, args=ARGS.Composite(state=ARGS.StandardRestore(big()))).state, big())
    state = ckptkit.verify(str(tmp_path)).steps[0].state
    assert state == ("proven" if manager_of is ckptkit.CheckpointManager else "unproven")


def test_wrong_template_names_the_leaf(tmp_path: Path) -> None:
    """Stock Orbax pads, cuts or casts, or names no leaf."""
    direct.save(tmp_path / "x", big())
    with pytest.raises(ckptkit.TreeMismatchError, match=r"x:w is float32\[65536\] on disk"):
        direct.load(tmp_path / "x", {"w": np.zeros(4, np.float32), "step": 0})


def test_existing_directory_is_replaced_only_with_force(tmp_path: Path) -> None:
    """A checkpoint would be overwritten by a second run."""
    direct.save(tmp_path / "x", {"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="already exists"):
        direct.save(tmp_path / "x", {"w": jnp.ones(3)})
    direct.save(tmp_path / "x", {"w": jnp.ones(3)}, force=True)
    assert_same(direct.load(tmp_path / "x"), {"w": jnp.ones(3)})
    with pytest.raises(FileNotFoundError):
        direct.load(tmp_path / "y")


def test_async_save_returns_once_the_tree_may_be_donated(tmp_path: Path) -> None:
    """The next step would write into what is being saved."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for kind in (direct.StandardCheckpointer, lambda: direct.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())):
        tree = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
        with kind() as checkpointer:
            shutil.rmtree(tmp_path / "x", ignore_errors=True)
            checkpointer.save(tmp_path / "x", tree)
            step(tree)
        assert_same(direct.load(tmp_path / "x"), {"w": np.arange(1 << 20, dtype=np.float32)})


KINDS: dict[str, tuple[Any, Any]] = {
    "standard": (direct.StandardCheckpointer, ocp.StandardCheckpointer),
    "pytree": (direct.PyTreeCheckpointer, ocp.PyTreeCheckpointer),
    "handler": (
        lambda: direct.Checkpointer(ocp.PyTreeCheckpointHandler()),
        lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
    ),
    "async": (
        lambda: direct.AsyncCheckpointer(ocp.StandardCheckpointHandler()),
        lambda: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_stock_orbax(tmp_path: Path, kind: str) -> None:
    """Types, containers, casts: what a trainer does with what it restores would break."""
    params = {"dense": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4, jnp.bfloat16)}}
    state = {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(0), "step": 3, "none": None}
    answers = []
    for make in KINDS[kind]:
        with make() as checkpointer:
            path = tmp_path / str(len(answers))
            checkpointer.save(path, state)
            getattr(checkpointer, "wait_until_finished", lambda: None)()
            found = [checkpointer.restore(path), checkpointer.restore(path, state)]
            answers.append((found, checkpointer.metadata(path).item_metadata))
    ours, stock = answers
    for mine, theirs in zip(ours[0], stock[0], strict=True):
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        assert list(map(type, jax.tree.leaves(mine))) == list(map(type, jax.tree.leaves(theirs)))
        assert_same(mine, theirs)
    assert jax.tree.structure(ours[1].tree) == jax.tree.structure(stock[1].tree)
    with KINDS[kind][0]() as mine, KINDS[kind][1]() as theirs:
        assert isinstance(mine, type(theirs)), "trainers ask for the class"


def test_flax_and_brax_calls_are_verified(tmp_path: Path) -> None:
    """The calls of `flax.training.checkpoints` and of brax would not reach the digests."""
    params = {"kernel": jnp.arange(1 << 16, dtype=jnp.float32)}
    checkpointer = direct.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "brax", params, force=True, save_args=orbax_utils.save_args_from_target(params))
    assert_same(checkpointer.restore(tmp_path / "brax"), params)
    target = jax.tree.map(jnp.zeros_like, params)
    wishes = orbax_utils.restore_args_from_target(target)
    assert_same(checkpointer.restore(tmp_path / "brax", item=target, restore_args=wishes), params)
    flax = direct.Checkpointer(ocp.PyTreeCheckpointHandler())
    saved = checkpoints.save_checkpoint(tmp_path / "flax", params, 7, orbax_checkpointer=flax)
    assert_same(checkpoints.restore_checkpoint(tmp_path / "flax", target, orbax_checkpointer=flax), params)
    for directory, restore in (
        (tmp_path / "brax", lambda: checkpointer.restore(tmp_path / "brax", item=target, restore_args=wishes)),
        (Path(saved), lambda: checkpoints.restore_checkpoint(tmp_path / "flax", target, orbax_checkpointer=flax)),
    ):
        flip_bit(directory)
        with pytest.raises(ckptkit.CorruptCheckpointError, match="digest"):
            restore()


@pytest.mark.parametrize(
    "handler", [ocp.JsonCheckpointHandler(), ocp.PyTreeCheckpointHandler(use_zarr3=True)], ids=["json", "zarr3"]
)
def test_other_handlers_work_without_digests(tmp_path: Path, handler: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A layout that the caller asked for would be another one, or a user would believe it verified."""
    with caplog.at_level(logging.INFO, "ckptkit"), direct.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", {"n": 3})
        assert checkpointer.restore(tmp_path / "x") == {"n": 3}
    assert "keeps no digests" in caplog.text
    assert not (tmp_path / "x" / "_ckptkit").exists()


def test_text_is_verified(tmp_path: Path) -> None:
    """A name of a run or of a tokenizer would be lost, or another one after a damage."""
    tree = {"name": "run 7", "w": jnp.ones(3)}
    for found in (tree, {"name": "run 7", "n": 3}):
        direct.save(tmp_path / "x", found, force=True)
        assert direct.load(tmp_path / "x")["name"] == "run 7"
        assert ocp.PyTreeCheckpointer().restore(tmp_path / "x")["name"] == "run 7"
    direct.save(tmp_path / "y", tree)
    strings = tmp_path / "y" / "_strings.json"
    strings.write_text(strings.read_text().replace("run 7", "run 8"))
    assert direct.load(tmp_path / "y", tree)["name"] == "run 7", "the sidecar has it"
    assert ckptkit.verify(str(tmp_path / "y")).steps[0].state == "corrupt"


def test_tree_that_orbax_alone_holds_is_saved_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tree would be refused, or pass as verified."""
    with caplog.at_level(logging.INFO, "ckptkit"):
        direct.save(tmp_path / "x", {"a/b": "text", "w": jnp.ones(3)})
    assert "saved without digests" in caplog.text


def test_bucket_holds_the_same_tree(server: BucketServer, tmp_path: Path) -> None:
    """On a bucket, digests would be missing or stock Orbax would not read the tree."""
    state = make_state(2)
    direct.save("gs://runs/models/best", state)
    assert_same(direct.load("gs://runs/models/best", abstract(state)), state)
    with ocp.StandardCheckpointer() as stock:
        assert_same(stock.restore("gs://runs/models/best", abstract(state)), state)
    direct.save("gs://runs/models/big", big())
    store = open_store("gs://runs/models/big")
    key = max((key for key in store.stat_all("") if "d/" in key), key=lambda key: len(store.get(key)))
    content = bytearray(store.get(key))
    content[len(content) // 2] ^= 1
    store.put(key, bytes(content))
    with pytest.raises(ckptkit.CorruptCheckpointError, match="digest"):
        direct.load("gs://runs/models/big")


def test_name_save_is_the_function_beside_its_package() -> None:
    """The import of `ckptkit.save.pipeline` would replace the function by a module."""
    module = importlib.import_module("ckptkit.save.pipeline")
    assert sys.modules["ckptkit.save.pipeline"] is module
    assert direct.save is ckptkit.direct.save


@pytest.mark.parametrize(
    "save",
    [
        lambda path, tree: direct.save(path, tree),
        lambda path, tree: direct.StandardCheckpointer().save(path, tree),
        lambda path, tree: direct.PyTreeCheckpointer().save(path, tree),
    ],
)
def test_result_of_a_refuted_program_is_saved_by_no_door(save: Callable[[Path, Any], None], tmp_path: Path) -> None:
    """A step that another program computed would be stored as the result of this one."""

    def refute() -> None:
        raise ProgramChangedError("refuted", path="p")

    unproven.add(0, refute)
    try:
        with pytest.raises(ProgramChangedError):
            save(tmp_path / "tree", {"w": jnp.zeros(2)})
    finally:
        unproven.remove(0)
    assert not (tmp_path / "tree").exists()
