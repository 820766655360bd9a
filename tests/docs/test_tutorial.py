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

# Facts that the text of each chapter claims.
FACTS = {
    "Train, and lose a process": ["chaos: killed process 0", "the job ended well"],
    "Look at what was saved": ["durable", "/dev/shm/story", "1 loss", "mesh: data=1,fsdp=2,model=1"],
    "Damage a file, and repair it": ["0 proven, 1 corrupt", "6 copies, 1 damaged", "repaired", "1 proven, 0 corrupt"],
    "Move to another mesh": ["mesh data=1,fsdp=1,model=1 on 1 process,", "from step 400 to 440"],
    "Publish the weights": ["21 leaves are the same, 0 differ"],
    "Clean up": [],
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Callable[[str], str]]]:
    """The home of the story, and the function that runs it up to a chapter and returns what that printed."""
    home, told = tmp_path_factory.mktemp("tutorial"), dict[str, str]()
    with (
        tempfile.TemporaryDirectory(prefix="ckptkit-story-", dir="/dev/shm") as ramdisk,
        pytest.MonkeyPatch.context() as at,
    ):
        at.delenv("XLA_FLAGS", raising=False)  # of the other tests: a laptop has one device
        playing = play(PAGE.read_text(), {"runs/story": f"{home}/story", "/dev/shm/story": f"{ramdisk}/story"})

        def until(title: str) -> str:
            while title not in told:
                chapter, printed = next(playing)
                told[chapter.title] = "\n".join(output for _, output in printed)
            return told[title]

        yield home / "story", until


@pytest.mark.long
@pytest.mark.parametrize("title", FACTS)
def test_every_command_of_the_tutorial_runs(story: tuple[Path, Callable[[str], str]], title: str) -> None:
    """A newcomer's first twenty minutes would end at an error."""
    home, until = story
    out = until(title)
    for expected in FACTS[title]:
        assert expected in out
    if title == "Publish the weights":
        config = json.loads((home / "llama" / "config.json").read_text())
        assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 128, 2)
        with open_checkpoint(str(home / "llama")) as opened:
            names = set(opened.by_name())
        assert {"model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"} <= names
    assert home.exists() == (title != "Clean up")


def test_every_chapter_is_run() -> None:
    """A new chapter would be the one whose commands fail."""
    assert [chapter.title for chapter in chapters(PAGE.read_text())] == list(FACTS)


def test_pictures_show_the_commands_of_the_page() -> None:
    """The page would show another story than it tells, or fetch fonts: run `make campaign NAME=pictures`."""
    pictured = [chapter for chapter in chapters(PAGE.read_text()) if chapter.picture]
    assert len(pictured) == 5
    for chapter in pictured:
        svg = html.unescape((PAGE.parent / str(chapter.picture)).read_text()).replace("\xa0", " ")
        shown = re.sub(r"<[^>]+>|\s", "", svg)
        for command, _ in chapter.commands:
            assert re.sub(r"\s", "", command) in shown, command
        assert not re.search(r"https?://(?!www\.w3\.org|www\.textualize\.io)", svg)
