"""The command and what it can do: flags to arguments, a library function, its records to text or JSON."""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import ckptkit
from ckptkit.cli.exits import Exit, exit_of, quiet_libraries
from ckptkit.cli.interrupts import Interrupts
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError

# Each command: its section and its line in `ckptkit --help`, in that order, and its module, where it is a function of
# the same name. A module is imported when its command is called: most need JAX and Orbax, 1.6 s of processor time, and
# `--help` needs neither.
_ALL = {
    "run": ("Run", "launch.run_command", "Run a job, and restart it at once when a process is lost."),
    "chaos": ("Run", "launch.chaos_command", "Run a job under faults, and report what they cost."),
    "goodput": ("Run", "cli.goodput", "Account for the time of a run."),
    "steps": ("Look", "cli.steps", "List the steps of a root and of its tiers."),
    "inspect": ("Look", "cli.inspect", "Show what a checkpoint is and what it holds."),
    "verify": ("Look", "cli.verify", "Compare every byte of a save with its checksum."),
    "plan-restore": ("Look", "cli.plan_restore", "Show which save a restart would read, and from where."),
    "doctor": ("Look", "diagnosis.doctor_command", "Report what is slow, at risk or wasteful about a run."),
    "du": ("Look", "cli.du", "Report the bytes of a root by step, item and kind."),
    "scrub": ("Repair and maintain", "cli.verify", "Verify every copy of every save; repair on request."),
    "rollback": ("Repair and maintain", "cli.upkeep", "Make restarts continue from an older step."),
    "prune": ("Repair and maintain", "cli.upkeep", "Delete the steps that no rule keeps."),
    "pin": ("Repair and maintain", "cli.upkeep", "Protect a step from deletion."),
    "unpin": ("Repair and maintain", "cli.upkeep", "Remove the pin of a step."),
    "copy": ("Repair and maintain", "cli.upkeep", "Copy steps to another root."),
    "tiers": ("Repair and maintain", "cli.tiers", "List or free the slots of fast tiers."),
    "sign": ("Repair and maintain", "cli.upkeep", "Sign a step, so that a restore can refuse any other."),
    "convert": ("Convert", "cli.convert", "Write a checkpoint in another format."),
    "diff": ("Convert", "cli.diff", "Compare two checkpoints."),
    "reshard": ("Convert", "cli.reshard", "Rewrite an Orbax checkpoint for other meshes."),
    "extract": ("Convert", "cli.convert", "Write parts of a checkpoint."),
    "merge": ("Convert", "cli.convert", "Combine checkpoints: parts, averages, LoRA weights."),
    "simulate": ("Plan", "diagnosis.simulation.command", "Estimate goodput under failures and save policies."),
    "explain": ("Plan", "diagnosis.tune_command", "Forecast what a durable save costs."),
    "tune": ("Plan", "diagnosis.tune_command", "Measure a durable root and propose a profile."),
    "certify": ("Plan", "guard.certify_command", "Replay steps, and compare the saves with the replay."),
}

_ALIASES = {"ls": "steps"}
_HERE = Path(ckptkit.__file__).parent
# Without those of optional packages that are not installed.
_COMMANDS = {name: row for name, row in _ALL.items() if _HERE.joinpath(*row[1].split(".")).with_suffix(".py").is_file()}


# The example at the end of each command's help. A test runs all of them.
_EXAMPLES = {
    "certify": "certify run --replay train:replay",
    "chaos": "chaos --faults 4 --kind kill:3 --kind preempt:1 --dry-run -- python train.py",
    "convert": "convert run/200 model.safetensors --to safetensors",
    "copy": "copy run/200 kept",
    "diff": "diff run/100 run/200 --rtol 1e-3",
    "doctor": "doctor run --events run/events",
    "du": "du run --tier /dev/shm/ckpt",
    "explain": "explain other --like run/200",
    "extract": "extract run/200 params.safetensors --only params --to safetensors",
    "goodput": "goodput run/events",
    "inspect": "inspect run --sort bytes",
    "merge": "merge encoder.npz head.npz model.npz --to npz",
    "pin": "pin run 100",
    "plan-restore": "plan-restore run",
    "prune": "prune run --keep newest=2 --keep every=1000 --dry-run",
    "reshard": "reshard run/200 new/200 --mesh data=2,model=4",
    "rollback": "rollback run --to 100 --dry-run",
    "run": "run --processes 2 -- python train.py",
    "scrub": "scrub run --tier /dev/shm/ckpt --repair",
    "sign": "sign run/200 --key private.pem",
    "simulate": "simulate --preset spot --hosts 64 --days 2 --runs 20",
    "steps": "steps run",
    "tiers clean": "tiers clean /dev/shm/ckpt --idle 7d --dry-run",
    "tiers list": "tiers list /dev/shm/ckpt",
    "tune": "tune other --like run/200 --probe 1MB --rounds 1",
    "unpin": "unpin run 100",
    "verify": "verify run",
}


