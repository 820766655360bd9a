"""Finds the modules that a script imports before it does anything else, without running any of its code."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ckptkit.launch.command import PythonCommand


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
