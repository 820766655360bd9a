"""`ckptkit --help` answers at once: it lists every command, whole, and imports none of them."""

from __future__ import annotations

import subprocess
import sys

import click

from ckptkit.cli.command import commands

_HELP = """
import re, sys
from ckptkit.cli import main
assert main(["--help"]) == 0
heavy = {"jax", "tensorstore", "orbax.checkpoint", "gcsfs", "ckptkit.manager", "ckptkit.conversion"}
peak_kb = int(re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1])  # since exec; ru_maxrss is not
sys.stderr.write(f"{sorted(heavy & set(sys.modules))} {peak_kb >> 10}")
"""
MEMORY_MB_MAX = 80


def test_help_imports_no_library_and_takes_little_memory() -> None:
    """Two seconds and 226 MB, before somebody sees what the command can do."""
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, timeout=120)
    imported, _, memory_mb = done.stderr.rpartition(" ")
    assert imported == "[]"
    assert int(memory_mb) < MEMORY_MB_MAX


def test_help_lists_every_command_on_an_uncut_line() -> None:
    """A command that is not listed is not found, and a truncated line does not describe it."""
    context = click.Context(commands, terminal_width=80)
    listed = commands.get_help(context).split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == commands.list_commands(context)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_listed_commands_are_those_of_their_modules() -> None:
    """A command that is listed and cannot be imported would end with a traceback."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
