"""A progress bar for commands that write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
from rich.progress import Progress as Bar


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What takes the bytes that are written and those in all, and shows them on stderr, where that is a terminal.

    For work that is interrupted inside, it says how to go on.
    """
    try:
        if not sys.stderr.isatty():
            yield None
            return
        with Bar(
            BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("", total=None)
            yield lambda written, total: bar.update(task, completed=written, total=total)
    except KeyboardInterrupt:
        click.echo("ckptkit: what was done is kept; the same command with --resume goes on from there", err=True)
        raise
