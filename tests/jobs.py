"""The directory that a job has in a tier, for tests that look into it."""

from __future__ import annotations

from pathlib import Path

from ckptkit.durable.lifecycle.root_record import read_root_record
from ckptkit.store import open_store


def job_of(root: Path | str) -> str:
    """The name of the directory of a job that saves to `root`, which a run has opened."""
    return read_root_record(open_store(root)).job_names(str(root))[0]
