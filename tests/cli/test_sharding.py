"""`ckptkit inspect --sharding`: how a saved state is placed on its mesh, or on another one."""

from __future__ import annotations

import json

import pytest

from ckptkit.model.leaf_info import parsed_sharding
from tests.cli.conftest import Ours, Run


def test_saved_mesh_gives_the_bytes_of_a_device(ckpt: Run, ours: Ours) -> None:
    """A checkpoint would not show what a device holds of it."""
    shown = ckpt("inspect", ours.root / "4", "--sharding")
    assert shown.code == 0
    assert "mesh data=2,fsdp=2: 4 devices" in shown.out
    found = json.loads(ckpt("inspect", ours.root / "4", "--sharding", "--json", "--match", "w").out)
    assert (found["whole_bytes"], found["device_bytes"], found["devices"]) == (256, 128, 4)


def test_other_mesh_is_computed_without_devices(ckpt: Run, ours: Ours) -> None:
    """A user would need the other machine to see what it has to hold."""
    words = ("inspect", ours.root / "4", "--sharding", "--json", "--match", "w", "--mesh", "data=1,fsdp=8,model=2")
    found = json.loads(ckpt(*words).out)
    assert (found["device_bytes"], found["devices"]) == (32, 16)
    assert {each["about"] for each in found["findings"]} == {"fsdp", "model"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh", "data=2"), "--mesh belongs to --sharding"),
        (("--sharding", "--stats"), "exclude each other"),
        (("--sharding", "--mesh", "data"), "cannot read 'data'"),
        (("--sharding", "--mesh", "data=2,data=2"), "cannot read 'data=2'"),
        (("--sharding", "--mesh", "data=0"), "cannot read 'data=0'"),
    ],
)
def test_flags_that_do_not_go_together_are_usage_errors(ckpt: Run, ours: Ours, words: tuple, message: str) -> None:
    """A report over a mesh that nobody meant would pass for the right one."""
    shown = ckpt("inspect", ours.root / "4", *words)
    assert shown.code == 2
    assert message in shown.err


def test_words_of_a_sharding_are_read_back() -> None:
    """A layout would be reported as whole."""
    assert parsed_sharding("P('fsdp', None, ('a', 'b')) on a=2,b=3,fsdp=4") == (
        (("fsdp",), (), ("a", "b")),
        {"a": 2, "b": 3, "fsdp": 4},
    )
    assert parsed_sharding("P() on data=2") == ((), {"data": 2})
    assert parsed_sharding("P('a,b') on a,b=2,c=3") == ((("a,b",),), {"a,b": 2, "c": 3})
    assert parsed_sharding("one device (cpu:0)") is None
    assert parsed_sharding(None) is None
