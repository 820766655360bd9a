"""Conversions while a run is active: its steps are leased while they are read, and nothing is written into its root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.conversion import leased
from ckptkit.durable.lifecycle.leases import PruneGuard
from ckptkit.errors import CheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.model import paths
from ckptkit.store import open_store
from tests.cli.conftest import Run
from tests.formats.writers import by_safetensors

MESH = ("--mesh", "a=1")


def run(root: Path, starts: int, *steps: int) -> Path:
    """A root of ours that a job has saved to, begun so many times."""
    for _ in range(starts):
        with ckptkit.CheckpointManager(root) as manager:
            manager.restore(None) if manager.all_steps() else None
            for step in steps:
                if step not in manager.all_steps():
                    manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(3.0) + step}))
            manager.wait_until_finished()
    return root


def stock(root: Path, *steps: int) -> Path:
    with ocp.CheckpointManager(root) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(3.0) + step}))
        manager.wait_until_finished()
    return root


def below(root: Path) -> list[str]:
    return sorted(str(each.relative_to(root)) for each in root.rglob("*"))


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_target_in_the_root_of_a_run_is_refused(command: str, ckpt: Run, tmp_path: Path) -> None:
    """A restart would take the foreign save for the newest of the run, and the run's own steps be deleted."""
    root, other = run(tmp_path / "root", 1, 1000, 2000), run(tmp_path / "other", 3, 50)
    before = below(root)
    how = ("--to", "orbax") if command == "convert" else MESH
    for name in ("60", "3000", "2000/more"):
        said = ckpt(command, other / "50", root / name, *how)
        assert (said.code, "ame a place outside" in said.err) == (1, True), said.err
    assert below(root) == before
    with ckptkit.CheckpointManager(root) as manager:
        assert manager.latest_step() == 2000


@pytest.mark.parametrize("command", ["convert", "extract", "merge", "reshard"])
@pytest.mark.parametrize("at", ["2", "2/default", "by a link"])
def test_target_inside_its_source_is_refused(command: str, at: str, ckpt: Run, tmp_path: Path) -> None:
    """The work would change what it reads: it failed at its end, and blamed another writer."""
    root = stock(tmp_path / "root", 1, 2)
    (tmp_path / "link").symlink_to(root / "2")
    source = tmp_path / "link" if at == "by a link" else root / at
    before = below(root)
    first, flags = {
        "convert": ([], ["--to", "npz"]),
        "extract": ([], ["--to", "npz", "--only", "w"]),
        "merge": ([root / "1"], ["--to", "npz", "--average"]),
        "reshard": ([], MESH),
    }[command]
    said = ckpt(command, *first, source, source / "new", *flags)
    assert (said.code, "which is read; name a place outside of it" in said.err) == (1, True), said.err
    assert below(root) == before


def test_target_below_its_source_in_a_bucket_is_refused(ckpt: Run, tmp_path: Path) -> None:
    """All would be read and written, and then be thrown away, because the source has one more object."""
    file = by_safetensors(tmp_path / "m.safetensors", {"w": np.arange(3.0)})
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe_file("/b/inside/m.safetensors", file.read_bytes())
        said = ckpt("convert", "memory://b/inside", "memory://b/inside//m.npz", "--to", "npz")
        assert (said.code, "is inside memory://b/inside, which is read" in said.err) == (1, True), said.err
        assert memory.find("/b/inside") == ["/b/inside/m.safetensors"]
        assert ckpt("convert", "memory://b/inside", "memory://b/inside.npz", "--to", "npz").code == 0
    finally:
        memory.rm("/b", recursive=True)


def test_step_among_stock_steps_must_fit_their_order(ckpt: Run, tmp_path: Path) -> None:
    """An older step of a run with more starts would outrank the steps of stock Orbax."""
    root, other = stock(tmp_path / "root", 1000, 2000), run(tmp_path / "other", 3, 50)
    said = ckpt("reshard", other / "50", root / "60", *MESH)
    assert (said.code, "the root of a run with steps up to 2000" in said.err) == (1, True), said.err
    assert "the root of a run" in ckpt("convert", other / "50", root / "3000", "--to", "orbax").err
    assert ckpt("reshard", other / "50", root / "3000", *MESH).code == 0


