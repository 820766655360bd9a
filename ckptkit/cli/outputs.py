"""Files that a command writes besides its printed output: checked before the work, with the packages for it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import click

from ckptkit.util.distribution import install_command


class OutputFile(click.Path):
    """A file that will be written. A missing directory is reported before the work starts, not an hour later."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or click's message."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.path.isdir(path.parent):
            self.fail(f"{path.parent} is not a directory; make it first", param, ctx)
        return path


def needed(module: str, extra: str) -> Any:
    """An optional package, or a usage error that shows how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise click.UsageError(f"this needs {module}: {install_command(extra)}") from error
