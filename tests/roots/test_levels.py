"""Every command on the directories of every layout, a choice of cells; and old layouts, which are read or refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.errors import StepNotFoundError
from ckptkit.inspection import aggregate
from tests.cli.conftest import Run
from tests.cli.conftest import ckpt as ckpt  # the fixture
from tests.roots.layouts import AGGREGATE, LAYOUTS, write_aggregate
from tests.roots.levels import ACTIONS, Levels, chosen

SEED = int(os.environ.get("CKPTKIT_ZOO_SEED", "21"))
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.usefixtures("orbax_may_fail"),
]


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Levels:
    return Levels(tmp_path_factory.mktemp("levels"))


@pytest.mark.parametrize("each", [1, pytest.param(6, marks=pytest.mark.long)])
def test_every_level_of_every_layout_gets_a_right_answer(levels: Levels, each: int) -> None:
    """A part of a checkpoint could be pruned, written into, or called whole; an array could be left out."""
    cells = chosen(levels.cells(), SEED, each)
    assert {cell.layout for cell in cells} == set(LAYOUTS)
    assert {cell.action for cell in cells} == set(ACTIONS)
    wrong = [f"{found.kind}: {found.text}" for cell in cells for found in levels.run(cell)]
    assert not wrong, "\n".join([f"seed {SEED}", *wrong, "`python -m tests.roots.levels` runs all"])


def built(tmp_path: Path, layout: str) -> Path:
    (tmp_path / "built").mkdir()
    LAYOUTS[layout].build(tmp_path / "built")
    return tmp_path / "built/run"


@pytest.mark.parametrize("read_only", [False, True])
def test_manager_refuses_a_step_and_names_the_root(tmp_path: Path, read_only: bool) -> None:
    """The manager would make the step a root of its own: the run loses it, and no one sees why."""
    run = built(tmp_path, "manager")
    before = sorted(run.rglob("*"))
    options = ocp.CheckpointManagerOptions(read_only=read_only)
    for place in ("300", "300/default", "300/default/d", "300/default/ocdbt.process_0", "300/new"):
        with pytest.raises(StepNotFoundError, match=f"name the root, {run}, or for a new root a place outside"):
            ckptkit.CheckpointManager(run / place, options=options)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("there", ["nothing", "empty", "notes", "stock root", "text of TensorFlow", "arrays of a user"])
def test_manager_takes_a_root_whose_name_is_a_number(tmp_path: Path, there: str) -> None:
    """A sweep over seeds or sizes has roots with such names: none would start any more."""
    root = tmp_path / "sweeps/300"
    if there != "nothing":
        root.mkdir(parents=True)
    if there == "notes":
        (root / "notes.txt").write_text("words")
        (root / "figures").mkdir()
    if there == "stock root":
        with ocp.CheckpointManager(root) as stock:
            stock.save(1, args=ocp.args.StandardSave({"w": jnp.ones(2)}))  # pyright: ignore[reportCallIssue]
    if there == "text of TensorFlow":
        (root / AGGREGATE).write_text('model_checkpoint_path: "ckpt-1"\n')
    if there == "arrays of a user":
        (root / "loss.zarr").mkdir()
        (root / "loss.zarr/.zarray").write_text("{}")
    for step in (2, 3):  # at the second start there are records of the first
        with ckptkit.CheckpointManager(root) as manager:
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(2)}))  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(root) as manager:
        assert manager.all_steps() == [*[1] * (there == "stock root"), 2, 3]


def test_stock_root_inside_of_a_step_is_still_a_root(tmp_path: Path) -> None:
    """People have put roots there: a directory with steps is a root, wherever it is."""
    run = built(tmp_path, "manager")
    with ocp.CheckpointManager(run / "300/tuned") as stock:
        stock.save(1, args=ocp.args.StandardSave({"w": jnp.ones(2)}))  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(run / "300/tuned") as manager:
        assert manager.all_steps() == [1]


TREE: dict[str, Any] = {
    "half": jnp.arange(3, dtype=jnp.bfloat16),
    "pair": (np.float32(2.5), {"w": np.arange(6).reshape(2, 3)}),
    "list": [np.int8(3), True],
    "wave": 1 + 2j,
    "rate": 0.5,
    "name": "adam",
    "none": None,
    "empty": {},
}
ARRAYS = {
    "half": TREE["half"],
    "pair.0": np.float32(2.5),
    "pair.1.w": np.arange(6).reshape(2, 3),
    "list.0": np.int8(3),
    "list.1": True,
    "wave": 1 + 2j,
    "rate": 0.5,
}


def test_tree_in_one_file_is_read_as_stock_orbax_reads_it(ckpt: Run, tmp_path: Path) -> None:
    """The leaves had 0 bytes, a verification read none of them, and a conversion left them out with exit code 0."""
    write_aggregate(tmp_path / "old", TREE)
    found = {
        leaf["name"]: leaf for leaf in json.loads(ckpt("inspect", tmp_path / "old", "--json").out)["items"][0]["leaves"]
    }
    assert {name: each["bytes"] for name, each in found.items() if each["dtype"]} == {
        name: np.asarray(value).nbytes for name, value in ARRAYS.items()
    }
    (step,) = json.loads(ckpt("verify", tmp_path / "old", "--json").out)["steps"]
    assert (step["state"], step["cells"]) == ("unproven", len(ARRAYS))
    said = ckpt("convert", tmp_path / "old", tmp_path / "new", "--to", "orbax")
    assert said.code == 0
    assert "left out: empty (Dict), name (string), none (None), which are not arrays" in said.out
    new, old = ocp.PyTreeCheckpointer().restore(tmp_path / "new"), ocp.PyTreeCheckpointer().restore(tmp_path / "old")
    for name, value in ARRAYS.items():
        was, now = old, new
        for part in name.split("."):
            was, now = (
                was[int(part) if isinstance(was, list | tuple) else part],
                now[int(part) if isinstance(now, list) else part],
            )
        np.testing.assert_array_equal(np.asarray(now), np.asarray(value))
        np.testing.assert_array_equal(np.asarray(was), np.asarray(value))


def test_array_in_chunks_is_read(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax split arrays of more than 1 GiB."""
    monkeypatch.setattr("orbax.checkpoint.msgpack_utils.MAX_CHUNK_SIZE", 16)
    write_aggregate(tmp_path / "old", {"w": np.arange(12.0).reshape(3, 4)})
    assert ckpt("convert", tmp_path / "old", tmp_path / "new.npz").code == 0
    with np.load(tmp_path / "new.npz") as found:
        np.testing.assert_array_equal(found["w"], np.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("layout", ["aggregate", "aggregate with metadata", "placeholders with metadata"])
def test_damaged_or_lost_file_is_damage(ckpt: Run, tmp_path: Path, layout: str) -> None:
    """A conversion would go without the leaves of the file, and a verification would call the rest whole."""
    run = built(tmp_path, layout)
    data = (run / AGGREGATE).read_bytes()
    (run / AGGREGATE).write_bytes(data[:-9])
    for line in ("inspect {}", "verify {}", "convert {} {}.npz"):
        assert ckpt(*line.format(run, run).split()).code == 11, line
    assert not (tmp_path / "built/run.npz").exists()
    (run / AGGREGATE).unlink()
    if layout != "aggregate":
        for line in ("inspect {}", "verify {}"):
            said = ckpt(*line.format(run).split())
            assert (said.code, "count" in said.err) == (11, True), (line, said)
        assert ckpt("convert", run, tmp_path / "new.npz").code in (1, 11)


def test_too_large_file_is_not_read_and_that_is_an_error(
    ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the memory of the host, or be left out with exit code 0."""
    run = built(tmp_path, "aggregate")
    monkeypatch.setattr(aggregate, "FILE_BYTES_MAX", 10)
    for line, code in {"inspect {}": 1, "verify {}": 13, "convert {} {}.npz": 1}.items():
        said = ckpt(*line.format(run, run).split())
        assert (said.code, "restore it with Orbax and save it again" in said.err) == (code, True), (line, said)


def test_part_of_one_process_is_not_read_as_the_item(ckpt: Run, tmp_path: Path) -> None:
    """The parts of the other processes would be zeros, with exit code 0."""
    item = built(tmp_path, "several processes") / "300/state"
    for line in ("inspect {}", "verify {}", "convert {} /dev/null/x.npz", "diff {} {}", "reshard {} {}/x --mesh x=2"):
        said = ckpt(*line.format(*[item / "ocdbt.process_1"] * 2).split())
        assert (said.code, said.out) == (10, ""), (line, said)
        assert f"it is the part of {item} that one process wrote; name {item}" in said.err


def test_directories_with_names_of_steps_alone_are_no_root(ckpt: Run, tmp_path: Path) -> None:
    """`0 steps`, exit code 0, of a wrong path would pass for good news."""
    for name in ("0", "12", "layer_1"):
        (tmp_path / f"notes/{name}").mkdir(parents=True)
        (tmp_path / f"notes/{name}/words.txt").write_text("words")
    for line in ("steps {}", "du {}", "scrub {}", "prune {} --keep newest=1 --unread", "doctor {}"):
        said = ckpt(*line.format(tmp_path / "notes").split())
        assert (said.code, "it has no step, and no record of a run" in said.err) == (10, True), (line, said)


def test_what_was_not_read_has_an_exit_code_of_its_own(ckpt: Run, tmp_path: Path) -> None:
    """`verify` of a step of which it read nothing, or a conversion without an item, would pass for done."""
    step = built(tmp_path, "manager of items") / "300"
    said = ckpt("convert", step, tmp_path / "new.npz")
    assert (said.code, "not read: " in said.err, (tmp_path / "new.npz").exists()) == (13, True, True)
    assert f"{step}: item key, which only its own handler reads" in said.err
    said = ckpt("diff", step, step)
    assert (said.code, "item key, which only its own handler reads" in said.err) == (13, True)
    shutil.rmtree(step / "key")
    shutil.rmtree(step / "numpy_key")
    (step / "story").mkdir()
    (step / "story/words.bin").write_bytes(b"words")
    said = ckpt("verify", step)
    assert (said.code, "not read: " in said.err, "story is not understood" in said.err) == (13, True, True)
