"""`du`, `prune`, `rollback`, `pin`, `copy` and `tiers` as commands: plans, shapes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptkit.upkeep import list_arenas
from ckptkit.util import clock
from tests.cli.conftest import HOST, Ours, Run
from tests.upkeep.conftest import make_root
from tests.upkeep.test_prune import flip


def snapshot(home: Path) -> dict[str, int]:
    return {str(path.relative_to(home)): path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}


def test_dry_runs_print_the_plan_and_write_nothing(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """The printed plan would differ from the work, or a dry run would do it."""
    before = snapshot(ours.home)
    tiers = ("--tier", ours.ram, "--host-id", HOST)
    for arguments in (
        ("prune", ours.root, "--keep", "newest=1"),
        ("rollback", ours.root, "--to", "4", *tiers),
        ("pin", ours.root, "4"),
        ("copy", ours.root, tmp_path / "into"),
        ("tiers", "clean", ours.ram, "--idle", "0s", "--host-id", HOST),
    ):
        said = ckpt(*arguments, "--dry-run")
        assert (said.code, said.err) == (0, "")
        assert "would" in said.out or "to copy" in said.out
        planned = json.loads(ckpt(*arguments, "--dry-run", "--json").out)
        assert (planned["format"], planned["done"]) == (1, False)
    assert snapshot(ours.home) == before
    assert not (tmp_path / "into").exists()


def test_commands_work_in_sequence(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """The commands would not fit together."""
    found = json.loads(ckpt("du", mine.root, "--tier", mine.ram, "--host-id", HOST, "--keep", "newest=1", "--json").out)
    assert [(step["step"], step["state"]) for step in found["steps"]] == [(4, "committed"), (8, "abandoned")]
    assert [dead["kind"] for dead in found["dead"]] == ["abandoned"]
    assert found["prune"]["freed_bytes"] == found["dead"][0]["bytes"] == found["steps"][1]["bytes"]
    assert found["tiers"][0]["saves"][-1] == {"step": 5, "epoch": 2, "number": 0}
    assert "a pruning would free" in ckpt("du", mine.root, "--keep", "newest=1").out
    assert "pinned are: 8" in ckpt("pin", mine.root / "8").out
    assert "pinned are: 8" in ckpt("pin", mine.root, "8", "--reason", "paper").out
    alone = ckpt("unpin", mine.root)
    assert (alone.code, f"write ROOT STEP, or ROOT/STEP as in {mine.root}/100" in alone.err) == (2, True), alone.err
    assert "abandoned, pinned (paper)" in ckpt("du", mine.root).out
    assert json.loads(ckpt("prune", mine.root, "--keep", "newest=1", "--json").out)["freed_bytes"] == 0
    assert ckpt("unpin", mine.root, "8").code == 0
    assert "8          abandoned" in ckpt("prune", mine.root, "--keep", "newest=1", "--keep", "every=100").out
    assert not (mine.root / "8").exists()
    assert "1 step" in ckpt("copy", mine.root, tmp_path / "into").out
    assert "there already" in ckpt("copy", mine.root, tmp_path / "into", "--resume").out
    assert ckpt("verify", tmp_path / "into").code == 0
    rolled = ckpt("rollback", mine.root, "--to", "4", "--tier", mine.ram, "--host-id", HOST)
    assert "continues from step 4; 1 newer step abandoned" in rolled.out
    assert ckpt("rollback", mine.root, "--to", "5", "--tier", mine.ram, "--host-id", HOST).code == 10
    listed = json.loads(ckpt("tiers", "list", mine.ram, "--json").out)["arenas"]
    assert [(each["host_id"], each["live"]) for each in listed] == [(HOST, False)]
    assert "1 arena, 0 held by a running process" in ckpt("tiers", "list", mine.ram).out
    freed = json.loads(ckpt("tiers", "clean", mine.ram, "--root", mine.root, "--host-id", HOST, "--json").out)
    assert freed["freed_bytes"] >= listed[0]["bytes"] > 0
    assert json.loads(ckpt("tiers", "list", mine.ram, "--json").out)["arenas"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("prune", "{root}"), 2, "Missing option '--keep'"),
        (("prune", "{root}", "--keep", "oldest=1"), 2, "write newest=5, bytes=2TiB or every=1000"),
        (("prune", "{root}", "--keep", "newest=0"), 2, "'newest=0' is not a rule"),
        (("prune", "{root}", "--keep", "bytes=lots"), 2, "'lots' is not a size"),
        (("prune", "{root}", "--keep", "newest=9999999999999999999999999", "--dry-run"), 0, ""),
        (("prune", "{home}/none", "--keep", "newest=1"), 10, "there is no such root"),
        (("du", "{home}/none"), 10, "there is no such root"),
        (("rollback", "{root}", "--to", "77"), 10, "no restart would take step 77: there is none"),
        (("rollback", "{root}", "--to", "8"), 10, "it is abandoned"),
        (("rollback", "{home}/none", "--to", "1"), 10, "there is no such root"),
        (("pin", "{root}", "77"), 10, "no committed durable step 77"),
        (("pin", "{root}", "99999999999999999999"), 10, "no committed durable step 99999999999999999999"),
        (("unpin", "{root}", "4"), 10, "has no pin of step 4; pinned are: none"),
        (("copy", "{home}/none", "{home}/into"), 10, "there is nothing to copy"),
        (("copy", "{root}", "{root}"), 1, "is where the step is"),
        (("copy", "{root}/4/state", "{home}/into"), 10, "is not a step of a root"),
        (("copy", "{root}", "{home}/some.txt"), 1, "some.txt"),
        (("tiers", "clean", "{ram}"), 2, "give one of --job, --root and --idle"),
        (("tiers", "clean", "{ram}", "--idle", "soon"), 2, "'soon' is not a length of time"),
        (("tiers", "clean", "{home}/none", "--idle", "1d"), 10, "there is no such directory"),
        (("tiers", "list", "gs://bucket/x"), 2, "is not a local directory"),
        (("tiers", "list", "{home}/none"), 10, "none: there is no such directory; check the path"),
        (("tiers", "list", "{home}/some.txt"), 10, "some.txt: there is no such directory"),
        (("tiers",), 2, "Usage: ckptkit tiers"),
    ],
)
def test_exit_codes_and_messages(ckpt: Run, mine: Ours, arguments: tuple[str, ...], code: int, message: str) -> None:
    """A slip would be carried out, or end in words that do not help."""
    (mine.home / "some.txt").write_text("words")
    names = {"home": mine.home, "root": mine.root, "ram": mine.ram}
    before = snapshot(mine.home)
    said = ckpt(*(argument.format(**names) for argument in arguments))
    assert said.code == code, said.err
    assert message in said.err
    assert snapshot(mine.home) == before


def test_unrelated_tier_is_reported(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A slip in a tier's path, or another host's name, would look like a tier without bytes."""
    none = tmp_path / "none"
    for words in (("du",), ("doctor",), ("steps",), ("scrub",), ("rollback", "--to", "4", "--dry-run")):
        command, *more = words
        said = ckpt(command, ours.root, *more, "--tier", none, "--tier", ours.ram, "--host-id", "h9")
        assert f"  {none} is not a directory: a ramdisk that was wiped, or another host's tier" in said.out
        assert f"  {ours.ram} holds no slots of host h9 for this root" in said.out
        found = json.loads(ckpt(command, ours.root, *more, "--tier", none, "--host-id", HOST, "--json").out)
        assert found["notes"] == [f"{none} is not a directory: a ramdisk that was wiped, or another host's tier"]