def test_steps_are_resharded_into_a_new_root_one_by_one(ckpt: Run, tmp_path: Path) -> None:
    """The second step of a run could not follow the first into a root of their own."""
    root, made = run(tmp_path / "root", 2, 1, 2, 3), tmp_path / "made"
    made.mkdir()
    for step in (2, 3, 1):
        assert ckpt("reshard", root / str(step), made / str(step), *MESH).code == 0
    with ckptkit.CheckpointManager(made) as manager:
        assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("of", ["", "/2", "/2/default"])
def test_source_is_leased_while_it_is_read(of: str, ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job would delete the step that a long conversion reads."""
    root = run(tmp_path / "root", 1, 1, 2)
    store, seen = open_store(root), []
    plain = shutil.disk_usage

    def looks(path: str) -> object:  # in the middle of the work
        seen.append([store.get(f"{paths.LEASES_DIR}/{name}") for name in store.list(paths.LEASES_DIR)])
        return plain(path)

    monkeypatch.setattr("shutil.disk_usage", looks)
    assert ckpt("convert", f"{root}{of}", tmp_path / "out", "--to", "npz").code == 0
    assert len(seen) == 1
    assert b'"step": 2' in seen[0][0]
    assert store.list(paths.LEASES_DIR) == []


def test_step_that_is_being_deleted_is_refused(tmp_path: Path) -> None:
    """Half of it would be read, and the error would call it damaged."""
    root = run(tmp_path / "root", 1, 1, 2)
    guard = PruneGuard(open_store(root))
    guard.announce({1})
    with pytest.raises(CheckpointError, match="step 1 is being deleted by its job"), leased([f"{root}/1"]):
        pass
    guard.settle()
    assert os.listdir(root / paths.LEASES_DIR) == []


def test_step_among_stock_steps_has_a_name_like_theirs(ckpt: Run, tmp_path: Path) -> None:
    """A plain number would change what every command takes for the steps of the root."""
    root, other = tmp_path / "root", run(tmp_path / "other", 1, 50)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(step_prefix="step")) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))
    refused = ckpt("reshard", other / "50", root / "50", *MESH)
    assert (refused.code, "step_3" in refused.err, "(step_50)" in refused.err) == (1, True, True), refused.err
    assert ckpt("reshard", other / "50", root / "step_50", *MESH).code == 0


@pytest.mark.parametrize("at", ["", "2", "2/default"])
@pytest.mark.parametrize("writer", ["ckptkit", "orbax"])
def test_exported_file_does_not_hide_the_run(writer: str, at: str, ckpt: Run, tmp_path: Path) -> None:
    """Every command would read an old export in place of the newest step, without a message."""
    root = run(tmp_path / "root", 1, 1, 2) if writer == "ckptkit" else stock(tmp_path / "root", 1, 2)
    place = root / at
    by_safetensors(place / "old.safetensors", {"w": np.zeros(3, np.float32)})
    with open_checkpoint(str(place)) as opened:
        assert opened.by_name()["w"].read().tolist() == [2, 3, 4]
    found = ckptkit.inspect(str(place))
    assert found.kind == ("item" if at.endswith("default") else "step")
    assert "not read: old.safetensors; name a file to read it" in found.notes
    same = by_safetensors(tmp_path / "same.safetensors", {"w": np.array([2, 3, 4], np.float32)})
    assert ckpt("diff", place, same).code == 0
    if not at:
        assert ckpt("merge", root, root / "2", tmp_path / "m.npz", "--average", "--to", "npz").code == 0
        with np.load(tmp_path / "m.npz") as loaded:
            assert loaded["w"].tolist() == [2, 3, 4]


def test_directory_of_hugging_face_with_other_directories_is_read(ckpt: Run, tmp_path: Path) -> None:
    """A model would be taken for a root or a step because of a directory in it."""
    for below in ("onnx", "original", ".cache/huggingface", "7"):
        (tmp_path / "m" / below).mkdir(parents=True)
        (tmp_path / "m" / below / "config.json").write_text("{}")
    by_safetensors(tmp_path / "m/model.safetensors", {"w": np.arange(3.0)})
    assert ckptkit.inspect(str(tmp_path / "m")).kind == "directory"
    assert ckpt("convert", tmp_path / "m", tmp_path / "m.npz", "--to", "npz").code == 0
