"""CHANGELOG.md: a reader finds what to change before an upgrade."""

from __future__ import annotations

import re
from pathlib import Path

SECTIONS = ["You must change", "Removed", "New", "Faster", "Fixed"]
BULLETS_MAX = 70


def test_newest_version_is_grouped_by_what_it_means_for_users() -> None:
    """Somebody who upgrades would read 161 bullets to find the five that break a script."""
    page = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    newest = page.split("\n## ")[1]
    sections = dict(re.findall(r"^### (.+)\n((?:(?!### ).*\n?)+)", newest, re.MULTILINE))
    assert list(sections) == [name for name in SECTIONS if name in sections]
    bullets = [len(re.findall(r"^- ", text, re.MULTILINE)) for text in sections.values()]
    assert all(bullets)
    assert sum(bullets) == len(re.findall(r"^- ", newest, re.MULTILINE)) <= BULLETS_MAX, "a bullet outside a section"
