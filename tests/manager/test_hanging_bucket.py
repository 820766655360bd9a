"""A bucket that takes a request and never answers it: a save, a restore and the step loop have an end all the same."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import DurableProfile, FailurePolicy
from ckptkit.durable.cells import writer
from ckptkit.durable.lifecycle.listing import latest_step
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Hang, Kind, PermissionWithdrawn, Status

TIMEOUT_S = 1.0  # of an operation: generous for a bucket in this process
PROFILE = DurableProfile(operation_timeout_s=TIMEOUT_S)
DATA = "*/1/default/d/*"


@pytest.fixture(autouse=True)
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed write waits for those in flight, which hang: seconds that prove nothing more."""
    monkeypatch.setattr(writer, "_GIVE_UP_S", 0.2)


@pytest.fixture
def run() -> str:
    """A name of its own: a write that timed out may land while the next test runs."""
    return uuid.uuid4().hex


def manager_of(run: str, events: list[ckptkit.Event], **settings: Any) -> ckptkit.CheckpointManager:
    log = ckptkit.EventLog()
    log.observe(events.append)
    saving = ckptkit.SaveOptions(on_failure=FailurePolicy(retries=1, retry_delay_s=0.01))
    settings = {"saving": saving, "durable": PROFILE, **settings}
    return ckptkit.CheckpointManager(
        f"gs://runs/{run}", options=ocp.CheckpointManagerOptions(save_interval_steps=1), events=log, **settings
    )


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((64, 64), float(step))}


def save(manager: ckptkit.CheckpointManager, step: int) -> None:
    assert manager.save(step, args=ocp.args.StandardSave(state(step)))  # pyright: ignore[reportCallIssue]


def restored(manager: ckptkit.CheckpointManager, step: int | None = None) -> float:
    found = manager.restore(step, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    assert len(np.unique(found["w"])) == 1
    return float(found["w"][0, 0])


@pytest.mark.parametrize("stage", ["before", "after"])
def test_hanging_upload_times_out_and_is_retried(server: BucketServer, run: str, stage: Any) -> None:
    """The durable thread would wait without an end, and every later durable save with it."""
    events: list[ckptkit.Event] = []
    server.faults = FaultPlan(faults=(Fault(effect=Hang(stage=stage), kinds=(Kind.WRITE,), objects=DATA, count=1),))
    with manager_of(run, events) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        assert [event.step for event in events if event.kind == ckptkit.Kind.RETRIED] == [1]
        assert restored(manager) == 1
        server.faults = FaultPlan(faults=(Fault(effect=Hang(stage=stage), kinds=(Kind.WRITE,), objects="*/d/*"),))
        save(manager, 2)
        with pytest.raises(ckptkit.SaveFailedError, match=r"/2/default: no end within 1\.\d* s; look at the network"):
            manager.wait_until_finished()
        server.faults = FaultPlan()
        assert latest_step(f"gs://runs/{run}") == 1
        save(manager, 3)
        manager.wait_until_finished()
        assert restored(manager) == 3
        recovered = next(event for event in events if event.kind == ckptkit.Kind.RECOVERED)
        assert (recovered.step, recovered.tier, recovered.fields["failures"]) == (3, "durable", 1)


def test_failed_listing_does_not_hide_the_save_error(
    server: BucketServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax's error for an unreachable bucket is not transient: the save would be dropped."""
    events: list[ckptkit.Event] = []

    looks: list[int] = []

    def fails_twice(*args: Any) -> Any:
        looks.append(len(events))
        if len(looks) <= 2:
            raise ckptkit.TransientStoreError("the bucket is away")
        return listed(*args)

    server.faults = FaultPlan(faults=(Fault(effect=Hang(), kinds=(Kind.WRITE,), objects=DATA, count=1),))
    with manager_of(run, events) as manager:
        listed = manager._durable.stock.listed
        monkeypatch.setattr(manager._durable.stock, "listed", fails_twice)
        save(manager, 1)
        manager.wait_until_finished()
        assert [event.step for event in events if event.kind == ckptkit.Kind.RETRIED] == [1]
        assert len(looks) == 3, "the next try looks again, until one has seen it"
        save(manager, 2)
        manager.wait_until_finished()
        assert len(looks) == 3
        assert manager.all_steps() == [1, 2]
        assert restored(manager) == 2


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "default/_METADATA", "default/manifest.ocdbt"])
def test_hanging_small_object_write_is_retried(server: BucketServer, run: str, name: str) -> None:
    """One lost packet would cost a step."""
    server.faults = FaultPlan(faults=(Fault(effect=Hang(), kinds=(Kind.WRITE,), objects=f"*/1/{name}", count=1),))
    with manager_of(run, []) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        assert server.fired() == [1]
        assert restored(manager) == 1


