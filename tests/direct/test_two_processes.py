"""Two real JAX processes save and load trees at paths of their own."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.together import run_together


def test_two_processes_save_load_and_refuse_together(tmp_path: Path) -> None:
    """Digests of one process's part would be missing, or one process would go on with damage."""
    for text in run_together("tests.direct.two_processes", 2, str(tmp_path)):
        assert text.rstrip().endswith("done"), text[-3000:]
