"""The help of every command in docs/CLI.md, between its markers: `python -m tools.cli_docs` (`make pages`).

A command's section has a block from `<!-- help: NAME -->` to `<!-- /help -->`, which is written from the command's own
help; the rest of the page is kept. A test holds the page to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ckptkit.cli.command import commands

PAGE = Path(__file__).parents[1] / "docs" / "CLI.md"
_WIDTH = 100
_BLOCK = re.compile(r"<!-- help: (?P<name>[a-z -]+) -->\n.*?<!-- /help -->", re.DOTALL)


def named_commands(group: click.Group = commands, above: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with the words that call it, in order."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from named_commands(command, (*above, name))
        else:
            yield " ".join((*above, name)), command


def help_block(name: str, command: click.Command) -> str:
    """The block of one command, with its markers."""
    context = click.Context(
        command,
        info_name=f"ckptkit {name}",
        max_content_width=_WIDTH,
        terminal_width=_WIDTH,
        help_option_names=["-h", "--help"],  # as the group orders them; click caches the first that it made
    )
    text = command.get_help(context).removeprefix("Usage: ")
    return f"<!-- help: {name} -->\n```text\n{text}\n```\n<!-- /help -->"


def rewritten(page: str) -> str:
    """The page with the help of today. Raises ValueError for a command without a block, or a block without one."""
    known = dict(named_commands())
    found = [match["name"] for match in _BLOCK.finditer(page)]
    if sorted(found) != sorted(known):
        missing, extra = sorted(set(known) - set(found)), sorted(set(found) - set(known))
        raise ValueError(f"{PAGE.name}: commands without a block: {missing}; blocks without a command: {extra}")
    return _BLOCK.sub(lambda match: help_block(match["name"], known[match["name"]]), page)


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(rewritten(page))
    sys.exit(0)
