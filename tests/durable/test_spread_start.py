"""The processes of a job do not all send their first requests to a bucket at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.durable.cells import pacing
from ckptkit.model.durable_profile import DurableProfile


def test_start_waits_in_a_bucket_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 hosts that start again get 429; a disk would make every save wait for nothing."""
    waited = list[float]()
    monkeypatch.setattr(pacing.time, "sleep", waited.append)
    job = DurableProfile().for_one_of(1000)
    pacing.spread_start(job, str(tmp_path))
    pacing.spread_start(DurableProfile().for_one_of(1), "gs://bucket/run")
    assert waited == []
    for _ in range(200):
        pacing.spread_start(job, "gs://bucket/run")
    assert 0 <= min(waited) < 0.2
    assert 0.8 < max(waited) <= 1.0
