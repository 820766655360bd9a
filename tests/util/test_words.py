"""Commands in messages: what is copied from one into a shell is what was meant."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click

import ckptkit
from ckptkit.cli.command import commands
from ckptkit.util.words import command_line, repair_command

PACKAGE = Path(ckptkit.__file__).parent
NAMES = "|".join(commands.list_commands(click.Context(commands)))
OPEN_COMMAND = re.compile(rf"(`|^)ckptkit ({NAMES}) [^`]*$")  # the text before a value in a command
PERCENT_COMMAND = re.compile(r"`ckptkit [a-z][^`]*%s")


def test_words_of_a_command_are_quoted_for_a_shell() -> None:
    """`ckptkit tiers clean /mnt/my run` would clean two other directories."""
    assert shlex.split(command_line("steps", "/mnt/my run", 5)) == ["ckptkit", "steps", "/mnt/my run", "5"]
    assert command_line("steps", "gs://bucket/run") == "ckptkit steps gs://bucket/run"
    said = repair_command("/a b", [Path("/ram"), "/it's"], ["h;0"])
    assert said == """ckptkit scrub '/a b' --tier /ram --tier '/it'"'"'s' --host-id 'h;0' --repair"""


def test_no_message_puts_a_value_into_a_command_unquoted() -> None:
    """The next message with a command would forget it."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                before = ""
                for part in node.values:
                    if isinstance(part, ast.FormattedValue):
                        found += [f"{path}:{node.lineno}"] if OPEN_COMMAND.search(before) else []
                        before += "X"
                    elif isinstance(part, ast.Constant):
                        before += str(part.value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{path}:{node.lineno}"] if PERCENT_COMMAND.search(node.value) else []
    assert not found, "use command_line: " + ", ".join(found)
