"""Files of slots that go, or are replaced, while their run lives: nothing is committed into them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.errors import TierUnusableError
from ckptkit.slots.arena import Arena
from tests.slots.arenas import PAGE, commit, fill, new_host, proven, save_of, write


@pytest.fixture
def host() -> Iterator[Path]:
    """A host's directory on the ramdisk."""
    host = new_host()
    yield host
    shutil.rmtree(host, ignore_errors=True)


def unlink_slots(directory: Path) -> None:
    """As a cleaner does."""
    for path in directory.glob("slot-*"):
        path.unlink()


def replace_slots(directory: Path) -> None:
    """As a copy over the directory does."""
    for path in directory.glob("slot-*"):
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        os.replace(other, path)


def remove_directory(directory: Path) -> None:
    """What RemoveIPC does."""
    shutil.rmtree(directory.parent)


LOSSES = [unlink_slots, replace_slots, remove_directory]


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("lose", LOSSES)
def test_lost_slot_takes_no_commit_and_is_made_anew(host: Path, lose: Callable[[Path], None], synced: bool) -> None:
    arena = Arena.open(host, 0, slots=3, synced=synced)
    said: list[ckptkit.CheckpointError] = []
    arena.on_lost = said.append
    directory = host / "0"
    write_any(arena, 1)
    slot = arena.acquire(2 * PAGE)
    assert slot is not None
    manifest = fill(slot, save_of(2), 2 * PAGE)
    lose(directory)
    with pytest.raises(TierUnusableError, match=r"has lost .*slot-"):
        commit(arena, slot, manifest)
    arena.release(slot)
    for step in (3, 4, 5, 6):
        write_any(arena, step)
    assert len(said) == 1
    arena.close()
    assert {save.step for save in proven(directory)} == {4, 5, 6}


def write_any(arena: Arena, step: int) -> None:
    """`write`, also to a disk."""
    slot = arena.acquire(2 * PAGE)
    assert slot is not None
    source = np.zeros(2 * PAGE, np.uint8)
    manifest = fill(slot, save_of(step), 2 * PAGE)
    if arena.synced:
        source[:] = slot.memory
        arena.write(slot, source, 0)
    commit(arena, slot, manifest)
    arena.release(slot)


def test_directory_made_anew_is_held_again(host: Path) -> None:
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    remove_directory(host / "0")
    write(arena, 2)
    other = Arena.open(host, 0, slots=2, synced=False)
    assert other.directory == host / "0.1"
    other.close()
    arena.close()


def test_directory_taken_by_another_process_is_left_to_it(host: Path) -> None:
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    remove_directory(host / "0")
    other = Arena.open(host, 0, slots=2, synced=False)
    assert other.directory == host / "0"
    with pytest.raises(TierUnusableError, match="another process has made and taken it"):
        arena.acquire(PAGE)
    write(other, 7)
    assert {save.step for save in proven(host / "0")} == {7}
    assert not can_lock(host / "0" / "lock")
    other.close()
    arena.close()


def can_lock(path: Path) -> bool:
    """Whether nobody holds a lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("tier", ["ram", "ssd"])
@pytest.mark.parametrize("lose", LOSSES)
def test_lost_tier_is_reported_and_later_saves_restore(tmp_path: Path, tier: str, lose: Callable[[Path], None]) -> None:
    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)
    given: dict[str, Any] = {
        "options": ocp.CheckpointManagerOptions(save_interval_steps=100),
        "tiers": [
            ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1)),
            ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1)),
        ],
        "host_id": "host",
    }
    with ckptkit.CheckpointManager(tmp_path / "root", events=log, **given) as manager:
        for step in range(1, 8):
            state = {"w": np.full(1 << 12, step)}
            manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
            if step == 2:
                lose(next((tmp_path / tier).glob("*/host/0")))
    assert {event.tier for event in events if event.kind == Kind.DEGRADED} == {tier}
    assert not [event for event in events if event.kind == Kind.FAILED]
    shutil.rmtree(tmp_path / ("ssd" if tier == "ram" else "ram"))
    with ckptkit.CheckpointManager(tmp_path / "root", **given) as manager:
        found = manager.restore(None, args=ocp.args.StandardRestore())  # pyright: ignore[reportCallIssue]
    assert found is not None
    assert set(np.asarray(found["w"]).tolist()) == {7}


def test_slot_that_was_removed_on_purpose_is_not_reported_as_lost(tmp_path: Path) -> None:
    """A tier that needs fewer slots for a while, and then more, would be reported as degraded by its own deletion."""
    arena, lost = Arena.open(tmp_path, 0, slots=2, synced=False), list[Any]()
    arena.on_lost = lost.append
    write(arena, 1)
    write(arena, 2)
    arena.resize(1)
    arena.protect(save_of(1))
    assert len(list(tmp_path.glob("0/slot-*"))) == 1
    arena.resize(2)
    write(arena, 3)
    arena.close()
    assert lost == []
