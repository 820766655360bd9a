"""Crash points of durable saves by two processes, which have a joined record: a part of them, and what has to be found.

All of them: `make campaign NAME=crashpoints`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.crash_job import small_leaves_shared
from bench.crash_pair import RIGHT
from bench.crash_pair_bucket import (
    HOME,
    SHORT_POINTS,
    checked_in_bucket,
    controls_found_in_bucket,
    record_pair_in_bucket,
)
from bench.crash_pair_disk import checked, controls_found, points_of, record_pair
from ckptkit.model import paths
from ckptkit.testing.bucket import BucketServer
from ckptkit.testing.crash import Trace
from tests.strace import needs_strace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The operations of both processes, in one order."""
    return record_pair(tmp_path_factory.mktemp("pair") / "run")


@pytest.fixture(autouse=True)
def continues_as_the_job() -> Iterator[None]:
    """The run that goes on after a crash shares small leaves too."""
    with small_leaves_shared():
        yield


@pytest.mark.long
@needs_strace
def test_both_processes_write_rows_link_frozen_files_and_are_joined(trace: Trace) -> None:
    """Crash points of a job in which one process writes everything would prove nothing about the joined record."""
    steps = [trace.operations[number] for number in points_of(trace, RIGHT)]
    for process in (0, 1):
        own = [each for each in steps if f"/default/ocdbt.process_{process}/d/" in each.path]
        assert len([each for each in own if "write" in each.call]) >= 3, "a data file with each step"
        assert len([each for each in own if each.call == "link" and "/unchanged." in each.path]) == 1
    names = [each.path.rpartition("/default/")[2] for each in steps if each.call == "rename"]
    assert [names.count(name) for name in (paths.JOINED_SIDECARS, "_ckptkit/process-1.json")] == [3, 3]
    writers = [each.path.split("/")[3][-1:] for each in steps if "/default/ocdbt.process_" in each.path]
    turns = sum(before != after for before, after in itertools.pairwise(writers))
    assert turns >= 3, "both in one order"


@pytest.mark.long
@needs_strace
def test_crash_of_two_processes_keeps_every_promised_step(trace: Trace, tmp_path: Path) -> None:
    """A step would be listed whose sidecars or joined record a power failure has taken, or a promised one be lost."""
    rows, wrong = dict[str, int](), list[Any]()
    for name, number, found, restarts in checked(trace, tmp_path / "at", full=False, chance=random.Random(0)):
        rows[name] = rows.get(name, 0) + restarts
        wrong += [(trace.operations[number], state, every) for state, every in found if every]
    assert not wrong, wrong[:3]
    assert set(rows) == {"pair start", "pair parts", "pair commit", "pair other record"}
    assert all(restarts >= 3 for restarts in rows.values()), rows


@pytest.mark.long
@needs_strace
def test_each_broken_rule_is_found(trace: Trace, tmp_path: Path) -> None:
    """An enumeration that finds nothing wrong in a commit before the sidecars would prove nothing."""
    found = controls_found(trace, tmp_path / "at")
    not_synced = ("sidecar-not-synced", "sidecar-left-to-process-0")
    assert found.keys() == {"sidecar-late", "sidecars-deleted", *not_synced, "other-record-believed"}
    for name in ("sidecar-late", "sidecars-deleted"):
        assert "1/default has sidecars of processes 0 and saves" in found[name]
    for name in not_synced:
        assert "step 1 is corrupt" in found[name]
    assert "2 is no longer save 2@1.1" in found["other-record-believed"]


@pytest.mark.long
def test_crash_of_two_processes_in_a_bucket_keeps_every_promised_step(server: BucketServer) -> None:
    """A step would be committed before process 1's sidecar is there, or restored by the record of another save."""
    history, asked = record_pair_in_bucket(), 0
    for _, after, wrong, restarts in checked_in_bucket(history, full=False, chance=random.Random(0)):
        asked += restarts
        assert not wrong, (after, wrong)
    assert asked == 2 * SHORT_POINTS
    found = controls_found_in_bucket(history)
    assert len(found) == 3
    assert all(found.values()), found
    copied = [
        name for name, _ in history.states if name.startswith(f"copy {HOME}/{RIGHT}/3/") and "/unchanged." in name
    ]
    assert len(copied) == 2, "both processes take over an object of the step before"
    del server
