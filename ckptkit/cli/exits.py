"""From what went wrong to an exit code and one message on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import click

from ckptkit.cli.text import printable
from ckptkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MemoryBudgetError,
    StepNotFoundError,
    TreeMismatchError,
    internal_error,
    store_error,
)

_log = logging.getLogger("ckptkit")
_TALKERS = ("gcsfs", "fsspec", "aiohttp", "asyncio", "absl")  # tracebacks for errors that we print in one line


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 10
    CORRUPT = 11
    TREE_MISMATCH = 12
    NOT_READ = 13
    DIFFERENT = 20
    PREEMPTED = 75
    INTERRUPTED = 130


def exit_of(error: BaseException) -> Exit:
    """The code and, on stderr, the message of what ended a command, with what was noted of it."""
    code = _exit_of(error)
    noted = error.__cause__ if isinstance(error, click.Abort) else error  # click's own word for Ctrl-C
    for note in getattr(noted, "__notes__", ()):
        if "\n" in note:  # JAX's, of its tracebacks
            continue
        click.echo(f"ckptkit: {printable(note)}", err=True)
    return code


def _exit_of(error: BaseException) -> Exit:
    if isinstance(error, click.UsageError):
        error.show(sys.stderr)
        if isinstance(error, click.MissingParameter) and error.ctx is not None and error.ctx.command.epilog:
            example = error.ctx.command.epilog.partition("Example:")[2].strip()
            click.echo(f"Example: {example}", err=True)
        return Exit.USAGE
    if isinstance(error, click.ClickException):
        return _said(error.format_message(), Exit.ERROR)
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return _said("interrupted", Exit.INTERRUPTED)
    if isinstance(error, StepNotFoundError):
        return _said(str(error), Exit.NOT_FOUND)
    if isinstance(error, CorruptCheckpointError):
        return _said(f"corrupt: {error}", Exit.CORRUPT)
    if isinstance(error, TreeMismatchError):
        return _said(error, Exit.TREE_MISMATCH)
    if isinstance(error, MemoryBudgetError):
        return _said(error, Exit.USAGE)
    if isinstance(error, RecursionError):
        return _said("corrupt: a JSON item is nested too deeply to be read", Exit.CORRUPT)
    if isinstance(error, CheckpointError):
        return _said(error, Exit.ERROR)
    if isinstance(error, FileNotFoundError) and error.errno is None:  # ours: a whole sentence
        return _said(str(error), Exit.NOT_FOUND)
    if isinstance(error, OSError):
        return _said(store_error(error, error.filename or "input or output"), Exit.ERROR)
    _log.debug("internal error", exc_info=error)
    return _said(f"{internal_error(error)}; `ckptkit --debug ...` shows where", Exit.ERROR)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps the libraries' loggers off stderr for one command; their errors reach us as exceptions."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def exit_with(problems: Sequence[str], failed: Sequence[str] = (), unread: Sequence[str] = ()) -> Exit:
    """Everything readable was printed. Damage is reported on stderr, and by the exit code. `failed`: what could not be
    looked at because of an error of ckptkit's own. `unread`: what no part of ckptkit reads, which may be good."""
    sys.stdout.flush()
    for problem in problems:
        click.echo(f"ckptkit: damaged: {printable(problem)}", err=True)
    for each in failed:
        click.echo(f"ckptkit: {printable(each)}", err=True)
    for each in unread:
        click.echo(f"ckptkit: not read: {printable(each)}", err=True)
    return Exit.CORRUPT if problems else Exit.ERROR if failed else Exit.NOT_READ if unread else Exit.OK


def _said(message: str | CheckpointError, code: Exit) -> Exit:
    """Errors that list what is wrong have a line for each, and have escaped the names in it."""
    lines = str(message).split("\n") if isinstance(message, CheckpointError) and message.has_lines else [str(message)]
    click.echo("\n".join(["ckptkit: " + printable(lines[0]), *map(printable, lines[1:])]), err=True)
    return code
