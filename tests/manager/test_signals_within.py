"""Signal handlers that emit, ask or save in the middle of a save, a question, a wait or an emit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# An act, what the handler does at each of its lines, over which tiers, at every which line, and the fewest signals.
SHORT = [
    ("save", "ask", "ram", 41, 30),
    ("save", "save", "ram", 53, 25),
    ("save", "exit", "durable", 89, 15),
    ("should_save", "save", "policy", 27, 10),
    ("wait_until_finished", "exit", "ram", 13, 10),
    ("emit", "save", "ram", 7, 5),
]
ACTS = ("save", "should_save", "wait_until_finished", "latest_step", "emit")
FULL = [
    (act, does, tiers, 1, 5)
    for act in ACTS
    for does in ("ask", "save", "exit")
    for tiers in ("ram", "durable", "policy")
]


@pytest.mark.parametrize(
    ("act", "does", "tiers", "every", "signals_min"),
    [*SHORT, *(pytest.param(*each, marks=pytest.mark.slow) for each in FULL)],
)
def test_handler_at_every_line_ends_in_no_deadlock(
    act: str, does: str, tiers: str, every: int, signals_min: int, tmp_path: Path
) -> None:
    """A job that saves in its handler of SIGTERM would hang until it is killed, and lose its last steps."""
    program = ["-m", "tests.manager.signals_program", act, does, tiers, str(every), str(tmp_path)]
    limit_s = 120 if every > 1 else 3600
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= signals_min
