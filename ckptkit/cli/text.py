"""How values are written for people: sizes, ages, tables; and nothing that a terminal would obey."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptkit.inspection.words import size_text as size_text

_RICH_ROWS_MAX = 1000  # rich lays out 2,500 rows a second (measured): plain columns beyond, and in pipes

Columns = Sequence[tuple[str, bool]]  # title, and whether it holds numbers, which stand to the right


def printable(text: str) -> str:
    """`text` with what is no printable character escaped: names in a checkpoint may hold terminal commands."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def age_text(age_s: float) -> str:
    """Seconds in the largest unit that fits: `5 min`. A negative age (another host's clock) is `0 s`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


def shape_text(shape: Sequence[int] | None) -> str:
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
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and len(rows) <= _RICH_ROWS_MAX:
        Console(file=sys.stdout, highlight=False).print(_rich_table(columns, rows))
        return
    lines = [[title for title, _ in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, columns, strict=True)
        padded = (cell.rjust(width) if numeric else cell.ljust(width) for cell, width, (_, numeric) in cells)
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _rich_table(columns: Columns, rows: Sequence[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, numeric in columns:
        made.add_column(title, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # Text: brackets in a name are no markup
    return made


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN and infinities become strings, which JSON has no numbers for."""
    strict = json.loads(json.dumps(value), parse_constant=str)
    sys.stdout.write(json.dumps(strict, indent=2) + "\n")
    sys.stdout.flush()
