"""A durable step that is written in pieces, at a rate: the same step, and no more of it in flight than is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from bench.measure import PeakMemory, settle
from ckptkit import DurableProfile
from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.cells.pieces import Pieces
from ckptkit.durable.cells.reader import CellReader, encoded_bytes
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.write_step import StepWriter
from ckptkit.model.durable_profile import COMPRESSORS, Codec
from ckptkit.model.manifest import SaveId
from tests.states import abstract, assert_same, make_state

PROFILES = [
    DurableProfile(data_file_bytes=1 << 14, in_flight_bytes=1 << 15, copied_bytes=1 << 12),  # each cell a piece or more
    DurableProfile(data_file_bytes=1 << 10, in_flight_bytes=1, copied_bytes=1 << 20),  # one at a time, all copied
    DurableProfile(write_bytes_per_s=4e6),
    DurableProfile(compression="zstd_shuffle", copied_bytes=1 << 10, data_file_bytes=1 << 14, in_flight_bytes=1 << 15),
]


@pytest.mark.parametrize("profile", PROFILES, ids=["pieces", "one at a time", "rate", "encoded"])
def test_step_in_several_pieces_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: DurableProfile
) -> None:
    """A step that only fits in several commits of its database would be half of one."""
    taken: list[int] = []
    in_flight: list[int] = []
    take, finish = Pace.take, Pieces.finish_oldest
    monkeypatch.setattr(Pace, "take", lambda self, nbytes: taken.append(nbytes) or take(self, nbytes))
    monkeypatch.setattr(Pieces, "finish_oldest", lambda self: in_flight.append(self.sent_bytes) or finish(self))
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
        text_bytes = 1000  # of a leaf's metadata, which goes with its cells
        assert max(in_flight) <= max(profile.in_flight_bytes, largest + text_bytes + profile.piece_bytes)
    with ocp.CheckpointManager(tmp_path / "root") as stock:
        assert_same(stock.restore(1, args=ocp.args.StandardRestore(abstract(state))), state)  # pyright: ignore[reportCallIssue]


@pytest.mark.long
def test_memory_for_small_cells_is_a_sixth_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of small leaves would be in memory twice, in addition to its snapshot."""
    held: list[int] = []
    add = Pieces.add
    monkeypatch.setattr(Pieces, "add", lambda self, part: add(self, part) or held.append(self.held_bytes))
    state = {f"leaf{index:04}": np.full(4096, index, np.float32) for index in range(5000)}
    nbytes = sum(leaf.nbytes for leaf in state.values())
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):  # by the second, what is made once is there
            settle()
            with PeakMemory() as memory:
                manager.save(step, args=ocp.args.StandardSave(state), force=True)  # pyright: ignore[reportCallIssue]
                manager.wait_until_finished()
        found = manager.restore(2, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
    assert_same(found, state)
    assert len(list(tmp_path.glob("2/default/d/*"))) == 18
    assert nbytes / 7 < max(held) < nbytes / 5.8
    assert memory.extra_bytes < nbytes / 2
    with ocp.CheckpointManager(tmp_path) as stock:
        assert_same(stock.restore(2, args=ocp.args.StandardRestore(abstract(state))), state)  # pyright: ignore[reportCallIssue]


def step_of(root: Path, state: Any, profile: DurableProfile) -> Path:
    with ckptkit.CheckpointManager(root, durable=profile) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
    return root / "1"


def restored(root: Path, state: Any) -> Any:
    """With the defaults: a profile controls how a step is written, not how it can be read."""
    with ckptkit.CheckpointManager(root) as manager:
        return manager.restore(1, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("codec", COMPRESSORS)
def test_encoded_cells_are_smaller_and_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    """Compression would cost bits, or a millisecond and a request for each leaf of a restore."""
    state = {
        "wide": jnp.arange(300 * 64).reshape(300, 64) % 7,
        "half": (jnp.arange(5000) % 11).astype(jnp.bfloat16),
        "small": jnp.arange(9),
    }
    plain = step_of(tmp_path / "plain", state, DurableProfile())
    encoded = step_of(tmp_path / "encoded", state, DurableProfile(compression=codec, copied_bytes=1 << 10))
    sizes = [sum(path.stat().st_size for path in step.glob("*/d/*")) for step in (plain, encoded)]
    assert sizes[1] < sizes[0] / 3
    monkeypatch.delattr(DurableReader, "read_cell")
    assert_same(restored(tmp_path / "encoded", state), state)
    monkeypatch.undo()
    with ocp.CheckpointManager(tmp_path / "encoded") as stock:
        assert_same(stock.restore(1, args=ocp.args.StandardRestore(abstract(state))), state)  # pyright: ignore[reportCallIssue]


def test_damaged_encoded_cells_are_detected(tmp_path: Path) -> None:
    """A flipped bit in a frame would become another number, or crash whoever decodes it."""
    state = {"wide": jax.random.randint(jax.random.key(0), (300, 64), 0, 7)}
    step = step_of(tmp_path / "run", state, DurableProfile(compression="lz4_shuffle", copied_bytes=1 << 10))
    (data,) = step.glob("*/d/*")
    whole = data.read_bytes()
    frame = whole.index(state["wide"].nbytes.to_bytes(4, "little")) - 4  # blosc records the length of its content
    for at in [frame + byte for byte in (0, 2, 3, 5, 9, 13, 17, 100)]:
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        (proof,) = ckptkit.verify(str(tmp_path / "run")).steps
        if proof.state == "proven":  # the frame's type size and format version are not needed
            assert_same(restored(tmp_path / "run", state), state)
        else:
            assert proof.state == "corrupt", at
            with pytest.raises(ckptkit.CorruptCheckpointError):
                restored(tmp_path / "run", state)


def test_plain_cell_with_a_codec_magic_is_not_decoded(tmp_path: Path) -> None:
    """It would be decoded to something else, and a good step be refused."""
    leaf = np.arange(1024, dtype=np.uint32)
    leaf[1] = leaf[3] = leaf.nbytes
    state = {"w": jnp.asarray(leaf)}
    step_of(tmp_path, state, DurableProfile())
    assert encoded_bytes(leaf.tobytes()) == leaf.nbytes
    assert_same(restored(tmp_path, state), state)


def test_all_processes_use_the_profile_of_process_0(tmp_path: Path) -> None:
    """Profiles that differ between processes: cells would not match the leaf's metadata."""

    class ProcessZeroEncodes:
        def __init__(self) -> None:
            self.process, self.count = 0, 1

        def agree(
            self, channel: str, value: Any, decide: Any, *, timeout_s: float | None = None, about: str = ""
        ) -> Any:
            del timeout_s
            said = decide([value])
            return [said[0], "zstd", 1 << 10, [[]]] if channel == "step-begun" else said

    writer = StepWriter(str(tmp_path), ProcessZeroEncodes(), DurableProfile())  # pyright: ignore[reportArgumentType]
    leaf = np.arange(4096) % 5
    items = {"default": HostTreeSave({"w": leaf})}
    writer.write("1", SaveId(1, 1, 0), items, {})
    assert sum(path.stat().st_size for path in tmp_path.glob("1/*/d/*")) < leaf.nbytes / 3
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/1/default/", "path": "w/"}}
    assert np.array_equal(ts.open(spec, open=True).result().read().result(), leaf)


def test_cell_requested_out_of_order_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes would be paid for twice, and what nobody takes would fill the room for reading ahead."""
    step = step_of(tmp_path, {name: jnp.arange(2000.0) + index for index, name in enumerate("abc")}, DurableProfile())
    (manifest,) = DurableReader(str(step), step=1).manifests()
    cells = CellReader(str(step), DurableProfile(read_ahead_bytes=1))  # one at a time
    begun: list[str] = []
    start = CellReader._start
    monkeypatch.setattr(CellReader, "_start", lambda self, *args: begun.append(args[1].name) or start(self, *args))
    leaves = {leaf.name: leaf for leaf in manifest.arrays["default"]}
    cells.expect([("default", leaf, leaf.boxes[0], leaf.boxes[0].box) for leaf in leaves.values()])
    for name in ("c", "b", "a"):
        found = cells.fetch("default", leaves[name], leaves[name].boxes[0].box)
        assert found is not None
        assert found[1] == 1 + "abc".index(name)
    assert sorted(begun) == ["a", "b", "c"]
    assert cells._started_bytes == 0
    assert not cells._overtaken
