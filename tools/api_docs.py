"""The tables of docs/api.md, from the docstrings: `python -m tools.api_docs` (`make pages`).

A line `::: NAME` on the page is a name of the reference. The tables between `<!-- names -->` and `<!-- /names -->` are
written anew: the names by section, and the methods of the manager, each with the first clause of its docstring. A test
holds the page to it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptkit

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_BLOCK = re.compile(r"<!-- names -->\n.*?<!-- /names -->", re.DOTALL)
_ENTRY = re.compile(r"^(?:## (?P<section>.+)|::: (?P<name>\S+))$", re.MULTILINE)
_CLAUSE = re.compile(r"(?<=[.:;])\s")
_WORDS_MAX = 20  # of a cell


def named(name: str) -> Any:
    """The object of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ValueError(f"{name} is not a name of a package")


def clause_of(documented: Any) -> str:
    """The first clause of a docstring, at most `_WORDS_MAX` words. Raises ValueError without one."""
    text = inspect.getdoc(documented)
    if not text:
        raise ValueError(f"{documented} has no docstring")
    clause = _CLAUSE.split(" ".join(text.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".:;")
    if clause.count("(") > clause.count(")"):
        clause = clause.rpartition(" (")[0]
    while len(clause.split()) > _WORDS_MAX:
        clause = clause.rpartition(",")[0] or " ".join(clause.split()[: _WORDS_MAX - 1]) + " ..."
    return clause.replace("|", "\\|")


def _tables(page: str) -> Iterator[str]:
    rows: list[str] = []
    for entry in _ENTRY.finditer(page):
        if entry["section"]:
            if rows:
                yield "\n".join(rows)
            rows = [f"| {entry['section'].lower()} | |", "|---|---|"]
        else:
            rows.append(f"| `{entry['name']}` | {clause_of(named(entry['name']))} |")
    yield "\n".join(rows)
    methods = [(name, each) for name, each in vars(ckptkit.CheckpointManager).items() if not name.startswith("_")]
    rows = ["| methods of `CheckpointManager` | |", "|---|---|"]
    yield "\n".join([*rows, *(f"| `{name}` | {clause_of(each)} |" for name, each in methods)])


def rewritten(page: str) -> str:
    """The page with the tables of today."""
    tables = "\n\n".join(_tables(_BLOCK.sub("", page)))
    return _BLOCK.sub(lambda _: f"<!-- names -->\n\n{tables}\n\n<!-- /names -->", page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
    sys.exit(0)
