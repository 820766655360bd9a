"""Every kind of item, in both directions with stock Orbax, with and without a fast tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from tests.states import abstract, assert_same, make_state, mesh, put

args: Any = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def tree() -> dict[str, Any]:
    params = {"w": put(jnp.arange(16.0).reshape(4, 4), "fsdp"), "b": np.arange(3.0)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "none": None, "empty": {}, "step": 3, "lr": 0.5}


SMALL: dict[str, tuple[Any, Any]] = {
    "json": (args.JsonSave({"a": [1, {"b": None}]}), args.JsonRestore()),
    "jax array": (args.ArraySave(jnp.arange(4, dtype=jnp.bfloat16)), args.ArrayRestore()),
    "numpy array": (args.ArraySave(np.arange(4.0)), args.ArrayRestore()),
    "number": (args.ArraySave(7), args.ArrayRestore()),
    "typed key": (args.JaxRandomKeySave(jax.random.key(3)), args.JaxRandomKeyRestore()),
    "raw key": (args.JaxRandomKeySave(jax.random.PRNGKey(3)), args.JaxRandomKeyRestore()),
    "numpy key": (args.NumpyRandomKeySave(np.random.RandomState(1).get_state()), args.NumpyRandomKeyRestore()),
    "numpy key, new": (
        args.NumpyRandomKeySave(np.random.RandomState(1).get_state(legacy=False)),
        args.NumpyRandomKeyRestore(),
    ),
}


@pytest.fixture(params=[False, True], ids=["durable", "ram"])
def manager_of(request: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes our managers over one directory."""

    def make(*given: Any, **more: Any) -> Any:
        fast = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if request.param else []
        return ckptkit.CheckpointManager(tmp_path / "run", *given, tiers=fast, host_id="host", **more)

    return make


def stock_of(tmp_path: Path, *given: Any, **more: Any) -> Any:
    return ocp.CheckpointManager(tmp_path / "run", *given, **more)


@pytest.mark.parametrize("kind", SMALL)
def test_small_item_is_restored_from_every_source(manager_of: Any, tmp_path: Path, kind: str) -> None:
    """A run would continue with other random numbers or other data."""
    save, restore = SMALL[kind]
    expected = save.item
    with stock_of(tmp_path) as stock:
        stock.save(0, args=args.Composite(item=save))
    with manager_of() as manager:
        assert_same(manager.restore(0, args=args.Composite(item=restore)).item, expected)
        assert manager.save(1, args=args.Composite(item=save))
    with manager_of() as manager, stock_of(tmp_path) as stock:
        for each in (manager, stock):
            assert_same(each.restore(1).item, expected)
            assert_same(each.restore(1, args=args.Composite(item=restore)).item, expected)
        assert type(manager.restore(1).item) is type(stock.restore(1).item)


def test_small_item_is_copied_before_save_returns(manager_of: Any, tmp_path: Path) -> None:
    """The loop goes on and changes it while the step is written."""
    array, words, key = np.arange(4), {"at": 1}, np.random.RandomState(1).get_state(legacy=False)
    given = args.Composite(a=args.ArraySave(array), b=args.JsonSave(words), c=args.NumpyRandomKeySave(key))
    with manager_of() as manager:
        assert manager.save(0, args=given)
        array += 1
        words["at"] = 2
        key["state"]["key"] += 1
        manager.wait_until_finished()
        for each in (manager, stock_of(tmp_path)):
            found = each.restore(0)
            np.testing.assert_array_equal(found.a, np.arange(4))
            assert found.b == {"at": 1}
            assert_same(found.c, np.random.RandomState(1).get_state(legacy=False))


@pytest.mark.parametrize("kind", ["Standard", "PyTree"])
def test_restored_tree_has_the_structure_of_orbax(manager_of: Any, tmp_path: Path, kind: str) -> None:
    """Empty optimizer states, None and numbers would be lost, or move to other places of a list."""
    save, restore = getattr(args, f"{kind}Save"), getattr(args, f"{kind}Restore")
    with manager_of() as manager:
        assert manager.save(0, args=save(tree()))
    with manager_of() as manager, stock_of(tmp_path) as stock:
        for given in (None, restore(), restore(abstract(tree()))):
            found, expected = manager.restore(0, args=given), stock.restore(0, args=given)
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            assert_same(found, expected)
        assert found["opt"][0].count.dtype == jnp.int32


