"""The steps of a worker, as its agent reads them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.util import heartbeat
from ckptkit.util.heartbeat import Beats


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Beats | None]]:
    """The marker of this process, which is a worker now, as the agent reads it."""
    monkeypatch.setattr(heartbeat, "_marker", None)
    fd = os.memfd_create("beats")
    os.ftruncate(fd, heartbeat.BYTES)
    shared = mmap.mmap(fd, heartbeat.BYTES)
    heartbeat.start(fd)
    yield lambda: heartbeat.read(shared)
    shared.close()


def test_a_loop_that_only_saves_is_followed_by_its_saves(beats: Callable[[], Beats | None]) -> None:
    assert beats() is None
    for step in (7, 7, 8, 9):
        heartbeat.beat(step)
    found = beats()
    assert found is not None
    assert (found.count, found.first_step, found.step) == (3, 7, 9)


def test_first_step_after_a_restore_is_the_one_after_the_restored(beats: Callable[[], Beats | None]) -> None:
    """A loop that calls the manager every 10 steps repeats 10 steps where its first call seems to be 1."""
    heartbeat.resumed(30)
    heartbeat.beat(40)
    found = beats()
    assert found is not None
    assert (found.first_step, found.step) == (31, 40)


@pytest.mark.parametrize("asks_first", [False, True])
def test_steps_have_the_numbers_of_the_loop_and_not_those_of_saves(
    beats: Callable[[], Beats | None], asks_first: bool
) -> None:
    """A loop from 0 saves `step + 1`: one step too many would be reported as repeated after a loss."""
    if asks_first:
        heartbeat.beat(35)
    for step in (35, 36, 37):
        heartbeat.beat(step, done=True)
        heartbeat.beat(step + 1)
    found = beats()
    assert found is not None
    assert (found.count, found.first_step, found.step) == (6 + asks_first, 35, 37)


def test_saves_are_counted_with_the_time_of_this_process(beats: Callable[[], Beats | None], tmp_path: Path) -> None:
    """A process that copies slowly, or reaches its steps last, would not be named while the job runs."""
    args = ocp.args
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=args.StandardSave({"w": jnp.zeros(1 << 16)}))
            manager.wait_until_finished()
    found = beats()
    assert found is not None
    assert (found.count, found.saves.count) == (2, 2)
    assert 0.0 < found.saves.own_s < 60.0
    assert 0.0 <= found.saves.computing_s < 60.0
