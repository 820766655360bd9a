"""A power failure at any moment of the calls that make a checkpoint: what a call has returned is there afterwards."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit import direct
from ckptkit.cli import main
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import local
from ckptkit.testing.crash import CrashState, Disk, Names, Note, Notes, notes, record, unsynced
from ckptkit.upkeep import plan_prune, pruning
from tests.strace import needs_strace
from tests.upkeep.conftest import make_root

_MADE = {
    "save": "save/new/tree",
    "copy": "copy/new/1",
    "convert": "convert/weights",
    "reshard": "reshard/item",
    "prune": "source/1",
    "mark": "mark/1",
}
_LAST = {paths.COMMIT_MARK, paths.STEP_METADATA}  # Orbax writes them between our last sync and its rename


def run(root: str) -> None:
    """Each call, and a note once it has returned."""
    told = Notes(Path(root))
    for call in _MADE:
        os.makedirs(f"{root}/{call}")  # a user's `mkdir -p`, which syncs nothing
    direct.save(f"{root}/{_MADE['save']}", {"w": np.arange(600.0), "name": "text"})
    told.say("save")
    for command, words in (
        ("copy", [f"{root}/source", f"{root}/copy/new"]),
        ("convert", [f"{root}/source/1/default", f"{root}/{_MADE['convert']}", "--to", "hf"]),
        ("reshard", [f"{root}/source/1/default", f"{root}/{_MADE['reshard']}", "--mesh", "data=2"]),
    ):
        assert main([command, *words]) == 0, command
        told.say(command)
    planned = plan_prune(f"{root}/source", [ckptkit.KeepNewest(1)]).doomed[0]
    assert not pruning._removed(replace(planned, save_id=SaveId(9, 1, 1))), "the number is another save's: it goes back"
    told.say("prune")
    local.DIRECTORY = replace(local.DIRECTORY, atomic_rename=False)  # such as vfat: a mark commits a step
    make_root(f"{root}/mark", (1,))
    told.say("mark")


def _files(disk: Disk, below: str) -> dict[str, bytes]:
    return {path: disk.content(node) for path, node in disk.tree(below)}


@pytest.mark.long
@needs_strace
def test_power_failure_keeps_what_has_returned_and_leaves_all_or_nothing(tmp_path: Path) -> None:
    """A name, a sidecar or metadata that is not synced would be lost: the checkpoint with it, or all its digests."""
    root = tmp_path / "root"
    make_root(root / "source", (1, 2))
    trace = record([sys.executable, "-m", __name__, str(root)], root)
    whole = {call: _files(trace.disk(), path) for call, path in _MADE.items()}
    assert min(map(len, whole.values())) >= 2
    returned = {text: number for number, text in notes(trace)}
    found: dict[str, list[str]] = {call: [] for call in _MADE}
    for number, operation in enumerate(trace.operations):
        if not isinstance(operation.effect, Names | Note):
            continue
        pending = frozenset(unsynced(trace, number + 1, lambda _: True))
        named = {each for each in pending if trace.operations[each].call.startswith(("rename", "link", "mkdir"))}
        # Nothing of it reaches the disk; all but the last; or new and changed names alone: a disk may write them first.
        for lost, in_order in ((pending, True), (pending and {max(pending)}, True), (pending - named, False)):
            disk = CrashState(count=number + 1, dropped=frozenset(lost)).disk(trace)
            for call, path in _MADE.items():
                after = f"{call}: power fails after {operation}"
                left = _files(disk, path)
                wrong = {name for name in whole[call] if left.get(name) != whole[call][name]}
                is_there = disk.find(f"{path}/{paths.COMMIT_MARK}" if call == "mark" else path) is not None
                found[call].append("all" if not wrong else "some" if is_there else "nothing")
                if number >= returned[call]:
                    assert not in_order or not wrong, after
                elif is_there and call != "prune":
                    assert {Path(name).name for name in wrong} <= _LAST, after
    assert all({"nothing", "all"} <= set(found[call]) for call in _MADE), found


if __name__ == "__main__":
    run(sys.argv[1])
