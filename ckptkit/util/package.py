"""The package itself: names that are imported when they are first asked for, the distribution that installs it, and its
log lines on a stream.
"""

from __future__ import annotations

import ast
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from ckptkit.util.gc_pause import collection_paused

NAME = "ckptkit-jax"
FOREIGN = "ckptkit"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


def install_command(extra: str) -> str:
    """The shell command that installs this distribution with an extra."""
    return f"pip install '{NAME}[{extra}]'"


def refuse_foreign(paths: Iterable[str]) -> None:
    """Raises ImportError if the distribution `ckptkit` has installed files of a package `ckptkit` below one of `paths`.

    Its modules and ours would then be mixed in one directory, or one would hide the other. An editable install has no
    such files and is not refused. Cost: one directory listing per path.
    """
    for folder in paths:
        for info in _infos(folder):
            if _installs_the_package(os.path.join(folder, info)):
                version = info.removeprefix(f"{FOREIGN}-").removesuffix(".dist-info")
                raise ImportError(
                    f"the distribution {FOREIGN} {version} in {folder} is another project, which also installs a "
                    f"package named ckptkit; this package is the distribution {NAME}. Remove it and repair this one: "
                    f"pip uninstall {FOREIGN}, then pip install --force-reinstall --no-deps {NAME}"
                )


def _infos(folder: str) -> list[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a zip file, or a directory that does not exist
        return []
    return [name for name in names if name.startswith(f"{FOREIGN}-") and name.endswith(".dist-info")]


def _installs_the_package(info: str) -> bool:
    try:
        with open(os.path.join(info, "RECORD"), encoding="utf-8") as record:
            return any(line.startswith("ckptkit/") for line in record)
    except OSError:  # without a record pip cannot remove it either
        return False


def log_to(level: int | str = "INFO", *, stream: TextIO | None = None) -> None:
    """Writes the log lines of `ckptkit` from `level` on to `stream` (default: stderr).

    For scripts. After `import orbax.checkpoint`, absl owns the root logger, and `logging.basicConfig` does nothing. The
    lines go to this stream alone: the handlers of the root logger get them no more. A second call replaces the first.
    Raises ValueError for a level that `logging` does not know.
    """
    logger = logging.getLogger("ckptkit")
    logger.setLevel(level)
    handler = _Lines(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    for each in [each for each in logger.handlers if isinstance(each, _Lines)]:
        logger.removeHandler(each)
    logger.addHandler(handler)
    logger.propagate = False


class _Lines(logging.StreamHandler[TextIO]):
    """A handler of ours, so that the next call finds it."""
