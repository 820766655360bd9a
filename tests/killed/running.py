"""Runs the command in this process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from tests.roots.kinds import quiet
from tests.roots.running import Main as Main


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Exit code and output."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}: {self.err.strip() or self.out.strip()[-300:]}"


def run(main: Main, words: Sequence[str]) -> Answer:
    """Runs it. An internal error is the exit code -1."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), quiet():
        code = main(words)
    if "internal error" in err.getvalue():
        code = -1
    return Answer(code=code, out=out.getvalue(), err=err.getvalue())
