"""Prints the lowest versions that pyproject.toml allows, as constraints for pip: `make test-floor`.

Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_BOUND = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9][0-9.]*)")


def floors(pyproject: str, extras: tuple[str, ...] = ("trainer",)) -> list[str]:
    """`name==version` for every requirement with a lower bound, of the core and of `extras`."""
    project = tomllib.loads(pyproject)["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    return [f"{found[1]}=={found[2]}" for line in lines if (found := _BOUND.match(line))]


if __name__ == "__main__":
    sys.stdout.write("\n".join(floors((Path(__file__).parent.parent / "pyproject.toml").read_text())) + "\n")
