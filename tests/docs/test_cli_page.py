"""docs/CLI.md has the help of the commands."""

from __future__ import annotations

import html
import re

import pytest

from ckptkit.cli.exits import Exit
from tools.cli_docs import PAGE, named_commands, rewritten
from tools.session import COMMANDS, SVG


def test_page_matches_the_current_help() -> None:
    """A flag that is on the page would be refused, or one that there is never be found: run `make pages`."""
    page = PAGE.read_text()
    assert rewritten(page) == page


def test_every_exit_code_is_on_the_page() -> None:
    """A script could not tell what ended a command."""
    rows = set(re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE))
    assert rows == {str(int(code)) for code in Exit}


def test_every_command_has_json_with_its_shape() -> None:
    """The fields that a script reads would not be documented."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    for name, command in named_commands():
        assert any(parameter.name == "as_json" for parameter in command.params), name
        (section,) = [each for each in sections if f"<!-- help: {name} -->" in each]
        assert "JSON:" in section or "`--json`" in section.split("<!-- /help -->")[-1] or "GOODPUT.md" in section, name
        assert "`format`" in section or "GOODPUT.md" in section, name


@pytest.mark.parametrize("page", ["", "<!-- help: nonsense -->\n<!-- /help -->"])
def test_command_without_a_block_is_refused(page: str) -> None:
    """A new command would not be documented, and nobody would see it."""
    with pytest.raises(ValueError, match="commands without a block"):
        rewritten(page)


def test_recorded_session_is_current_and_self_contained() -> None:
    """The README would show commands that no longer exist, or fetch fonts: run `make campaign NAME=pictures`."""
    svg = html.unescape(SVG.read_text()).replace("\xa0", " ")
    known = dict(named_commands())
    for command in COMMANDS:
        assert command.split()[1] in known
        assert command.removeprefix("ckptkit ") in svg
    assert "params.block0.attention" in svg
    assert not re.search(r"https?://(?!www\.w3\.org|www\.textualize\.io)", svg)
    assert "docs/session.svg" in (SVG.parents[1] / "README.md").read_text()
