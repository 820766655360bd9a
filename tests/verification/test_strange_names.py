"""Names that come out of a record or a listing: none leads out of its place, and a strange step costs one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.testing.bucket import BucketServer
from ckptkit.verification import durable
from tests.cli.conftest import Run
from tests.manager.test_handler_items import StorySave
from tests.model.hostile import HOSTILE, changed, places, sealed

A = ocp.args
HOST = "here"
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("names")
    tiers = [ckptkit.Tier.ram(str(home / "ram"), slots=3)]
    with ckptkit.CheckpointManager(home / "run", host_id=HOST, tiers=tiers) as manager:
        for step in (1, 2):
            state = A.StandardSave({"w": jnp.arange(4.0), "empty": {}})
            manager.save(step, args=A.Composite(state=state, story=StorySave("once"), j=A.JsonSave({"a": step})))
            manager.wait_until_finished()
    return home


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A root of two steps, without its tier."""
    shutil.copytree(saved / "run", tmp_path / "run")
    return tmp_path / "run"


def rewrite(step: Path, change: Callable[[Any], None]) -> None:
    """Changes the sidecar of a step, and makes its digest fit."""
    sidecar = step / "state/_ckptkit/process-0.json"
    body = json.loads(sidecar.read_bytes())["manifest"]
    change(body)
    sidecar.write_bytes(sealed(body))


STORY: list[Any] = [
    *[{name: "eA=="} for name in ("../../../x", "/tmp/ckptkit-not-there", "a//b", "", "\ud800", "y" * 300)],
    *[{"length": 7}, {"length": "?"}, ["length"], 7, None],
]


@pytest.mark.parametrize("value", STORY, ids=lambda value: ascii(value)[:20])
def test_record_of_files_no_writer_writes_is_damage_of_its_step(root: Path, value: Any) -> None:
    """A repair would write wherever the path leads; a list of files ended the look at every other step."""

    def change(body: Any) -> None:
        body["inline"]["story"]["value"] = value

    rewrite(root / "1", change)
    assert [proof.state for proof in ckptkit.verify(str(root)).steps] == ["corrupt", "proven"]
    before = {path for path in root.parent.rglob("*") if root not in path.parents}
    found = ckptkit.scrub(str(root), [], repair=True, host_id=HOST)
    assert [each.act for each in found.treatments] != ["repair"]
    assert {path for path in root.parent.rglob("*") if root not in path.parents} == before
    assert not os.path.exists("/tmp/ckptkit-not-there")


@pytest.mark.parametrize("digests", ["text", {"../../x": [1, 1, ["a" * 32]]}, {"x": 7}, {"x": [1, 1, "ab"]}])
def test_digests_of_files_no_writer_writes_are_damage_of_their_step(root: Path, digests: Any) -> None:
    """One of them ended the look at every other step."""

    def change(body: Any) -> None:
        body["inline"]["story"]["digests"] = digests

    rewrite(root / "1", change)
    assert [proof.state for proof in ckptkit.verify(str(root)).steps] == ["corrupt", "proven"]


@pytest.mark.parametrize("value", [7, "x", [7], [["a"]], [[["empty"], "d", "set"]], [[[1], "d", "dict"]]])
def test_empty_nodes_no_writer_writes_are_damage_of_their_step(root: Path, value: Any, ckpt: Run) -> None:
    """`reshard` and a restore ended in an error of Python."""

    def change(body: Any) -> None:
        body["inline"]["state"]["value"] = value

    rewrite(root / "1", change)
    said = ckpt("reshard", root / "1", root.parent / "new", "--mesh", "data=1")
    assert (said.code, "cannot be read: item 'state'" in said.err) == (11, True)
    assert [proof.state for proof in ckptkit.verify(str(root)).steps] == ["corrupt", "proven"]


COMMANDS = (
    "steps",
    "du",
    "du --deep",
    "prune --keep newest=1 --dry-run",
    "plan-restore",
    "doctor",
    "rollback --to 2 --dry-run",
)


