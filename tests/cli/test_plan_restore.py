"""`ckptkit plan-restore`: the source of a restart, reported before it happens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.inspection import outlook
from ckptkit.model.manifest import Writer
from ckptkit.slots.reader import read_manifest
from ckptkit.store.mounts import FILE_SYSTEMS
from tests.cli.conftest import HOST, Ours, Run
from tests.states import make_state, save_args


def planned(ckpt: Run, root: object, *arguments: object) -> dict[str, Any]:
    said = ckpt("plan-restore", root, "--json", *arguments)
    assert said.code == 0, said.err
    return json.loads(said.out)


def tiers(ours: Ours) -> tuple[object, ...]:
    return ("--tier", ours.ram, "--host-id", HOST)


def test_plan_reads_the_new_branch_from_the_ramdisk(ckpt: Run, ours: Ours) -> None:
    """Somebody would plan a restart by the highest number, which a rollback has abandoned."""
    found = planned(ckpt, ours.root, *tiers(ours))
    assert (found["step"], found["rejected"]) == (5, [])
    assert found["save_id"].items() >= {"epoch": 2, "step": 5, "number": 0}.items()
    plan = found["plan"]
    assert set(plan["bytes_by_tier"]) == {str(ours.ram)}
    held = read_manifest(ours.manifest(5))
    assert {box["leaf"] for box in plan["boxes"]} == {leaf.name for leaf in held.arrays["state"]}
    whole = {leaf.name: list(leaf.shape) for leaf in held.arrays["state"]}
    assert all(box["stop"] == whole[box["leaf"]] for box in plan["boxes"])


def test_order_of_the_tiers_on_the_command_line_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan would name the disk for what a restart reads from memory."""
    monkeypatch.setattr(outlook, "file_system_of", lambda path: FILE_SYSTEMS["tmpfs" if path == "/ram" else "ext4"])
    assert outlook.in_order_of_cost(["/ssd", "/ram"]) == outlook.in_order_of_cost(["/ram", "/ssd"]) == ["/ram", "/ssd"]


def test_plan_without_tiers_reads_the_durable_step(ckpt: Run, ours: Ours) -> None:
    """The plan would name a place that was not given."""
    found = planned(ckpt, ours.root)
    assert (found["step"], set(found["plan"]["bytes_by_tier"])) == (4, {"durable"})
    assert planned(ckpt, ours.root, "--step", 4)["where"] == "durable"


def test_like_slot_plans_the_boxes_of_that_slot(ckpt: Run, ours: Ours) -> None:
    """Nobody could ask what one process of a job would read."""
    like = planned(ckpt, ours.root, *tiers(ours), "--like", ours.slots)
    boxes = {(box["leaf"], tuple(box["start"])) for box in like["plan"]["boxes"]}
    held = read_manifest(ours.manifest(5))
    assert boxes == {(leaf.name, record.box.start) for leaf in held.arrays["state"] for record in leaf.boxes}
    by_step = planned(ckpt, ours.root, "--like", ours.root / "4")
    assert by_step["plan"] == planned(ckpt, ours.root)["plan"]


def test_like_accepts_a_step_with_a_prefix(ckpt: Run, tmp_path: Path) -> None:
    """A user with steps named `run_7` could not choose the wanted leaves."""
    options = ocp.CheckpointManagerOptions(step_prefix="run")
    with ckptkit.CheckpointManager(tmp_path / "root", options=options) as manager:
        manager.save(7, args=save_args(make_state(7), 7))
    found = planned(ckpt, tmp_path / "root", "--like", tmp_path / "root/run_7")
    assert (found["step"], bool(found["plan"]["boxes"])) == (7, True)


def test_damaged_manifest_is_reported_and_next_source_planned(ckpt: Run, mine: Ours) -> None:
    """A restart that falls back would come as a surprise."""
    mine.manifest(5).write_text("{}")
    said = ckpt("plan-restore", mine.root, *tiers(mine))
    assert said.code == 11
    assert "step 4, save 4@1.4" in said.out
    assert str(mine.manifest(5)) in said.err


