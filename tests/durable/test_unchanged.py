"""Bytes that did not change are not written again, and each step still needs no other step."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from ckptkit import DurableProfile
from ckptkit.durable.cells import unchanged
from ckptkit.durable.cells.writer import CellWriter
from ckptkit.durable.orbax.host_shards import HostShards, HostTreeSave
from ckptkit.durable.write_step import StepWriter
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, SaveId
from tests.cases import long_except
from tests.durable.stock import linked_alone, restored_alone
from tests.durable.test_write_step import Meeting
from tests.states import abstract, assert_same

_PROFILES = {
    "one file": DurableProfile(),
    "pieces": DurableProfile(data_file_bytes=1 << 18, in_flight_bytes=1 << 19, copied_bytes=1 << 12),
    "encoded": DurableProfile(compression="zstd_shuffle", copied_bytes=1 << 10, data_file_bytes=1 << 18),
}
_BASE_LEAVES = 6


def _state(step: int, *, changed: int = 0) -> dict[str, jax.Array]:
    """A frozen base of 6 leaves of 400 kB, of which the first `changed` follow the step, and a small adapter."""
    base = {
        f"base{n}": jax.random.normal(jax.random.key(n + 100 * step * (n < changed)), (100, 1000))
        for n in range(_BASE_LEAVES)
    }
    return {**base, "adapter": jnp.full((200, 100), float(step)), "scale": jnp.asarray(float(step))}


def _save(manager: Any, step: int, state: Any) -> None:
    manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def _shared(step: Path) -> set[str]:
    """The files of a step that another directory has too."""
    return {path.name for path in step.rglob("*") if path.is_file() and path.stat().st_nlink > 1}


def _own_bytes(step: Path) -> int:
    return sum(p.stat().st_size for p in step.rglob("*") if p.is_file() and p.stat().st_nlink == 1)


@pytest.mark.parametrize("name", long_except(["pieces"], _PROFILES))
def test_stock_orbax_restores_a_sharing_step_alone(tmp_path: Path, name: str) -> None:
    """A step that needs files of a deleted step is lost with it."""
    root, alone = tmp_path / "root", tmp_path / "alone"
    with ckptkit.CheckpointManager(root, durable=_PROFILES[name]) as manager:
        for step in range(5):
            _save(manager, step, _state(step))
        for step in range(5):
            args = ocp.args.StandardRestore(abstract(_state(step)))  # pyright: ignore[reportCallIssue]
            assert_same(manager.restore(step, args=args), _state(step))
    assert _shared(root / "4")
    assert _own_bytes(root / "4") < 200_000 < _own_bytes(root / "0")
    found = restored_alone({step: linked_alone(root, step, alone / str(step)) for step in range(5)}, tmp_path / "found")
    for step, leaves in found.items():
        assert_same(leaves, {name: np.asarray(value) for name, value in _state(step).items()})
    shutil.rmtree(alone)
    for step in range(4):
        shutil.rmtree(root / str(step))
    assert not _shared(root / "4"), "nothing is left that it shares a file with"


def test_changed_leaf_of_a_group_is_written(tmp_path: Path) -> None:
    """A leaf that changes again would come back with its old values."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in range(3):
            _save(manager, step, _state(step))
        for step, changed in ((3, 1), (4, 1), (5, 3), (6, 3), (7, 3), (8, 0)):
            _save(manager, step, _state(step, changed=changed))
    for step, changed in ((2, 0), (3, 1), (4, 1), (5, 3), (6, 3), (7, 3), (8, 0)):
        with ckptkit.CheckpointManager(tmp_path) as reader:
            args = ocp.args.StandardRestore(abstract(_state(step)))  # pyright: ignore[reportCallIssue]
            assert_same(reader.restore(step, args=args), _state(step, changed=changed))
    assert len(_shared(tmp_path / "3")) == 1, "most of the group is unchanged"
    assert not _shared(tmp_path / "5") & _shared(tmp_path / "4"), "too little of the group was left"
    assert _shared(tmp_path / "5") == _shared(tmp_path / "7")


