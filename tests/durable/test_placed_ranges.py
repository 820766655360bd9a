"""Durable steps in a bucket, read as ranges of the data objects that hold their cells."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit.durable import read_step
from ckptkit.durable.cells import placed
from ckptkit.durable.cells.ocdbt import Placed
from ckptkit.durable.cells.placed import _joined
from ckptkit.durable.cells.reader import CellReader
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Hang, Kind

STATE = {
    "large": jnp.arange(3 << 20, dtype=jnp.float32).reshape(3, 1 << 20),
    "small": [jnp.arange(5000, dtype=jnp.int32) + index for index in range(40)],
    "tiny": jnp.ones((3,), jnp.bfloat16),
    "scalar": jnp.float32(7),
    "host": np.arange(1 << 19),
}
PADDED = {"padded": jnp.arange(5 * 3_400_001, dtype=jnp.float32).reshape(5, 3_400_001)}
SMALL_BYTES = sum(np.asarray(leaf).nbytes for leaf in STATE["small"])


def save(state: Any = None, **settings: Any) -> None:
    with ckptkit.CheckpointManager("gs://runs/run", **settings) as manager:
        manager.save(1, args=ocp.args.StandardSave(state or STATE))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()


def restore(state: Any = None, **settings: Any) -> None:
    state = state or STATE
    with ckptkit.CheckpointManager("gs://runs/run", **settings) as manager:
        found = manager.restore(None, args=ocp.args.StandardRestore(state))  # pyright: ignore[reportCallIssue]
    for one, other in zip(_leaves(found), _leaves(state), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _leaves(tree: dict[str, Any]) -> list[Any]:
    return [leaf for name in sorted(tree) for leaf in (tree[name] if isinstance(tree[name], list) else [tree[name]])]


def data_objects() -> list[str]:
    return [key for key in open_store("gs://runs/run").list_all("1") if "/d/" in key]


@pytest.mark.parametrize(("range_bytes", "read_ahead_bytes"), [(1, 1), (100_000, 256 << 10), (8 << 20, 128 << 20)])
def test_cells_are_read_in_few_requests_within_the_budget(
    server: BucketServer, range_bytes: int, read_ahead_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request and a future for each cell: 4,000 leaves took twice as long, or held all of the step in memory."""
    state = STATE if range_bytes < SMALL_BYTES else {**STATE, **PADDED}
    save(state)
    asked: list[str] = []
    fetch, begin = CellReader.fetch, placed.PlacedRanges._begin
    held: list[tuple[int, int]] = []

    def fetched(self: CellReader, item: str, leaf: Any, cell: Any) -> Any:
        asked.append(leaf.name)
        return fetch(self, item, leaf, cell)

    def begun(self: Any, made: Any) -> None:
        begin(self, made)
        held.append((self._begun_bytes, made.nbytes))

    monkeypatch.setattr(CellReader, "fetch", fetched)
    monkeypatch.setattr(placed.PlacedRanges, "_begin", begun)
    monkeypatch.setattr(placed, "_RANGE_BYTES", range_bytes)
    server.log.clear()
    restore(state, durable=DurableProfile(read_ahead_bytes=read_ahead_bytes))
    assert set(asked) == set(state) - set(STATE), "a last cell that is padded is TensorStore's"
    # Eight threads may each ask for one before its turn.
    assert all(total <= read_ahead_bytes + 9 * max(each for _, each in held) for total, each in held)
    if range_bytes >= SMALL_BYTES:
        assert len([entry for entry in server.log.entries() if "/d/" in entry.name]) < 20


@pytest.mark.parametrize("harm", ["flipped", "gone", "short"])
def test_damaged_data_object_is_never_restored(server: BucketServer, harm: str) -> None:
    """Bytes read without TensorStore would bypass its checks."""
    save()
    store, (key,) = open_store("gs://runs/run"), data_objects()
    data = bytearray(store.get(key))
    if harm == "gone":
        store.delete(key)
    else:
        data[len(data) // 2] ^= 1
        store.put(key, {"flipped": bytes(data), "short": bytes(data[: len(data) // 2])}[harm])
    with pytest.raises(ckptkit.NoRestorableStepError):
        restore()


def test_encoded_cells_are_left_to_the_decoder(server: BucketServer) -> None:
    """Frames would be taken for elements."""
    save(durable=DurableProfile(compression="zstd"))
    restore()


def test_unlocated_or_hanging_reads_fall_back_to_tensorstore(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortcut that fails would fail the restore."""
    save()
    with monkeypatch.context() as patch:
        patch.setattr(read_step, "_KEYS_MAX", 1)
        restore()
    server.faults = FaultPlan(faults=(Fault(effect=Hang(), kinds=(Kind.READ,), objects="*/d/*", skip=1, count=1),))
    restore(durable=DurableProfile(operation_timeout_s=1.0))
    assert server.fired() == [1]


@given(st.data())
def test_each_cell_is_in_one_range_and_ranges_are_bounded(data: st.DataObject) -> None:
    """A cell in no range would never come, and one in two would free the bytes of others."""
    lengths = data.draw(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=30))
    gaps = data.draw(st.lists(st.integers(0, 2 << 20), min_size=len(lengths), max_size=len(lengths)))
    files = sorted(data.draw(st.lists(st.sampled_from("ab"), min_size=len(lengths), max_size=len(lengths))))
    at, cells = 0, []
    for number, (length, gap, file) in enumerate(zip(lengths, gaps, files, strict=True)):
        cells.append((("item", f"cell{number}"), Placed(file, at + gap, length)))
        at += gap + length
    expected = data.draw(st.permutations(cells))
    made = _joined(expected)
    assert sorted(cell for each in made for cell in each.cells) == sorted(cells)
    for each in made:
        assert each.start == min(placed.start for _, placed in each.cells)
        assert each.stop == max(placed.start + placed.length for _, placed in each.cells)
        assert {placed.path for _, placed in each.cells} == {each.path}
        assert each.nbytes <= placed._RANGE_BYTES or len(each.cells) == 1
    first = [min(expected.index(cell) for cell in each.cells) for each in made]
    assert first == sorted(first)
