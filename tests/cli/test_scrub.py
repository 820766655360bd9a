"""`ckptkit scrub`: the plan, the repair, and an exit code that tells whether damage is left."""

from __future__ import annotations

import json

import pytest

from ckptkit.slots.reader import read_manifest
from tests.cli.conftest import HOST, Ours, Run


def test_scrub_prints_the_plan_and_repairs(ckpt: Run, mine: Ours) -> None:
    """Nobody could see what a repair would do, or whether it was done."""
    slot = mine.slots / read_manifest(mine.manifest(8)).slot
    data = bytearray(slot.read_bytes())
    data[0] ^= 4
    slot.write_bytes(data)
    scrub = ("scrub", mine.root, "--tier", mine.ram, "--host-id", HOST)
    for flags in ((), ("--dry-run",), ("--repair", "--dry-run")):
        said = ckpt(*scrub, *flags)
        assert said.code == 11
        assert "5 copies, 1 damaged, nothing was changed" in said.out
        assert "can be repaired" in said.out
        assert slot.read_bytes() == bytes(data)
    found = json.loads(ckpt(*scrub, "--repair", "--json").out)
    (treatment,) = found["treatments"]
    assert (treatment["act"], treatment["done"]) == ("repair", True)
    assert set(treatment) == {"step", "save_id", "kind", "path", "act", "done", "reason", "sources"}
    assert ckpt(*scrub).out == f"{mine.root}: 5 copies, 0 damaged, nothing was changed\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scrub",), "Missing argument 'ROOT'"),
        (("scrub", "{root}", "--tier", "gs://b/x"), "not a local directory"),
        (("scrub", "{root}", "--host-id", "../x"), "cannot be a directory name"),
    ],
)
def test_usage_errors_are_refused(ckpt: Run, ours: Ours, arguments: tuple[str, ...], message: str) -> None:
    """A mistyped tier would pass for one without damage."""
    said = ckpt(*(argument.format(root=ours.root) for argument in arguments))
    assert said.code == 2
    assert message in said.err


def test_absent_root_is_not_found(ckpt: Run, ours: Ours) -> None:
    """A mistyped root would pass for one without damage."""
    assert ckpt("scrub", ours.home / "none").code == 10
