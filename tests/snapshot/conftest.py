"""Devices for the tests of staging."""

from __future__ import annotations

import pytest

from ckptkit.snapshot import describe, staging
from tests.snapshot.allocator import PIECE


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices pass for accelerators."""
    monkeypatch.setattr(describe, "is_accelerator", lambda device: True)
    monkeypatch.setattr(staging, "GROUP_BYTES", 2 * PIECE)
