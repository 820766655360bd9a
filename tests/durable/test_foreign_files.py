"""Files and directories of others in a root, a step, or around one: they hide nothing, and keep no run away."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.places import Place, require_possible_root
from ckptkit.errors import BeyondLimitError
from ckptkit.inspection import aggregate
from ckptkit.inspection.aggregate import read_aggregate

NOBODY = 65534


def packed(value: object) -> bytes:
    data = msgpack.packb(value)
    assert data is not None
    return data


def test_pickle_named_checkpoint_hides_no_step(tmp_path: Path) -> None:
    """A user's file would be taken for the items of a step, or for the root: the rest was not read, and called good."""
    root = tmp_path / "run"
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    (root / "checkpoint").write_bytes(pickle.dumps({"mine": 1}, protocol=4))
    (root / "1/checkpoint").write_bytes(pickle.dumps({"mine": 1}, protocol=4))
    assert ckptkit.latest_step(str(root)) == 1
    (proof,) = ckptkit.verify(str(root)).steps
    assert (proof.state, proof.step) == ("proven", 1)
    tree = packed({"w": 1})
    (root / "checkpoint").write_bytes(tree)
    (root / "1/checkpoint").write_bytes(tree)
    (proof,) = ckptkit.verify(str(root)).steps
    assert (proof.state, proof.step) == ("proven", 1)


@pytest.mark.parametrize("content", [pickle.dumps([1], protocol=4), b"\x80" * 3, b"\x81\x01\x02", bytes(2 << 20)])
def test_foreign_file_named_checkpoint_refuses_no_root(tmp_path: Path, content: bytes) -> None:
    """An experiment's own file would keep every run from its directory."""
    (tmp_path / "checkpoint").write_bytes(content)
    for root in (tmp_path / "new", tmp_path):
        with ckptkit.CheckpointManager(root) as manager:
            assert manager.latest_step() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")
def test_directory_that_may_not_be_read_refuses_no_root() -> None:
    """A fresh file system has `lost+found`, which is root's alone: no manager would begin there."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own are closed to others
        (Path(made) / "lost+found").mkdir(mode=0o700)
        os.chmod(made, 0o755)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(PermissionError):
                os.listdir(f"{made}/lost+found")
            require_possible_root(Place.open(made, timeout_s=5))
        finally:
            os.seteuid(0)


def test_group_of_zarr_holds_a_root(tmp_path: Path) -> None:
    """Its file has the name of an array's."""
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() is None
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with pytest.raises(ckptkit.StepNotFoundError, match=r"which is .*array"):
        ckptkit.CheckpointManager(tmp_path / "other")


def nested(depth: int) -> bytes:
    """Orbax's extension for a tuple, one in the other."""
    data = packed([])
    for _ in range(depth):
        data = packed([msgpack.ExtType(4, data)])
    return packed({"w": msgpack.ExtType(4, data)})


def test_deep_tree_in_one_file_is_damage(tmp_path: Path) -> None:
    """Ten kilobytes would take the whole stack of the process, which ends without a message."""
    (tmp_path / "checkpoint").write_bytes(nested(20))
    place = Place.open(str(tmp_path), timeout_s=5)
    assert read_aggregate(place, timeout_s=5) is not None
    for depth in (100, 2000):
        (tmp_path / "checkpoint").write_bytes(nested(depth))
        with pytest.raises(ckptkit.CorruptCheckpointError):
            read_aggregate(place.again(), timeout_s=5)


def test_tuple_of_a_tree_in_one_file_is_read(tmp_path: Path) -> None:
    """It is unpacked apart from the rest."""
    array = msgpack.ExtType(1, packed([[2], "float32", np.ones(2, np.float32).tobytes()]))
    tree = {"t": msgpack.ExtType(4, packed([array, 3]))}
    (tmp_path / "checkpoint").write_bytes(packed(tree))
    found = read_aggregate(Place.open(str(tmp_path), timeout_s=5), timeout_s=5)
    assert found is not None
    assert {path: np.asarray(value).tolist() for path, value in found.items()} == {
        ("t", "0"): [1.0, 1.0],
        ("t", "1"): 3,
    }


def test_tree_in_a_file_that_is_too_large_is_said_not_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all steps called it an error of ckptkit's own."""
    monkeypatch.setattr(aggregate, "FILE_BYTES_MAX", 100)
    (tmp_path / "1/default").mkdir(parents=True)
    (tmp_path / "1/default/checkpoint").write_bytes(packed({"w": list(range(200))}))
    with pytest.raises(BeyondLimitError):
        read_aggregate(Place.open(str(tmp_path / "1/default"), timeout_s=5), timeout_s=5)
    for place in (tmp_path, tmp_path / "1"):
        (proof,) = ckptkit.verify(str(place)).steps
        assert (proof.state, len(proof.unread)) == ("unproven", 1), place
        assert "bytes, and at most 100 of a tree in one file are read" in str(proof.reason)
