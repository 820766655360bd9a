"""How values are written for people: sizes, ages, tables; and nothing that a terminal would obey."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptkit.errors import one_line as printable
from ckptkit.util.words import count_text as count_text
from ckptkit.util.words import first_of
from ckptkit.util.words import size_text as size_text

_NAMED_MAX = 8  # rows that share a reason
_INDENTED_CHARS = 1 << 20
_RICH_ROWS_MAX = 1000  # rich lays out 2,500 rows a second (measured): plain columns beyond, and in pipes


class _Result(Protocol):
    def to_json(self) -> dict[str, Any]: ...


_Found = TypeVar("_Found", bound=_Result)
Columns = Sequence[tuple[str, bool]]  # title, and whether it holds numbers, which are right-aligned


def age_text(age_s: float) -> str:
    """Seconds in the largest unit that fits: `5 min`. A negative age (another host's clock) is `0 s`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


@lru_cache(maxsize=4096)  # many leaves, few shapes
def shape_text(shape: tuple[int, ...] | None) -> str:
    """A shape as code writes it: `[8,4]`."""
    return "" if shape is None else f"[{','.join(map(str, shape))}]"


def short_json(value: Any, limit: int = 200) -> str:
    """A small item's value on one line, cut at `limit` characters."""
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def print_line(line: str = "") -> None:
    """One line on stdout."""
    sys.stdout.write(printable(line) + "\n")


def print_table(columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: folded to a terminal's width, one unbroken line per row elsewhere."""
    if sys.stdout.isatty() and len(rows) <= _RICH_ROWS_MAX:
        Console(file=sys.stdout, highlight=False).print(_rich_table(columns, rows))
        return
    padded = []  # column by column: a table of 100,000 rows is a third of a second of single calls
    for (title, numeric), cells in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        cells = [title, *(cells if "".join(cells).isprintable() else map(printable, cells))]
        pad, width = str.rjust if numeric else str.ljust, max(map(len, cells))
        padded.append([pad(cell, width) for cell in cells])
    sys.stdout.write("".join(["  ".join(line).rstrip() + "\n" for line in zip(*padded, strict=True)]))


def print_part(columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """An empty line and the table; nothing without rows."""
    if rows:
        print_line()
        print_table(columns, rows)


def print_notes(notes: Iterable[str]) -> None:
    """Each on a line, below the one that it is about."""
    for note in notes:
        print_line(f"  {note}")


def print_part_and_reasons(columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """As `print_part`; the last column has reasons, and one that several rows share is printed once, below them."""
    shared = [reason for reason, count in Counter(row[-1] for row in rows if row[-1]).items() if count > 1]
    if all(row[-1] in (*shared, "") for row in rows):
        columns = columns[:-1]
    own = [[*row[:-1], "" if row[-1] in shared else row[-1]][: len(columns)] for row in rows]
    print_part(columns, own)
    for reason in shared:
        of = [row[0] for row in rows if row[-1] == reason]
        print_line()
        print_line(f"{columns[0][0]}s {first_of(of, _NAMED_MAX)}: {reason}")


def names_of_tiers(names: Mapping[str, str]) -> list[str]:
    """The line that gives the directory of each tier's name; none without names."""
    return [", ".join(f"{name} is {path}" for path, name in names.items())] if names else []


def tier_name(tier: str, names: Mapping[str, str]) -> str:
    """The run's own name of a tier, `ram` or `ssd`; the given path where no save records it."""
    return names.get(os.path.abspath(tier), tier)


def print_top(columns: Columns, rows: Sequence[Sequence[str]], top: int | None) -> None:
    """The first `top` rows of a table (None: all), and how many more there are."""
    print_table(columns, rows[:top])
    if top is not None and len(rows) > top:
        print_line(f"... and {len(rows) - top} more")


def group_of(name: str, depth: int) -> str:
    """The first `depth` parts of a leaf's name."""
    return ".".join(name.split(".")[:depth])


def _rich_table(columns: Columns, rows: Sequence[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, numeric in columns:
        made.add_column(title, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))  # Text: brackets in a name are not markup
    return made


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN and infinities become strings, which JSON has no numbers for.

    Indented up to a size that people may read: what indents is Python's own encoder, at a tenth of the speed.
    """
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text:
        value = json.loads(text, parse_constant=str)
        text = json.dumps(value)
    sys.stdout.write((json.dumps(value, indent=2) if len(text) <= _INDENTED_CHARS else text) + "\n")
    sys.stdout.flush()


def print_found(found: _Found, show: Callable[[_Found], None], as_json: bool) -> None:
    """A result as one JSON document, or as `show` prints it."""
    if as_json:
        print_json(found.to_json())
    else:
        show(found)
