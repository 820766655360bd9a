"""Messages of the whole package: commands that a person copies from one, and counts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

import ckptkit
from ckptkit.cli.command import commands

PACKAGE = Path(ckptkit.__file__).parent
NAMES = "|".join(commands.list_commands(click.Context(commands)))
OPEN_COMMAND = re.compile(rf"(`|^)ckptkit ({NAMES}) [^`]*$")  # the text before a value in a command
PERCENT_COMMAND = re.compile(r"`ckptkit [a-z][^`]*%s")
AD_HOC_PLURAL = re.compile(r"""['"](?:e?s)['"] \* |(?:''|"") if [^"']* == 1 else ['"]e?s['"]|else ['"]e?s['"]""")


Parsed = list[tuple[Path, list[ast.AST]]]


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    """Every module, parsed once for all tests of this file."""
    return [(path, list(ast.walk(ast.parse(path.read_text())))) for path in PACKAGE.rglob("*.py")]


def test_commands_in_messages_have_what_they_need(parsed: Parsed) -> None:
    """A person who copies one would be told of a missing option."""
    context, found, wrong = click.Context(commands), 0, []
    for path, nodes in parsed:
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line" and node.args:
                words = [str(word.value) if isinstance(word, ast.Constant) else "X" for word in node.args]
                if not isinstance(node.args[0], ast.Constant) or any(
                    isinstance(each, ast.Starred) for each in node.args
                ):
                    continue
                found += 1
                name, command, rest = commands.resolve_command(context, words)
                assert command is not None, words
                for option in command.params:
                    given = isinstance(option, click.Argument) or not set(option.opts).isdisjoint(rest)
                    wrong += [f"{path}:{node.lineno} {option.opts}"] if option.required and not given else []
                missing = [each for each in command.params if isinstance(each, click.Argument) and each.required]
                wrong += [f"{path}:{node.lineno} {name}"] if missing and "X" not in rest and not rest else []
    assert found > 8
    assert not wrong, ", ".join(wrong)


def test_no_message_puts_a_value_into_a_command_unquoted(parsed: Parsed) -> None:
    """The next message with a command would forget it."""
    found = []
    for path, nodes in parsed:
        for node in nodes:
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


def test_counts_are_written_by_one_function() -> None:
    """The next message would have "1 steps" or "step(s)"."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if AD_HOC_PLURAL.search(line)
    ]
    assert not found, "count_text of ckptkit.util.words"
    assert all(map(AD_HOC_PLURAL.search, ("'s' * (n > 1)", "'' if n == 1 else 's'", '"es" * many')))
