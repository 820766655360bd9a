"""Damage that a command has seen is told, by whatever way the command ends."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.testing.damage import inflict
from ckptkit.upkeep.disk_usage import usage
from ckptkit.verification.mending import SlotShare
from tests.cli.conftest import HOST, Ours, Run
from tests.formats.writers import by_safetensors


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the steps 100, 200 and 300; not to be changed."""
    root = tmp_path_factory.mktemp("three") / "run"
    with ckptkit.CheckpointManager(root) as manager:
        for step in (100, 200, 300):
            state = {"w": jnp.full((64, 64), step), "b": jnp.arange(4.0)}
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
    return root


def sidecar(root: Path, step: int) -> Path:
    return root / str(step) / "state/_ckptkit/process-0.json"


@pytest.fixture
def root(three: Path, tmp_path: Path) -> Path:
    """The same with a newest step of which the sidecar is damaged."""
    shutil.copytree(three, tmp_path / "run")
    sidecar(tmp_path / "run", 300).write_text("{}")
    return tmp_path / "run"


COMMANDS = [
    ("steps {root}", 11),
    ("inspect {root}", 11),
    ("inspect {root} --match nolayer", 10),
    ("inspect {root} --sharding", 2),
    ("inspect {root}/300 --stats", 11),
    ("plan-restore {root}", 11),
    ("plan-restore {root} --step 300", 11),
    ("plan-restore {root} --step 77", 10),
    ("doctor {root}", 11),
    ("doctor {root} --events {root}/none", 10),
    ("du {root}", 11),
    ("verify {root}", 11),
    ("scrub {root}", 11),
    ("prune {root} --keep newest=1 --dry-run", 11),
    ("rollback {root} --to 300 --dry-run", 11),
    ("rollback {root} --to 200 --dry-run", 0),
    ("pin {root} 300 --dry-run", 11),
    ("convert {root} {out}/a.npz --to npz", 11),
    ("convert {root} {out}/a --to orbax", 11),
    ("extract {root} {out}/b.npz --only ** --to npz", 11),
    ("diff {root} {root}/200", 11),
    ("explain {root} --like {root}", 11),
    ("tune {out} --like {root} --dry-run", 11),
    ("copy {root} {out}/copy", 11),
    ("certify {root} --replay m:f --step-prefix x", 11),
]


