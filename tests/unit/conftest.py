"""Slots on the ramdisk, gone when the test ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.slots.arena import Arena
from tests.unit.arenas import new_host


@pytest.fixture
def host() -> Iterator[Path]:
    """A host directory on the ramdisk, not made yet."""
    path = new_host()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def arena(host: Path) -> Iterator[Arena]:
    """Two slots in it."""
    made = Arena.open(host, 0, slots=2, synced=False)
    yield made
    made.close()
