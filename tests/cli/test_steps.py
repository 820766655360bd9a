"""`ckptkit steps`: every save over all tiers, with its state, and nothing changed by looking."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, Writer
from ckptkit.model.tiers import places_of_text, places_text
from ckptkit.slots.reader import read_manifest
from tests.cli.conftest import HOST, Ours, Run
from tests.states import make_state, save_args


def listed(ckpt: Run, root: object, *arguments: object, code: int = 0) -> dict[int, dict[str, Any]]:
    said = ckpt("steps", root, "--json", *arguments)
    assert said.code == code, said.err
    return {entry["step"]: entry for entry in json.loads(said.out)["steps"]}


def tiers(ours: Ours) -> tuple[object, ...]:
    return ("--tier", ours.ram, "--host-id", HOST)


def test_lists_steps_of_all_tiers_and_states(ckpt: Run, ours: Ours) -> None:
    """Nobody could tell which step a restart takes, or which were abandoned by a rollback."""
    steps = listed(ckpt, ours.root, *tiers(ours))
    assert {step: entry["state"] for step, entry in steps.items()} == {
        4: "committed",
        5: "committed",
        7: "abandoned",
        8: "abandoned",
    }
    held = {step: [tier["tier"] for tier in entry["tiers"]] for step, entry in steps.items()}
    assert held == {4: ["durable"], 5: [str(ours.ram)], 7: [str(ours.ram)], 8: [str(ours.ram), "durable"]}
    assert steps[5]["save_id"].items() >= {"epoch": 2, "step": 5, "number": 0}.items()
    assert steps[5]["items"] == ["data", "state"]
    assert (steps[5]["processes"], steps[5]["expected_processes"]) == ([0], 1)
    files = [path for path in (ours.root / "8").rglob("*") if path.is_file()]
    assert steps[8]["tiers"][1]["bytes"] == sum(path.stat().st_size for path in files)
    assert steps[8]["tiers"][0]["bytes"] == read_manifest(ours.manifest(8)).held_bytes
    assert 0 <= os.stat(ours.manifest(8)).st_mtime - steps[8]["committed_at_s"] < 60


def test_text_table_has_all_columns(ckpt: Run, ours: Ours) -> None:
    """The table that people read would lose a column."""
    lines = ckpt("steps", ours.root, *tiers(ours)).out.splitlines()
    assert lines[0] == f"{ours.root}: 2 steps, 2 abandoned, host {HOST}"
    (row,) = [line.split() for line in lines if line.split()[:1] == ["8"]]
    assert row[:5] == ["8", "abandoned", "8@1.8", "ram,", "durable"]
    assert lines[1] == f"  ram is {ours.ram}"
    assert row[-5:] == ["1", "of", "1", "data,", "state"]


def test_tiers_of_the_run_are_found_without_their_paths(ckpt: Run, ours: Ours) -> None:
    """A person who does not know the tiers of a job would believe that its newest steps are lost."""
    said = ckpt("steps", ours.root, "--host-id", HOST)
    given = ckpt("steps", ours.root, *tiers(ours))
    assert re.sub(r"\d+ s", "", said.out) == re.sub(r"\d+ s", "", given.out)
    found = json.loads(ckpt("steps", ours.root, "--host-id", HOST, "--json").out)
    assert found["names"] == {str(ours.ram): "ram"}
    planned = ckpt("plan-restore", ours.root, "--host-id", HOST).out
    assert planned == ckpt("plan-restore", ours.root, *tiers(ours)).out
    assert planned.splitlines()[0].startswith(f"{ours.root}: step 5, save 5@2.0")
    assert planned.splitlines()[1] == f"  ram is {ours.ram}"
    assert planned.splitlines()[2].endswith(" from ram")
    assert len(planned.splitlines()) == 3, "the leaves are many"


def test_found_tier_of_another_user_is_left_out(ckpt: Run, ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who may read the root alone could not list its steps any more: slots are private to their user."""
    listdir = os.listdir

    def refused(path: str = ".") -> list[str]:
        if os.fspath(path) == str(ours.ram):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    for command in ("steps", "plan-restore"):
        said = ckpt(command, ours.root, "--host-id", HOST)
        assert (said.code, f"{ours.ram} is left out: " in said.out) == (0, True), said.out
        assert ckpt(command, ours.root, *tiers(ours)).code == 1, "it was asked for"


