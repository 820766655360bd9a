"""The trees that `make release` refuses to build."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.release import ReleaseError, pythons, refusals, release

Change = Callable[[Path], object]


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.com"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone that could be released."""
    (tmp_path / "ckptkit").mkdir()
    (tmp_path / "ckptkit" / "__init__.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0 (2027-01-01)\n\n- New.\n\n## 0.2.0\n\n- Old.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def rewrite(name: str, old: str, new: str) -> Change:
    def change(root: Path) -> None:
        path = root / name
        path.write_text(path.read_text().replace(old, new))
        git(root, "commit", "-qam", "changed")

    return change


def add_change(root: Path) -> None:
    (root / "changes").mkdir()
    (root / "changes" / "restore-fast.md").write_text("Faster\nA restore.\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a change")


REFUSED: dict[str, Change] = {
    "changes/ has 1 files that are in no section": add_change,
    "1 files are changed or new, the first is notes.txt": lambda root: (root / "notes.txt").write_text("new"),
    "CHANGELOG.md has no section 0.4.0": rewrite("ckptkit/__init__.py", "0.3.0", "0.4.0"),
    "CHANGELOG.md has nothing below 0.3.0": rewrite("CHANGELOG.md", "- New.\n", ""),
    "CHANGELOG.md calls 0.3.0 unreleased": rewrite("CHANGELOG.md", "2027-01-01", "unreleased"),
    "the tag v0.3.0 exists": lambda root: git(root, "tag", "v0.3.0"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_tree_that_must_not_be_released_is_refused(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, reason: str
) -> None:
    """The published files could not be built again, would have no notes, or would be another 0.3.0."""
    assert not refusals(tree)
    REFUSED[reason](tree)
    (found,) = refusals(tree)
    assert found.startswith(reason)
    into = tmp_path_factory.mktemp("out") / "dist"
    with pytest.raises(ReleaseError, match=reason.split(",")[0]):
        release(tree, into)
    assert not into.exists()


def test_every_supported_python_is_looked_for() -> None:
    """A release would be called checked on a Python that nobody started."""
    found = dict(pythons())
    assert list(found) == ["3.11", "3.12", "3.13", "3.14"]
    assert any(found.values()), "this test runs on one of them"
