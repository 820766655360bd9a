"""Names of a package that are imported when they are first asked for: a command that reads metadata needs no JAX."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptkit.util.gc_pause import collection_paused


def lazy_names(package: str, source: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose file `source` imports them below `TYPE_CHECKING`.

    That block is the one list of the names: type checkers and readers see it, and each import in it is done when the
    name is first used. Modules of the package can be reached in the same way, without being in the list. Cost: the file
    is parsed, 1 ms for 60 names. No name may be that of a module: importing the module sets the package's attribute.
    """
    (block,) = [node for node in ast.parse(Path(source).read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        home = home_of.get(name, f"{package}.{name}")
        if name not in home_of and (name.startswith("_") or find_spec(home) is None):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collection_paused():  # modules stay: looking for garbage took a sixth of their time
            module = importlib.import_module(home)
        value = getattr(module, name) if name in home_of else module
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return __getattr__, __dir__, sorted(home_of)
