"""`scrub --repair` in a root with the files of others: only damaged saves of ours are moved, and damage is reported."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.durable.lifecycle.leases import Lease
from ckptkit.store import open_store
from ckptkit.store.quarantine import QUARANTINE_DIR
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import pin
from tests.upkeep.conftest import HOST, make_root, manager_of, restored


def files_of(root: Path) -> dict[str, str]:
    """Every file of a root by its content; what ckptkit keeps in `_ckptkit` is not looked at."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "_ckptkit"
    }


def repaired(root: Path | str) -> tuple[ckptkit.Scrub, dict[int, tuple[str, str | None]]]:
    found = ckptkit.scrub(str(root), (), repair=True, host_id=HOST)
    return found, {each.step: (each.act, each.reason) for each in found.treatments}


def flip(step: Path) -> None:
    for path in (step / "default/d").iterdir():
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


class Text(ocp.CheckpointHandler):
    """A handler of somebody's own: one file of text."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "text.bin").write_text(args.text)

    def restore(self, directory: Any, args: Any = None) -> str:
        del args
        return (directory / "text.bin").read_text()


@ocp.args.register_with_handler(Text, for_save=True, for_restore=True)
class TextArgs(ocp.args.CheckpointArgs):
    def __init__(self, text: str = ""):
        self.text = text


def test_good_steps_of_other_handlers_stay(tmp_path: Path) -> None:
    """Good checkpoints would be moved out of the root, and a restart find none."""
    args = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": jnp.ones(3)}),  # pyright: ignore[reportCallIssue]
        key=ocp.args.JaxRandomKeySave(jax.random.key(0)),  # pyright: ignore[reportCallIssue]
        note=TextArgs("mine"),
    )
    for make in (ckptkit.CheckpointManager, ocp.CheckpointManager):
        root = tmp_path / make.__module__.partition(".")[0]
        with make(root) as manager:
            manager.save(1, args=args)
            manager.wait_until_finished()
        before = files_of(root)
        repaired(root)
        assert files_of(root) == before
        assert not (root / "_ckptkit" / QUARANTINE_DIR).exists()
        with make(root) as manager:
            assert manager.latest_step() == 1


def test_directories_that_are_not_steps_stay(tmp_path: Path) -> None:
    """`/exp/0`, a root of its own, would be moved to the quarantine of `/exp`."""
    make_root(tmp_path / "0", [1])
    make_root(tmp_path / "1", [1])
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/notes.txt").write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(ckptkit.StepNotFoundError, match="name one of the roots in it: 0, 1"):
        repaired(tmp_path)
    assert files_of(tmp_path) == before


def test_damaged_stock_step_stays_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of another job would be moved away, or its damage pass with exit code 0."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))  # pyright: ignore[reportCallIssue]
    (tmp_path / "1/default/manifest.ocdbt").unlink()
    before = files_of(tmp_path)
    _, acts = repaired(tmp_path)
    assert acts[1][0] == "leave"
    assert "Orbax wrote it without digests" in str(acts[1][1])
    assert main(["scrub", str(tmp_path), "--repair"]) == 11
    assert files_of(tmp_path) == before
    assert "Orbax wrote it without digests" in capsys.readouterr().out


def test_pinned_and_leased_steps_are_not_put_aside(tmp_path: Path) -> None:
    """A step would go that a person has protected, or that somebody reads."""
    make_root(tmp_path, [1, 2, 3])
    pin(str(tmp_path), 1, reason="do not touch")
    for step in (1, 2, 3):
        flip(tmp_path / str(step))
    before = files_of(tmp_path)
    with Lease(open_store(str(tmp_path)), 2, lease_s=60):
        found, acts = repaired(tmp_path)
    assert {step: act for step, (act, _) in acts.items()} == {1: "leave", 2: "leave", 3: "quarantine"}
    assert str(acts[1][1]).startswith("pinned")
    assert str(acts[2][1]).startswith("in use")
    after = files_of(tmp_path)
    assert after == {name: content for name, content in before.items() if not name.startswith("3/")}
    assert found.damaged


def test_what_was_put_aside_is_reported_by_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint would be lost, and the command report success."""
    make_root(tmp_path, [1, 2])
    flip(tmp_path / "2")
    assert main(["scrub", str(tmp_path), "--repair", "--dry-run"]) == 11
    assert (tmp_path / "2").is_dir()
    assert main(["scrub", str(tmp_path), "--repair"]) == 11
    assert not (tmp_path / "2").exists()
    assert "damaged" in capsys.readouterr().err
    assert main(["scrub", str(tmp_path), "--repair"]) == 0
    assert restored(tmp_path)[0] == 1


def test_link_out_of_the_root_does_not_stop_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One link of somebody would make every command fail."""
    root = tmp_path / "run"
    make_root(root, [1, 2])
    make_root(tmp_path / "other", [7])
    os.symlink(tmp_path / "other/7", root / "7")
    os.symlink(tmp_path / "nowhere", root / "8")
    for arguments in (
        ["steps", root],
        ["verify", root],
        ["du", root],
        ["scrub", root, "--repair"],
        ["prune", root, "--keep", "newest=1"],
        ["copy", root, tmp_path / "copied"],
    ):
        assert main(list(map(str, arguments))) == 0, arguments
        assert arguments[0] == "copy" or "links, which are never steps: 7" in capsys.readouterr().out, arguments
    assert sorted(path.name for path in root.iterdir()) == ["2", "7", "8", "_ckptkit"]
    assert (tmp_path / "other/7/default").is_dir()


def test_foreign_objects_of_a_bucket_stay(server: BucketServer) -> None:
    """Objects of other people in a bucket would be copied to a quarantine and deleted."""
    del server
    root = "gs://runs/run"
    make_root(root, [1])
    store = open_store(root)
    store.put("2024/notes.txt", b"mine")
    store.put("7/100/commit_success.txt", b"")
    before = store.list_all("")
    found, acts = repaired(root)
    assert (acts, found.damaged) == ({}, False)
    assert store.list_all("") == before
    with manager_of(root) as manager:
        assert manager.all_steps() == [1]


def test_stock_step_is_not_mended_from_a_slot_of_its_number(tmp_path: Path) -> None:
    """A save of ours would take the place of another job's step, because both have the number."""
    root = tmp_path / "run"
    ram = tmp_path / "ram"
    ram.mkdir()
    make_root(root, [1], ram=ram)
    shutil.rmtree(root / "1")
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.zeros(64)}))  # pyright: ignore[reportCallIssue]
    (root / "1/default/manifest.ocdbt").unlink()
    before = files_of(root)
    found = ckptkit.scrub(str(root), [str(ram)], repair=True, host_id=HOST)
    assert [(each.kind, each.act) for each in found.treatments] == [("durable", "leave")]
    assert files_of(root) == before
