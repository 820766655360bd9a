"""The `ckptkit` command: a thin layer over the library's functions. Exit codes and shapes are in docs/CLI.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ckptkit.cli.interrupts import Interrupts

_INTERRUPTED = 130  # `Exit.INTERRUPTED`, of a command that was ended while it was imported


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (default: the process's own) and returns its exit code. Never raises."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the command (`>&-`): its number is taken before a file's
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the process ends
    try:
        with Interrupts() as interrupts:
            from ckptkit.cli.command import run

            return run(arguments, interrupts)
    except KeyboardInterrupt:  # while modules are imported, or after the command has ended
        sys.stderr.write("ckptkit: interrupted\n")
        return _INTERRUPTED
