"""`ckptkit verify`: what it prints, and an exit code for each end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from ckptkit.cli import verify as verify_module
from ckptkit.cli.text import print_part_and_reasons
from ckptkit.slots.reader import read_manifest
from tests.cli.conftest import HOST, Ours, Run
from tests.cli.test_inspect import CHECK_BACKEND


def test_whole_run_is_proven(ckpt: Run, ours: Ours) -> None:
    """A whole checkpoint would be called damaged, or nobody see what was proven."""
    lines = ckpt("verify", ours.root).out.splitlines()
    assert lines[0] == f"{ours.root}: 2 saves, 2 proven, 0 corrupt"
    assert [line.split()[:3] for line in lines[3:]] == [["4", "proven", "4@1.4"], ["8", "proven", "8@1.8"]]
    for path in (ours.ram, ours.slots, ours.slots.parent):
        assert "3 saves, 3 proven, 0 corrupt" in ckpt("verify", path).out


def test_flipped_bit_exits_11_and_names_the_leaf(ckpt: Run, mine: Ours) -> None:
    """A script could not tell a damaged checkpoint from a whole one, nor a person which leaf it is."""
    slot = mine.slots / read_manifest(mine.manifest(8)).slot
    data = bytearray(slot.read_bytes())
    data[0] ^= 4
    slot.write_bytes(data)
    said = ckpt("verify", mine.ram)
    assert said.code == 11
    assert f"damaged: {slot}: leaf state:b, cell (0,) to (4,): the bytes are not those that were saved" in said.err
    assert ckpt("verify", mine.ram, "--step", 7).code == 0
    found = json.loads(ckpt("verify", mine.ram, "--json").out)
    assert [(step["step"], step["state"]) for step in found["steps"]] == [
        (5, "proven"),
        (7, "proven"),
        (8, "corrupt"),
    ]


def test_stock_orbax_steps_are_unproven(ckpt: Run, stock: Path) -> None:
    """People would take a step that nobody can prove for a proven one."""
    said = ckpt("verify", stock / "root")
    assert said.code == 0
    assert said.out.startswith(f"{stock / 'root'}: 1 save, 0 proven, 0 corrupt, 1 unproven\n")


def test_reason_that_steps_share_is_printed_once(ckpt: Run, tmp_path: Path) -> None:
    """A sentence of 100 characters in each row would push the columns that differ off the screen."""
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(4)}))
    said = ckpt("verify", tmp_path).out.splitlines()
    assert said[2].split() == ["step", "state", "save", "cells", "bytes", "where"]
    assert [line for line in said if "keeps no digests" in line] == said[-1:]
    assert said[-1].startswith("steps 0, 1, 2: unproven: every chunk of default decodes")


def test_reasons_that_rows_have_alone_stay_in_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """A reason would be given for other steps than its own."""
    rows = [["1", "a"], ["2", "b"], ["3", "a"], ["4", ""]]
    print_part_and_reasons([("step", True), ("why", False)], rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [["step", "why"], ["1"], ["2", "b"], ["3"], ["4"], ["steps", "1,", "3:", "a"]]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("verify",), 2, "Missing argument 'PATH'"),
        (("verify", "{home}", "--step", "-1"), 2, "-1 is not in the range"),
        (("verify", "{home}/none"), 10, "there is no such directory"),
        (("verify", "{root}", "--step", "5"), 10, "step 5 does not exist"),
        (("verify", "{root}/4/_CHECKPOINT_METADATA"), 10, "it is a file, and a directory with steps is expected"),
        (("verify", "{home}/loop"), 1, "look at its permissions and links"),
    ],
)
def test_exit_codes_and_messages(ckpt: Run, mine: Ours, arguments: tuple[str, ...], code: int, message: str) -> None:
    """A mistyped path would look like a proven checkpoint."""
    (mine.home / "loop").symlink_to("loop")
    said = ckpt(*(argument.format(home=mine.home, root=mine.root) for argument in arguments))
    assert (said.code, said.out) == (code, "")
    assert message in said.err


def test_interrupt_ends_without_traceback(ckpt: Run, ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a long read would end in a traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_module, "verify_path", interrupted)
    assert ckpt("verify", ours.root).code == 130


def test_verify_starts_no_jax_backend(ours: Ours) -> None:
    """A check on a training host would fight the job for its accelerator."""
    arguments = ["verify", str(ours.root)]
    done = subprocess.run([sys.executable, "-c", CHECK_BACKEND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert HOST not in done.stderr
