"""One file for each change: the rule of changes/README.md, and the section that a release makes of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.changes import ROOT, ChangesError, change_files, join, read_change

BEFORE = "# Changelog\n\nThe rule.\n\n## 0.2.0 (2026-12-01)\n\n### New\n\n- Old.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("# The rule\n")
    (tmp_path / "CHANGELOG.md").write_text(BEFORE)
    return tmp_path


def test_files_become_one_section_by_kind(tree: Path) -> None:
    """A release would lose a change, or list it twice in the next one."""
    (tree / "changes" / "b-late.md").write_text("Fixed\nA restore\nended.\n")
    (tree / "changes" / "c-new.md").write_text("New\nA command.\n")
    (tree / "changes" / "a-fix.md").write_text("Fixed\nA save ended.\n")
    section = join(tree, "0.3.0", "2027-01-31")
    assert section == (
        "## 0.3.0 (2027-01-31)\n\n### New\n\n- A command.\n\n### Fixed\n\n- A save ended.\n- A restore ended.\n"
    )
    page = (tree / "CHANGELOG.md").read_text()
    assert page == BEFORE.replace("\n## 0.2.0", f"\n{section}\n## 0.2.0")
    assert [path.name for path in (tree / "changes").iterdir()] == ["README.md"]


def test_first_release_gives_its_section_the_day_and_takes_what_came_later(tree: Path) -> None:
    """The first release was refused: the page had its section already."""
    begun = (
        "# Changelog\n\nThe rule.\n\n## 0.2.0 (unreleased)\n\nFirst.\n\n### New\n\n- Old.\n\n### Files\n\nFormat 3.\n"
    )
    (tree / "CHANGELOG.md").write_text(begun + "\n## 0.1.0\n\nInternal.\n")
    section = join(tree, "0.2.0", "2026-12-01")
    assert section.startswith("## 0.2.0 (2026-12-01)\n\nFirst.\n\n### New\n\n- Old.\n")
    assert (tree / "CHANGELOG.md").read_text() == begun.replace(
        "unreleased", "2026-12-01"
    ) + "\n## 0.1.0\n\nInternal.\n"
    (tree / "CHANGELOG.md").write_text(begun)
    (tree / "changes" / "x.md").write_text("New\nA command.\n")
    (tree / "changes" / "y.md").write_text("Fixed\nA save ended.\n")
    assert "- Old.\n- A command.\n\n### Fixed\n\n- A save ended.\n\n### Files\n" in join(tree, "0.2.0", "2026-12-01")


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        ("Better\nA command.\n", "0.3.0", "the first line is 'Better'"),
        ("New\n", "0.3.0", "0 words below the first line"),
        ("New\n" + "word " * 61, "0.3.0", "61 words below the first line"),
        ("New\nA command.\n", "0.2.0", "has a section 0.2.0 already"),
        (None, "0.3.0", "has no file to join"),
    ],
)
def test_what_cannot_be_joined_changes_no_file(tree: Path, text: str | None, version: str, reason: str) -> None:
    """Half of the changes would be in the page, and their files gone."""
    if text is not None:
        (tree / "changes" / "x.md").write_text(text)
    with pytest.raises(ChangesError, match=reason):
        join(tree, version, "2027-01-31")
    assert (tree / "CHANGELOG.md").read_text() == BEFORE
    assert (text is None) == (not change_files(tree))


def test_files_of_this_tree_follow_the_rule() -> None:
    """The next release would be refused for a file that somebody else wrote months ago."""
    for path in change_files(ROOT):
        read_change(path)
