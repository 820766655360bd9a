"""Commands in messages: what is copied from one into a shell is what was meant."""

from __future__ import annotations

import ast
import re
import shlex
import socket
from pathlib import Path

import click

import ckptkit
from ckptkit.cli.command import commands
from ckptkit.util.words import command_line, count_text, on_each_host, repair_command

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


def test_host_is_named_only_where_a_command_would_take_another() -> None:
    """The same command on the next host would look for slots of the first."""
    here = repair_command("/run", ["/ram"], [socket.gethostname()])
    assert on_each_host(here) == "on each host: `ckptkit scrub /run --tier /ram --repair`"
    pod = repair_command("/run", ["/ram"], ["pod-3"])
    assert on_each_host(pod) == (
        "on each host, with its own --host-id: `ckptkit scrub /run --tier /ram --host-id pod-3 --repair`"
    )


def test_commands_in_messages_have_what_they_need() -> None:
    """A person who copies one would be told of a missing option."""
    context, found, wrong = click.Context(commands), 0, []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
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


AD_HOC_PLURAL = re.compile(r"""['"](?:e?s)['"] \* |(?:''|"") if [^"']* == 1 else ['"]e?s['"]|else ['"]e?s['"]""")


def test_counts_are_written_by_one_function() -> None:
    """One message would have "1 steps", and the next one "1 step(s)"."""
    assert (count_text(1, "leaf", "leaves"), count_text(2, "leaf", "leaves")) == ("1 leaf", "2 leaves")
    assert (count_text(0, "step"), count_text(1, "step"), count_text(1200, "step")) == (
        "0 steps",
        "1 step",
        "1,200 steps",
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if AD_HOC_PLURAL.search(line)
    ]
    assert not found, "count_text of ckptkit.util.words"
    assert all(map(AD_HOC_PLURAL.search, ("'s' * (n > 1)", "'' if n == 1 else 's'", '"es" * many')))
