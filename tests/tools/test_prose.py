"""The check of phrases in pages, docstrings and comments: `python -m tools.prose`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose


def found(tmp_path: Path, name: str, text: str) -> list[prose.Finding]:
    path = tmp_path / name
    path.write_text(text)
    return list(prose.findings(path, name))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Process 0 hears the others.", "receives"),
        ("The file is no directory.", "is not a"),
        ("The slot stands beside it.", "next to"),
        ("Done. Whoever comes later waits.", "name the subject"),
        ("What the reader returns.", "name the thing"),
        ("The newest step that proves whole.", "verifies completely"),
        (" ".join(["word"] * (prose.SENTENCE_WORDS_MAX + 1)), "two sentences"),
        (f"| {' '.join(['word'] * (prose.CELL_WORDS_MAX + 1))} |", "two sentences"),
    ],
)
def test_phrase_is_found_with_advice(text: str, advice: str, tmp_path: Path) -> None:
    """A page would come back to phrases that newcomers read twice."""
    assert advice in " ".join(each.advice for each in found(tmp_path, "page.md", f"{text}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "What does it cost? A copy.",
        "The step is no longer there.",
        "```\nprocess 0 said so\n```",
        "Call `said` with the step.",
        "Every process receives the verdict.",
    ],
)
def test_plain_text_and_code_are_not_findings(text: str, tmp_path: Path) -> None:
    """The lint would refuse questions, code and names."""
    assert found(tmp_path, "page.md", f"{text}\n") == []


def test_docstrings_comments_and_messages_are_read_with_their_lines(tmp_path: Path) -> None:
    """A finding would be reported far from its place, or an error message not at all."""
    source = '"""A module."""\n\n# What it is.\nraise ValueError("this is no list of names")\n'
    assert [(each.line, each.excerpt[:8]) for each in found(tmp_path, "module.py", source)] == [
        (3, "What it "),
        (4, "this is "),
    ]


def test_sentence_over_several_lines_is_one_sentence(tmp_path: Path) -> None:
    """A long sentence would pass if it is wrapped."""
    lines = "\n".join(["six words are in this line"] * 7)
    assert [each.advice for each in found(tmp_path, "page.md", f"{lines}\n")] == ["make two sentences, or a list"]


def test_allowed_finding_is_silent_and_unused_row_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The allow list would hide new findings, or keep rows for text that was edited long ago."""
    (tmp_path / "README.md").write_text("Process 0 hears it.\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "PARTS", ("README.md",))
    monkeypatch.setattr(prose, "ALLOWED", tmp_path / "allowed.txt")
    (tmp_path / "allowed.txt").write_text("")
    assert prose.main([]) == 1
    assert capsys.readouterr().out.startswith("README.md:1: 'Process 0 hears it.': write: receives")
    assert prose.main(["--allow"]) == 0
    assert prose.main([]) == 0
    (tmp_path / "README.md").write_text("Process 0 receives it.\n")
    assert prose.main([]) == 1
    assert "nothing matches it" in capsys.readouterr().out
