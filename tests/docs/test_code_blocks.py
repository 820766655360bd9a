"""The code in README.md and docs/ is run unchanged."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\nIt prints:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    """Page, code, and the output that the page shows: empty for any."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [(page.name, *found) for page in pages for found in BLOCK.findall(page.read_text())]


def test_documents_have_code_blocks() -> None:
    """The pattern would match nothing, and the test below would test nothing."""
    assert "README.md" in [page for page, _, _ in blocks()]
    assert len([output for _, _, output in blocks() if output]) >= 2


@pytest.mark.parametrize(
    ("page", "code", "output"),
    [pytest.param(*block, marks=pytest.mark.long) if block[0] == "TESTING.md" else block for block in blocks()],
)
def test_code_block_runs(page: str, code: str, output: str, tmp_path: Path) -> None:
    """The first thing that a reader tries would fail, or print something else than the page shows."""
    code = code.replace("/dev/shm/", f"{tmp_path}/ram-").replace("/tmp/", f"{tmp_path}/")
    command = [sys.executable, "-c", code]
    if "StoreContract" in code:  # a module of tests
        (tmp_path / "test_example.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    for _ in range(2 if "CheckpointManager" in code else 1):  # the second run resumes
        result = run_forked(command, timeout=400, cwd=tmp_path)
        assert result.returncode == 0, f"{page}:\n{result.stdout}{result.stderr}"
        assert output in ("", result.stdout), page
    assert any(tmp_path.rglob("_ckptkit")) == ("CheckpointManager" in code)
    shutil.rmtree(tmp_path)


def test_drop_in_stays_short() -> None:
    """Nobody would read a drop-in of a page."""
    (code,) = [code for page, code, _ in blocks() if page == "README.md"]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 16


def test_files_named_in_the_tree_exist() -> None:
    """The tree on the page would be that of an older version."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    tree = text.split("## Layers")[1].split("```")[1]
    for line in tree.strip().splitlines():
        parent = ROOT / "ckptkit" if line.startswith("  ") else ROOT
        for name in re.findall(r"^\s*((?:[\w./]+(?:\.py|/)\s)+)", line):
            for path in name.split():
                assert (parent / path).exists(), path