def test_hostile_value_in_a_small_item_ends_no_command(root: Path, ckpt: Run) -> None:
    """One step with a record that nobody has foreseen hid what is known of all others."""
    body = json.loads((root / "1/state/_ckptkit/process-0.json").read_bytes())["manifest"]["inline"]
    cases = [(at, value) for at in places(body) for value in HOSTILE]
    seed = random.randrange(1 << 30)
    for number, (at, value) in enumerate(random.Random(seed).sample(cases, 24)):

        def change(found: Any, at: Any = at, value: Any = value) -> None:
            found["inline"] = changed(body, at, value)

        rewrite(root / "1", change)
        states = [(proof.step, proof.state) for proof in ckptkit.verify(str(root)).steps]
        assert states in ([(1, "corrupt"), (2, "proven")], [(1, "proven"), (2, "proven")]), (seed, at, value, states)
        name, *options = COMMANDS[number % len(COMMANDS)].split()
        assert ckpt(name, root, *options).code in (0, 11), (seed, at, value)


@pytest.mark.parametrize("link", ["j/metadata", "j", "story/length"])
def test_repair_never_writes_through_a_link(saved: Path, tmp_path: Path, link: str) -> None:
    """The file that the link names, which is another one's, would be overwritten."""
    kept = saved.with_name("names-kept")
    shutil.copytree(saved, kept)
    try:
        step, other = saved / "run/1", saved / "run/notes"
        (other / "metadata").parent.mkdir()
        (other / "metadata").write_text("my own")
        target = step / link
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.symlink_to(other if link == "j" else other / "metadata")
        found = ckptkit.scrub(str(saved / "run"), [str(saved / "ram")], repair=True, host_id=HOST)
        assert [(each.step, each.act, each.done) for each in found.treatments] == [(1, "repair", True)]
        assert (other / "metadata").read_text() == "my own"
        assert os.listdir(other) == ["metadata"]
        assert not target.is_symlink()
        assert [proof.state for proof in ckptkit.verify(str(saved / "run")).steps] == ["proven", "proven"]
    finally:
        shutil.rmtree(saved)
        kept.rename(saved)


@pytest.mark.parametrize("command", ["verify", "scrub"])
def test_error_of_our_own_costs_one_line(
    root: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step that nobody has foreseen hid what is known of all others."""

    def fails(place: Any, *others: Any, **options: Any) -> Any:
        if place.name == "1":
            raise AttributeError("no such thing")
        return prove(place, *others, **options)

    prove = durable.prove_written
    monkeypatch.setattr(durable, "prove_written", fails)
    assert main([command, str(root)]) == 1
    said = capsys.readouterr()
    line = f"ckptkit: {root}/1: internal error, please report it: AttributeError: no such thing"
    assert said.err.splitlines() == [line]
    assert "1 proven, 0 corrupt, 1 failed" in said.out or "2 copies, 0 damaged" in said.out


def test_debug_shows_where_an_error_was_raised(root: Path) -> None:
    """A report of an internal error would have no place in the code."""
    program = (
        "import sys; from ckptkit.verification import durable; durable.identity_of = lambda place: 1 / 0; "
        "from ckptkit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for option, shown in (["--debug"], True), ([], False):
        command = [sys.executable, "-c", program, *option, "verify", str(root / "1")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (said.returncode, "Traceback" in said.stderr) == (1, shown), said.stderr


def test_line_end_in_a_name_begins_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A leaf or a directory could report in a line of its own that a step is proven."""
    false = "\nckptkit: run: 3 proven, 0 corrupt"
    arrays: dict[str, Any] = {f"w{false}": np.ones(3), "v": np.ones(2)}
    np.savez(tmp_path / "model.npz", **arrays)
    (tmp_path / f"1{false}").mkdir()
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=A.StandardSave({f"w{false}": jnp.ones(3)}))
        manager.wait_until_finished()
    other = tmp_path / f"other{false}.npz"
    commands: list[tuple[object, ...]] = [
        ("inspect", tmp_path / "model.npz"),
        ("convert", tmp_path / "model.npz", other, "--to", "npz"),
        ("diff", tmp_path / "model.npz", tmp_path / "2"),
        ("inspect", tmp_path / f"absent{false}"),
        ("verify", tmp_path),
        ("scrub", tmp_path),
        ("steps", tmp_path),
        ("du", tmp_path),
        ("prune", tmp_path, "--keep", "newest=1", "--dry-run"),
    ]
    for command in commands:
        assert main(list(map(str, command))) in (0, 10, 20), command
        said = capsys.readouterr()
        lines = [*said.out.splitlines(), *said.err.splitlines()]
        assert [line for line in lines if line.startswith("ckptkit: run:")] == [], command