def test_share_of_one_of_two_hosts_is_not_called_damaged(ckpt: Run, mine: Ours) -> None:
    """A person would repair, and put aside, a save whose other half the next host has."""
    path = mine.manifest(5)
    held = read_manifest(path)
    first, *others = held.arrays["state"]
    share = replace(
        held,
        writer=Writer(process=0, count=2, host=HOST),
        arrays={"state": [replace(first, boxes=first.boxes[1:]), *others]},
    )
    path.write_bytes(share.to_bytes())
    said = ckpt("plan-restore", mine.root, *tiers(mine), "--step", 5)
    assert (said.code, "Nothing is damaged" in said.err, "--repair" in said.err) == (1, True, False)
    assert "This host has the shares of 1 of 2 processes" in said.err
    lost = mine.slots.parent / "1" / path.name
    lost.parent.mkdir()
    lost.write_text("{}")  # what it recorded is not known
    said = ckpt("plan-restore", mine.root, *tiers(mine), "--step", 5)
    assert (said.code, "Nothing is damaged" in said.err, "--repair" in said.err) == (1, False, True)
    assert str(lost) in said.err


def test_step_whose_manifest_is_damaged_is_not_only_called_missing(ckpt: Run, mine: Ours) -> None:
    """A person would look for it everywhere but where it is."""
    mine.manifest(5).write_text("{}")
    said = ckpt("plan-restore", mine.root, *tiers(mine), "--step", 5)
    assert (said.code, "step 5 cannot be restored: it is damaged" in said.err) == (11, True)
    assert str(mine.manifest(5)) in said.err


def test_different_leaves_are_a_mismatch(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A restart with a changed model would be planned, and then refused."""
    held = read_manifest(ours.manifest(5))
    fewer = tmp_path / ours.manifest(5).name
    fewer.write_bytes(replace(held, arrays={"state": held.arrays["state"][1:]}).to_bytes())
    said = ckpt("plan-restore", ours.root, *tiers(ours), "--like", fewer)
    assert said.code == 12
    assert f"state:{held.arrays['state'][0].name} is" in said.err


def test_stock_orbax_step_is_reported_as_such(ckpt: Run, stock: Path) -> None:
    """It would be taken for a step without leaves."""
    said = ckpt("plan-restore", stock / "root")
    assert said.code == 0
    assert "stock Orbax wrote it" in said.out
    assert planned(ckpt, stock / "root")["plan"] is None


@pytest.mark.parametrize("arguments", [(), ("--step", "77")])
def test_nothing_to_restore_exits_as_not_found(
    ckpt: Run, ours: Ours, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A script could not tell a fresh start from a broken one."""
    assert ckpt("plan-restore", tmp_path / "none" if not arguments else ours.root, *arguments).code == 10


def test_text_lists_every_box(ckpt: Run, ours: Ours) -> None:
    """A person would have to read JSON."""
    said = ckpt("plan-restore", ours.root, *tiers(ours), "--leaves")
    assert said.out.startswith("leaf ")
    assert "state:w" in said.out
    _, _, end = said.out.rpartition("\n\n")  # the sum is at the end: a table of many leaves scrolls it away
    assert end.startswith(f"{ours.root}: step 5, save 5@2.0, as host {HOST} sees it\n")
    assert end.endswith(" from ram\n")


def test_a_slot_that_is_gone_is_not_planned(ckpt: Run, mine: Ours) -> None:
    """The plan would name bytes that a restart does not find."""
    for slot in mine.slots.glob("slot-*.bin"):
        slot.unlink()
    said = ckpt("plan-restore", mine.root, *tiers(mine), "--json")
    assert said.code == 11
    found = json.loads(said.out)
    assert (found["step"], set(found["plan"]["bytes_by_tier"])) == (4, {"durable"})
    (rejected,) = found["rejected"]
    assert rejected == {"tier": "fast", "step": 5, "reason": "the slots of save 5@2.0 are missing or damaged"}
