"""Full, failing, read-only and forbidden storage in mid-run, on each tier: it is reported, and training continues."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.slots import reader
from ckptkit.store import LocalStore
from ckptkit.testing import bucket
from ckptkit.testing.bucket import BucketServer, FaultPlan
from tests.mounts import Mounts, fill

TIERS = ("ram", "ssd", "durable")
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)


class Job:
    """A run that saves every step to every tier, as a training loop does: a failed save is reported, and it
    continues."""

    def __init__(self, home: Path, durable: str | None = None, *, ram: ckptkit.Tier | None = None):
        self.events: list[ckptkit.Event] = []
        self.home = home
        log = ckptkit.EventLog()
        log.observe(self.events.append)
        self.manager = ckptkit.CheckpointManager(
            durable or home / "durable",
            options=ocp.CheckpointManagerOptions(save_interval_steps=1),
            tiers=[
                ram or ckptkit.Tier.ram(str(home / "ram"), slots=2),
                ckptkit.Tier.ssd(str(home / "ssd"), save=ckptkit.EverySteps(1)),
            ],
            host_id="host",
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=60),
            saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=0)),
        )

    def save(self, step: int) -> list[str]:
        """Saves a step and returns the failure from `check_for_errors`."""
        assert self.manager.save(step, args=ocp.args.StandardSave(state(step)))  # pyright: ignore[reportCallIssue]
        try:
            self.manager.wait_until_finished()
        except ckptkit.SaveFailedError as error:
            return [str(error)]
        return []

    def tiers_of(self, step: int) -> set[str]:
        return {tier for record in self.manager.steps() if record.step == step for tier in record.tiers}

    def said(self) -> set[str | None]:
        return {event.tier for event in self.events if event.kind in (Kind.DEGRADED, Kind.FAILED, Kind.SKIPPED)}


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(3000.0) + step}


def check_survival(job: Job, tier: str, broken: Callable[[], Any]) -> None:
    """Step 1 is complete everywhere, step 2 has the fault in `tier`, step 3 finds it repaired."""
    assert job.save(1) == []
    assert job.tiers_of(1) == set(TIERS)
    with broken():
        failed = job.save(2)
        assert tier in job.said(), "nobody was told"
        assert failed or tier != "durable", "check_for_errors did not raise for a durable step"
        assert tier not in job.tiers_of(2)
        assert job.manager.latest_step() in (1, 2)
        assert set(job.manager.all_steps()) >= {1}
    assert job.save(3) == []
    assert job.tiers_of(3) == set(TIERS)
    job.manager.check_for_errors()
    job.manager.close()
    with ckptkit.CheckpointManager(job.manager._durable.url) as manager:
        found = manager.restore(None, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
        np.testing.assert_array_equal(found["w"], state(3)["w"])


@contextmanager
def failing_below(root: Path, code: int) -> Iterator[None]:
    """Every call of this process that changes something below `root` fails with `code`; syncs too."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            for where in (*args[:2], kwargs.get("dir")):
                place = f"/proc/self/fd/{where}" if type(where) is int and call.__name__.endswith("sync") else where
                if isinstance(place, str | os.PathLike) and os.path.realpath(place).startswith(str(root)):
                    raise OSError(code, os.strerror(code), str(place))
            return call(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "link", "rename", "replace", "fsync", "fdatasync"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr(tempfile, "mkstemp", failing(tempfile.mkstemp))
        yield


@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
@pytest.mark.parametrize("tier", TIERS)
def test_storage_error_during_a_save_is_survived(tmp_path: Path, tier: str, code: int) -> None:
    """One bad disk would end the training, or lose the saves after it."""
    job = Job(tmp_path)
    check_survival(job, tier, lambda: failing_below(tmp_path / tier, code))


@pytest.mark.parametrize("tier", TIERS)
def test_full_mount_is_survived(tmp_path: Path, mounts: Mounts, tier: str) -> None:
    """The same by the kernel itself: no page is left."""
    mount = mounts.small(tmp_path / tier, "1m")

    @contextmanager
    def full() -> Iterator[None]:
        fill(mount / "filler")
        yield
        (mount / "filler").unlink()

    check_survival(Job(tmp_path), tier, full)


@pytest.mark.parametrize("tier", TIERS)
def test_read_only_mount_is_survived(tmp_path: Path, mounts: Mounts, tier: str) -> None:
    """The same by the kernel itself: what ext4 does to a disk that fails."""
    mount = mounts.small(tmp_path / tier, "1m")

    @contextmanager
    def read_only() -> Iterator[None]:
        mounts.read_only(mount)
        yield
        mounts.writable(mount)

    check_survival(Job(tmp_path), tier, read_only)


@pytest.mark.parametrize("keeps", [None, ckptkit.KeepNewest(1)], ids=["any", "newest"])
def test_failed_ramdisk_deletion_never_raises_from_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: Any
) -> None:
    """A slot that cannot be freed would end the training on this host, and leave the others waiting at the vote."""
    delete, where = LocalStore.delete, str(tmp_path / "ram")

    def refused(self: LocalStore, key: str) -> None:
        if self.url.startswith(where):
            raise ckptkit.StoreError(f"{self.url}/{key}: Read-only file system")
        delete(self, key)

    job = Job(tmp_path, ram=ckptkit.Tier.ram(where, slots=2, keep=keeps))
    assert [job.save(step) for step in (1, 2)] == [[], []]
    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "delete", refused)
        said = [*job.save(3), *job.save(4)]
        assert said
        assert all("was not committed to tier ram: " in each for each in said)
        assert job.tiers_of(2) >= {"durable"}
    assert job.save(5) == []
    assert job.tiers_of(5) == set(TIERS)
    job.manager.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """One for all: clients of this process remember where it is."""
    with (
        BucketServer(dir=tmp_path_factory.mktemp("bucket"), buckets=["runs"]) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.env().items():
            patch.setenv(name, value)
        yield server


@pytest.mark.parametrize("effect", [bucket.QuotaFull(), bucket.PermissionWithdrawn()], ids=["quota", "permission"])
def test_bucket_that_refuses_writes_is_survived(tmp_path: Path, server: BucketServer, effect: Any) -> None:
    """A quota that is reached at night would end the run."""
    writes = (bucket.Kind.WRITE, bucket.Kind.RESUME, bucket.Kind.CHUNK)

    @contextmanager
    def refusing() -> Iterator[None]:
        server.faults = FaultPlan(faults=(bucket.Fault(effect=effect, kinds=writes),))
        yield
        server.faults = FaultPlan()

    check_survival(Job(tmp_path, f"gs://runs/{type(effect).__name__}"), "durable", refusing)


def test_temporary_bucket_outage_is_survived(tmp_path: Path, server: BucketServer) -> None:
    """Clients try 503 again: the step may only be late, and it is in the fast tiers meanwhile."""
    job = Job(tmp_path, "gs://runs/away")
    assert job.save(1) == []
    server.faults = FaultPlan(faults=(bucket.Fault(effect=bucket.Status(code=503), count=2),))
    job.save(2)
    assert job.tiers_of(2) >= {"ram", "ssd"}
    server.faults = FaultPlan()
    assert job.save(3) == []
    assert job.tiers_of(3) == set(TIERS)
    job.manager.close()


@pytest.mark.parametrize("what", ["manifest", "slot"])
def test_missing_read_permission_stops_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """If it failed, a job that is started as another user would go on from an older step, or from the slow tier."""
    job = Job(tmp_path)
    assert job.save(1) == []
    job.manager.close()
    open_file, read = os.open, reader.read_manifest

    def refused(path: Any) -> None:
        if str(path).startswith(str(tmp_path / "ram")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def open_or_refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".bin") and not flags & (os.O_WRONLY | os.O_RDWR):
            refused(path)
        return open_file(path, flags, *rest, **named)

    def read_or_refuse(path: Path) -> Any:
        refused(path)
        return read(path)

    with monkeypatch.context() as patch:
        if what == "slot":
            patch.setattr(os, "open", open_or_refuse)
        else:
            patch.setattr(reader, "read_manifest", read_or_refuse)
        again = Job(tmp_path)
        with pytest.raises(
            ckptkit.CheckpointError, match=r"^process 0: .*ram.*Permission denied.*give this user access"
        ):
            again.manager.restore(None, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
        again.manager.close()
    again = Job(tmp_path)
    found: Any = again.manager.restore(None, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    np.testing.assert_array_equal(found["w"], state(1)["w"])
    again.manager.close()


def test_full_durable_disk_is_named_so(tmp_path: Path, mounts: Mounts) -> None:
    """TensorStore's RESOURCE_EXHAUSTED was reported as a network that does not answer, and tried again."""
    root = mounts.small(tmp_path / "disk", "1m") / "run"
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        fill(root.parent / "filler")
        manager.save(2, args=ocp.args.StandardSave(state(2)))  # pyright: ignore[reportCallIssue]
        with pytest.raises(ckptkit.SaveFailedError, match="No space left on device; free some space") as caught:
            manager.wait_until_finished()
    chain: list[BaseException] = [caught.value]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    assert any(isinstance(error, ckptkit.StoreFullError) for error in chain), chain


def test_root_that_cannot_be_written_names_what_can_be_done(tmp_path: Path, mounts: Mounts) -> None:
    """The error was `ROOT/_ckptkit/probe: Read-only file system`, a file that nobody knows."""
    job = Job(tmp_path)
    assert job.save(1) == []
    job.manager.close()
    root = Path(job.manager._durable.url)
    mounts.read_only(root)
    with pytest.raises(ckptkit.CheckpointError, match=r"cannot be written \(Read-only file system\): make it writable"):
        ckptkit.CheckpointManager(root)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ckptkit.CheckpointManager(root, options=options) as manager:
        found = manager.restore(None, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    np.testing.assert_array_equal(found["w"], state(1)["w"])