def test_recorded_tiers_that_are_no_tiers_are_left_out(ckpt: Run, mine: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint from elsewhere names directories of another host, or anything."""
    said = ckpt("steps", mine.root, "--host-id", "h9")
    assert "it has slots of h0 (name the host with --host-id)" in said.out
    shutil.rmtree(mine.ram)
    mine.ram.mkdir()
    said = ckpt("steps", mine.root, "--host-id", HOST)
    assert (said.code, "holds no slots" in said.out) == (0, False), "another run's directory"
    mine.ram.rmdir()
    said = ckpt("steps", mine.root, "--host-id", HOST)
    assert (said.code, " is /" in said.out) == (0, False), said.out
    assert places_of_text("ram=relative ssd=/a b=/c 'ram=") == places_of_text("ram=x other=/y nonsense") == {}
    assert places_of_text(places_text({"ram": "/a b", "ssd": "/c=d"})) == {"/a b": "ram", "/c=d": "ssd"}


def test_only_the_given_host_is_opened(ckpt: Run, mine: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a shared tier would take another host's slots for this one's."""
    other = mine.slots.parent.with_name("h1")
    shutil.copytree(mine.slots.parent, other)
    opened: list[str] = []
    listdir, scandir = os.listdir, os.scandir
    monkeypatch.setattr(os, "listdir", lambda path=".": (opened.append(os.fspath(path)), listdir(path))[1])
    monkeypatch.setattr(os, "scandir", lambda path=".": (opened.append(os.fspath(path)), scandir(path))[1])
    assert 5 in listed(ckpt, mine.root, *tiers(mine))
    assert str(mine.slots) in opened
    assert [path for path in opened if path.startswith(str(other))] == []
    assert 5 not in listed(ckpt, mine.root, "--tier", mine.ram, "--host-id", "h2")


def test_slots_of_another_root_are_skipped(ckpt: Run, ours: Ours, stock: Path) -> None:
    """Two jobs on one ramdisk would be mixed up."""
    said = ckpt("steps", stock / "root", *tiers(ours))
    assert said.code == 0
    assert f"{ours.ram} holds no slots of host {HOST} for this root" in said.out
    assert list(listed(ckpt, stock / "root", *tiers(ours))) == [3]


def test_missing_process_share_makes_a_save_partial(ckpt: Run, mine: Ours) -> None:
    """A save of which this host lost a process's share would look whole."""
    path = mine.manifest(5)
    manifest = read_manifest(path)
    for process in (0, 2):
        share = dataclasses.replace(manifest, writer=Writer(process=process, count=3, host=HOST))
        directory = mine.slots.parent / str(process)
        directory.mkdir(exist_ok=True)
        (directory / path.name).write_bytes(share.to_bytes())
    steps = listed(ckpt, mine.root, *tiers(mine))
    assert (steps[5]["state"], steps[5]["processes"], steps[5]["expected_processes"]) == ("partial", [0, 2], 3)
    assert "2 of 3" in ckpt("steps", mine.root, *tiers(mine)).out


def test_shares_in_two_tiers_make_a_save_whole(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """A save whose shares are in different tiers would be called partial, though a restart takes it."""
    path = mine.manifest(5)
    manifest = read_manifest(path)
    path.write_bytes(dataclasses.replace(manifest, writer=Writer(process=0, count=2, host=HOST)).to_bytes())
    other = tmp_path / "ssd" / mine.slots.relative_to(mine.ram).parent / "1"
    other.mkdir(parents=True)
    share = dataclasses.replace(manifest, writer=Writer(process=1, count=2, host=HOST))
    (other / path.name).write_bytes(share.to_bytes())
    assert listed(ckpt, mine.root, *tiers(mine))[5]["state"] == "partial"
    assert listed(ckpt, mine.root, *tiers(mine), "--tier", tmp_path / "ssd")[5]["state"] == "committed"


def test_unfinished_and_damaged_steps_are_marked(ckpt: Run, mine: Ours) -> None:
    """A save that was cut off, or a step without its records, would be taken for good."""
    shutil.copytree(mine.root / "4", mine.root / "12.orbax-checkpoint-tmp")
    (mine.root / "16").mkdir()
    (mine.root / "16/_CHECKPOINT_METADATA").write_text("{}")
    (mine.root / "20").mkdir()
    (mine.root / "notes_2024").mkdir()
    mine.manifest(5).write_bytes(mine.manifest(5).read_bytes()[:-200])
    (mine.root / "8/state/_ckptkit/process-0.json").write_text("{}")
    said = ckpt("steps", mine.root, *tiers(mine), "--json")
    assert said.code == 11
    found = [(e["step"], e["state"], len(e["tiers"])) for e in json.loads(said.out)["steps"]]
    assert found == [
        (4, "committed", 1),
        (7, "abandoned", 1),
        (8, "abandoned", 1),  # the ramdisk's share, which the damaged durable step cannot claim any more
        (5, "damaged", 1),
        (8, "damaged", 1),
        (12, "unfinished", 1),
        (16, "damaged", 1),
    ]
    said = ckpt("steps", mine.root, *tiers(mine))
    assert str(mine.manifest(5)) in said.err
    assert f"step 8 in {mine.root / '8'}: manifest" in said.err
    assert f"step 16 in {mine.root / '16'}: it holds no item" in said.err
    assert said.out.count("  damaged  ") == 3


def test_durable_step_missing_a_process_record_is_damaged(ckpt: Run, mine: Ours) -> None:
    """A durable step that lost a process's record would be called committed."""
    path = mine.root / "4/state/_ckptkit/process-0.json"
    manifest = Manifest.from_bytes(path.read_bytes(), path=str(path))
    path.write_bytes(dataclasses.replace(manifest, writer=Writer(process=0, count=2, host=HOST)).to_bytes())
    said = ckpt("steps", mine.root)
    assert said.code == 11
    assert "has sidecars of processes 0 and saves 4@1.4, expected processes 0, 1 and one save" in said.err
    assert ckpt("inspect", mine.root / "4").code == 11


def test_damaged_newest_step_is_reported(ckpt: Run, mine: Ours) -> None:
    """`inspect ROOT` would show an older step as the newest, and nobody would look at what broke."""
    (mine.root / "6").mkdir()
    (mine.root / "6/_CHECKPOINT_METADATA").write_text("{}")
    said = ckpt("inspect", mine.root)
    assert said.code == 11
    assert "step 4," in said.out
    assert f"step 6 in {mine.root / '6'}: it holds no item" in said.err
    shutil.rmtree(mine.root / "4")
    said = ckpt("inspect", mine.root)
    assert (said.code, said.out) == (11, "")
    assert f"{mine.root} has no whole step" in said.err


def test_listing_steps_writes_nothing(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """A look would write, make directories, or take a lock that a starting job needs."""

    def facts() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in mine.home.rglob("*")}

    before = facts()
    with (mine.slots / paths.LOCK_NAME).open("rb") as lock:  # as a running job holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ckpt("steps", mine.root, *tiers(mine), "--tier", tmp_path / "none").code == 0
        assert ckpt("inspect", mine.slots).code == 0
        assert ckpt("inspect", mine.root).code == 0
    assert facts() == before
    assert not (tmp_path / "none").exists()


def test_steps_of_stock_orbax_are_listed_with_ours(ckpt: Run, tmp_path: Path) -> None:
    """Steps that stock Orbax wrote, with its own names and metrics, would be missing from the list."""
    options = ocp.CheckpointManagerOptions(step_prefix="run", step_format_fixed_length=6)
    with ocp.CheckpointManager(tmp_path / "root", options=options) as manager:
        manager.save(7, args=save_args(make_state(7), 7))
    steps = listed(ckpt, tmp_path / "root")
    assert (steps[7]["state"], steps[7]["save_id"], steps[7]["processes"]) == ("committed", None, None)
    assert steps[7]["tiers"][0]["path"] == str(tmp_path / "root/run_000007")
    assert json.loads(ckpt("inspect", tmp_path / "root", "--json").out)["step"] == 7


def test_metrics_are_listed(ckpt: Run, stock: Path, tmp_path: Path) -> None:
    """A search for the best step would have to open every one."""
    assert listed(ckpt, stock / "root")[3]["metrics"] == {"loss": 0.5}
    assert ckpt("steps", stock / "root").out.splitlines()[-1].endswith("loss 0.5")
    home = tmp_path / "root"
    shutil.copytree(stock / "root", home)
    (home / "3/metrics/metrics").write_text("{")
    assert listed(ckpt, home, code=11)[3]["metrics"] is None
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ckptkit.CheckpointManager(tmp_path / "ours", options=options) as manager:
        manager.save(7, args=save_args(make_state(7), 7), metrics={"loss": 0.25, "steps": [1, 2]})
    assert listed(ckpt, tmp_path / "ours")[7]["metrics"] == {"loss": 0.25, "steps": [1, 2]}
    assert "loss 0.25, steps [1, 2]" in ckpt("steps", tmp_path / "ours").out


def test_metrics_of_steps_in_fast_tiers_are_listed(ckpt: Run, tmp_path: Path) -> None:
    """The metrics of a step that only a ramdisk has were left out, as if it had none."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=100, best_fn=lambda metrics: metrics["loss"])
    root, tier = tmp_path / "root", ckptkit.Tier.ram(str(tmp_path / "ram"))
    with ckptkit.CheckpointManager(root, options=options, tiers=[tier], host_id=HOST) as manager:
        for step in (1, 2):
            manager.save(step, args=save_args(make_state(step), step), metrics={"loss": step / 4})
            manager.wait_until_finished()
    found = json.loads(ckpt("steps", root, "--json", "--tier", tmp_path / "ram", "--host-id", HOST).out)
    assert [(each["step"], each["metrics"]) for each in found["steps"]] == [(1, {"loss": 0.25}), (2, {"loss": 0.5})]


def test_json_shape_is_documented(ckpt: Run, ours: Ours) -> None:
    """Scripts that read `--json` would break: docs/CLI.md promises these names."""
    found = json.loads(ckpt("steps", ours.root, "--json", *tiers(ours)).out)
    top = ["format", "root", "host_id", "steps", "notes", "problems", "names"]
    assert list(found) == top
    entry = [
        "step",
        "state",
        "save_id",
        "items",
        "metrics",
        "problem",
        "certified",
        "committed_at_s",
        "processes",
        "expected_processes",
        "tiers",
    ]
    assert list(found["steps"][0]) == entry
    tier = ["tier", "path", "committed_at_s", "processes", "bytes"]
    assert list(found["steps"][0]["tiers"][0]) == tier
    page = (Path(__file__).parents[2] / "docs/CLI.md").read_text()
    assert [name for name in (*top, *entry, *tier) if f"`{name}`" not in page] == []


def test_hosts_with_slots_are_named(ckpt: Run, ours: Ours) -> None:
    """On a machine of another name people would have to guess what --host-id takes."""
    said = ckpt("steps", ours.root, "--tier", ours.ram, "--host-id", "h9")
    assert f"{ours.ram} holds no slots of host h9 for this root; it has slots of {HOST} (name the host" in said.out


def test_largest_groups_of_reads_come_first(ckpt: Run, ours: Ours) -> None:
    """The plan of a large model would be thousands of rows."""
    lines = ckpt("plan-restore", ours.root, "--depth", 1, "--top", 1).out.splitlines()
    assert lines[0].split() == ["group", "tier", "reads", "bytes"]
    assert lines[2].startswith("... and ")


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "diff"])
def test_step_that_is_not_there_is_answered_by_those_that_are(ckpt: Run, ours: Ours, command: str) -> None:
    """A person who mistypes a number had to ask again what there is."""
    path = ours.root / "250"
    more = {"convert": ["x.npz"], "diff": [ours.root / "4"]}.get(command, [])
    said = ckpt(command, path, *more)
    assert said.code == 10
    assert re.search(f"no such .*The steps in {ours.root} are 8, 4$", said.err, re.M), said.err


def test_step_of_a_root_is_inspected_by_its_number(ckpt: Run, ours: Ours) -> None:
    """`verify` and `plan-restore` have the option, `inspect` refused it."""
    by_path = ckpt("inspect", ours.root / "4", "--json")
    assert ckpt("inspect", ours.root, "--step", 4, "--json").out == by_path.out
    said = ckpt("inspect", ours.root, "--step", 250)
    assert (said.code, "it has no step 250; its steps are 8, 4" in said.err) == (10, True), said.err


def test_ls_is_steps(ckpt: Run, ours: Ours) -> None:
    """The first word that a person tries."""
    assert ckpt("ls", ours.root, "--json").out == ckpt("steps", ours.root, "--json").out
    assert ckpt("ls").code == 2


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m.pt"])
def test_suffix_of_the_target_is_its_format(ckpt: Run, ours: Ours, tmp_path: Path, name: str) -> None:
    """`convert run/200 model.safetensors` asked for the format that it had just been told."""
    assert ckpt("convert", ours.root / "4", tmp_path / name).code == 0
    to = {"m.safetensors": "safetensors", "m.npz": "npz", "m.pt": "torch"}[name]
    assert ckpt("convert", ours.root / "4", tmp_path / "other", "--to", to).code == 0
    assert (tmp_path / name).read_bytes() == (tmp_path / "other").read_bytes()
    said = ckpt("convert", ours.root / "4", tmp_path / "no-suffix")
    assert (said.code, "--to is missing: its value is one of orbax, " in said.err) == (2, True)