def test_save_args_and_restore_args_cast(manager_of: Any, tmp_path: Path) -> None:
    """A checkpoint would be twice as large as asked for, or come back in a dtype that the model has not."""
    state = {"w": put(jnp.arange(16.0).reshape(4, 4) / 3, "fsdp"), "b": np.arange(3.0), "step": 3}
    f16, f32 = np.dtype("float16"), np.dtype("float32")
    wishes = {
        "w": ocp.SaveArgs(dtype=np.dtype("bfloat16")),
        "b": ocp.SaveArgs(dtype=f32),
        "step": ocp.SaveArgs(),
    }
    other = NamedSharding(mesh(), PartitionSpec(None, "data"))
    asked = {
        "w": ocp.ArrayRestoreArgs(sharding=other, dtype=f32),
        "b": ocp.RestoreArgs(restore_type=np.ndarray, dtype=f16),
        "step": ocp.RestoreArgs(restore_type=int),
    }
    with manager_of() as manager:
        assert manager.save(0, args=args.PyTreeSave(state, save_args=wishes))
    with manager_of() as manager, stock_of(tmp_path) as stock:
        for each in (manager, stock):
            stored = each.restore(0)
            assert (stored["w"].dtype, stored["b"].dtype) == (jnp.bfloat16, np.float32)
            np.testing.assert_array_equal(np.asarray(stored["w"]), np.asarray(state["w"].astype(jnp.bfloat16)))
            found = each.restore(0, args=args.PyTreeRestore(state, restore_args=asked))
            assert (found["w"].dtype, found["w"].sharding, found["b"].dtype) == (jnp.float32, other, np.float16)
            assert type(found["step"]) is int
            np.testing.assert_array_equal(np.asarray(found["w"]), np.asarray(stored["w"]).astype(np.float32))


