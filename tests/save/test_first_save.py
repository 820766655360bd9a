"""The slots of a run that begins: a save waits for none that the background is touching, and loses none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.save.slot_maker import SlotMaker
from ckptkit.slots import files
from ckptkit.slots.files import Slot, SlotFiles
from ckptkit.slots.reader import read_manifests

LIMIT_S = 60.0
States = list[tuple[int, dict[str, Any]]]


def manager_of(path: Path, slots: int = 3) -> ckptkit.CheckpointManager:
    """With a ramdisk that takes every step, and a durable root that takes none before step 1000."""
    return ckptkit.CheckpointManager(
        path / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1000),
        tiers=[ckptkit.Tier.ram(str(path / "ram"), slots=slots, save=ckptkit.EverySteps(1))],
        host_id="host",
    )


class Fails:
    """Makes no slot after the first `made` ones; then one more for each `True` in `more`."""

    def __init__(self, made: int, error: Exception, more: list[bool]):
        self.left, self.error, self.more = made, error, more

    def of(self, real: Callable[..., None]) -> Callable[..., None]:
        """In the place of `SlotFiles.make`."""

        def make(files: SlotFiles, slot: Slot, size_bytes: int) -> None:
            self.left -= 1
            if self.left < 0 and not (self.more and self.more.pop(0)):
                raise self.error
            real(files, slot, size_bytes)

        return make


def steps_in(path: Path) -> set[int]:
    """The steps that the ramdisk's manifests name."""
    manifests, _ = read_manifests((path / "ram").glob("*/host/0"))
    return {manifest.save_id.step for _, manifest in manifests}


@pytest.mark.parametrize(
    ("error", "more", "saved"),
    [
        (OSError("no such device"), [], {1, 2}),
        (ckptkit.StoreFullError("full"), [], {1, 2}),
        (ckptkit.StoreFullError("full"), [False, True], {2, 3}),
    ],
    ids=["error", "full", "another slot"],
)
def test_slot_that_cannot_be_made_keeps_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, more: list[bool], saved: set[int]
) -> None:
    """A state that grew takes a slot with an older save: where the slot cannot grow, both would be lost."""
    monkeypatch.setattr(SlotMaker, "reserve", lambda *_: None)
    fails = Fails(2, error, more)
    monkeypatch.setattr(SlotFiles, "make", fails.of(SlotFiles.make))
    policy = ckptkit.FailurePolicy(skipped_max=None, raise_in_save="never")
    with ckptkit.CheckpointManager(
        tmp_path / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1000),
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3 if more else 2, save=ckptkit.EverySteps(1))],
        host_id="host",
        saving=ckptkit.SaveOptions(on_failure=policy),
    ) as manager:
        for step, size in ((1, 1000), (2, 1000), (3, 100_000)):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(size, step)}))
            with suppress(ckptkit.SaveFailedError):
                manager.wait_until_finished()
        assert steps_in(tmp_path) >= saved
        assert manager._pipeline.threads.in_flight == 0


def test_save_takes_a_slot_that_is_being_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` touches memory at 0.3 to 1.4 GB/s on one core: a save right after it would wait for all of it."""
    touching, ended = threading.Event(), threading.Event()

    def populate(memory: np.ndarray, between: Callable[[], bool]) -> bool:
        del memory
        while between() and not ended.is_set():
            touching.set()
            time.sleep(0.01)
        return False

    monkeypatch.setattr(files, "populate", populate)
    state = {"w": jnp.arange(1000.0)}
    with manager_of(tmp_path, slots=2) as manager:
        manager.prepare(args=ocp.args.StandardSave(state))
        for step in (1, 2, 3):  # from the second on the only free slot is the one that the thread has
            assert touching.wait(LIMIT_S)
            assert manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            touching.clear()
        ended.set()
    assert steps_in(tmp_path) == {2, 3}


def test_paused_maker_takes_every_order(tmp_path: Path) -> None:
    """A save pauses the thread that makes slots, and orders some: its own wait would never end."""
    with manager_of(tmp_path) as manager:
        maker = manager._pipeline.slots
        with maker.held_by("save"):
            done = threading.Thread(target=lambda: [maker.reserve(4096 * n) for n in range(1, 20)], daemon=True)
            done.start()
            done.join(LIMIT_S)
            assert not done.is_alive()
