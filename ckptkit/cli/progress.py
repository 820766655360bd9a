"""A progress bar for commands that take long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What takes the bytes that are written and those in all, and shows them on stderr, where that is a terminal.

    For work that is interrupted inside, it says how to go on.
    """
    try:
        with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn()) as update:
            yield update
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):  # else it is said where, when the command ends
            error.add_note("what was done is kept; the same command with --resume goes on from there")
        raise


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What takes the bytes that are read and those in all; as `progress_bar`, gone at the end."""
    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn(), transient=True) as update:
        yield update


@contextmanager
def counting_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What takes how much is done and how much there is in all, of anything; as `progress_bar`, gone at the end."""
    with _bar(TimeRemainingColumn(), transient=True) as update:
        yield update


@contextmanager
def _bar(*columns: ProgressColumn, transient: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with Bar(BarColumn(), *columns, console=Console(stderr=True), transient=transient) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
