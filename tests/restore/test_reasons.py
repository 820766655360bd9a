"""Outcomes are values: no decision reads the name of a class, or words, out of a message."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import errors
from ckptkit.errors import CorruptCheckpointError, ItemNotFoundError, Reason, UnsuitedSaveError

NAMES = sorted(name for name in vars(errors) if name.endswith("Error"))
SOURCES = sorted(Path(errors.__file__).parent.rglob("*.py"))
# Foreign libraries, whose errors have no other sign: their own words, in the one module that knows each of them.
FOREIGN = {"coordination.py", "shards.py", "signatures.py", "failures.py", "tensorstore_wait.py", "refused.py"}


def test_no_decision_reads_a_message() -> None:
    """A path, an item or a cause with such a name would change which error is raised."""
    reads = re.compile(r"Error\.__name__ (not )?in |\bin (str\(error\)|(reason|outcome|rejection)(\.text)?)(?![\w.])")
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCES
        if path.name not in FOREIGN
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line) and not line.lstrip().startswith(("for ", "#")) and " for " not in line
    ]
    assert found == []


@pytest.mark.parametrize("name", [*NAMES, "FileNotFoundError"])
def test_items_and_paths_named_like_errors_change_no_outcome(name: str, tmp_path: Path) -> None:
    """The restore would raise that the item is missing, instead of taking the step before."""
    wanted = ocp.args.Composite(**{name: ocp.args.StandardRestore({"w": np.zeros(4)}, strict=False)})  # pyright: ignore[reportCallIssue]
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, step_prefix=None)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1))]
    with ckptkit.CheckpointManager(tmp_path / name, options=options, tiers=tiers) as manager:
        for step in (0, 1):  # the second is in the ramdisk alone, and Orbax restores no such request from there
            args = {name: ocp.args.StandardSave({"w": np.full(4, float(step))})}  # pyright: ignore[reportCallIssue]
            assert manager.save(step, args=ocp.args.Composite(**args))
            manager.wait_until_finished()
        assert np.array_equal(manager.restore(None, args=wanted)[name]["w"], np.zeros(4))
        with pytest.raises(ckptkit.NoRestorableStepError, match="Nothing is damaged"):
            manager.restore(1, args=wanted)


def test_reasons_of_processes_keep_every_cause() -> None:
    """Damage on the hundredth process would count as none."""
    reasons = {process: Reason.of(UnsuitedSaveError("another number")) for process in range(100)}
    joined = Reason.of_processes(reasons, 2)
    assert joined is not None
    assert joined.is_intact
    assert joined.text.count("UnsuitedSaveError") == 2
    assert joined.text.endswith("and 98 more processes")
    damaged = Reason.of_processes(reasons | {100: Reason.of(CorruptCheckpointError("cell 3"))}, 2)
    assert damaged is not None
    assert damaged.is_damage
    assert not damaged.is_intact
    assert Reason.of_processes({}, 2) is None
    assert Reason.of_json([*damaged]) == damaged
    assert Reason.of(ItemNotFoundError("x")).causes == ("no item",)
