"""The site: every page is in it, every public name in its reference."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ckptkit
from ckptkit import errors
from tools.api_docs import PAGE, rewritten

ROOT = Path(__file__).parents[2]
CELL_WORDS_MAX = 20


def test_every_public_name_is_in_the_reference() -> None:
    """A new name would be documented nowhere."""
    told = set(re.findall(r"ckptkit\.(\w+)", (ROOT / "docs" / "api.md").read_text()))
    source = (ROOT / "ckptkit" / "__init__.py").read_text()
    public = set(re.findall(r"import (\w+) as \1$", source, re.MULTILINE))
    assert len(public) > 40
    assert public <= told, sorted(public - told)
    gone = [name for name in told if not hasattr(ckptkit, name) and find_spec(f"ckptkit.{name}") is None]
    assert not gone, "names that no longer exist"  # a package is an attribute only after its import


def test_every_error_on_the_page_of_errors_is_in_the_reference() -> None:
    """A person with an error would look for its class in vain."""
    public = {
        name for name, found in vars(errors).items() if isinstance(found, type) and found.__module__ == errors.__name__
    }
    told = set(re.findall(r"`(\w+Error)`", (ROOT / "docs" / "ERRORS.md").read_text())) & public
    assert len(told) > 20
    reference = (ROOT / "docs" / "api.md").read_text()
    assert not {name for name in told if not re.search(rf"^::: ckptkit\.\S*{name}$", reference, re.MULTILINE)}


def test_tables_of_the_reference_are_those_of_the_docstrings() -> None:
    """Without the site the page would have no words about a name, or old ones: run `make pages`."""
    page = PAGE.read_text()
    assert rewritten(page) == page
    table = page.split("<!-- names -->")[1].split("<!-- /names -->")[0]
    assert table.count("\n| `") > 100
    assert "| `ckptkit.Tier` | A fast tier of this host |" in table
    assert rewritten(page.replace("A fast tier of this host", "Old words")) == page


def test_every_page_is_in_the_site_menu() -> None:
    """Nobody would find a page that is not there."""
    menu = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"[\w-]+\.md", menu))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as links on GitHub and in the site have them after `#`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_to_a_file_and_a_heading() -> None:
    """A reader would be led to the top of a long page, or to nothing."""
    found = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")]:
        for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)
            found += 1
    assert found > 50


def test_every_symptom_tells_what_is_seen_and_what_survives() -> None:
    """Somebody whose job has just died would not know whether this is the section, or what is left."""
    symptoms = (ROOT / "docs" / "FAULTS.md").read_text().split("\n## What a dead run leaves\n")[0].split("\n## ")[1:]
    assert len(symptoms) > 10
    for section in symptoms:
        assert "*You see:*" in section, section.splitlines()[0]
        assert "*What survives:*" in section, section.splitlines()[0]


def test_cells_of_tables_are_short() -> None:
    """A sentence of 25 words in a narrow column is read twice."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
        long = [cell.strip() for row in rows for cell in row.split("|") if len(cell.split()) > CELL_WORDS_MAX]
        assert not long, (page.name, long)


def test_tables_have_no_gap() -> None:
    """The rows below a blank line would be shown as text with pipes."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]:
        lines = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
        lost = [lines[i] for i in starts if not lines[i + 1].startswith(("|--", "|:-"))]
        assert not lost, (page.name, lost)


@pytest.mark.long
def test_site_builds_with_docstrings(tmp_path: Path) -> None:
    """`make docs` would fail, or give an empty reference."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "site" / "api.html").read_text()
    assert "Returns once the caller may donate" in text
    assert text.count('class="doc doc-heading"') > 100
