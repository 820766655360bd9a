"""Four real JAX processes as two slices of two hosts lose their ramdisks."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.together import run_together


def test_lost_ramdisks_are_replaced_by_another_slice_or_the_root(tmp_path: Path) -> None:
    """After the loss of a host, of a slice or of all, the job would start from an older step or from none."""
    for text in run_together("tests.emergency.four_processes", 4, str(tmp_path), devices=1):
        assert text.rstrip().endswith("done"), text[-3000:]
