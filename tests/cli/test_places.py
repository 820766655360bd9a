"""Every command on each kind of place: what takes a root refuses all that can be none, names the right call, and
changes nothing."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.cli.conftest import Run
from tests.formats.writers import by_safetensors
from tests.roots.levels import OF_ROOTS, OF_TARGETS
from tests.upkeep.conftest import make_root
from tools.cli_docs import named_commands

# Commands that take checkpoints of any kind, or no checkpoint.
OTHERS = {"chaos", "diff", "explain", "goodput", "inspect", "run", "sign", "simulate", "tiers clean", "tiers list"}
OTHERS |= {"verify"}


@dataclass(frozen=True, slots=True)
class Home:
    """A root with two steps and a fast tier, two trees without a root, and a file to convert."""

    path: Path
    root: Path
    places: dict[str, Path]

    def words(self, line: str, place: str, format: str = "npz") -> list[str]:
        names = {"root": self.root, "file": self.path / "m.safetensors", "path": self.places[place], "format": format}
        return [word.format(**names) for word in line.split()]

    def content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.path.rglob("*")) if path.is_file()}


PLACES = (
    *("step", "item", "data", "array_metadatas", "sidecars", "absent in a step", "absent in an item"),
    *("records", "epochs", "absent in records", "tier", "job", "host", "slots", "absent in a job"),
    *("old tree", "its part", "its part's data", "lone checkpoint", "its item", "stock step", "unfinished step"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    path = tmp_path_factory.mktemp("places")
    root, stock = path / "run", path / "stock"
    make_root(root, (200, 300), ram=path / "ram")
    tree = {"w": np.arange(8.0), "layer_1": {"b_0": np.ones(3)}}
    ocp.PyTreeCheckpointer().save(path / "tree", tree)
    ocp.Checkpointer(ocp.CompositeCheckpointHandler()).save(
        path / "lone", args=ocp.args.Composite(state_1=ocp.args.StandardSave(tree))
    )
    with ocp.CheckpointManager(stock) as manager:
        manager.save(7, args=ocp.args.Composite(state_1=ocp.args.StandardSave(tree)))
    shutil.copytree(root / "300", root / "400.orbax-checkpoint-tmp")
    by_safetensors(path / "m.safetensors", {"w": np.arange(9.0)})
    (slots,) = (path / "ram").glob("*/*/*")
    item = root / "300/default"
    places = [
        *(root / "300", item, item / "d", item / "array_metadatas", item / "_ckptkit", root / "300/x/y", item / "x"),
        *(root / "_ckptkit", root / "_ckptkit/epochs", root / "_ckptkit/x/y"),
        *(path / "ram", slots.parent.parent, slots.parent, slots, slots.parent.parent / "x"),
        *(path / "tree", path / "tree/ocdbt.process_0", path / "tree/ocdbt.process_0/d", path / "lone"),
        *(path / "lone/state_1", stock / "7", root / "400.orbax-checkpoint-tmp"),
    ]
    return Home(path, root, dict(zip(PLACES, places, strict=True)))


def test_every_command_is_of_one_kind() -> None:
    """A new command would take a step for a root."""
    assert {*OF_ROOTS, *OF_TARGETS, *OTHERS} == {name for name, _ in named_commands()}


@pytest.mark.parametrize("place", PLACES)
def test_what_can_be_no_root_is_refused_with_the_right_call(ckpt: Run, home: Home, place: str) -> None:
    """A step would be pruned, pinned or copied into, or called a root with nothing damaged."""
    before, right = home.content(), r"name the root, /|name the durable root|`ckptkit verify /"
    right += "|there is no such root" * ("absent" in place)
    for line in (line for lines in OF_ROOTS.values() for line in lines):
        said = ckpt(*home.words(line, place))
        assert (said.code, said.out) == (10, ""), (line, said)
        assert str(home.places[place]) in said.err, (line, said.err)
        assert re.search(right, said.err), (line, said.err)
    assert home.content() == before


@pytest.mark.parametrize("place", [each for each in PLACES if each not in ("tier",) and "absent" not in each])
def test_nothing_is_written_into_a_step_item_or_record(ckpt: Run, home: Home, place: str) -> None:
    """The checkpoint would not be what was committed: stock Orbax does not restore a step with one more item."""
    before = home.content()
    for line in OF_TARGETS.values():
        for format in ("npz", "orbax") if "{format}" in line else ("orbax",):
            said = ckpt(*home.words(line, place, format))
            assert (said.code, "name a place outside" in said.err) == (1, True), (line, said)
    assert home.content() == before


def test_directory_without_a_run_is_no_root(ckpt: Run, home: Home, tmp_path: Path) -> None:
    """`0 copies, 0 damaged` of a wrong path would pass for good news."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/model.safetensors").write_bytes((home.path / "m.safetensors").read_bytes())
    (tmp_path / "empty").mkdir()
    for command in ("scrub {path}", "steps {path}", "du {path}", "doctor {path}", "prune {path} --keep newest=1"):
        said = ckpt(*command.format(path=tmp_path / "notes").split())
        assert (said.code, "no step, and no record of a run; name the dir" in said.err) == (10, True), (command, said)
        said = ckpt(*command.format(path=home.path).split())
        assert (said.code, "name one of the roots in it: run, stock" in said.err) == (10, True), (command, said)
        assert ckpt(*command.format(path=tmp_path / "empty").split()).code == 0, command