@pytest.mark.parametrize(("line", "code"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_every_command_names_the_damaged_step(ckpt: Run, root: Path, tmp_path: Path, line: str, code: int) -> None:
    """A person would read that all is well, or that nothing is there, of a run whose newest step is damaged."""
    if "certify" in line:
        for step in (100, 200):
            sidecar(root, step).write_text("{}")
        line = line.replace(" --step-prefix x", "")
    said = ckpt(*line.format(root=root, out=tmp_path).split())
    assert said.code == code, said
    assert f"{root}/300" in said.out + said.err, said
    assert not (tmp_path / "a.npz").exists()


@pytest.mark.parametrize("line", ["plan-restore {root}", "copy {root} {out}", "certify {root} --replay m:f"])
def test_root_of_damaged_steps_is_not_called_empty(ckpt: Run, root: Path, tmp_path: Path, line: str) -> None:
    """A script would begin a new run over the old one."""
    for step in (100, 200):
        sidecar(root, step).write_text("{}")
    said = ckpt(*line.format(root=root, out=tmp_path / "out").split())
    assert said.code == 11, said
    assert all(f"{root}/{step}" in said.err for step in (100, 200, 300)), said


def test_older_step_is_converted_when_it_is_named(ckpt: Run, root: Path, tmp_path: Path) -> None:
    """The refusal would leave no way to what is whole."""
    refused = ckpt("convert", root, tmp_path / "a.npz", "--to", "npz")
    assert f"name it: {root}/200" in refused.err
    assert ckpt("convert", root / "200", tmp_path / "a.npz", "--to", "npz").code == 0
    with np.load(tmp_path / "a.npz") as found:
        assert {int(found[name].flat[0]) for name in found.files if found[name].size > 4} == {200}
    assert ckpt("diff", root / "200", root / "200").code == 0


def test_unreadable_tier_is_not_an_empty_one(ckpt: Run, mine: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of another account would read that a run has no copies in memory, and free or rewrite them."""
    scandir = os.scandir

    def refuse(path: str | os.PathLike[str]) -> object:
        if os.fspath(path).rstrip("/").endswith(f"/{HOST}"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for line in (
        "steps {root} --tier {ram} --host-id h0",
        "scrub {root} --tier {ram} --host-id h0",
        "tiers list {ram}",
    ):
        said = ckpt(*line.format(root=mine.root, ram=mine.ram).split())
        assert (said.code, "Permission denied" in said.err) == (1, True), said


@pytest.mark.parametrize("command", ["verify", "scrub"])
def test_damage_is_told_when_a_later_step_cannot_be_read(
    ckpt: Run, root: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Hours of reading would be lost, because of one file that may not be read."""
    module: Any = sys.modules[f"ckptkit.verification.{command}"]  # the function has its name
    prove = module.judged_step

    def refuse(place: object, step: int, *args: object, **words: object) -> object:
        if step == 200:
            raise PermissionError(13, "Permission denied", f"{root}/200/state")
        return prove(place, step, *args, **words)

    inflict("bit flip", sorted((root / "100/state/d").iterdir()), [], 1)
    monkeypatch.setattr(module, "judged_step", refuse)
    said = ckpt(command, root)
    assert said.code == 1
    assert all(f"{root}/{step}" in said.err for step in (100, 200, 300)), said.err


def test_repair_that_stops_names_what_it_has_done(ckpt: Run, mine: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know which copies were changed before a disk refused."""
    for slot in mine.slots.glob("slot-*.bin"):
        slot.write_bytes(bytes(byte ^ 1 for byte in slot.read_bytes()))
    put_aside, done = SlotShare.put_aside, list[SlotShare]()

    def once(share: SlotShare) -> str | None:
        if done:
            raise OSError(5, "Input/output error", "slot")
        done.append(share)
        return put_aside(share)

    monkeypatch.setattr(SlotShare, "put_aside", once)
    said = ckpt("scrub", mine.root, "--tier", mine.ram, "--host-id", HOST, "--repair")
    assert said.code == 1
    assert "done before that: " in said.err
    assert said.err.count("damaged: ") >= 2


def test_damaged_records_do_not_hide_what_du_has_counted(ckpt: Run, root: Path) -> None:
    """`--keep` would take the table away."""
    for path in (root / "_ckptkit/epochs").iterdir():
        path.write_text("{}")
    said = ckpt("du", root, "--keep", "newest=1", "--json")
    assert (said.code, json.loads(said.out)["prune"]) == (11, None)
    assert "what a pruning would free is not known" in said.err
    assert usage(str(root), host_id="h").steps


def test_log_with_nothing_to_account_for_is_not_damage(ckpt: Run, three: Path, tmp_path: Path) -> None:
    """A job that has just been started would have corrupt logs."""
    (tmp_path / "launcher.jsonl").touch()
    said = ckpt("doctor", three, "--events", tmp_path)
    assert said.code == 0, said
    assert "no goodput" in said.out + said.err


def test_plan_of_faults_is_printed_as_json(ckpt: Run) -> None:
    """A script that asks for JSON would get a sentence."""
    said = ckpt("chaos", "--faults", 2, "--dry-run", "--json", "--", "true")
    assert [fault["number"] for fault in json.loads(said.out)["faults"]] == [0, 1]


def test_run_under_slurm_with_a_strange_number_of_hosts_is_a_usage_error(
    ckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ask for a report of an internal error."""
    for name, value in (("PROCID", "0"), ("STEP_NODELIST", "n1"), ("STEP_NUM_NODES", "x")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert ckpt("run", "--dry-run", "--", "true").code == 2


def test_root_of_links_alone_is_not_verified_as_good(ckpt: Run, three: Path, tmp_path: Path) -> None:
    """`0 saves, 0 proven` would pass for a proof."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links/100").symlink_to(three / "100")
    said = ckpt("verify", tmp_path / "links")
    assert (said.code, "100" in said.err) == (10, True), said


def test_conversion_through_a_link_does_not_write_into_a_step(ckpt: Run, root: Path, tmp_path: Path) -> None:
    """The step would have an item that it was not saved with, and be found damaged."""
    source = by_safetensors(tmp_path / "a.safetensors", {"w": np.arange(9.0)})
    (tmp_path / "latest").symlink_to(root / "200")
    said = ckpt("convert", source, tmp_path / "latest/extra", "--to", "orbax")
    assert (said.code, "which is a step" in said.err) == (1, True), said
    assert ckpt("verify", root / "200").code == 0


def test_target_with_a_backslash_is_refused(ckpt: Run, tmp_path: Path) -> None:
    """TensorStore would write the arrays elsewhere, and the exit code would be 0."""
    source = by_safetensors(tmp_path / "a.safetensors", {"w": np.arange(9.0)})
    said = ckpt("convert", source, tmp_path / "c\\d", "--to", "orbax")
    assert (said.code, "backslash" in said.err) == (1, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert ckpt("convert", source, tmp_path / "c\\d.npz", "--to", "npz").code == 0, "nothing of TensorStore is in it"


def test_item_with_the_name_of_a_step_is_verified(ckpt: Run, tmp_path: Path) -> None:
    """An intact item would be called corrupt."""
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        items = {"model_1": ocp.args.StandardSave({"w": jnp.arange(9.0)})}  # pyright: ignore[reportCallIssue]
        manager.save(2, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    said = ckpt("verify", tmp_path / "run/2/model_1")
    assert said.code == 0, said


def test_step_is_leased_by_any_of_its_names(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job could delete a step while it is signed."""
    from ckptkit.conversion.roots import _step_of

    (tmp_path / "latest").symlink_to(root / "200")
    monkeypatch.chdir(root)
    found = {_step_of(name, 5.0) for name in ("200", str(tmp_path / "latest"), str(root / "200"))}
    assert found == {(str(root), 200, "200")}


def test_status_file_is_checked_before_the_job_starts(ckpt: Run, tmp_path: Path) -> None:
    """A batch script would find no status after the job, and not queue it again."""
    said = ckpt("run", "--status", tmp_path / "none/s.json", "--dry-run", "--", "true")
    assert said.code == 2
    from ckptkit.util.whole_file import write_whole

    write_whole(tmp_path / ("n" * 250), "x")
    assert (tmp_path / ("n" * 250)).read_text() == "x"


def test_damage_under_the_name_of_a_step_is_no_deletion(ckpt: Run, tmp_path: Path) -> None:
    """A leaf `w_0`, and a file `checkpoint_100`, end like steps: damage in them was told as a deletion."""
    step = tmp_path / "run/100"
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        ocp.Checkpointer(handler).save(tmp_path / "tree", {"w_0": np.arange(64.0)})
        manager.save(100, args=ocp.args.StandardSave({"w_0": np.arange(64.0)}))
        manager.wait_until_finished()
    (tmp_path / "tree/w_0/0").write_bytes(b"x")
    for data in step.rglob("d/*"):
        data.write_bytes(b"x" * data.stat().st_size)
    (tmp_path / "checkpoint_100").write_bytes(flax.serialization.msgpack_serialize({"w": np.arange(64.0)})[:-9])
    for source in (tmp_path / "tree", step, tmp_path / "checkpoint_100"):
        said = ckpt("convert", source, tmp_path / "m.npz")
        assert (said.code, "was deleted" in said.err) == (11, False), (source, said.err)


def test_missing_root_is_named_before_its_steps(ckpt: Run, tmp_path: Path) -> None:
    """`inspect typo --step 3` answered that its steps are none."""
    assert "there is no such root; check the path" in ckpt("inspect", tmp_path / "typo", "--step", 3).err
