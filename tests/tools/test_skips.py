"""In CI a skipped test fails, unless another target runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import CI, LEFT_TO, MEANINGLESS, SYSTEM, TARGET, WITHOUT_SYSTEM, accepted

ROOT = Path(__file__).parents[2]
FILE = """
import pytest

def test_left_to_another_target():
    pytest.skip("could not import 's3fs': No module named 's3fs'")

@pytest.mark.skipif(True, reason="only root can make files of another user")
def test_needs_the_machine():
    pass

@pytest.mark.xfail
def test_fails_as_expected():
    raise OSError
"""
MODULE = "import pytest\npytest.importorskip('no_such_package', reason='ckptkit-jax[sign] is not installed')"


def run(directory: Path, **variables: str) -> str:
    """The output of pytest for two files of its own."""
    (directory / "test_one.py").write_text(FILE)
    (directory / "test_module.py").write_text(MODULE)
    environ = {name: value for name, value in os.environ.items() if name not in (CI, TARGET, WITHOUT_SYSTEM)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "-o", "addopts=-rfE"]
    command += ["--continue-on-collection-errors", str(directory)]
    environ |= {"PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.long
def test_skip_fails_in_ci_unless_another_target_runs_it(tmp_path: Path) -> None:
    """CI would pass without the tests of two formats and a store, and name them in a line that nobody reads."""
    assert "3 skipped, 1 xfailed" in run(tmp_path)
    shown = run(tmp_path, CKPTKIT_CI="1", CKPTKIT_TARGET="test")
    assert "1 skipped, 1 xfailed, 2 errors" in shown
    assert "ERROR test_one.py::test_needs_the_machine" in shown
    assert "ckptkit-jax[sign] is not installed" in shown
    assert "1 failed, 1 xfailed, 2 errors" in run(tmp_path, CKPTKIT_CI="1", CKPTKIT_TARGET="s3")
    without = run(tmp_path, CKPTKIT_CI="1", CKPTKIT_TARGET="test", CKPTKIT_CI_WITHOUT_SYSTEM="1")
    assert "2 skipped, 1 xfailed, 1 error" in without, "a package of Python's can be installed anywhere"


def test_targets_that_run_what_others_skip_are_part_of_ci() -> None:
    """A test would be left to a target that nothing starts."""
    text = (ROOT / ".ci" / "run").read_text()
    started = re.findall(r"^(?:start \w+ )?make (?:campaign NAME=)?([\w-]+)", text, re.MULTILINE)
    assert started.index("docs") < started.index("test"), "a long test of the site needs mkdocs"
    for target, reasons in LEFT_TO.items():
        assert {target, *reasons.values()} <= set(started)
        for reason, other in reasons.items():
            assert not accepted(reason, {CI: "1", TARGET: other}), "the other target would skip it too"


@pytest.mark.parametrize("reason", [*MEANINGLESS, *SYSTEM, *(each for left in LEFT_TO.values() for each in left)])
def test_every_accepted_reason_is_that_of_a_test(reason: str) -> None:
    """A reason that was reworded would stay on the list, and its test would fail in CI alone."""
    package = re.fullmatch(r"(?:could not import )?'(\w+)'?", reason)
    wanted = f'"{package[1]}' if package else reason
    files = [*(ROOT / "tests").rglob("*.py"), ROOT / "ckptkit" / "testing" / "store_contract.py"]
    assert any(wanted in path.read_text() for path in files if path.name not in ("skips.py", "test_skips.py"))


def test_a_target_of_make_knows_its_name() -> None:
    """Every target would have the list of none, and CI would fail with the first skip."""
    command = ["make", "--no-print-directory", "--eval", "probe: ; @echo is $$CKPTKIT_TARGET", "probe"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "is probe\n"
