"""CHANGELOG.md: a reader finds what to change before an upgrade, on one page for each version."""

from __future__ import annotations

import re
from pathlib import Path

from tools.changes import KINDS

WORDS_MAX = 700


def test_newest_version_is_a_page_grouped_by_what_it_means_for_users() -> None:
    """Somebody who upgrades would read 161 bullets to find the five that break a script."""
    page = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    newest = page.split("\n## ")[1]
    sections = dict(re.findall(r"^### (.+)\n((?:(?!### ).*\n?)+)", newest, re.MULTILINE))
    named = [name for name in sections if name in KINDS]
    assert named == [name for name in KINDS if name in sections]
    assert "New" in sections
    assert len(newest.split()) <= WORDS_MAX