@pytest.mark.parametrize("objects", [DATA, "*/1/default/manifest.ocdbt", "*/1/default/_ckptkit/*"])
def test_hanging_read_is_retried(server: BucketServer, run: str, objects: str) -> None:
    """A restart would wait without an end on one connection, while the others are well."""
    with manager_of(run, []) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        server.faults = FaultPlan(faults=(Fault(effect=Hang(), kinds=(Kind.READ,), objects=objects, count=1),))
        assert restored(manager) == 1
        assert server.fired() == [1]


def test_restore_from_a_hanging_bucket_times_out(server: BucketServer, run: str) -> None:
    """The cluster would be idle until somebody looks."""
    with manager_of(run, []) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        server.faults = FaultPlan(faults=(Fault(effect=Hang(), kinds=(Kind.READ,), objects=DATA),))
        with pytest.raises(ckptkit.TransientStoreError, match=r"/1/default: no end within 1\.\d* s; look"):
            restored(manager)
        server.faults = FaultPlan()
        assert restored(manager) == 1


def test_failing_tier_is_paused_and_training_continues(server: BucketServer, run: str, tmp_path: Path) -> None:
    """Each durable save would block the step loop until it times out, as long as the bucket is unreachable."""
    events: list[ckptkit.Event] = []
    policy = FailurePolicy(retries=0, pause_after=2, pause_s=0.5)
    hang = Fault(effect=Hang(), kinds=(Kind.WRITE,), objects="*/default/d/*")
    server.faults = FaultPlan(faults=(hang,))
    manager = manager_of(
        run,
        events,
        saving=ckptkit.SaveOptions(on_failure=policy),
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3)],
    )
    step = 0
    while not any("pause_s" in event.fields for event in events):
        step += 1
        save(manager, step)
        time.sleep(0.05)  # a step of training
    # Only before the first failure is known does a save wait for the durable tier.
    waited = [event.step for event in events if event.kind == ckptkit.Kind.STAGED and event.fields["waited_s"] > 0.3]
    assert len(waited) <= 2, waited
    assert len([event for event in events if event.kind == ckptkit.Kind.COMMITTED and event.tier == "ram"]) > 5
    manager._pipeline.threads.wait()
    paused_at = step
    with pytest.raises(ckptkit.SaveFailedError):
        manager.check_for_errors()
    server.faults = FaultPlan()
    while not any(event.kind == ckptkit.Kind.RECOVERED for event in events):
        step += 1
        save(manager, step)
        manager._pipeline.threads.wait()
        time.sleep(0.05)
    with pytest.raises(ckptkit.SaveFailedError, match=r"tier is paused for \d\.\d s more, after 2 failed saves in"):
        manager.check_for_errors()
    assert latest_step(f"gs://runs/{run}") == step > paused_at
    manager.close(remove_arenas=True)


def test_forced_save_is_attempted_during_a_pause(server: BucketServer, run: str) -> None:
    """The last save of a run would be missing because of what was mended a moment before."""
    policy = FailurePolicy(retries=0, pause_after=1, pause_s=3600)
    refused = Fault(effect=Status(code=403), kinds=(Kind.WRITE,), objects="*/1/_CHECKPOINT_METADATA")
    server.faults = FaultPlan(faults=(refused,))
    with manager_of(run, [], saving=ckptkit.SaveOptions(on_failure=policy)) as manager:
        for step in (1, 2):
            save(manager, step)
            with pytest.raises(ckptkit.SaveFailedError, match=r"refuses|is paused for 3"):
                manager.wait_until_finished()
        assert manager.save(3, args=ocp.args.StandardSave(state(3)), force=True)  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        save(manager, 4)
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]


@pytest.mark.parametrize(
    ("effect", "who"), [(PermissionWithdrawn(), "an anonymous caller"), (Status(code=401), "Anonymous caller")]
)
@pytest.mark.parametrize("objects", [DATA, "*/1/default/_METADATA"], ids=["tensorstore", "gcsfs"])
def test_a_refused_save_names_bucket_identity_and_permission(
    server: BucketServer, run: str, effect: Any, who: str, objects: str
) -> None:
    """A person would look for the bug in the trainer, or ask which account the job runs as."""
    server.faults = FaultPlan(faults=(Fault(effect=effect, kinds=(Kind.WRITE,), objects=objects),))
    with manager_of(run, []) as manager:
        save(manager, 1)
        with pytest.raises(ckptkit.SaveFailedError) as caught:
            manager.wait_until_finished()
    text = str(caught.value)
    assert f"the bucket gs://runs refuses {who}" in text
    # The emulator names the permission to read for whatever is asked with 401, and none with 403.
    assert f"missing is storage.objects.{'get' if effect == Status(code=401) else 'create'}" in text
    assert "grant storage.objects.get, .list, .create and .delete on the bucket" in text
    assert isinstance(caught.value.__cause__, ckptkit.StoreError)
    assert not isinstance(caught.value.__cause__, ckptkit.TransientStoreError)
