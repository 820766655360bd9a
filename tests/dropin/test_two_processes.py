"""Two real JAX processes: policies that each would answer differently, casts, NNX, the newer style, other items."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.together import run_together


@pytest.mark.long
def test_two_processes_decide_save_delete_and_restore_together(tmp_path: Path) -> None:
    """One process would wait without an end for a step, a barrier or a deletion that the other does not know of."""
    said = run_together("tests.dropin.two_processes", 2, str(tmp_path))
    for process, text in enumerate(said):
        assert "done [0, 3, 4, 5, 6, 7]" in text, text[-3000:]
        for news in ("start: ", "restore: step ", "is committed to tier durable"):
            lines = [line for line in text.splitlines() if "INFO ckptkit: " in line and news in line]
            assert bool(lines) is (process == 0), f"{news!r} is logged once in a job: {lines}"