class _Commands(click.Group):
    """The group. It imports a command when that is called or its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"ckptkit.{_COMMANDS[cmd_name][1]}")
        if not gc.get_freeze_count():
            gc.freeze()  # modules stay: the collector would look at them for a quarter of the time
        found: click.Command = getattr(module, cmd_name.replace("-", "_"))
        _refuse_empty_paths(found)
        _add_examples(found, cmd_name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names at once: click would import every command at each Tab."""
        items = [
            CompletionItem(name, help=line) for name, (_, _, line) in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = _ALIASES.get(args[0], str(args[0]))
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, _COMMANDS, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        width = max(map(len, _COMMANDS))  # one column for all sections
        for section, rows in groupby(_COMMANDS.items(), key=lambda row: row[1][0]):
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, (_, _, line) in rows])


_PATH_METAVARS = frozenset({"PATH", "ROOT", "FILE", "CHECKPOINT", "RUN_DIR"})


def _refuse_empty_paths(command: click.Command) -> None:
    """Makes an empty path a usage error: an unset variable of a shell would name the current directory."""
    for each in getattr(command, "commands", {}).values():
        _refuse_empty_paths(each)
    for parameter in command.params:
        is_path = isinstance(parameter, click.Argument) and parameter.type is not click.UNPROCESSED
        if is_path or parameter.metavar in _PATH_METAVARS:
            parameter.callback = _not_empty


def _add_examples(command: click.Command, name: str) -> None:
    for below, each in getattr(command, "commands", {}).items():
        _add_examples(each, f"{name} {below}")
    if name in _EXAMPLES:
        command.epilog = f"\b\nExample:\n  ckptkit {_EXAMPLES[name]}"


def _not_empty(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("it is empty; write . for the current directory", ctx, parameter)
    return value


def run(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    """The command's exit code; what ended it is on stderr. Raises nothing but a `KeyboardInterrupt` at its end."""
    try:
        with quiet_libraries():
            code = commands.main(
                None if arguments is None else list(arguments),
                prog_name="ckptkit",
                standalone_mode=False,
                obj=interrupts,
            )
        return int(code or Exit.OK)
    except BrokenPipeError:  # `ckptkit ... | head`: what reads us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.ERROR
    except SystemExit as end:  # rich's own answer to a broken pipe
        return int(end.code or Exit.OK)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the top of a process: one message, never a traceback
        return exit_of(_as_interrupt(error) if interrupts.seen else _unless_deleted(error))


def _unless_deleted(error: BaseException) -> BaseException:
    """The error; in place of damage in a step that is being deleted, or was deleted while it was read, that fact."""
    if not isinstance(error, CorruptCheckpointError) or not error.path:
        return error
    from ckptkit.inspection.roots import deleted_step

    with suppress(CheckpointError, OSError):
        if (step := deleted_step(error.path)) is not None:
            return StepNotFoundError(f"{step} was deleted while it was read; name another step", path=step)
    return error


def _as_interrupt(error: BaseException) -> BaseException:
    """A module whose import was interrupted raises an error of its own."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return error
    interrupt = KeyboardInterrupt()
    for note in getattr(error, "__notes__", ()):
        interrupt.add_note(note)
    return interrupt


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ckptkit.__version__, message="ckptkit %(version)s")
@click.option("--debug", is_flag=True, help="Show the log of ckptkit, and tracebacks, on stderr.")
def commands(debug: bool) -> None:
    """Start here: `ckptkit steps ROOT` lists the checkpoints of a run.

    No command needs an accelerator. The help of each one ends with an example.
    """
    if debug:
        ckptkit.log_to("DEBUG")
