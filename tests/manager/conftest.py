"""A job of one process with all tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.manager.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Its directories, in the test's own."""
    return Run(tmp_path)
