"""The story of docs/TUTORIAL.md runs as it is written, and its pictures show it."""

from __future__ import annotations

import html
import json
import re
import tempfile
from pathlib import Path

import pytest

from ckptkit.formats import open_checkpoint
from tools.tutorial import PAGE, chapters, play


def test_every_command_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's first twenty minutes would end at an error."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the other tests: a laptop has one device
    text = PAGE.read_text().replace("rm -r ", "ls -d ")  # what was published is read below
    with tempfile.TemporaryDirectory(prefix="ckptkit-story-", dir="/dev/shm") as ramdisk:
        places = {"runs/story": f"{tmp_path}/story", "/dev/shm/story": f"{ramdisk}/story"}
        out = "\n".join(output for _, told in play(text, places) for _, output in told)
    for expected in (
        "chaos: killed process 0",
        "the job ended well",
        "1 save, 0 proven, 1 corrupt",
        "6 copies, 1 damaged",
        "repaired",
        "1 save, 1 proven, 0 corrupt",
        "mesh data=1,fsdp=1,model=1 on 1 processes",
        "from step 400 to 440",
        "21 leaves are the same, 0 differ",
    ):
        assert expected in out, (expected, out)
    published = tmp_path / "story" / "llama"
    config = json.loads((published / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 128, 2)
    with open_checkpoint(str(published)) as opened:
        names = set(opened.by_name())
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"} <= names


def test_pictures_show_the_commands_of_the_page() -> None:
    """The page would show another story than it tells, or ask a stranger for fonts: run `make docs-session`."""
    pictured = [chapter for chapter in chapters(PAGE.read_text()) if chapter.picture]
    assert len(pictured) == 5
    for chapter in pictured:
        assert chapter.picture
        svg = html.unescape((PAGE.parent / chapter.picture).read_text()).replace("\xa0", " ")
        shown = re.sub(r"<[^>]+>|\s", "", svg)
        for command, _ in chapter.commands:
            assert re.sub(r"\s", "", command) in shown, command
        assert not re.search(r"https?://(?!www\.w3\.org|www\.textualize\.io)", svg)