def test_root_itself_and_new_places_are_taken(ckpt: Run, home: Home, tmp_path: Path) -> None:
    """A root would be refused for what lies near it."""
    for name in ("pin {path} 200", "unpin {path} 200", "steps {path}", "scrub {path}", "du {path}"):
        assert ckpt(*(word.format(path=home.root) for word in name.split())).code == 0, name
    assert ckpt("copy", home.root, tmp_path / "new").code == 0
    assert ckpt("copy", home.root / "200", home.path / "ram/beside").code == 0
    assert ckpt("steps", home.path / "ram/beside").code == 0
    (tmp_path / "new/commit_success.txt").write_text("copied by hand")
    assert ckpt("pin", tmp_path / "new", "200").code == 0


@pytest.mark.parametrize(
    "line",
    [
        "copy {root}/200",
        "copy {root}",
        "convert {root}/200 --to npz",
        "convert {root}/200 --to hf",
        "extract {root}/200 --only w --to npz",
    ],
)
def test_nothing_is_made_under_the_name_of_a_step(ckpt: Run, home: Home, line: str) -> None:
    """The job of the root could not save step 500 any more. With other names it can."""
    command, *words = line.format(root=home.root).split()
    before = home.content()
    said = ckpt(command, words[0], home.root / "500", *words[1:])
    assert (said.code, f"the job of the root {home.root} may save a step of this name" in said.err) == (1, True), said
    assert home.content() == before
    if command == "convert":
        made = home.root / f"{words[-1]}_500"
        assert ckpt(command, words[0], made, *words[1:]).code == 0
        shutil.rmtree(made) if made.is_dir() else made.unlink()


def test_roots_may_be_named_by_their_day(ckpt: Run, home: Home, tmp_path: Path) -> None:
    """They would be taken for steps of the directory that they are in."""
    for day in ("20261128", "20261129"):
        assert ckpt("copy", home.root / "200", tmp_path / "runs" / day).code == 0
    assert ckpt("copy", home.root / "300", tmp_path / "runs/20261129").code == 0


def test_item_is_not_copied_and_its_step_is_named(ckpt: Run, home: Home, tmp_path: Path) -> None:
    """A person would look for the call that copies it."""
    said = ckpt("copy", home.root / "300/default", tmp_path / "new")
    assert said.code == 10
    assert f"`ckptkit copy {home.root}/300 {tmp_path}/new` copies that" in said.err
    assert not (tmp_path / "new").exists()


def test_step_in_a_bucket_is_no_root(ckpt: Run, home: Home) -> None:
    """The same damage as on a disk."""
    memory, root = fsspec.filesystem("memory"), "memory://b/run"
    try:
        for path in (path for path in home.root.rglob("*") if path.is_file()):
            memory.pipe_file(f"/b/run/{path.relative_to(home.root)}", path.read_bytes())
        before = memory.find("/b")
        for place in ("300", "300/default", "300/default/d", "_ckptkit", "300/new"):
            for line in ("copy {root}/200 {root}/{place}", "scrub {root}/{place}", "pin {root}/{place} 0"):
                said = ckpt(*(word.format(root=root, place=place) for word in line.split()))
                assert said.code == 10, (line, place, said)
                assert f"name the root, {root}" in said.err or "there is no such root" in said.err, (line, place, said)
        assert memory.find("/b") == before
    finally:
        memory.rm("/b", recursive=True)
