"""Runs the named commands one after another, each in its directory, and notes where each begins and ends."""

from __future__ import annotations

import sys
from pathlib import Path

from ckptkit.cli import main
from ckptkit.testing.crash import Notes
from tests.killed.commands import COMMANDS
from tests.killed.media import slug


def run(root: Path, key: str, names: list[str]) -> None:
    """Ends with an error where a command does."""
    told = Notes(root)
    for name in names:
        place = str(root / slug(name))
        told.say(name)
        code = main(COMMANDS[name].arguments(place, key, place))
        told.say(f"{name} ended")
        assert code == COMMANDS[name].code, (name, code)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
