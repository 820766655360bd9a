"""A manager's warnings about tiers on mounts that only look local."""

from __future__ import annotations

import logging
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.manager import mounts as reporting
from ckptkit.model.tiers import RAM, SSD
from ckptkit.store.mounts import row_of
from tests.mount import MountedBucket
from tests.mounts import Mounts


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mount is reported once in a process."""
    monkeypatch.setattr(reporting, "_reported", set())


def open_manager(root: Path, *tiers: ckptkit.Tier) -> list[ckptkit.Event]:
    """The `tier_mounted` events of a manager that is made and closed."""
    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    ckptkit.CheckpointManager(root, options=options, tiers=tiers, events=log).close()
    return [event for event in events if event.kind == ckptkit.Kind.MOUNTED]


def test_mounted_bucket_is_named_once(mounted_bucket: MountedBucket, caplog: pytest.LogCaptureFixture) -> None:
    """A GKE user would not learn that the bucket's URL is faster, or would read it with every manager."""
    with caplog.at_level(logging.INFO, "ckptkit"):
        (event,) = open_manager(mounted_bucket.path / "run")
        open_manager(mounted_bucket.path / "run")
    assert event.tier == "durable"
    assert (event.fields["file_system"], event.fields["commit"]) == ("fuse.gcsfuse", "mark")
    (line,) = [each.getMessage() for each in caplog.records if "fuse.gcsfuse" in each.getMessage()]
    assert "a mark, written last" in line
    assert "Give the bucket's own URL" in line


def test_tiers_on_the_wrong_mounts_warn_with_the_measured_rate(
    tmp_path: Path, mounts: Mounts, mounted_bucket: MountedBucket, caplog: pytest.LogCaptureFixture
) -> None:
    """A ramdisk tier that is a disk, or an SSD tier behind a network, costs every save; nobody would know why."""
    memory = mounts.small(tmp_path / "memory", "64m")
    with caplog.at_level(logging.WARNING, "ckptkit"):
        events = open_manager(
            tmp_path / "run",
            ckptkit.Tier.ram(str(tmp_path / "ram")),
            ckptkit.Tier.ssd(str(mounted_bucket.path / "ssd")),
        )
    by_tier = {event.tier: event for event in events if event.tier in (RAM, SSD)}
    assert by_tier[RAM].fields["rate_bytes_s"] > 0
    assert "which is not memory" in by_tier[RAM].fields["problem"]
    assert "not a disk of this host" in by_tier[SSD].fields["problem"]
    assert sum("a second" in each.getMessage() for each in caplog.records) == 2
    assert not list((tmp_path / "ram").rglob(".rate-*")), "the measurement leaves nothing"
    assert open_manager(tmp_path / "run", ckptkit.Tier.ram(str(memory))) == []


@pytest.mark.parametrize(
    ("medium", "type_name", "wrong"),
    [
        (RAM, "tmpfs", False),
        (RAM, "ext4", True),
        (RAM, "nfs4", True),
        (RAM, "fuse.unknown", False),
        (SSD, "xfs", False),
        (SSD, "overlay", False),
        (SSD, "lustre", True),
        (SSD, "fuse.gcsfuse", True),
        (SSD, "tmpfs", True),
    ],
)
def test_problem_of_a_tier_follows_from_its_mount(medium: str, type_name: str, wrong: bool) -> None:
    """If it failed, a right mount would be warned of, or a wrong one not."""
    assert (reporting.tier_problem(medium, row_of(type_name)) is not None) == wrong
