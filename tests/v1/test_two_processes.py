"""Two real JAX processes load by `ckptkit.v1.Checkpointer`."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.together import run_together


def test_processes_load_by_what_process_0_has_read_of_the_step(tmp_path: Path) -> None:
    """A process that cannot read the root for a moment would raise alone, and the others would wait for it."""
    for text in run_together("tests.v1.two_processes", 2, str(tmp_path)):
        assert text.rstrip().endswith("done"), text[-3000:]
