"""Durable steps on a disk, read from the files that hold their cells."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.cells import placed
from ckptkit.durable.cells.reader import CellReader
from ckptkit.model.durable_profile import DurableProfile

STATE = {
    "large": jnp.arange(3 << 20, dtype=jnp.float32).reshape(3, 1 << 20),
    "padded": jnp.arange(5 * 700_001, dtype=jnp.float32).reshape(5, 700_001),
    "small": jnp.arange(5000, dtype=jnp.int32),
    "tiny": jnp.ones((3,), jnp.bfloat16),
    "scalar": jnp.float32(7),
    "host": np.arange(1 << 19),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one durable step."""
    _save(tmp_path / "root")
    return tmp_path / "root"


def _save(root: Path, **settings: Any) -> None:
    with ckptkit.CheckpointManager(root, **settings) as manager:
        manager.save(1, args=ocp.args.StandardSave(STATE))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()


def _restore(root: Path) -> None:
    with ckptkit.CheckpointManager(root) as manager:
        found = manager.restore(1, args=ocp.args.StandardRestore(STATE))  # pyright: ignore[reportCallIssue]
    for name, leaf in STATE.items():
        assert found[name].dtype == leaf.dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name


def _data_files(root: Path) -> list[Path]:
    return [path for path in root.glob("1/default/**/d/*") if path.is_file()]


def test_plain_cells_are_read_without_tensorstore(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands out copies of copies: a third of the speed."""
    asked: list[str] = []
    real = CellReader.fetch

    def fetch(self: CellReader, item: str, leaf: Any, cell: Any) -> Any:
        asked.append(leaf.name)
        return real(self, item, leaf, cell)

    monkeypatch.setattr(CellReader, "fetch", fetch)
    _restore(root)
    assert set(asked) <= {"padded"}


def test_a_flipped_bit_in_a_data_file_is_never_restored(root: Path) -> None:
    path = max(_data_files(root), key=lambda each: each.stat().st_size)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)[0]
        file.seek(1 << 20)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(ckptkit.NoRestorableStepError), ckptkit.CheckpointManager(root) as manager:
        manager.restore(None, args=ocp.args.StandardRestore(STATE))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("harm", ["gone", "short", "empty"])
def test_missing_or_truncated_data_file_is_damage(root: Path, harm: str) -> None:
    path = max(_data_files(root), key=lambda each: each.stat().st_size)
    if harm == "gone":
        path.unlink()
    else:
        os.truncate(path, 0 if harm == "empty" else path.stat().st_size // 2)
    with pytest.raises(ckptkit.NoRestorableStepError), ckptkit.CheckpointManager(root) as manager:
        manager.restore(None, args=ocp.args.StandardRestore(STATE))  # pyright: ignore[reportCallIssue]


def test_encoded_cells_are_left_to_the_decoder(tmp_path: Path) -> None:
    _save(tmp_path / "encoded", durable=DurableProfile(compression="zstd"))
    _restore(tmp_path / "encoded")


def test_few_data_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a hundred gigabytes has more data files than a process may have open."""
    monkeypatch.setattr(placed, "_FILES_MAX", 2)
    _save(tmp_path / "root", durable=DurableProfile(data_file_bytes=1 << 20))
    assert len(_data_files(tmp_path / "root")) > 3
    most = [0]
    real = placed.PlacedCells._file

    def watched(self: placed.PlacedCells, item: str, path: str) -> Any:
        found = real(self, item, path)
        most[0] = max(most[0], len(self._files))
        return found

    monkeypatch.setattr(placed.PlacedCells, "_file", watched)
    (proof,) = ckptkit.verify(str(tmp_path / "root")).steps
    assert (proof.state, most) == ("proven", [2])
    _restore(tmp_path / "root")
