"""The reports as a whole."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.reports.reported import REPORTS


def test_there_are_thirty_reports_with_addresses_of_their_own() -> None:
    """A report could be counted twice, or a test here have no report."""
    found = set()
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.reports.{file.stem}")
        if module.__name__ != __name__:
            found |= {f"{file.stem}.{name}" for name in vars(module) if name.startswith("test_")}
    named = {f"{each.test.__module__.rpartition('.')[2]}.{each.test.__name__}" for each in REPORTS}
    assert found == named
    addresses = [each.address for each in REPORTS]
    assert len(set(addresses)) == len(addresses) >= 30
    assert all(each.needed.endswith(".") for each in REPORTS)
