"""The commands of docs/TUTORIAL.md: `make campaign NAME=pictures` runs them and records pictures.

They run unchanged and in order, in the clone. The picture of a chapter has all its commands.
`# exit code N` at the end of a command is the code that the page expects.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.session import COLUMNS, picture, shown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "TUTORIAL.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"\]\((tutorial-\w+\.svg)\)")
_EXIT_CODE = re.compile(r"\s+# exit code (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """The commands of a chapter with the exit codes that the page expects, the lines that the page shows of their
    output (`...`: more), and the name of their picture, if any."""

    title: str
    commands: tuple[tuple[str, int], ...]
    output: tuple[str, ...]
    picture: str | None


def chapters(page: str) -> list[Chapter]:
    """The chapters of the page that run something."""
    found = []
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        blocks = _BLOCK.findall(part)
        lines = [line for of, text in blocks if of == "sh" for line in re.split(r"(?<!\\)\n", text.strip())]
        codes = [(_EXIT_CODE.sub("", line), int((_EXIT_CODE.findall(line) or [0])[0])) for line in lines]
        named = _PICTURE.search(part)
        title = part.partition("\n")[0]
        output = tuple(line for of, text in blocks if not of for line in text.splitlines() if line.strip(" ."))
        found.append(Chapter(title=title, commands=tuple(codes), output=output, picture=named and named[1]))
    return [chapter for chapter in found if chapter.commands]


def play(
    page: str, places: Mapping[str, str] | None = None, *, columns: int = COLUMNS
) -> Iterator[tuple[Chapter, list[tuple[str, str]]]]:
    """Runs the page's commands in a clone, and yields what each printed on a terminal of so many columns. `places` are
    used for directories of the page.

    Raises RuntimeError, with the output, for a command that ends with another exit code than the page's.
    """
    for chapter in chapters(page):
        yield chapter, [(command, _output(command, code, places or {}, columns)) for command, code in chapter.commands]


def _output(command: str, code: int, places: Mapping[str, str], columns: int) -> str:
    there = command
    for here, place in places.items():
        there = there.replace(here, place)
    output = shown(there, ROOT, codes=(code,), columns=columns).replace(f"{Path(sys.executable).parent}/", "")
    output = output.replace(str(ROOT), "/ckptkit")
    for here, place in places.items():
        output = output.replace(place, here)
    return output


def main() -> None:
    """Records the pictures."""
    if found := [place for place in (ROOT / "runs" / "story", Path("/dev/shm/story")) if place.exists()]:
        sys.exit(f"{found[0]} exists: delete it first, or the story would continue another one")
    for chapter, outputs in play(PAGE.read_text()):
        if chapter.picture:
            (PAGE.parent / chapter.picture).write_text(picture(outputs))


if __name__ == "__main__":
    main()
