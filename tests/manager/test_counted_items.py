"""An item that belongs to a number of processes is refused on another number, by name, before anything is read.

A position that is the same for every process is restored on any number of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grain
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.errors import CorruptCheckpointError, Reason, UnsuitedSaveError
from ckptkit.model.manifest import SaveId, Writer
from ckptkit.restore.records import Rejection
from ckptkit.resume import ElasticBatches
from ckptkit.slots.reader import read_manifest
from tests.states import abstract, assert_same, make_state


def iterator() -> Any:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


def written_by_two(slots: Path, states: Sequence[str] = ()) -> None:
    """The save of this process's slots as two processes of this host would have written it, with their `states`."""
    shutil.copytree(slots, slots.with_name("1"))
    for process in (0, 1):
        for path in slots.with_name(str(process)).glob("step-*.json"):
            held = read_manifest(path)
            inline = (
                {**held.inline, "data": {**held.inline["data"], "value": states[process]}} if states else held.inline
            )
            writer = Writer(process=process, count=2, host="h")
            path.write_bytes(replace(held, writer=writer, inline=inline).to_bytes())


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
            match=r"item 'data' is a data iterator saved by 2 processes, and this job has 1: restore on 2, or read the",
        ) as failed:
            restoring.restore(2, args=ocp.args.Composite(state=wanted, data=read))
        assert str(failed.value).endswith("\nNothing is damaged, and nothing was deleted.")  # not: run `scrub --repair`
        assert [event.kind for event in events if event.kind in ("restore_planned", "restored")] == []
        restored = restoring.restore(2, args=ocp.args.Composite(state=wanted))
    assert_same(restored["state"], state)
    (damaged,) = slots.with_name("1").glob("step-000000000002-*.json")
    damaged.write_bytes(b"{")  # it may be the one that would have made the difference
    repaired = "Run on each host, with its own --host-id: `ckptkit scrub"
    with manager() as restoring, pytest.raises(ckptkit.NoRestorableStepError, match=repaired):
        restoring.restore(2, args=ocp.args.Composite(state=wanted, data=read))


def test_save_that_one_process_finds_damaged_is_repaired() -> None:
    """The error would not name the command that repairs."""
    errors = {0: UnsuitedSaveError("saved by 2"), 1: CorruptCheckpointError("cell 3")}
    reason = Reason.of_processes({process: Reason.of(error) for process, error in errors.items()}, 4)
    assert reason is not None
    rejection = Rejection(save_id=SaveId(1, 5, 1), where="ram", reason=reason)
    assert rejection.is_damage
    assert not rejection.is_unsuited


def elastic(kind: str, rows: Sequence[int]) -> Any:
    """An iterator over 100 records in batches of 12, and its rows of each."""
    data = grain.MapDataset.range(100)
    if kind == "Grain's":
        half = grain.sharding.ShardOptions(shard_index=rows[0] // 6, shard_count=12 // len(rows))
        return iter(grain.experimental.ElasticIterator(data, 12, half))
    if kind == "by index":
        return ElasticBatches(data, 12, rows=rows)
    return ElasticBatches([data[part::4].to_iter_dataset() for part in range(4)], 12, rows=rows)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("kind", ["Grain's", "by index", "streams"])
def test_one_process_goes_on_from_the_position_of_two(tmp_path: Path, kind: str, durable: bool) -> None:
    """A job that comes back with fewer hosts could not read its own data position."""

    def manager() -> ckptkit.CheckpointManager:
        every = 1 if durable else 100
        return ckptkit.CheckpointManager(
            tmp_path / "run",
            options=ocp.CheckpointManagerOptions(save_interval_steps=every),
            tiers=[] if durable else [ckptkit.Tier.ram(str(tmp_path / "ram"))],
            host_id="h",
        )

    def args(how: str, iterator: Any) -> Any:
        return ocp.args.Composite(
            state=getattr(ocp.args, f"Standard{how}")(state if how == "Save" else abstract(state)),
            data=getattr(grain.checkpoint, f"Checkpoint{how}")(iterator),
        )

    state = make_state(5)
    halves = [elastic(kind, range(6)), elastic(kind, range(6, 12))]
    undisturbed = elastic(kind, range(12))
    for _ in range(3):
        for each in (*halves, undisturbed):
            next(each)
    states = [json.dumps(each.get_state()) for each in halves]
    with manager() as saving:
        for step in (1, 2):
            saving.save(step, args=args("Save", halves[0]))
            saving.wait_until_finished()
    if durable:
        sidecars = list((tmp_path / "run" / "2").rglob("*ckptkit*"))
        assert sidecars
    else:
        (slots,) = (tmp_path / "ram").glob("*/h/0")
        shutil.rmtree(tmp_path / "run" / "1", ignore_errors=True)
        for path in slots.glob("step-000000000001-*.json"):
            path.unlink()
        written_by_two(slots, states)
    whole = elastic(kind, range(12))
    with manager() as restoring:
        if durable and kind == "streams":  # one process had written it, and read two of four streams
            with pytest.raises(ckptkit.CheckpointError, match="position of stream 2, 3"):
                restoring.restore(2, args=args("Restore", whole))
            return
        restored = restoring.restore(2, args=args("Restore", whole))
    assert restored["data"] is whole
    assert next(whole).tolist() == next(undisturbed).tolist()
    assert_same(restored["state"], state)
