"""Finds the script or module of this Python environment that a command runs, and the modules that it imports first."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

_FLAGS = re.compile(r"-[bBdEIOPqsSuvx]+")
_SHEBANG_BYTES_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """`interpreter` with `options` runs the script or module `target`; `named` are the words that name it, and
    the words from `arguments_at` on are its arguments."""

    interpreter: str
    options: tuple[str, ...]
    kind: Literal["script", "module"]
    target: str
    named: tuple[str, ...]
    arguments_at: int

    def to_json(self) -> dict[str, Any]:
        """For a worker."""
        return {"kind": self.kind, "target": self.target, "options": list(self.options), "named": list(self.named)}


def python_command(words: Sequence[str]) -> PythonCommand | None:
    """The script or module that `words` run. None: not Python, another environment, or an option not known here."""
    found = shutil.which(words[0])
    if found is None:
        return None
    if not re.fullmatch(r"python(\d(\.\d+)?)?", Path(found).name):
        return _entry_point(Path(found))
    if not _is_of_this_environment(Path(found)):
        return None
    options: list[str] = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        word = rest[0]
        if word == "-m" and len(rest) > 1:
            named, at = ("-m", rest[1]), len(words) - len(rest) + 2
            return PythonCommand(
                interpreter=found, options=tuple(options), kind="module", target=rest[1], named=named, arguments_at=at
            )
        if word in ("-X", "-W") and len(rest) > 1:
            options += rest[:2]
            rest = rest[2:]
        elif _FLAGS.fullmatch(word) or re.fullmatch(r"-[XW].+", word):
            options.append(word)
            rest = rest[1:]
        else:
            return None
    if not rest or not Path(rest[0]).is_file():
        return None
    named, at = (rest[0],), len(words) - len(rest) + 1
    return PythonCommand(
        interpreter=found, options=tuple(options), kind="script", target=rest[0], named=named, arguments_at=at
    )


def _entry_point(path: Path) -> PythonCommand | None:
    """A console script that an installer made: Python, below a line that names the interpreter."""
    with path.open("rb") as file:
        head = file.read(_SHEBANG_BYTES_MAX).split(b"\n")
    interpreter = head[0].removeprefix(b"#!").strip().decode(errors="replace")
    if interpreter == "/bin/sh" and len(head) > 1:  # where the path of the interpreter is too long for a first line
        match = re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\" \"\$@\"", head[1].decode(errors="replace"))
        interpreter = match[1] if match else ""
    if not head[0].startswith(b"#!") or " " in interpreter or not _is_of_this_environment(Path(interpreter)):
        return None
    return PythonCommand(
        interpreter=interpreter, options=(), kind="script", target=str(path), named=(str(path),), arguments_at=1
    )


def _is_of_this_environment(interpreter: Path) -> bool:
    """Whether it has this process's packages: an interpreter of the same folder, and the same program."""
    own = Path(sys.executable)
    try:
        return interpreter.parent.resolve() == own.parent.resolve() and interpreter.resolve() == own.resolve()
    except OSError:
        return False


def leading_imports(command: PythonCommand) -> tuple[str, ...]:
    """The modules that the script or module of `command` imports in its first statements, in order.

    The statement that ends them may prepare later imports: it may set a variable of the environment, or `sys.path`. A
    cold start imports the same modules in the same order before it. Empty where the source cannot be found or parsed.
    """
    parents: tuple[str, ...] = ()
    package, path = "", Path(command.target)
    if command.kind == "module":
        found = _spec_of(command.target)
        if found is None or found.origin is None:
            return ()
        package, path = found.parent or "", Path(found.origin)
        parts = package.split(".") if package else []
        parents = tuple(".".join(parts[: end + 1]) for end in range(len(parts)))  # imported first, by `python -m`
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ()
    names = [*parents]
    for statement in body:
        if isinstance(statement, ast.Import):
            names += [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            relative = "." * statement.level + (statement.module or "")
            with suppress(ImportError):  # beyond the top package: the worker raises that
                names.append(importlib.util.resolve_name(relative, package))
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            break
    return tuple(dict.fromkeys(names))


def _spec_of(name: str) -> ModuleSpec | None:
    """The spec of what `python -m NAME` runs. Imports no package: that would run its code in this process."""
    places: Sequence[str] = [os.getcwd(), *sys.path]
    found: ModuleSpec | None = None
    so_far = ""
    for part in name.split("."):
        so_far = f"{so_far}.{part}" if so_far else part
        found = PathFinder.find_spec(so_far, places)
        places = [] if found is None else list(found.submodule_search_locations or [])
    if found is not None and found.submodule_search_locations is not None:
        found = PathFinder.find_spec(f"{name}.__main__", list(found.submodule_search_locations))
    return found
