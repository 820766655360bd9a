"""Devices for the tests of staging."""

from __future__ import annotations

import pytest

from ckptkit.slots import host_memory
from ckptkit.snapshot import describe, staging
from tests.snapshot.allocator import PIECE


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices pass for accelerators, and the host has memory."""
    monkeypatch.setattr(describe, "is_accelerator", lambda device: True)
    monkeypatch.setattr(staging, "GROUP_BYTES", 2 * PIECE)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 40)
