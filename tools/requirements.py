"""Prints the requirements of the project and of extras, as pip reads them: `python tools/requirements.py trainer s3`.

Environments that are made at the same time install these, and the project alone at the end: pip's build of the project
writes into its directory. With `--lowest`, the lowest allowed version of each, for `make campaign NAME=floor`.
Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_BOUND = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9][0-9.]*)")
_OWN_EXTRAS = re.compile(r"^ckptkit-jax\[([^]]*)\]$")


def requirements(pyproject: str, extras: Sequence[str]) -> list[str]:
    """Every requirement of the core and of `extras`, those of extras that these name too. Raises KeyError for an extra
    that there is not."""
    project = tomllib.loads(pyproject)["project"]

    def of(extra: str) -> Iterator[str]:
        for line in project["optional-dependencies"][extra]:
            if (own := _OWN_EXTRAS.match(line)) is None:
                yield line
            else:
                for name in own[1].split(","):
                    yield from of(name)

    return [*project["dependencies"], *(line for extra in extras for line in of(extra))]


def floors(pyproject: str, extras: Sequence[str] = ("trainer",)) -> list[str]:
    """`name==version` for every requirement with a lower bound, of the core and of `extras`."""
    found = [_BOUND.match(line) for line in requirements(pyproject, extras)]
    return [f"{each[1]}=={each[2]}" for each in found if each is not None]


if __name__ == "__main__":
    words = sys.argv[1:]
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    lines = floors(text, words[1:]) if words[:1] == ["--lowest"] else requirements(text, words)
    sys.stdout.write("\n".join(lines) + "\n")