def test_clean_without_a_match_lists_existing_arenas(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A slip in a job's or host's name would look like a tier that is clean."""
    clean = ("tiers", "clean", ours.ram, "--dry-run")
    said = ckpt(*clean, "--job", "job-1", "--host-id", "h9").out
    assert f"the tiers hold arenas of other hosts: {HOST} (name one with --host-id)" in said
    job = ours.slots.parents[1].name
    assert f"no job is meant; the tiers hold arenas of {job}" in ckpt(*clean, "--job", "job-1", "--host-id", HOST).out
    (tmp_path / "ram").mkdir()
    assert "hold no arena of any job" in ckpt("tiers", "clean", tmp_path / "ram", "--idle", "0s").out
    assert json.loads(ckpt(*clean, "--job", job, "--host-id", HOST, "--json").out)["notes"] == []


@pytest.mark.parametrize(
    ("idle", "kept"),
    [("0s", False), ("0.9", False), ("59s", False), ("1min", False), ("2m", True), ("0.1h", True), ("1d", True)],
)
def test_idle_time_has_units(ckpt: Run, ours: Ours, monkeypatch: pytest.MonkeyPatch, idle: str, kept: bool) -> None:
    """Another unit than the one meant would free the slots of a job that saves every hour."""
    newest_s = max(entry.used_at_s or 0.0 for entry in list_arenas([str(ours.ram)]))
    monkeypatch.setattr(clock, "wall_s", lambda: newest_s + 90.0)
    said = ckpt("tiers", "clean", ours.ram, "--idle", idle, "--host-id", HOST, "--dry-run", "--json")
    assert bool(json.loads(said.out)["kept"]) == kept


def test_copy_goes_on_behind_damaged_steps_and_reports_what_was_copied(ckpt: Run, tmp_path: Path) -> None:
    """A backup would end at the first damaged step, and nobody would know what it has."""
    make_root(tmp_path / "run", (1, 2, 3, 4, 5))
    for step in (2, 4):
        flip(tmp_path / "run", step)
    (tmp_path / "run/5/default/_ckptkit/process-0.json").write_text("{}")
    said = ckpt("copy", tmp_path / "run", tmp_path / "into")
    assert said.code == 11
    assert "ckptkit: copied and proven: steps 1, 3\n" in said.err
    assert all(f"{tmp_path / 'run'}/{step}" in said.err for step in (2, 4, 5))


def test_prune_text_states_freed_bytes_and_steps(ckpt: Run, mine: Ours) -> None:
    """A person would read `0 B: steps none`."""
    assert ckpt("du", mine.root, "--keep", "newest=9").out.endswith(": step 8\n"), "abandoned"
    assert ckpt("prune", mine.root, "--keep", "newest=9").out.startswith(f"{mine.root}: 1 of 2 steps, ")
    assert ckpt("du", mine.root, "--keep", "newest=9").out.endswith("a pruning would free nothing\n")
    assert ckpt("prune", mine.root, "--keep", "newest=9").out.startswith(f"{mine.root}: 0 of 1 step, ")
    assert "bytes), 1 step, 0 B dead weight" in ckpt("du", mine.root).out


def test_copy_without_the_damaged_step_is_reported(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """A backup would be called complete, and lack the newest step."""
    (sidecar,) = (mine.root / "8/state/_ckptkit").iterdir()
    sidecar.unlink()
    said = ckpt("copy", mine.root, tmp_path / "into")
    assert said.code == 11
    assert "has lost its sidecars" in said.err
    assert not (tmp_path / "into/8").exists()
