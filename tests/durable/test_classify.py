"""The class of a directory in a root: pure rules, and one opinion of the manager and the listing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit.cli import main
from ckptkit.cli.exits import Exit
from ckptkit.durable.lifecycle.classify import (
    Content,
    NameFormat,
    StepClass,
    class_of,
    content_of,
    format_of,
    has_been_written,
    run_format,
)
from ckptkit.durable.lifecycle.delete import remove_step
from ckptkit.durable.lifecycle.listing import RootSteps, read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.sidecars import marker_text
from ckptkit.inspection.roots import read_ancestry
from ckptkit.model.manifest import SaveId
from ckptkit.store import Store, open_store
from ckptkit.store.base import StoreOperation, WrapperStore
from ckptkit.testing.bucket import BucketServer
from tests.upkeep.conftest import make_root, manager_of, save


def look(root: Path | str) -> RootSteps:
    place = Place.open(str(root), timeout_s=5)
    return read_root(place, read_ancestry(place)[0])


def numbers_of(root: Path | str) -> list[int]:
    return [each.step for each in look(root).steps if each.state == "committed"]


def stock_step(root: Path, step: int) -> None:
    with ocp.CheckpointManager(root) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, step)}))  # pyright: ignore[reportCallIssue]


@given(
    st.sampled_from([None, "step", "a_b"]),
    st.one_of(st.none(), st.integers(2, 8)),
    st.lists(st.integers(0, 10**9), min_size=1, unique=True),
)
def test_format_reads_the_names_that_orbax_builds(prefix: str | None, digits: int | None, steps: list[int]) -> None:
    """A run's own steps would not be found by the commands."""
    orbax = ocp.path.step.standard_name_format(step_prefix=prefix, step_format_fixed_length=digits)
    names = {orbax.build_name(step): step for step in steps}
    found = format_of(names)
    assert {name: found.step_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["100", "best_250", "gemma_3"], {"100"}),  # plain numbers before any prefix
        (["best_250"], {"best_250"}),
        (["best_250", "gemma_3"], set()),  # nothing tells which: neither is judged
        (["0010", "7"], {"7"}),
        (["0010", "0200"], {"0010", "0200"}),
        (["0010", "20000"], {"0010", "20000"}),
        (["wandb", "notes"], set()),
    ],
)
def test_names_that_disagree_are_left_out(names: list[str], expected: set[str]) -> None:
    """A base model next to the run would be pruned as the oldest of its steps."""
    found = format_of(names)
    assert {name for name in names if found.step_of(name) is not None} == expected


def test_marks_decide_where_names_disagree() -> None:
    """Plain numbers of others would hide the steps of a run with a prefix; a renamed copy would be its newest."""
    marks = {
        "step_5": marker_text("gs://b/run/step_5", SaveId(1, 5, 0)).encode(),
        "7": b"Checkpoint commit was successful to gs://b/run/7",
        "best_9": marker_text("gs://b/run/step_9", SaveId(1, 9, 1)).encode(),
    }
    assert run_format(list(marks), marks.get) == NameFormat("step")
    assert run_format(list(marks), marks.get, prefix="best") == NameFormat("best")
    assert run_format(list(marks), marks.get, prefix="") == NameFormat()


@pytest.mark.parametrize(
    ("names", "below", "expected"),
    [
        ([], {}, "nothing"),
        (["notes.txt"], {}, "nothing"),
        (["_CHECKPOINT_METADATA"], {}, "step"),
        (["commit_success.txt"], {}, "step"),
        (["default/"], {"default": ["_METADATA", "d/"]}, "step"),
        (["data/"], {"data": ["metadata"]}, "step"),
        (["plots/", "default/"], {"plots": ["a.png"], "default": ["process_0-of-1.json"]}, "step"),
        (["plots/"], {"plots": ["a.png"]}, "nothing"),
        (["_METADATA", "_CHECKPOINT_METADATA", "d/"], {}, "item"),
        (["100/", "200/"], {"100": ["_CHECKPOINT_METADATA"], "200": ["_METADATA"]}, "root"),
        (["_ckptkit/", "notes.txt"], {}, "root"),
        (["slot-0.bin", "lock"], {}, "slots"),
    ],
)
def test_content_is_read_off_the_names(names: list[str], below: dict[str, list[str]], expected: Content) -> None:
    """A directory with a number for a name would be moved away as a damaged step."""
    assert content_of(names, lambda name: below[name]) == expected


