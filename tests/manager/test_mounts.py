"""A manager's warnings about tiers on mounts that only look local."""

from __future__ import annotations

import logging
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.manager import start_warnings as reporting
from ckptkit.model.tiers import RAM, SSD
from ckptkit.store.mounts import root_problem, row_of, tier_problem
from tests.mount import MountedBucket, why_not
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
    assert "Give gs://bucket instead" in line


def test_bucket_that_gke_mounts_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GKE's driver mounts as plain `fuse`: neither the root nor an SSD tier there would be warned of."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no FUSE file system can be mounted here: {reason}")
    with MountedBucket(tmp_path / "data", "fuse") as mounted, caplog.at_level(logging.WARNING, "ckptkit"):
        root, ssd = open_manager(mounted.path / "run", ckptkit.Tier.ssd(str(mounted.path / "ssd")))
    assert (root.fields["commit"], ssd.tier) == ("mark", SSD)
    assert "on GKE give gs://bucket instead" in root.fields["problem"]
    assert "is on fuse (bucket), a FUSE program of which nothing is known" in ssd.fields["problem"]
    assert sum("fuse" in each.getMessage() for each in caplog.records) == 2


@pytest.mark.disk
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
        (RAM, "fuse.unknown", True),
        (RAM, "fuse.sshfs", True),
        (SSD, "xfs", False),
        (SSD, "overlay", False),
        (SSD, "fuse.fuse-overlayfs", False),
        (SSD, "lustre", True),
        (SSD, "wekafs", True),
        (SSD, "fuse.gcsfuse", True),
        (SSD, "fuse.daos", True),
        (SSD, "fuse", True),
        (SSD, "tmpfs", True),
        (SSD, "oddfs", False),
        (None, "tmpfs", False),
        (None, "ext4", False),
        (None, "nfs4", True),
        (None, "fuse.unknown", True),
    ],
)
def test_problem_of_a_tier_follows_from_its_mount(medium: str | None, type_name: str, wrong: bool) -> None:
    """If it failed, a right mount would be warned of, or a wrong one not. None: `doctor` does not know the medium."""
    assert (tier_problem(medium, row_of(type_name)) is not None) == wrong


@pytest.mark.parametrize(
    ("type_name", "device", "words"),
    [
        ("fuse", "my-bucket", "It is probably a mounted bucket: on GKE give gs://my-bucket instead"),
        ("fuse", "_", "on GKE give the gs:// URL instead"),  # all buckets of a project
        ("fuse", "/dev/fuse", "on GKE give the gs:// URL instead"),
        ("fuse", "mountpoint-s3", "Give the bucket's own URL instead"),
        ("fuse.gcsfuse", "my-bucket", "Give gs://my-bucket instead"),
        ("fuse.s3fs", "s3fs", "Give the bucket's own URL instead"),
        ("fuse", "blobfuse2", None),  # no URL of Azure is read
        ("nfs4", "filer:/export", None),
        ("fuse.sometool", "tool", None),
    ],
)
def test_advice_for_a_root_names_the_bucket(type_name: str, device: str, words: str | None) -> None:
    """If it failed, a user of GKE would not learn which URL to give, or a user of Azure would look for one."""
    problem = root_problem(row_of(type_name, device))
    assert problem is None if words is None else words in (problem or "")
