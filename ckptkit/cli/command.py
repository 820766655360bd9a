"""The command and what it can do: flags to arguments, a library function, its records to text or JSON."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from ckptkit.cli.exits import Exit, exit_of, quiet_libraries

# Where each command stands: the module, which has it under its own name. Imported when it is called, because most of
# them need JAX and Orbax, 1.6 s of processor time, and `inspect` needs neither.
_HOMES = {
    "assemble": ("extract", "merge"),
    "convert": ("convert",),
    "copy": ("copy",),
    "diff": ("diff",),
    "doctor": ("doctor",),
    "goodput": ("goodput",),
    "inspect": ("inspect",),
    "reshard": ("reshard",),
    "simulate": ("simulate",),
    "steps": ("plan-restore", "steps"),
    "tiers": ("tiers",),
    "tune": ("explain", "tune"),
    "upkeep": ("du", "pin", "prune", "rollback", "unpin"),
    "verify": ("scrub", "verify"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


class _Commands(click.Group):
    """The group, which imports a command when it is called or its help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(_HOME_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _HOME_OF:
            return None
        module = importlib.import_module(f"ckptkit.cli.{_HOME_OF[cmd_name]}")
        return getattr(module, cmd_name.replace("-", "_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (default: the process's own) and returns its exit code. Never raises."""
    try:
        with quiet_libraries():
            code = commands.main(
                None if arguments is None else list(arguments), prog_name="ckptkit", standalone_mode=False
            )
        return int(code or Exit.OK)
    except BrokenPipeError:  # `ckptkit ... | head`: what reads us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.ERROR
    except SystemExit as end:  # rich's own answer to a broken pipe
        return int(end.code or Exit.OK)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the top of a process: one message, never a traceback
        return exit_of(error)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckptkit", message="%(package)s %(version)s")
def commands() -> None:
    """Look at checkpoints, prove them, mend them, keep them in order. Needs no accelerator."""