def test_part_of_a_tree_is_restored(manager_of: Any, tmp_path: Path) -> None:
    """An evaluation that needs the parameters alone would have to read the optimizer state too."""
    with manager_of() as manager:
        assert manager.save(0, args=args.PyTreeSave(tree()))
    part = {"params": tree()["params"]}
    with manager_of() as manager, stock_of(tmp_path) as stock:
        for each in (manager, stock):
            assert_same(each.restore(0, args=args.PyTreeRestore(part, partial_restore=True)), part)
            left_out = {**tree(), "step": ...}
            assert each.restore(0, args=args.PyTreeRestore(left_out))["step"] is ...
            with pytest.raises(ValueError, match="step"):
                each.restore(0, args=args.PyTreeRestore(part))


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_or_padded(manager_of: Any, tmp_path: Path, strict: bool) -> None:
    """`strict=False` asks for padding, and only Orbax does that: the step is proven, then read by Orbax."""
    with manager_of() as manager:
        assert manager.save(0, args=args.StandardSave({"w": jnp.arange(4.0)}))
    with manager_of() as manager, stock_of(tmp_path) as stock:
        for each in (manager, stock):
            given = args.StandardRestore({"w": jax.ShapeDtypeStruct((6,), jnp.float32)}, strict=strict)
            if strict:
                with pytest.raises(ValueError, match=r"6"):
                    each.restore(0, args=given)
            else:
                assert each.restore(0, args=given)["w"].tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_custom_handler_writes_the_durable_tier(manager_of: Any, tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    """A layout that other tools need would not be written."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with manager_of(item_names=("state",), item_handlers={"state": handler}) as manager:
        assert manager.save(0, args=args.Composite(state=args.PyTreeSave(make_state(1))))
        manager.wait_until_finished()
        assert_same(manager.restore(0, args=args.Composite(state=args.PyTreeRestore())).state, make_state(1))
    directory = tmp_path / "run" / "0" / "state"
    assert (directory / "manifest.ocdbt").exists() == ocdbt
    assert any(directory.rglob("zarr.json")) == (zarr3 and not ocdbt)
    with stock_of(tmp_path) as stock:
        assert_same(stock.restore(0).state, make_state(1))
    with manager_of() as manager:
        assert_same(manager.restore(0).state, make_state(1))


@dataclasses.dataclass
class Note:
    """An object of the caller's own kind."""

    text: str


class NoteHandler(ocp.CheckpointHandler):
    """Saves a `Note` as a file."""

    def save(self, directory: Any, args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        (directory / "note.txt").write_text(args.item.text)

    def restore(self, directory: Any, args: Any = None) -> Note:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Note((directory / "note.txt").read_text())


@ocp.args.register_with_handler(NoteHandler, for_save=True)
@dataclasses.dataclass
class NoteSave(ocp.args.CheckpointArgs):
    item: Note


@ocp.args.register_with_handler(NoteHandler, for_restore=True)
@dataclasses.dataclass
class NoteRestore(ocp.args.CheckpointArgs):
    item: Any = None


def test_custom_item_type_is_saved_and_restored(manager_of: Any, tmp_path: Path) -> None:
    """A script with a handler of its own could not change its import."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("note", NoteSave, NoteHandler())
    registry.add("note", NoteRestore, NoteHandler())
    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)
    with manager_of(handler_registry=registry, events=log) as manager:
        for step in range(3):
            given = args.Composite(note=NoteSave(Note(f"at {step}")), state=args.StandardSave(make_state(step)))
            assert manager.save(step, args=given)
        manager.wait_until_finished()
        found = manager.restore(1, args=args.Composite(note=NoteRestore(), state=args.StandardRestore()))
        assert found.note == Note("at 1")
        assert_same(found.state, make_state(1))
        fast = tuple(tier.name for tier in manager._settings.tiers)
        assert {record.tiers for record in manager.steps()} == {("durable", *fast)}
    assert [e.fields["reason"] for e in events if e.kind == ckptkit.Kind.DEGRADED] == []
    with stock_of(tmp_path, handler_registry=registry) as stock:
        assert stock.restore(2, args=args.Composite(note=NoteRestore())).note == Note("at 2")


def test_legacy_call_forms_work(manager_of: Any, tmp_path: Path) -> None:
    """Scripts from before 2024 would stop at the import."""
    state = {"w": np.arange(4.0)}
    for number, checkpointers in enumerate(
        [ocp.PyTreeCheckpointer(), ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())]
    ):
        with manager_of(checkpointers) as manager:
            wishes = {"save_args": {"w": ocp.SaveArgs(dtype=np.dtype(np.float32))}}
            assert manager.save(number, state, save_kwargs=wishes)
            manager.wait_until_finished()
            assert manager.restore(number)["w"].dtype == np.float32
            asked = {"restore_args": {"w": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype("float16"))}}
            assert manager.restore(number, items=state, restore_kwargs=asked)["w"].dtype == np.float16
            with pytest.raises(ValueError, match="Found an instance of `CheckpointArgs` provided for `items`"):
                manager.save(9, args.PyTreeSave(state))
    several = {"state": ocp.PyTreeCheckpointer(), "words": ocp.Checkpointer(ocp.JsonCheckpointHandler())}
    run = ckptkit.CheckpointManager(tmp_path / "several", several)
    with run as manager:
        assert manager.save(0, {"state": state, "words": {"a": 1}})
        manager.wait_until_finished()
        found = manager.restore(0, {"state": None, "words": None})
        assert (found["state"]["w"].tolist(), found["words"]) == ([0, 1, 2, 3], {"a": 1})
    with pytest.raises(ValueError, match="Must provide `args` for `save`"):
        run.save(1)


@pytest.mark.parametrize(
    "setup",
    [
        {"checkpointers": ocp.PyTreeCheckpointer(), "item_names": ("a",)},
        {"checkpointers": ocp.PyTreeCheckpointer(), "item_handlers": ocp.PyTreeCheckpointHandler()},
        {"item_names": ("a",), "item_handlers": ocp.PyTreeCheckpointHandler()},
        {"item_names": ("a",), "handler_registry": ocp.handlers.DefaultCheckpointHandlerRegistry()},
        {"options": ocp.CheckpointManagerOptions(max_to_keep=1, preservation_policy=object())},  # pyright: ignore[reportArgumentType]
    ],
)
def test_conflicting_arguments_are_refused_like_orbax(tmp_path: Path, setup: Any) -> None:
    """One of the two would be dropped without a message."""
    for make in (ckptkit.CheckpointManager, ocp.CheckpointManager):
        with pytest.raises(ValueError, match=r"mutually exclusive|together"):
            make(tmp_path, **setup)


def test_restores_from_another_directory(manager_of: Any, tmp_path: Path) -> None:
    """Fine-tuning from another run's checkpoint would need a second manager."""
    with ckptkit.CheckpointManager(tmp_path / "other") as other:
        other.save(7, args=args.StandardSave(make_state(7)))
    with manager_of() as manager:
        assert manager.save(0, args=args.StandardSave(make_state(0)))
        for step in (7, None):
            assert_same(manager.restore(step, directory=tmp_path / "other"), make_state(7))
        assert manager.save(1, args=args.StandardSave(make_state(1)))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        with pytest.raises(FileNotFoundError):
            manager.restore(None, directory=tmp_path / "nowhere")


def test_metadata_of_a_step_only_in_a_fast_tier_is_available(tmp_path: Path) -> None:
    """A tool that asks for shapes before it restores would find nothing."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=100, best_fn=lambda m: m["loss"])
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]

    def make() -> Any:
        return ckptkit.CheckpointManager(tmp_path / "run", options=options, tiers=tiers, host_id="host")

    with make() as manager:
        for step in range(2):
            manager.save(step, args=args.StandardSave(tree()), metrics={"loss": step})
            manager.wait_until_finished()  # a fast tier leaves out a step that comes too early
    with make() as manager:
        manager.restore(0, args=args.StandardRestore())  # Orbax knows the handler from here on
        by_orbax, by_us = manager.metadata(0), manager.metadata(1)
        assert by_us.metrics == {"loss": 1}
        assert manager.metrics(1) == {"loss": 1}
        assert manager.item_metadata(1)["params"]["w"].shape == (4, 4)
        found, expected = [
            jax.tree.map(lambda leaf: (type(leaf), leaf.name, leaf.shape, leaf.dtype), each.item_metadata.tree)
            for each in (by_us, by_orbax)
        ]
        assert found == expected


class Entries(ocp.logging.AbstractLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def log_entry(self, entry: Any) -> None:
        self.entries.append(entry)


def test_logger_gets_an_entry_for_each_save_and_restore(manager_of: Any, tmp_path: Path) -> None:
    """Dashboards that read Orbax's entries would go dark."""
    logger, orbaxs = Entries(), Entries()
    for manager in (manager_of(logger=logger), ocp.CheckpointManager(tmp_path / "stock", logger=orbaxs)):
        with manager:
            manager.save(0, args=args.StandardSave({"w": np.arange(2)}))
            manager.wait_until_finished()
            manager.restore(0)
    assert [(e["event_type"], e["step"], sorted(e)) for e in logger.entries] == [
        (e["event_type"], e["step"], sorted(e)) for e in orbaxs.entries
    ]


def test_manager_is_an_orbax_abstract_checkpoint_manager(manager_of: Any) -> None:
    """Libraries that ask for Orbax's interface would refuse ours."""
    with manager_of() as manager:
        assert ocp.AbstractCheckpointManager in type(manager).__mro__
        assert not getattr(type(manager), "__abstractmethods__", None)


def test_forced_save_adds_the_durable_tier(tmp_path: Path) -> None:
    """A script forces its last step, which its own policy had not asked for, and the ramdisk held it already."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=10)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3)]
    with ckptkit.CheckpointManager(tmp_path / "run", options=options, tiers=tiers) as manager:
        for step in range(6):
            assert manager.save(step, args=args.StandardSave(make_state(step)))
        assert manager.save(5, args=args.StandardSave(make_state(5)), force=True)
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="step 5 exists already"):
            manager.save(5, args=args.StandardSave(make_state(5)), force=True)
        assert_same(manager.restore(5, args=args.StandardRestore()), make_state(5))
    with stock_of(tmp_path) as stock:
        assert stock.all_steps() == [0, 5]
        assert_same(stock.restore(5, args=args.StandardRestore(make_state(5))), make_state(5))