def test_class_follows_from_records_and_damage() -> None:
    """Stock steps would be treated as ours, or damaged saves of ours as stock's."""
    ours, stock = SaveId(1, 5, 0), SaveId(1, 5, -1)
    assert class_of(ours, {"s": "arrays"}, []) is StepClass.WHOLE
    assert class_of(ours, {"s": "arrays"}, ["a cell"]) is StepClass.DAMAGED
    assert class_of(None, {"s": "arrays"}, [], lost=True) is StepClass.DAMAGED
    assert class_of(stock, {"s": "arrays"}, ["a chunk"]) is StepClass.STOCK
    assert class_of(None, {"s": "arrays", "blob": None}, []) is StepClass.PARTLY


def put_strange_neighbours(root: Path) -> None:
    """Leftovers of other people and tools in a root, each with a name that a step could have."""
    (root / "2024").mkdir()
    (root / "2024/notes.txt").write_text("mine")
    (root / "9000").mkdir()
    os.symlink(root / "2", root / "9001")
    os.symlink(root.parent, root / "9002")
    make_root(root / "9003", [1])
    ocp.PyTreeCheckpointer().save(root / "9004", {"w": jnp.ones(3)})
    ocp.PyTreeCheckpointer().save(root / "gemma_9005", {"w": jnp.ones(3)})
    shutil.copytree(root / "2", root / "best_9006")


def test_manager_and_listing_have_one_opinion(tmp_path: Path) -> None:
    """A restart would fail at what the listing calls no step, or pruning delete it as the oldest."""
    root = tmp_path / "run"
    make_root(root, [1, 2])
    put_strange_neighbours(root)
    found = look(root)
    assert [each.step for each in found.steps] == [1, 2]
    assert {why: set(names) for why, names in found.left_out.items()} == {
        "link": {"9001", "9002"},
        "name": {"best_9006", "gemma_9005"},
        "item": {"9004"},
        "root": {"9003"},
        "nothing": {"2024", "9000"},
    }
    assert ckptkit.latest_step(str(root)) == 2
    before = sorted(str(path) for path in root.rglob("*") if path.relative_to(root).parts[0] not in ("1", "2", "3"))
    with manager_of(root, max_to_keep=1) as manager:
        assert manager.all_steps() == [1, 2]
        assert int(manager.restore(None)["w"][0]) == 2
        save(manager, 3)
        manager.reload()
        assert manager.all_steps() == [3]
    after = {str(path) for path in root.rglob("*")}
    assert not [path for path in before if path not in after and "_ckptkit" not in path]


