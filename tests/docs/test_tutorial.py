"""The story of docs/TUTORIAL.md runs as it is written, and its pictures show it."""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptkit.formats import open_checkpoint
from tools.tutorial import PAGE, chapters, play

TITLES = [chapter.title for chapter in chapters(PAGE.read_text())]
_FIGURE = re.compile(r"(?:\b|(?<=-)|(?<=@))\d[\d.,]*\s?(?:ms|s|steps?|tokens/s)?(?![\w])|\b[0-9a-f]{12,}\b")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_COUNTED = re.compile(r"steps? # to #|step #")


def without_figures(line: str) -> str:
    """A line in which every number, time, hash and space is the same in each run."""
    line = _COLOUR.sub("", line).removesuffix("...").replace("/ckptkit/runs", "runs")
    return re.sub(r"\s+", " ", _COUNTED.sub("step #", _FIGURE.sub("#", line))).strip()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Callable[[str], str]]]:
    """The home of the story, and the function that runs it up to a chapter and returns what that printed."""
    home, told = tmp_path_factory.mktemp("tutorial"), dict[str, str]()
    with (
        tempfile.TemporaryDirectory(prefix="ckptkit-story-", dir="/dev/shm") as ramdisk,
        pytest.MonkeyPatch.context() as at,
    ):
        at.delenv("XLA_FLAGS", raising=False)  # of the other tests: a laptop has one device
        places = {"runs/story": f"{home}/story", "/dev/shm/story": f"{ramdisk}/story"}
        playing = play(PAGE.read_text(), places, columns=400)  # its paths are longer than those of the page

        def until(title: str) -> str:
            while title not in told:
                chapter, printed = next(playing)
                told[chapter.title] = "\n".join(output for _, output in printed)
            return told[title]

        yield home / "story", until


@pytest.mark.long
@pytest.mark.parametrize("title", TITLES)
def test_every_command_of_the_tutorial_runs(story: tuple[Path, Callable[[str], str]], title: str) -> None:
    """A newcomer's first twenty minutes would end at an error."""
    home, until = story
    out = "\n".join(map(without_figures, until(title).splitlines()))
    (chapter,) = (each for each in chapters(PAGE.read_text()) if each.title == title)
    missing = [line for line in map(without_figures, chapter.output) if line not in out]
    assert not missing, f"lines of the page that the commands do not print: {missing}\n{out}"
    if title == "Publish the weights":
        config = json.loads((home / "llama" / "config.json").read_text())
        assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 128, 2)
        with open_checkpoint(str(home / "llama")) as opened:
            names = set(opened.by_name())
        assert {"model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"} <= names
    assert home.exists() == (title != "Clean up")


def test_pictures_show_the_commands_of_the_page() -> None:
    """The page would tell another story than its pictures, or fetch fonts: run `make campaign NAME=pictures`."""
    pictured = [chapter for chapter in chapters(PAGE.read_text()) if chapter.picture]
    assert len(pictured) == 5
    assert all(chapter.output for chapter in pictured)
    for chapter in pictured:
        svg = html.unescape((PAGE.parent / str(chapter.picture)).read_text()).replace("\xa0", " ")
        shown = re.sub(r"<[^>]+>|\s", "", svg)
        for text in (*(command for command, _ in chapter.commands), *chapter.output):
            assert re.sub(r"\s", "", text.removesuffix("...")) in shown, text
        assert not re.search(r"https?://(?!www\.w3\.org|www\.textualize\.io)", svg)
