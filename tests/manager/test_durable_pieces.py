"""A durable step that is written in pieces, at a rate: the same step, and no more of it in flight than is allowed."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import DurableProfile
from ckptkit.durable.cells import CellWriter
from ckptkit.durable.pacing import Pace
from tests.states import abstract, assert_same, make_state

PROFILES = [
    DurableProfile(data_file_bytes=1 << 14, in_flight_bytes=1 << 15, copied_bytes=1 << 12),  # each cell a piece or more
    DurableProfile(data_file_bytes=1 << 10, in_flight_bytes=1, copied_bytes=1 << 20),  # one at a time, all copied
    DurableProfile(write_bytes_per_s=4e6),
]


@pytest.mark.parametrize("profile", PROFILES, ids=["pieces", "one at a time", "rate"])
def test_pieces_make_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: DurableProfile) -> None:
    """A step that only fits in several commits of its database would be half of one."""
    taken: list[int] = []
    in_flight: list[int] = []
    take, finish = Pace.take, CellWriter._finish_oldest
    monkeypatch.setattr(Pace, "take", lambda self, nbytes: taken.append(nbytes) or take(self, nbytes))
    monkeypatch.setattr(CellWriter, "_finish_oldest", lambda self: in_flight.append(self._sent_bytes) or finish(self))
    large = {f"large{index}": jnp.arange(64 * 300.0).reshape(300, 64) * (index + 1) for index in range(4)}
    state = {**make_state(3), **large}
    with ckptkit.CheckpointManager(tmp_path / "root", durable=profile) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
        assert_same(found, state)
    assert sum(taken) >= sum(leaf.nbytes for leaf in large.values())
    largest = max(leaf.nbytes for leaf in large.values())
    if profile.in_flight_bytes < 1 << 20:
        assert len(taken) > 4
        assert max(in_flight) <= max(profile.in_flight_bytes, largest + profile.piece_bytes)
    with ocp.CheckpointManager(tmp_path / "root") as stock:
        assert_same(stock.restore(1, args=ocp.args.StandardRestore(abstract(state))), state)  # pyright: ignore[reportCallIssue]