def test_error_of_several_lines_escapes_its_names() -> None:
    """The differences of two trees have a line each, and a name would begin one."""
    error = ckptkit.TreeMismatchError(["a\nckptkit: proven", "b"], step=1, where="run\x1b")
    assert str(error).splitlines()[:3] == [
        "step 1 in run\\x1b is not the tree that was asked for (2 differences):", "  a\\nckptkit: proven", "  b",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["verify", "scrub", "prune --keep newest=1", "rollback --to 1", "du --deep"])
def test_root_whose_path_is_not_text_is_refused_in_a_sentence(root: Path, command: str, ckpt: Run) -> None:
    """TensorStore cannot open it: the commands ended in an internal error, and one that goes on might delete."""
    strange = root.parent / os.fsdecode(b"r\xff")
    root.rename(strange)
    name, *options = command.split()
    said = ckpt(name, strange, *options)
    assert (said.code, said.err.count("is not UTF-8, and TensorStore reads no such path")) == (1, 1)
    assert sorted(os.listdir(strange)) == ["1", "2", "_ckptkit"]


def test_leaf_of_stock_orbax_whose_name_is_not_text_is_damage(tmp_path: Path, ckpt: Run) -> None:
    """TensorStore takes no such key: a conversion ended in an internal error."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {"w": jnp.arange(4.0)})
    metadata = tmp_path / "tree/_METADATA"
    record = json.loads(metadata.read_bytes())
    next(iter(record["tree_metadata"].values()))["key_metadata"][-1]["key"] = "\ud800"
    metadata.write_text(json.dumps(record))
    for line in ("inspect", f"convert {tmp_path}/out.npz --to npz"):
        name, *options = line.split()
        said = ckpt(name, tmp_path / "tree", *options)
        assert (said.code, "is the name of a leaf, and not UTF-8" in said.err + said.out) == (11, True), line


def test_stray_object_in_a_bucket_costs_nothing(tmp_path: Path, server: BucketServer, ckpt: Run) -> None:
    """Anybody who may create an object ended each restart of the run, and each command."""
    del server
    root = "gs://runs/run"
    with ckptkit.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, args=A.StandardSave({"w": jnp.full(4, step)}))
            manager.wait_until_finished()
    bucket = fsspec.filesystem("gs")
    for key in ("2/../x", "2/default/../x", "2//x", "../x", "2/./x"):
        with bucket.open(f"runs/run/{key}", "wb") as file:
            file.write(b"x")
    with ckptkit.CheckpointManager(root) as manager:
        assert (manager.restore(None)["w"] == 2).all()
    for line in ("verify", "steps", "plan-restore", "du", "scrub", "prune --keep newest=1", "doctor", "inspect"):
        name, *options = line.split()
        assert ckpt(name, root, *options).code == 0, line
    assert ckpt("copy", root, tmp_path / "kept").code == 0
    assert [proof.state for proof in ckptkit.verify(str(tmp_path / "kept")).steps] == ["proven"]