def test_step_with_damaged_orbax_metadata_is_the_newest_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan-restore` and evaluators would name the step before the one that a restart takes."""
    root = tmp_path / "run"
    make_root(root, [1, 2])
    (root / "2" / "_CHECKPOINT_METADATA").write_text("{")
    (newest,) = [each for each in look(root).steps if each.step == 2]
    assert newest.state == "committed"
    assert "_CHECKPOINT_METADATA cannot be read" in str(newest.problem)
    with manager_of(root) as manager:
        assert int(manager.restore(None)["w"][0]) == 2
    assert ckptkit.latest_step(str(root)) == 2
    assert main(["plan-restore", str(root)]) == Exit.CORRUPT
    printed = capsys.readouterr()
    assert f"{root}: step 2, save " in printed.out
    assert "_CHECKPOINT_METADATA cannot be read" in printed.err
    assert main(["copy", str(root), str(tmp_path / "copy")]) == Exit.CORRUPT
    assert numbers_of(tmp_path / "copy") == [1], "stock Orbax may not restore the other"


def test_metadata_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    """The constructor raised a bare RecursionError from within Orbax."""
    root = tmp_path / "run"
    make_root(root, [1, 2])
    (root / "2" / "_CHECKPOINT_METADATA").write_text("[" * 5000)
    with pytest.raises(ckptkit.CorruptCheckpointError, match="run/2/_CHECKPOINT_METADATA cannot be read"):
        manager_of(root)


def test_step_that_was_converted_into_a_root_is_not_the_newest(tmp_path: Path) -> None:
    """`convert --to orbax ROOT/3000` would make every restart of the run impossible."""
    root = tmp_path / "run"
    make_root(root, [1000, 2000])
    np.savez(tmp_path / "m.npz", w=np.ones(3))
    assert main(["convert", str(tmp_path / "m.npz"), str(tmp_path / "3000"), "--to", "orbax"]) == 0
    (tmp_path / "3000").rename(root / "3000")
    assert numbers_of(root) == [1000, 2000]
    with manager_of(root) as manager:
        assert manager.latest_step() == 2000
        assert int(manager.restore(None)["w"][0]) == 2000


def test_trees_without_a_manager_are_steps_of_their_own_root(tmp_path: Path) -> None:
    """The commands would find nothing in a root that a loop over `PyTreeCheckpointer.save` has filled."""
    for step in (1, 2):
        ocp.PyTreeCheckpointer().save(tmp_path / str(step), {"w": jnp.ones(3)})
    assert numbers_of(tmp_path) == [1, 2]
    stock_step(tmp_path, 5)
    assert numbers_of(tmp_path) == [5]
    assert look(tmp_path).left_out == {"item": ("1", "2")}


def test_save_without_arrays_is_ours_for_the_listing_too(tmp_path: Path) -> None:
    """The listing would take a step of small items for stock Orbax's, and order it after every save of ours."""
    with manager_of(tmp_path) as manager:
        manager.save(1, args=ocp.args.JsonSave({"a": 1}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
    (step,) = look(tmp_path).steps
    assert step.kind == StepClass.WHOLE
    assert step.identity.to_list()[:3] == [1, 1, 0]


def test_item_without_its_sidecars_is_damaged(tmp_path: Path) -> None:
    """A step whose digests were lost would be listed as stock Orbax's, and nobody would look."""
    make_root(tmp_path, [1])
    shutil.rmtree(tmp_path / "1/default/_ckptkit")
    (step,) = look(tmp_path).steps
    assert (step.state, step.kind) == ("damaged", StepClass.DAMAGED)
    assert "lost its sidecars" in str(step.problem)


@final
class Pruning(WrapperStore):
    """A store in which another process deletes a step after so many operations."""

    def __init__(self, inner: Store, step: str, after: int):
        super().__init__(inner)
        self._step, self.left = f"{inner.url}/{step}", after

    def _run(self, operation: StoreOperation, key: str, request: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == -1:
            remove_step(self._step, shutil.rmtree)
        return super()._run(operation, key, request)


@pytest.mark.parametrize("root", ["disk", "gs://runs/run"])
def test_step_that_is_deleted_during_the_look_is_not_damaged(tmp_path: Path, root: str, server: BucketServer) -> None:
    """While a job prunes, a command would call steps damaged now and then."""
    del server
    where, after, states = root if "://" in root else str(tmp_path / root), 0, set[str]()
    ended = False
    while not ended:
        make_root(where, [1, 2])
        store = Pruning(open_store(where), "1", after)
        found = read_root(Place(store), read_ancestry(Place.open(where, timeout_s=5))[0])
        states |= {each.state for each in found.steps if each.step == 1}
        assert "damaged" not in states, (after, [each.problem for each in found.steps])
        ended, after = store.left >= 0, after + 1
        open_store(where).delete_many(open_store(where).list_all(""))
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    assert after > 5
    assert "committed" in states


def test_stock_step_with_damaged_metadata_is_committed(tmp_path: Path) -> None:
    """A step that stock Orbax restores would be called damaged."""
    stock_step(tmp_path, 1)
    (tmp_path / "1/_CHECKPOINT_METADATA").write_text('{"item_handl')
    (step,) = look(tmp_path).steps
    assert (step.state, step.kind) == ("committed", StepClass.STOCK)


def test_foreign_directory_in_a_bucket_is_not_a_step(server: BucketServer) -> None:
    """A directory of notes in a bucket would be listed as a save that was cut off."""
    del server
    root = "gs://runs/run"
    make_root(root, [1])
    open_store(root).put("2024/notes.txt", b"mine")
    found = look(root)
    assert [(each.step, each.state) for each in found.steps] == [(1, "committed")]
    assert found.left_out == {"nothing": ("2024",)}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["notes.txt"], False),
        (["figures/loss.csv"], False),
        (["100/_CHECKPOINT_METADATA", "100/state/_METADATA"], False),  # a root of its own
        (["metadata"], False),  # a file of that name, not an item
        (["default/d/1a2b"], True),
        (["default/ocdbt.process_0/d/1a2b"], True),
        (["data/metadata"], True),
        (["_CHECKPOINT_METADATA"], True),
        (["_ckptkit_copy.json"], True),
        (["state/params.w/.zarray"], True),
    ],
)
def test_files_of_others_are_not_a_save_that_was_cut_off(keys: list[str], expected: bool) -> None:
    """A user's directory in a bucket would be emptied by the save of the step of its number."""
    assert has_been_written(keys) is expected


def test_save_does_not_replace_files_of_others_in_a_bucket(server: BucketServer) -> None:
    """The run would delete a directory of notes, because its name is the number of the step."""
    del server
    root = "gs://runs/run"
    open_store(root).put("7/notes.txt", b"mine")
    with manager_of(root) as manager:
        save(manager, 6)
        with pytest.raises(Exception, match="step 7 is in gs://runs/run/7 already"):
            save(manager, 7)
    assert open_store(root).get("7/notes.txt") == b"mine"
