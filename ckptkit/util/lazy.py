"""Names of a package that are imported when they are first asked for: a command that reads metadata needs no JAX."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names stand in the modules of `homes`.

    A package imports the same names below `if TYPE_CHECKING`, for those who read its source; a test holds the two
    together. A name may be that of a module of the package only where the module itself is meant: importing the module
    sets the package's attribute.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(home_of[name])
        value = importlib.import_module(f"{package}.{name}") if home_of[name] == package else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return __getattr__, __dir__, sorted(home_of)
