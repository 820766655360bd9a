"""A durable root in a bucket that is missing, refuses, or does not answer: one clear error, before training starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ckptkit
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Hang, PermissionWithdrawn, Status
from tests.states import abstract, assert_same, make_state, restore_args, save_args


def test_missing_bucket_is_named(server: BucketServer) -> None:
    """A typing error in the URL would be found at the first save, hours later."""
    with pytest.raises(ckptkit.StoreError, match=r"gs://no-such-bucket/run cannot be written: .*no such bucket"):
        ckptkit.CheckpointManager("gs://no-such-bucket/run")


def test_no_directory_is_made_in_a_bucket(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs first asks for the type of the bucket: without a network a job learns a minute later that there is none."""
    made: list[object] = []
    monkeypatch.setattr("etils.epath.gpath._GPath.mkdir", lambda self, **_: made.append(self))
    ckptkit.CheckpointManager("gs://runs/run").close()
    assert not made


def test_emulator_is_used_without_a_question_to_google(server: BucketServer) -> None:
    """Without a network the question can take a minute in every process, and ends in a warning."""
    code = (
        "import ckptkit\n"
        "assert ckptkit.latest_step('gs://runs/run') is None\n"
        "import gcsfs\n"
        "assert gcsfs.GCSFileSystem is gcsfs.core.GCSFileSystem\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_refused_permission_names_the_missing_one(server: BucketServer) -> None:
    """A person would look for the bug in the trainer."""
    server.faults = FaultPlan(faults=(Fault(effect=PermissionWithdrawn()),))
    with pytest.raises(ckptkit.StoreError, match=r"grant storage\.objects\.get, \.list, \.create") as caught:
        ckptkit.CheckpointManager("gs://runs/run")
    assert not isinstance(caught.value, ckptkit.TransientStoreError)


def test_unreachable_bucket_is_not_an_empty_bucket(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart while the bucket is away would begin again from step 0."""
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", _no_sleep)
    monkeypatch.setattr("ckptkit.manager.root.STORE_DEADLINE_S", 0.5)
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        manager.save(3, args=save_args(make_state(3), 3))
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=503)),))
    with pytest.raises(ckptkit.TransientStoreError, match="gs://runs/run"):
        ckptkit.CheckpointManager("gs://runs/run")
    server.faults = FaultPlan()
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        assert manager.latest_step() == 3
        assert_same(manager.restore(None, args=restore_args(abstract(make_state())))["state"], make_state(3))


def test_bucket_that_never_responds_times_out(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart would hang, without a message about the cause."""
    monkeypatch.setattr("ckptkit.store.remote.OPERATION_TIMEOUT_S", 1.0)
    monkeypatch.setattr("ckptkit.manager.root.STORE_DEADLINE_S", 0.5)
    server.faults = FaultPlan(faults=(Fault(effect=Hang()),))
    with pytest.raises(ckptkit.TransientStoreError, match=r"gs://runs/run.*: no answer within 0\.5 s"):
        ckptkit.CheckpointManager("gs://runs/run")
    server.faults = FaultPlan()


async def _no_sleep(_: float) -> None:
    """Retries at once."""
