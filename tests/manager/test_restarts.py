"""Restart after restart: on a damaged newest step, and with the leftovers of a dead run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.model.paths import COMMIT_MARK
from ckptkit.restore.candidates import Inventory
from ckptkit.testing.bucket import BucketServer
from ckptkit.testing.damage import inflict

RESTARTS = 4


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(2000.0) * step}


def make_manager(root: Path | str, home: Path, events: list[ckptkit.Event], **options: Any) -> Any:
    log = ckptkit.EventLog()
    log.observe(events.append)
    tiers = [ckptkit.Tier.ram(str(home / "ram"), slots=2)]
    settings = ocp.CheckpointManagerOptions(save_interval_steps=1, **options)
    return ckptkit.CheckpointManager(
        root, options=settings, tiers=tiers, host_id="host", events=log, processes=ckptkit.ProcessOptions(timeout_s=60)
    )


def save(manager: Any, step: int) -> None:
    assert manager.save(step, args=ocp.args.StandardSave(state(step)))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: Any) -> int:
    found = manager.restore(None, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    step = int(found["w"][1])
    assert (found["w"] == state(step)["w"]).all()
    return step


@pytest.mark.parametrize("kind", ["bit flip", "truncation", "missing file"])
def test_restarts_survive_repeated_damage_to_the_newest_step(tmp_path: Path, kind: Any) -> None:
    """A job that dies on its newest step at every start would never train again."""
    events: list[ckptkit.Event] = []
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        for step in (1, 2, 3):
            save(manager, step)
    for restart in range(RESTARTS):
        newest = 3 + restart
        slots = sorted((tmp_path / "ram").rglob("slot-*.bin"))
        for slot in slots:  # the whole ramdisk: both saves that it holds
            inflict("truncation", [slot], [], restart)
        data = sorted((tmp_path / "durable" / str(newest) / "default" / "d").iterdir())
        inflict(kind, [max(data, key=lambda path: path.stat().st_size)], [], restart)
        with make_manager(tmp_path / "durable", tmp_path, events) as manager:
            assert restored(manager) == newest - 1, "the step before, and with its own bits"
            assert any(event.kind == Kind.REJECTED and event.step == newest for event in events)
            save(manager, newest)  # the same number again, now whole
            save(manager, newest + 1)
        events.clear()
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        assert restored(manager) == 3 + RESTARTS


def test_leftovers_on_disk_are_reported_and_never_a_step(tmp_path: Path) -> None:
    """Half a step would be restored; or fill the disk, and nobody know of it."""
    events: list[ckptkit.Event] = []
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        save(manager, 1)
        save(manager, 2)
    assert not [event for event in events if event.kind == Kind.LEFT_BEHIND]
    (tmp_path / "durable" / "2").rename(tmp_path / "durable" / "2.orbax-checkpoint-tmp")
    for slot in (tmp_path / "ram").rglob("step-*.json"):
        slot.unlink()
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        (left,) = [event for event in events if event.kind == Kind.LEFT_BEHIND]
        assert (left.tier, left.fields["names"]) == ("durable", ["2.orbax-checkpoint-tmp"])
        assert restored(manager) == 1
        save(manager, 2)
        assert restored(manager) == 2
        assert (tmp_path / "durable" / "2.orbax-checkpoint-tmp").exists(), "Orbax's writer has no fence: it may live"
    with make_manager(tmp_path / "durable", tmp_path, events, cleanup_tmp_directories=True) as manager:
        assert restored(manager) == 2


def test_leftovers_in_a_bucket_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where a step without its mark is what is left."""
    import gcsfs

    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        events: list[ckptkit.Event] = []
        with make_manager("gs://runs/left", tmp_path / "a", events) as manager:
            save(manager, 1)
            save(manager, 2)
        gcsfs.GCSFileSystem().rm("runs/left/2/commit_success.txt")
        with make_manager("gs://runs/left", tmp_path / "b", events) as manager:
            (left,) = [event for event in events if event.kind == Kind.LEFT_BEHIND]
            assert left.fields["names"] == ["2"]
            assert restored(manager) == 1


def test_restart_examines_steps_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with 1,000 steps in a bucket would wait for as many round trips, one after the other."""
    with make_manager(tmp_path / "root", tmp_path, []) as manager:
        for step in range(4):
            save(manager, step)
    together = threading.Barrier(4, timeout=60)  # breaks where fewer come
    look = Inventory.identity

    def identity(self: Inventory, step: int, ancestry: Any) -> Any:
        together.wait()
        return look(self, step, ancestry)

    monkeypatch.setattr(Inventory, "identity", identity)
    with make_manager(tmp_path / "root", tmp_path, []) as manager:
        assert manager.all_steps() == [0, 1, 2, 3]


def test_damaged_durable_step_that_was_restored_from_elsewhere_is_advised_to_be_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The only durable copy would stay damaged until the good slots are reused, and nobody be told."""
    events: list[ckptkit.Event] = []
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        save(manager, 1)
    (sidecar,) = (tmp_path / "durable" / "1").rglob("process-0.json")
    sidecar.write_bytes(b"{")
    (tmp_path / "durable" / "1" / COMMIT_MARK).write_bytes(b"")  # nothing tells which save it is
    with make_manager(tmp_path / "durable", tmp_path, events) as manager:
        assert restored(manager) == 1
    command = f"ckptkit scrub {tmp_path / 'durable'} --tier {tmp_path / 'ram'} --host-id host --repair"
    (advice,) = [text for record in caplog.records if "Repair it" in (text := record.getMessage())]
    assert advice.startswith("restore: step 1 is damaged in the durable tier")
    assert command in advice


def test_failed_restore_ends_with_the_command_that_repairs(tmp_path: Path) -> None:
    """A person would read the reasons of every candidate, and not know what to run."""
    with make_manager(tmp_path / "durable", tmp_path, []) as manager:
        save(manager, 1)
    for path in (tmp_path / "ram").rglob("step-*.json"):
        path.write_bytes(b"{")
    (sidecar,) = (tmp_path / "durable" / "1").rglob("process-0.json")
    sidecar.write_bytes(b"{")
    command = f"ckptkit scrub {tmp_path / 'durable'} --tier {tmp_path / 'ram'} --host-id host --repair"
    manager = make_manager(tmp_path / "durable", tmp_path, [])
    with (
        manager,
        pytest.raises(ckptkit.NoRestorableStepError, match=f"Run on each host, with its own --host-id: `{command}`"),
    ):
        restored(manager)
