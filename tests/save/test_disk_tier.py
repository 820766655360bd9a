"""A disk tier that is written while the ramdisk slot is still being filled: what becomes of it when the save fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model.manifest import SaveId
from ckptkit.slots.arena import Arena


@pytest.fixture
def manager(tmp_path: Path, events: list[ckptkit.Event]) -> Iterator[ckptkit.CheckpointManager]:
    log = ckptkit.EventLog()
    log.observe(events.append)
    tiers = [
        ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1)),
        ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1)),
    ]
    made = ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers, events=log)
    yield made
    made.close()


@pytest.fixture
def events() -> list[ckptkit.Event]:
    return []


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.full((300, 77), step, jnp.float32), "b": jnp.arange(5) + step}


def save(manager: ckptkit.CheckpointManager, step: int) -> None:
    assert manager.save(step, args=ocp.args.StandardSave(state_of(step)))  # pyright: ignore[reportCallIssue]


def on_disk(tmp_path: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1].removesuffix(".json")) for path in tmp_path.glob("ssd/*/*/*/step-*"))


def test_failed_ramdisk_save_leaves_no_disk_manifest(
    tmp_path: Path, manager: ckptkit.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be on the disk by then. Without a manifest they are nobody's, and the slot is free again."""
    save(manager, 0)
    manager.wait_until_finished()
    commit = Arena.commit

    def fail(self: Arena, slot: Any, save_id: SaveId, manifest: bytes) -> None:
        if not self.synced and save_id.step == 1:
            raise OSError("broken")
        commit(self, slot, save_id, manifest)

    monkeypatch.setattr(Arena, "commit", fail)
    save(manager, 1)
    with pytest.raises(ckptkit.SaveFailedError, match="step 1 was not committed to tier ram"):
        manager.wait_until_finished()
    assert on_disk(tmp_path) == [0]
    for step in (2, 3):  # both disk slots can still be had
        save(manager, step)
        manager.wait_until_finished()
    assert on_disk(tmp_path) == [2, 3]


def test_save_of_deleted_arrays_does_not_hang_the_disk_tier(tmp_path: Path, manager: ckptkit.CheckpointManager) -> None:
    """If the copy that had begun waited for its bytes, the disk tier and `close` would hang."""
    save(manager, 0)
    manager.wait_until_finished()
    gone = state_of(1)
    gone["w"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        manager.save(1, args=ocp.args.StandardSave(gone))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()  # a disk that is still ending the copy for nothing would leave the next step out
    save(manager, 2)
    manager.wait_until_finished()
    assert on_disk(tmp_path) == [0, 2]


def test_disk_tier_holds_the_saved_bytes(
    tmp_path: Path, manager: ckptkit.CheckpointManager, events: list[ckptkit.Event]
) -> None:
    for step in range(4):
        save(manager, step)
        manager.wait_until_finished()
    committed = [e for e in events if e.kind == ckptkit.Kind.COMMITTED and e.tier == "ssd"]
    assert [e.step for e in committed] == [0, 1, 2, 3]
    assert {e.fields["method"] for e in committed} <= {"direct", "mapping"}
    manager.close()
    for path in (*tmp_path.glob("ram/*/*/*/step-*"), *tmp_path.glob("ram/*/*/*/slot-*")):
        path.unlink()
    tiers = [
        ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1)),
        ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1)),
    ]
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers) as again:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(3))
        found = again.restore(3, args=ocp.args.StandardRestore(abstract))  # pyright: ignore[reportCallIssue]
        for name, value in state_of(3).items():
            np.testing.assert_array_equal(found[name], value)
