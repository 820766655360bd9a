"""Joins the files of changes/ into a section of CHANGELOG.md: `python -m tools.changes 0.3.0 2027-01-31`.

The rule for the files is in changes/README.md. The files are deleted afterwards. A section `VERSION (unreleased)`, that
of the first release, gets the day and the files. Exit code 1, and no file is changed, if a file breaks the rule, if
there are none, or if CHANGELOG.md has a section of that version with a day.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
KINDS = ("You must change", "Removed", "New", "Faster", "Fixed")
WORDS_MAX = 60


class ChangesError(Exception):
    """The files cannot be joined; the message names each file with its reason."""


def change_files(root: Path) -> list[Path]:
    """The files of changes that are not released yet, by name."""
    return sorted(path for path in (root / "changes").glob("*.md") if path.name != "README.md")


def read_change(path: Path) -> tuple[str, str]:
    """The kind of a change, and its paragraph on one line. Raises `ChangesError` if the file breaks the rule."""
    kind, _, rest = path.read_text().partition("\n")
    text = " ".join(rest.split())
    if kind.strip() not in KINDS:
        raise ChangesError(f"{path.name}: the first line is {kind.strip()!r}, and must be one of {', '.join(KINDS)}")
    if not text or len(text.split()) > WORDS_MAX:
        raise ChangesError(f"{path.name}: {len(text.split())} words below the first line; write 1 to {WORDS_MAX}")
    return kind.strip(), text


def section_of(version: str, day: str, changes: list[tuple[str, str]], body: str = "") -> str:
    """The section of a release: a part for each kind, in the order of `KINDS`, and a bullet for each change. `body` is
    what the section has already."""
    head, *parts = re.split(r"^### ", body, flags=re.MULTILINE)
    found = {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}
    for kind in KINDS:
        if bullets := [f"- {text}" for of, text in changes if of == kind]:
            found[kind] = "\n".join(filter(None, (found.get(kind), *bullets)))
    order = [*(kind for kind in KINDS if kind in found), *(name for name in found if name not in KINDS)]
    pieces = [f"## {version} ({day})", head.strip(), *(f"### {name}\n\n{found[name]}" for name in order)]
    return "\n\n".join(filter(None, pieces)) + "\n"


def join(root: Path, version: str, day: str) -> str:
    """Writes the section above the newest one, deletes the files, and returns the section. Raises `ChangesError`."""
    paths, page = change_files(root), root / "CHANGELOG.md"
    before, mark, after = page.read_text().partition("\n## ")
    begun = f"{version} (unreleased)\n"
    if after.startswith(begun):
        body, mark, after = after.removeprefix(begun).partition("\n## ")
    elif not paths:
        raise ChangesError("changes/ has no file to join")
    elif re.search(rf"^## {re.escape(version)}(?:\s|$)", mark + after, re.MULTILINE):
        raise ChangesError(f"CHANGELOG.md has a section {version} already")
    else:
        body = ""
    section = section_of(version, day, [read_change(path) for path in paths], body)
    page.write_text(f"{before}\n{section}{mark}{after}")
    for path in paths:
        path.unlink()
    return section


@click.command()
@click.argument("version")
@click.argument("day")
def main(version: str, day: str) -> None:
    """Joins the files of changes/ into the section VERSION (DAY) of CHANGELOG.md."""
    try:
        click.echo(join(ROOT, version, day))
    except ChangesError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
