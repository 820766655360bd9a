"""Names that users have written down continue to work: the public surface holds everything that it held."""

from __future__ import annotations

import json
from pathlib import Path

from tests.packaging.surface import found

PINNED = json.loads((Path(__file__).parent / "surface.json").read_text())
FOUND = found()


def test_public_names_can_still_be_imported() -> None:
    """A job's `import` would fail after an upgrade."""
    missing = {package: sorted(set(names) - set(FOUND["names"][package])) for package, names in PINNED["names"].items()}
    assert not any(missing.values()), missing


def test_public_callables_still_take_their_arguments() -> None:
    """A call with keywords of before would raise TypeError."""
    for name, pinned in PINNED["parameters"].items():
        assert set(pinned) <= set(FOUND["parameters"][name]), name


def test_public_classes_still_have_their_members() -> None:
    """A call of a method would raise AttributeError."""
    for name, pinned in PINNED["members"].items():
        assert set(pinned) <= set(FOUND["members"][name]), name


def test_event_kinds_and_exit_codes_are_unchanged() -> None:
    """Dashboards read event kinds, scripts read exit codes."""
    for what in ("event_kinds", "exit_codes"):
        assert PINNED[what].items() <= FOUND[what].items()


def test_commands_still_take_their_options() -> None:
    """A script that calls the command would end with a usage error."""
    for name, pinned in PINNED["commands"].items():
        assert set(pinned) <= set(FOUND["commands"][name]), name
