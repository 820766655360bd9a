"""Commands start at once: `ckptkit --help` imports none of them, and those that read metadata only what they need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
from click.testing import CliRunner

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


_METADATA = """
import contextlib, io, json, sys
from ckptkit.cli import main
heavy = ("jax", "orbax", "etils", "tensorstore", "fsspec", "aiohttp", "asyncio", "matplotlib")
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    print(json.dumps([command[0], code, [name for name in heavy if name in sys.modules]]))
"""
GOLDEN = Path(__file__).parents[1] / "golden" / "0.2.0"


def test_commands_of_metadata_import_no_library_that_they_do_not_need() -> None:
    """`steps`, `du` and `tiers` took 2 to 3 s of processor time to start, for libraries that they never called."""
    root, ram = str(GOLDEN / "root"), str(GOLDEN / "ram")
    light = [["steps", root, "--tier", ram, "--host-id", "host-0"], ["tiers", "list", ram], ["du", root]]
    some = [["inspect", root], ["plan-restore", root]]  # TensorStore reads arrays
    done = subprocess.run(
        [sys.executable, "-c", _METADATA, json.dumps([*light, *some])], capture_output=True, text=True, timeout=120
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each[:2] for each in found] == [[command[0], 0] for command in [*light, *some]], done.stderr
    for command, _, imported in found[: len(light)]:
        assert not imported, command
    for command, _, imported in found[len(light) :]:
        assert not {"jax", "orbax"} & set(imported), command


def test_help_lists_every_command_once_by_task_on_an_uncut_line() -> None:
    """Somebody with a task would read 26 lines in the order of the alphabet, or not find a command at all."""
    shown = commands.get_help(click.Context(commands, terminal_width=80))
    assert shown.index("Start here: `ckptkit steps ROOT`") < shown.index("Options:")
    assert "\nRepair and maintain:\n" in CliRunner().invoke(commands, []).output, "the command alone"
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .+\n?)+)", shown, re.MULTILINE))
    assert list(sections) == ["Options", "Run", "Look", "Repair and maintain", "Convert", "Plan"]
    listed = [line for title, lines in sections.items() if title != "Options" for line in lines.splitlines()]
    assert [line.split()[0] for line in listed] == commands.list_commands(click.Context(commands))
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_listed_commands_are_those_of_their_modules() -> None:
    """A command that is listed and cannot be imported would end with a traceback."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
