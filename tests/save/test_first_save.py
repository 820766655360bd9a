"""A save whose slot is not made yet: `save` returns before it is, and what it returned with is what is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.save.slot_maker import SlotMaker
from ckptkit.slots.files import Slot, SlotFiles
from ckptkit.slots.host_memory import HostMemory
from ckptkit.slots.reader import read_manifests
from ckptkit.snapshot.describe import describe_items
from ckptkit.snapshot.staging import Stager

LIMIT_S = 60.0
States = list[tuple[int, dict[str, Any]]]


class SlowSlots:
    """Slots are made only when a test allows it."""

    def __init__(self) -> None:
        self.allowed, self.asked = threading.Event(), threading.Event()
        self.in_time = True

    def make(self, real: Callable[..., None]) -> Callable[..., None]:
        """In the place of `SlotFiles.make`."""

        def made(files: SlotFiles, slot: Slot, size_bytes: int, turn: Callable[[], None] = lambda: None) -> None:
            self.asked.set()
            self.in_time &= self.allowed.wait(LIMIT_S)
            real(files, slot, size_bytes, turn)

        return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowSlots]:
    """While a test runs, and not beyond."""
    slots = SlowSlots()
    monkeypatch.setattr(SlotFiles, "make", slots.make(SlotFiles.make))
    yield slots
    slots.allowed.set()


def manager_of(path: Path) -> ckptkit.CheckpointManager:
    """With a ramdisk that takes every step, and a durable root that takes none before step 1000."""
    return ckptkit.CheckpointManager(
        path / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1000),
        tiers=[ckptkit.Tier.ram(str(path / "ram"), slots=3, save=ckptkit.EverySteps(1))],
        host_id="host",
    )


def state_of(seed: int) -> dict[str, Any]:
    """Arrays of every kind of owner."""
    made = jax.random.normal(jax.random.key(seed), (1000, 100))
    return {"w": made, "step": jnp.array(seed), "host": np.full(100, seed), "key": jax.random.key(seed)}


def plain(tree: dict[str, Any]) -> Any:
    """The bits of a state."""
    return jax.tree.map(np.array, tree | {"key": jax.random.key_data(tree["key"])})


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("donates", [False, True])
def test_save_does_not_wait_for_its_slot(tmp_path: Path, slow: SlowSlots, prepared: bool, donates: bool) -> None:
    """The first save would hold the loop while its slot is touched for the first time, 0.2 to 4 s for each GB; and the
    next step must not change what is saved."""
    step = jax.jit(lambda w: w * 2, donate_argnums=0 if donates else ())
    state = state_of(1)
    before = plain(state)
    with manager_of(tmp_path) as manager:
        if prepared:
            manager.prepare(args=ocp.args.StandardSave(state))
            assert slow.asked.wait(LIMIT_S)
        assert manager.save(1, args=ocp.args.StandardSave(state))
        assert not slow.allowed.is_set()
        state["host"][:] = -1
        state["w"] = step(state["w"])
        state["w"].block_until_ready()
        slow.allowed.set()
        manager.wait_until_finished()
        assert slow.in_time
        restored = manager.restore(1, args=ocp.args.StandardRestore(jax.tree.map(lambda leaf: leaf, state)))
    jax.tree.map(np.testing.assert_array_equal, plain(restored), before)


def test_arrays_that_a_step_donates_are_not_held_twice(tmp_path: Path) -> None:
    """Each such step takes new memory: a loop that donates pays for the copy into a slot less."""
    description, memory = describe_items({"default": {"w": jnp.ones(1000)}}), np.zeros(1 << 16, np.uint8)
    for donates in (False, True):
        stager, state = Stager(), {"w": jnp.ones(1000)}
        held = stager.begin("auto", description, {"default": state}, None)
        if donates:
            jax.jit(lambda w: w * 2, donate_argnums=0)(state["w"])
        assert held.finish(memory, None).keys() == {0}
        assert memory[:4000].view(np.float32).tolist() == [1.0] * 1000
        assert stager.may_hold("auto", description) == (not donates)
    del tmp_path


def test_nothing_is_held_where_the_host_has_no_room(tmp_path: Path) -> None:
    """The arrays, the slot, and the next state: a process would be killed for the sake of a short save."""
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 4 kB\n")
    state = {"default": {"w": jnp.ones(1000)}}
    description = describe_items(state)
    assert Stager().may_hold("auto", description)
    assert not Stager(HostMemory(host=tmp_path / "meminfo")).may_hold("auto", description)
    assert not Stager(HostMemory(bytes_max=6000)).may_hold("auto", description)
    assert not Stager().may_hold("slot_copy", description), "only where nothing else was asked for"


class Fails:
    """Makes no slot after the first `made` ones; then one more for each `True` in `more`."""

    def __init__(self, made: int, error: Exception, more: list[bool]):
        self.left, self.error, self.more = made, error, more

    def of(self, real: Callable[..., None]) -> Callable[..., None]:
        """In the place of `SlotFiles.make`."""

        def make(files: SlotFiles, slot: Slot, size_bytes: int, turn: Callable[[], None] = lambda: None) -> None:
            self.left -= 1
            if self.left < 0 and not (self.more and self.more.pop(0)):
                raise self.error
            real(files, slot, size_bytes, turn)

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


def test_paused_maker_takes_every_order(tmp_path: Path) -> None:
    """A save pauses the thread that makes slots, and orders some: its own wait would never end."""
    with manager_of(tmp_path) as manager:
        maker = manager._pipeline.slots
        maker.hold(by="save")
        done = threading.Thread(target=lambda: [maker.reserve(4096 * n) for n in range(1, 20)], daemon=True)
        done.start()
        done.join(LIMIT_S)
        assert not done.is_alive()
        maker.go_on("save")