def test_bytes_are_written_where_the_last_step_was_deleted(tmp_path: Path) -> None:
    """A save fails because another tool has deleted the newest step."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in range(3):
            _save(manager, step, _state(step))
        shutil.rmtree(tmp_path / "2")
        _save(manager, 3, _state(3))
        _save(manager, 4, _state(4))
    for step in (3, 4):
        with ckptkit.CheckpointManager(tmp_path) as reader:
            args = ocp.args.StandardRestore(abstract(_state(step)))  # pyright: ignore[reportCallIssue]
            assert_same(reader.restore(step, args=args), _state(step))
    assert _own_bytes(tmp_path / "3") + _own_bytes(tmp_path / "1") > 2_000_000
    assert _own_bytes(tmp_path / "4") < 200_000


@pytest.mark.parametrize(("most", "expected"), [(1, [1, 1, 1, 1, 1, 1, 1]), (3, [1, 3, 3, 3, 3, 3, 3])])
def test_few_steps_share_a_file(tmp_path: Path, most: int, expected: list[int]) -> None:
    """One damaged file would be damage of every step of a long run."""
    with ckptkit.CheckpointManager(tmp_path, durable=DurableProfile(shared_steps_max=most)) as manager:
        for step in range(7):
            _save(manager, step, _state(step))
    links = [max(p.stat().st_nlink for p in (tmp_path / str(s) / "default/d").iterdir()) for s in range(7)]
    assert links == expected


def test_state_that_changes_has_no_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary training would pay for what it does not use."""
    made = list[bool]()
    end = CellWriter.end_apart
    monkeypatch.setattr(CellWriter, "end_apart", lambda self: made.append(True) or end(self))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in range(1, 4):
            _save(manager, step, _state(step, changed=_BASE_LEAVES))
    assert not made
    assert not _shared(tmp_path / "3")


def test_each_of_several_processes_shares_its_part(tmp_path: Path) -> None:
    """In a job of several processes the frozen half of another process would come back, or none."""
    meeting, shape = Meeting(), (600, 1000)
    value = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    raised = list[BaseException]()

    def items(process: int, step: int) -> dict[str, Any]:
        changing = np.full(shape, step, np.float32)
        shards = {}
        for name, array in (("frozen", value), ("changing", changing)):
            box = Box((300 * process, 0), (300 * process + 300, 1000))
            block = np.ascontiguousarray(array[box.slices()])
            cells = tuple(digest_of(block[row : row + 100].tobytes()) for row in (0, 100, 200))
            record = LeafRecord(
                path=(name,),
                keys="d",
                kind="jax",
                shape=shape,
                dtype="float32",
                cell=(100, 1000),
                boxes=(BoxRecord(box=box, offset=-1, digests=cells),),
            )
            shards[name] = HostShards(record=record, blocks=[(box, block)])
        return {"state": HostTreeSave(shards)}

    def run(process: int) -> None:
        try:
            writer = StepWriter(str(tmp_path), meeting.of(process), DurableProfile(copied_bytes=1))
            for step in range(4):
                writer.write(str(step), SaveId(1, step, step), items(process, step), {})
        except BaseException as error:  # noqa: BLE001  looked at below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    assert len(_shared(tmp_path / "3")) == 2, "one file of each process"
    for step in range(3):
        shutil.rmtree(tmp_path / str(step))
    for name, expected in (("frozen", value), ("changing", np.full(shape, 3, np.float32))):
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/3/state/", "path": name}}
        assert np.array_equal(ts.open(spec).result().read().result(), expected), name


def test_padded_file_is_linked_and_a_short_one_is_not(tmp_path: Path) -> None:
    """TensorStore pads large files, and none of them would be shared; a file that was cut off would be."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    for name, size in (("padded", 8192), ("short", 4999)):
        (source / "d" / name).write_bytes(bytes(size))
    assert unchanged._link({"d/padded": 5000}, str(source), str(target))
    assert (target / "d/padded").stat().st_nlink == 2
    assert not unchanged._link({"d/padded2": 1}, str(source), str(target)), "missing"
    (target / "d/padded").unlink()
    assert not unchanged._link({"d/padded": 5000, "d/short": 5000}, str(source), str(target))
    assert not list((target / "d").iterdir())


def test_event_of_a_commit_has_the_shared_bytes(tmp_path: Path) -> None:
    """A person could not see that a commit was short because it wrote little, and which step has the bytes."""
    log = ckptkit.EventLog()
    found = dict[int | None, tuple[Any, Any]]()

    def note(event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.COMMITTED:
            found[event.step] = (event.fields.get("shared_bytes"), event.fields.get("shared_from"))

    log.observe(note)
    with ckptkit.CheckpointManager(tmp_path, events=log) as manager:
        for step in range(4):
            _save(manager, step, _state(step))
    assert found == {0: (None, None), 1: (None, None), 2: (2_400_000, 1), 3: (2_400_000, 2)}
