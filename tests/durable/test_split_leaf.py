"""A leaf that several processes hold, and that is large next to the others: each writes some of its rows."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.orbax.host_shards import HostTreeSave, host_tree
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.write_step import StepWriter
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from tests.durable.stock import linked_alone, restored_alone
from tests.durable.test_write_step import Meeting


def make_tree(
    value: np.ndarray, cell: tuple[int, ...], process: int, monkeypatch: pytest.MonkeyPatch, step: int = 5
) -> HostTreeSave:
    """The part that one of two processes writes, which both hold all of `value`."""
    box = Box.whole(value.shape)
    digests = tuple(digest_of(np.ascontiguousarray(value[each.slices()])) for each in cells_of(box, cell))
    leaf = LeafRecord(
        path=("w",),
        keys="d",
        kind="jax",
        shape=value.shape,
        dtype="float32",
        cell=cell,
        boxes=(BoxRecord(box=box, offset=0, digests=digests),),
    )
    writer = Writer(process=process, count=2, host=f"h{process}")
    manifest = Manifest(
        save_id=SaveId(1, step, 0), writer=writer, slot="slot-0.bin", arrays={"default": (leaf,)}, inline={}
    )
    treedef = jax.tree.structure({"w": 0})
    monkeypatch.setattr(jax, "process_index", lambda: process)
    made = host_tree([(leaf, {box: (0, 1)}, {box: value})], treedef, manifest, "default", lambda: None, standard=True)
    monkeypatch.undo()
    return made


def write_step(root: Path, step: int, trees: list[HostTreeSave]) -> None:
    """Both processes save their trees, as threads."""
    meeting, raised = Meeting(), list[BaseException]()

    def run(process: int) -> None:
        try:
            writer = StepWriter(str(root), meeting.of(process), DurableProfile())
            writer.write(str(step), SaveId(1, step, 0), {"default": trees[process]}, {})
        except BaseException as error:  # noqa: BLE001  raised below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(process,)) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert raised == []


@pytest.mark.parametrize(
    ("shape", "cell"),
    [((64, 6), (8, 6)), ((61, 6), (7, 6)), ((1, 50, 3), (1, 4, 3)), ((3, 40), (1, 40))],
    ids=["even", "uneven", "second dimension", "three rows"],
)
def test_rows_of_one_leaf_are_written_by_both_holders(
    shape: tuple[int, ...], cell: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process would stage and write the whole of it, or a part be recorded with another part's digests."""
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    trees = [make_tree(value, cell, process, monkeypatch) for process in (0, 1)]
    written = [sum(block.nbytes for _, block in tree.item["w"].blocks) for tree in trees]
    assert sum(written) == value.nbytes
    assert max(written) <= value.nbytes / 2 + np.prod(cell) * 4
    write_step(tmp_path / "run", 5, trees)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "run" / "5" / "default")["w"]
    assert (np.asarray(restored) == value).all()
    assert [proof.state for proof in ckptkit.verify(str(tmp_path / "run")).steps] == ["proven"]
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        template = {"w": jax.ShapeDtypeStruct(shape, np.float32)}
        found = manager.restore(5, args=ocp.args.StandardRestore(template))["w"]  # pyright: ignore[reportCallIssue]
    assert (np.asarray(found) == value).all()
    manifests = DurableReader(str(tmp_path / "run" / "5"), step=5).manifests()
    assert len([box for each in manifests for box in each.arrays["default"][0].boxes]) == 2


def test_stock_orbax_restores_a_split_leaf_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose rows are of two processes would need ckptkit, or an older step, to be read."""
    values = {step: np.arange(61 * 6, dtype=np.float32).reshape(61, 6) + step for step in (5, 6, 7)}
    root = tmp_path / "run"
    for step, value in values.items():
        write_step(root, step, [make_tree(value, (7, 6), process, monkeypatch, step) for process in (0, 1)])
    alone = {step: linked_alone(root, step, tmp_path / str(step)) for step in values}
    found = restored_alone(alone, tmp_path / "found")
    assert {step: leaves["w"].tobytes() for step, leaves in found.items()} == {
        step: value.tobytes() for step, value in values.items()
    }
