"""Pieces of an item that are databases of their own, in memory: what is left of them is the item's, and whole."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from ckptkit import DurableProfile
from ckptkit.diagnosis.tuner.forecasting import forecast
from ckptkit.durable.cells import writer as cells
from ckptkit.durable.cells.ocdbt import Placed, places
from ckptkit.durable.cells.writer import CellStream, CellWriter, merge_processes, process_directory
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import StoreError, TransientStoreError
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import BoxRecord, LeafRecord, SaveId
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Delay, Fault, FaultPlan, Fixed, Hang, Kind, Status
from ckptkit.upkeep.disk_usage import usage
from tests.states import assert_same

SMALL = DurableProfile(data_file_bytes=1 << 14, in_flight_bytes=1 << 16, copied_bytes=1 << 13)
ENCODED = DurableProfile(data_file_bytes=1 << 14, in_flight_bytes=1 << 16, copied_bytes=1 << 10, compression="zstd")
ARRAYS: dict[str, tuple[np.ndarray, tuple[int, ...]]] = {
    **{f"small{index:02}": (np.arange(1000.0) + index, (1000,)) for index in range(20)},
    "padded": (np.arange(300 * 64, dtype=np.float32).reshape(300, 64), (128, 64)),
    "padded small": (np.arange(5 * 70, dtype=np.int8).reshape(5, 70), (2, 70)),
    "empty": (np.zeros((0, 4), np.float32), (1, 4)),
    "number": (np.array(7), ()),
    "ü%41#?/ .": (np.arange(3000, dtype=np.uint8), (3000,)),
    "large": (np.arange(9000, dtype=np.float64), (3000,)),
}


LEAVES = {name: array for name, (array, _) in ARRAYS.items() if name.startswith("small")}


def leaf_of(name: str, array: np.ndarray, cell: tuple[int, ...]) -> LeafRecord:
    return LeafRecord(
        path=(name,) if name else (), keys="d", kind="jax", shape=array.shape, dtype=array.dtype.name, cell=cell
    )


def write(directory: str, profile: DurableProfile, arrays: Mapping[str, Any], *, expect: float = 1.0) -> None:
    """Through a writer that expects this much of them."""
    added = [(leaf_of(name, array, cell), [(Box.whole(array.shape), array)]) for name, (array, cell) in arrays.items()]
    writer = CellWriter(directory, profile, expected=(added * 2)[: int(len(added) * expect)])
    for leaf, blocks in added:
        writer.add(leaf, blocks, describe=True)
    writer.commit()


def assert_whole(base: Any, arrays: Mapping[str, Any], below: str = "d/") -> None:
    """Everything is read, and every reference leads to a data file, by those who know of no memory."""
    store = ts.KvStore.open(base).result()
    found = places(store, lambda future: future.result(timeout=60))
    files = {placed.path for placed in found.values() if isinstance(placed, Placed)}
    listed = {key.decode(): 0 for key in store.list().result()}
    assert files <= set(listed)
    assert all(path.startswith(below) for path in files)
    assert not [path for path in listed if path.startswith("n/")]
    for name, (array, _) in arrays.items():
        prefix = f"{name}/" if name else ""
        kvstore = {"driver": "ocdbt", "base": base, "path": prefix}
        opened = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
        assert np.array_equal(opened.read().result(), array), name


@pytest.mark.parametrize("expect", [1.0, 0.4, 2.0], ids=["as expected", "more", "less"])
@pytest.mark.parametrize("profile", [SMALL, ENCODED], ids=["plain", "encoded"])
def test_database_does_not_refer_to_memory(tmp_path: Path, profile: DurableProfile, expect: float) -> None:
    """A step would be there, be committed, and be gone with the process that wrote it."""
    directory = tmp_path / "a b#c%41ü?"
    directory.mkdir()
    write(str(directory), profile, ARRAYS, expect=expect)
    assert len(list(directory.glob("d/*"))) > 5
    assert_whole({"driver": "file", "path": f"{directory}/"}, ARRAYS)


def test_leaf_without_a_name_is_written(tmp_path: Path) -> None:
    """A state that is one array, in several pieces."""
    arrays = {"": (np.arange(40_000.0).reshape(400, 100), (20, 100))}
    write(str(tmp_path), SMALL, arrays)
    assert len(list(tmp_path.glob("d/*"))) > 8
    assert_whole({"driver": "file", "path": f"{tmp_path}/"}, arrays)


def test_pieces_are_written_to_a_bucket(server: BucketServer) -> None:
    """The tree of a piece would be an object, or data be read back and written a second time."""
    directory = "gs://runs/run/1/default"
    write(directory, SMALL, ARRAYS)
    methods = [entry.kind for entry in server.log.entries()]
    assert Kind.READ not in methods
    assert_whole(f"{directory}/", ARRAYS)


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_names_with_url_characters_are_restored(tmp_path: Path, server: BucketServer, where: str) -> None:
    """The data of `a%41` went to `aA`: the step was committed, and nothing of it could be restored."""
    root = f"{tmp_path if where == 'disk' else 'gs://runs'}/a%41 b#ü?"
    state = {name: jnp.asarray(array, np.float32) for name, array in LEAVES.items()}
    with ckptkit.CheckpointManager(root, durable=SMALL) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
    with ckptkit.CheckpointManager(root) as manager:
        assert_same(manager.restore(1, args=ocp.args.StandardRestore(state)), state)  # pyright: ignore[reportCallIssue]
    assert [step.state for step in ckptkit.verify(root).steps] == ["proven"]
    assert usage(root, host_id="host", deep=True).dead == ()


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_pieces_of_several_processes_are_merged(tmp_path: Path, server: BucketServer, where: str) -> None:
    """Joining what processes wrote would copy it, or refer to what one of them had in memory."""
    item = str(tmp_path) if where == "disk" else "gs://runs/run/1/default"
    shares = [dict(list(ARRAYS.items())[process::2]) for process in range(2)]
    for process, share in enumerate([*shares, {}]):  # the last one has nothing to write
        if where == "disk":
            os.makedirs(process_directory(item, process))
        write(process_directory(item, process), SMALL, share)
    merge_processes(item, 3, SMALL)
    base = f"{item}/" if where == "bucket" else {"driver": "file", "path": f"{item}/"}
    store = ts.KvStore.open(base).result()
    keys = [key.decode() for key in store.list().result()]
    made = [store.read(key).result().value for key in keys if not key.startswith(("ocdbt.process_", "bucket/"))]
    assert sum(map(len, made)) < 5000
    assert len([key for key in keys if "/d/" in key]) > 8
    assert_whole(base, {**shares[0], **shares[1]}, "ocdbt.process_")


@pytest.mark.parametrize("count", [2, 24])
def test_several_processes_write_the_forecast_files(server: BucketServer, count: int) -> None:
    """A bucket is paid by requests; of three processes one has nothing to write where there are two leaves."""
    arrays = {f"w{index:02}": (np.arange(1000.0) + index, (1000,)) for index in range(count)}
    for process in range(3):
        write(process_directory("gs://runs/run/1/default", process), SMALL, dict(list(arrays.items())[process::3]))
    merge_processes("gs://runs/run/1/default", 3, SMALL)
    box = BoxRecord(box=Box.whole((1000,)), offset=-1, digests=())
    leaves = [dataclasses.replace(leaf_of(name, *each), boxes=(box,)) for name, each in arrays.items()]
    several, one = (forecast({"default": leaves}, SMALL, remote=True, processes=each) for each in (3, 1))
    small_files = 2 + 4 + 2 * 3  # of the step, of the item, of each process
    sidecars_read = 3  # to be joined
    made = {entry.name for entry in server.log.entries() if entry.kind is Kind.WRITE}
    assert len(made) == several.files - small_files
    assert len(server.log.entries()) == several.requests - (one.requests - one.files) - small_files - sidecars_read


def test_stream_without_cells_writes_no_database(server: BucketServer) -> None:
    """An empty object in its place could not be read, and what was there before would be taken for its own."""
    directory = "gs://runs/run/1/default"
    for described in (True, False):
        stream = CellStream(directory, 1 << 20)
        if described:
            stream.create(leaf_of("w", np.arange(3), (3,)))
        stream.finish()
        assert ("manifest.ocdbt" in open_store(directory).list_all("")) == described


class Alone:
    """The only process."""

    process, count = 0, 1

    def agree(self, channel: str, value: Any, decide: Any, *, timeout_s: float | None = None, about: str = "") -> Any:
        del channel, timeout_s, about
        return decide([value])


def save(root: str, profile: DurableProfile) -> None:
    """Step 1, in several pieces."""
    writer = StepWriter(root, Alone(), profile)  # pyright: ignore[reportArgumentType]
    items = {"default": HostTreeSave(LEAVES)}
    writer.write("1", SaveId(1, 1, 0), items, {})


def test_hanging_piece_fails_the_save(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save would never fail, and never end."""
    monkeypatch.setattr(cells, "_GIVE_UP_S", 0.1)
    faults = (Fault(effect=Hang(), kinds=(Kind.WRITE,), objects="run/1/*/d/*", skip=1),)
    server.faults = FaultPlan(faults=faults)
    profile = dataclasses.replace(SMALL, operation_timeout_s=0.5)
    with pytest.raises(TransientStoreError, match="no end within"):
        save("gs://runs/run", profile)


def test_failed_piece_waits_for_writes_in_flight(server: BucketServer) -> None:
    """It would land in what the next attempt writes, or make a directory anew that was removed since."""
    place = "run/1/*/d/*"
    server.faults = FaultPlan(
        faults=(
            Fault(effect=Status(code=403), kinds=(Kind.WRITE,), objects=place, count=1),
            Fault(effect=Delay(latency=Fixed(seconds=1.0)), kinds=(Kind.WRITE,), objects=place),
        )
    )
    with pytest.raises(StoreError):
        save("gs://runs/run", SMALL)
    server.log.clear()
    time.sleep(1.5)
    assert not server.log.entries()
    server.faults = FaultPlan()
    save("gs://runs/run", SMALL)
    with ocp.CheckpointManager("gs://runs/run") as stock:
        found = stock.restore(1, args=ocp.args.PyTreeRestore())  # pyright: ignore[reportCallIssue]
    assert all(np.array_equal(found[name], array) for name, array in LEAVES.items())
