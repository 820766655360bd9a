"""A progress bar for commands that take long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from ckptkit.verification import VerifyProgress


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A function of (bytes written, bytes in total) that shows both on stderr, if that is a terminal.

    Reports how to resume, if the work inside is interrupted.
    """
    try:
        with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn()) as update:
            yield update
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):  # else the end of the command reports where it is
            error.add_note("the finished part is kept; the same command with --resume continues it")
        raise


@contextmanager
def reading_bar() -> Iterator[Callable[..., None] | None]:
    """A function of (bytes read, bytes in total, what is read). Like `progress_bar`, but removed at the end."""
    what = TextColumn("{task.description}")
    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn(), what, transient=True) as update:
        yield update


@contextmanager
def progress_line() -> Iterator[Callable[[VerifyProgress], None] | None]:
    """Shows on stderr which step is read and how far, where stderr is a terminal; None elsewhere."""
    with reading_bar() as update:
        yield update and (lambda at: update(at.checked_bytes, at.total_bytes, f"step {at.step}"))


@contextmanager
def counting_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A function of (amount done, amount in total), in any unit. Like `progress_bar`, but removed at the end."""
    with _bar(TimeRemainingColumn(), transient=True) as update:
        yield update


@contextmanager
def _bar(*columns: ProgressColumn, transient: bool = False) -> Iterator[Callable[..., None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with Bar(BarColumn(), *columns, console=Console(stderr=True), transient=transient) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what="": bar.update(task, completed=done, total=total, description=what)
