"""The distribution that installs this package: `ckptkit-jax`. Another project has the name `ckptkit` on the index."""

from __future__ import annotations

import os
from collections.abc import Iterable

NAME = "ckptkit-jax"
FOREIGN = "ckptkit"


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
