"""The mark of tests that trace system calls."""

from __future__ import annotations

import shutil

import pytest

from ckptkit.testing.crash import can_trace

needs_strace = pytest.mark.skipif(
    not can_trace(),
    reason="strace may not trace here" if shutil.which("strace") else "strace is not there: make setup-system",
)
