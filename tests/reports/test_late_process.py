"""A process of a job that is late in a restore, and a job of two processes with odd arrays."""

from __future__ import annotations

import re
from pathlib import Path

from tests.multiprocess.together import run_together
from tests.reports.late_process import LATE_S, LIMIT_S
from tests.reports.reported import reported


@reported("marin-community/marin/pull/8538", "One late process holds the others for a limit that is set, and is named.")
def test_late_process_holds_the_others_no_longer_than_the_limit(tmp_path: Path) -> None:
    punctual, late = run_together("tests.reports.late_process", 2, str(tmp_path))
    for text in (punctual, late):
        assert "arrays without elements: same" in text, text[-3000:]
    found = re.search(r"after ([\d.]+) s CoordinationError: (.*)", punctual)
    assert found is not None, punctual[-3000:]
    assert LIMIT_S <= float(found[1]) < LATE_S
    assert "process 1 did not join within 2 s" in found[2]
    assert "restored" not in late, "the process that is late goes on alone"
