"""An item that belongs to a number of processes is refused on another number, by name, before anything is read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grain
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model.manifest import Writer
from ckptkit.slots.reader import read_manifest
from tests.states import abstract, assert_same, make_state


def iterator() -> Any:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


def written_by_two(slots: Path) -> None:
    """The save of this process's slots as two processes of this host would have written it."""
    shutil.copytree(slots, slots.with_name("1"))
    for process in (0, 1):
        for path in slots.with_name(str(process)).glob("step-*.json"):
            held = read_manifest(path)
            path.write_bytes(replace(held, writer=Writer(process=process, count=2, host="h")).to_bytes())


def test_one_process_refuses_a_data_iterator_of_two(tmp_path: Path) -> None:
    """One process would go on with half of the data, or the state be read for nothing."""
    events: list[Any] = []
    log = ckptkit.EventLog()
    log.observe(events.append)

    def manager() -> ckptkit.CheckpointManager:
        return ckptkit.CheckpointManager(
            tmp_path / "run",
            options=ocp.CheckpointManagerOptions(save_interval_steps=100),
            tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))],
            host_id="h",
            events=log,
        )

    state = make_state(5)
    with manager() as saving:
        data = grain.checkpoint.CheckpointSave(iterator())  # pyright: ignore[reportCallIssue]
        for step in (1, 2):
            saving.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=data))  # pyright: ignore[reportCallIssue]
            saving.wait_until_finished()
    (slots,) = (tmp_path / "ram").glob("*/h/0")
    shutil.rmtree(tmp_path / "run" / "1", ignore_errors=True)
    for path in slots.glob("step-000000000001-*.json"):
        path.unlink()
    written_by_two(slots)
    events.clear()
    wanted = ocp.args.StandardRestore(abstract(state))  # pyright: ignore[reportCallIssue]
    with manager() as restoring:
        assert restoring.latest_step() == 2
        read = grain.checkpoint.CheckpointRestore(iterator())  # pyright: ignore[reportCallIssue]
        with pytest.raises(
            ckptkit.NoRestorableStepError,
            match=r"item 'data' is a data iterator saved by 2 processes, and this job has 1: restore on 2, or keep one",
        ):
            restoring.restore(2, args=ocp.args.Composite(state=wanted, data=read))
        assert [event.kind for event in events if event.kind in ("restore_planned", "restored")] == []
        restored = restoring.restore(2, args=ocp.args.Composite(state=wanted))
    assert_same(restored["state"], state)
