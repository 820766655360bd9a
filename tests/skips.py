"""A plugin of pytest: in CI a skipped test fails, unless another target runs it. Nobody reads of skipped tests.

`.ci/run` sets CKPTKIT_CI, the Makefile names the running target or campaign in CKPTKIT_TARGET.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import Any

import pytest

CI, TARGET, WITHOUT_SYSTEM = "CKPTKIT_CI", "CKPTKIT_TARGET", "CKPTKIT_CI_WITHOUT_SYSTEM"

# A part of the reason of a skip, and the target that runs the test: `.ci/run` installs something else for it. A module
# that skips itself does so in both: all are collected before tests are chosen.
_NOT_INSTALLED = {
    "could not import 's3fs'": "s3",
    "could not import 'botocore": "s3",
    "is not installed: make campaign NAME=strangers": "strangers-ci",  # one of nine public trainers; that has all
}
LEFT_TO: Mapping[str, Mapping[str, str]] = {"test": _NOT_INSTALLED}
# Combinations that do not exist, whatever is installed.
MEANINGLESS = ("this store has no generations", "this client cannot ask for it", "nothing guards there")
# Allowed with CKPTKIT_CI_WITHOUT_SYSTEM=1: Debian's packages are missing, or the user may not mount.
SYSTEM = ("make setup-", "needs root", "only root can", "no FUSE file system", "cannot be done here", "no direct I/O")


def accepted(reason: str, environ: Mapping[str, str]) -> bool:
    """Whether a test may be skipped for `reason`."""
    if not environ.get(CI):
        return True
    parts = [*MEANINGLESS, *LEFT_TO.get(environ.get(TARGET, ""), {}), *(SYSTEM if environ.get(WITHOUT_SYSTEM) else ())]
    return any(part in reason for part in parts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A test that skips itself, or that a mark skips. A test that fails as expected is not skipped."""
    report = yield
    return report if hasattr(report, "wasxfail") else _judged(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """A whole module that skips itself."""
    return _judged((yield))


def _judged(report: Any) -> Any:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not accepted(reason, os.environ):
            report.outcome, report.longrepr = "failed", f"{CI} is set, and no other target runs this: {reason}"
    return report
