"""What is synced while somebody else works beside it."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptkit.store.local import sync_tree


def test_what_is_removed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
