"""Files that a command writes beside what it prints: checked before the work, and there whole or not at all."""

from __future__ import annotations

import importlib
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click


class OutputFile(click.Path):
    """A file that will be written. That its directory is missing is said before an hour of work has made its text."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or click's message."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.path.isdir(path.parent):
            self.fail(f"{path.parent} is no directory; make it first", param, ctx)
        return path


def needed(module: str, extra: str) -> Any:
    """An optional package, or a usage error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise click.UsageError(f"this needs {module}: pip install 'ckptkit[{extra}]'") from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Replaces the file in one step: a collector or browser that reads meanwhile never sees half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        beside.replace(path)
    except OSError as error:
        error.filename = str(path)  # the one that was asked for
        raise
    finally:
        with suppress(OSError):  # it is not there, or never could be
            beside.unlink()


def write_figure(path: Path, figure: Any) -> None:
    """A figure of matplotlib's as a PNG."""
    made = io.BytesIO()
    figure.savefig(made, dpi=120, format="png")
    write_whole(path, made.getvalue())
