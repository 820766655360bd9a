"""Syncing files while another process works in the directory."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptkit.store.local import sync_tree


def test_file_removed_during_the_sync_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore takes its lock files away whenever it likes: between the listing and the opening, too."""
    (tmp_path / "a.__lock").write_bytes(b"")
    (tmp_path / "data").write_bytes(b"bytes")
    opened: list[str] = []
    real = os.open

    def taken_away(path: Any, flags: int, *rest: Any) -> int:
        if (name := os.path.basename(path)).endswith(".__lock"):
            Path(path).unlink()
        fd = real(path, flags, *rest)
        opened.append(name)
        return fd

    monkeypatch.setattr(os, "open", taken_away)
    sync_tree(tmp_path)
    assert "data" in opened
    assert "a.__lock" not in opened


def test_unchanged_files_are_not_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion of a long work would wait for a flush of the disk for every file of those before; or a file that was
    written since would be taken for safe."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"bytes")
    synced: list[str] = []
    real = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    known: set[tuple[int, ...]] = set()
    sync_tree(tmp_path, known)
    (tmp_path / "a").write_bytes(b"other bytes")
    (tmp_path / "new").write_bytes(b"bytes")
    os.replace(tmp_path / "new", tmp_path / "b")
    (tmp_path / "c").write_bytes(b"")
    del synced[:]
    sync_tree(tmp_path, known)
    assert sorted(synced) == ["a", "b", "c", tmp_path.name]
    del synced[:]
    sync_tree(tmp_path, known)
    assert synced == [tmp_path.name]
