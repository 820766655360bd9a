"""The forecast cost of a save, against the real one: files, requests, bytes, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from bench.measure import PeakMemory, settle
from ckptkit import DurableProfile
from ckptkit.diagnosis import explain
from ckptkit.diagnosis.tuner import explain_checkpoint
from ckptkit.durable.cells.pieces import Pieces
from ckptkit.model.durable_profile import Codec
from ckptkit.testing.bucket import BucketServer
from tests.cases import long_except
from tests.states import abstract, make_state

PIECES = DurableProfile(data_file_bytes=1 << 20, in_flight_bytes=1 << 20)


def changing(profile: DurableProfile) -> DurableProfile:
    """Writes a state again as one that has changed everywhere, which is what a forecast is for."""
    return replace(profile, shared_steps_max=1)


def few_large() -> dict[str, Any]:
    return {f"leaf{index}": jnp.arange(1 << 18, dtype=jnp.float32).reshape(512, 512) + index for index in range(8)}


def many_small() -> dict[str, Any]:
    return {f"leaf{index:04}": jnp.full((64, 64), float(index)) for index in range(800)}


def args_of(state: Any, *, json: bool) -> Any:
    items = {"state": ocp.args.StandardSave(state)}  # pyright: ignore[reportCallIssue]
    return ocp.args.Composite(**items, **({"cursor": ocp.args.JsonSave({"at": 3})} if json else {}))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("json", long_except([True], [False, True]))
@pytest.mark.parametrize("make", [few_large, many_small, make_state])
def test_save_to_a_disk_costs_what_explain_predicts(tmp_path: Path, make: Any, json: bool) -> None:
    """A quota, or the memory of a container, would be planned on a wrong number."""
    state = jax.block_until_ready(make())
    args = args_of(state, json=json)
    said = explain(tmp_path, args)
    assert said == explain(tmp_path, args_of(abstract(state), json=json)), "an abstract state is as good"
    with ckptkit.CheckpointManager(tmp_path, durable=changing(DurableProfile())) as manager:
        manager.save(1, args=args)
        manager.wait_until_finished()
        settle()
        with PeakMemory() as memory:
            manager.save(2, args=args, force=True)
            manager.wait_until_finished()
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    written_bytes = sum(path.stat().st_size for path in files)
    assert len(files) == said.files
    assert written_bytes == pytest.approx(said.written_bytes, rel=0.12, abs=4000)
    assert sum("/d/" in str(path) for path in files) == said.data_files
    # The snapshot is not a part of it, and exists since the first save.
    assert memory.extra_bytes <= said.peak_bytes
    assert said.requests == 0


@pytest.mark.parametrize("profile", [DurableProfile(), PIECES], ids=["one piece", "pieces"])
@pytest.mark.parametrize("make", [few_large, many_small])
def test_save_to_a_bucket_takes_the_predicted_requests(
    server: BucketServer, make: Any, profile: DurableProfile
) -> None:
    """A bucket that throttles by requests would surprise whoever had asked before."""
    state = make()
    said = explain("gs://runs/run", args_of(state, json=True), durable=profile)
    with ckptkit.CheckpointManager("gs://runs/run", durable=changing(profile)) as manager:
        manager.save(1, args=args_of(state, json=True))
        manager.wait_until_finished()
        server.log.clear()
        manager.save(2, args=args_of(state, json=True), force=True)
        manager.wait_until_finished()
        found = len(server.log.entries())
    assert said.pieces > 1 or profile is not PIECES
    assert found == said.requests


@pytest.mark.parametrize("profile", [DurableProfile(), PIECES], ids=["one piece", "pieces"])
def test_save_of_an_adapter_on_a_frozen_base_costs_what_explain_predicts(
    tmp_path: Path, server: BucketServer, profile: DurableProfile
) -> None:
    """A person would plan a disk and a bill for a base that is not written."""

    def args(step: int) -> Any:
        return args_of({**few_large(), "adapter": jnp.full((100, 100), float(step))}, json=False)

    said = explain(tmp_path, args(1), durable=profile, unchanged=["leaf*"])
    assert said.shared_bytes == 8 << 20
    assert explain(tmp_path, args(1), durable=profile).shared_bytes == 0
    in_bucket = explain("gs://runs/run", args(1), durable=profile, unchanged=["leaf*"])
    found = dict[str, int]()
    for root in (str(tmp_path / "run"), "gs://runs/run"):
        with ckptkit.CheckpointManager(root, durable=profile) as manager:
            for step in (1, 2, 3):
                server.log.clear()
                manager.save(step, args=args(step), force=True)
                manager.wait_until_finished()
        found[root] = len(server.log.entries())
    assert found["gs://runs/run"] == pytest.approx(in_bucket.requests, abs=2)
    files = [path for path in (tmp_path / "run/3").rglob("*") if path.is_file()]
    assert len(files) == said.files
    written_bytes = sum(path.stat().st_size for path in files if path.stat().st_nlink == 1)
    assert written_bytes == pytest.approx(said.written_bytes, rel=0.12, abs=4000)


Shapes = list[tuple[tuple[int, ...], str]]

AWKWARD: dict[str, Shapes] = {
    "leaves that are in the tree": [((100,), "float32")] * 2000,
    "two to a piece": [((150, 100), "float32")] * 40,
    "more than a piece each": [((400, 100), "float32")] * 12,
    "mixed": [((2,), "int8"), ((70, 100), "float32"), ((9000,), "int8"), ((300, 100), "float32")] * 15,
}


@pytest.mark.parametrize("compression", long_except([None], [None, "lz4_shuffle"]))
@pytest.mark.parametrize("shapes", AWKWARD.values(), ids=AWKWARD)
def test_pieces_of_uneven_shapes_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: Shapes, compression: Codec | None
) -> None:
    """Sizes that do not divide evenly: given in parts of a piece, files and memory were wrong by a factor of
    several."""
    profile = DurableProfile(
        data_file_bytes=200_000, in_flight_bytes=400_000, copied_bytes=50_000, compression=compression
    )
    held: list[int] = []
    add = Pieces.add
    monkeypatch.setattr(Pieces, "add", lambda self, part: add(self, part) or held.append(self.held_bytes))
    rng = np.random.default_rng(0)  # noise: it is not smaller when it is encoded
    state = {
        f"leaf{index:04}": rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype).reshape(shape)
        for index, (shape, dtype) in enumerate(shapes)
    }
    args = args_of(jax.tree.map(jnp.asarray, state), json=False)
    said = explain(tmp_path, args, durable=profile)
    held.clear()
    with ckptkit.CheckpointManager(tmp_path, durable=profile) as manager:
        manager.save(1, args=args)
        manager.wait_until_finished()
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert (len([path for path in files if "/d/" in str(path)]), len(files)) == (said.data_files, said.files)
    assert said.pieces > 1
    assert max(held) <= said.peak_bytes - (8 << 20)


def test_items_written_by_orbax_are_refused(tmp_path: Path) -> None:
    """A number without a basis would be reported."""
    args = ocp.args.Composite(key=ocp.args.JaxRandomKeySave(jax.random.key(0)))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="item 'key' is JaxRandomKeySaveArgs, which Orbax's own handler writes"):
        explain(tmp_path, args)


def test_one_database_per_process_is_predicted(tmp_path: Path) -> None:
    """A large job would be planned like a small one."""
    one, four = (explain("gs://runs/run", few_large(), processes=count) for count in (1, 4))
    assert four.written_bytes == one.written_bytes
    assert (one.data_files, four.data_files) == (1, 4)
    assert four.files > one.files
    assert four.requests > one.requests


def test_forecast_of_a_damaged_shape_is_refused(tmp_path: Path) -> None:
    """One changed digit in the metadata of an array would make a forecast take all memory."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave({"w": np.ones((4, 6))}))  # pyright: ignore[reportCallIssue]
    metadata = tmp_path / "one" / "w" / ".zarray"
    found = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**found, "shape": [1 << 36, 6]}))
    with pytest.raises(ckptkit.CheckpointError, match=r"leaf w has 17179869184 chunks.*at most 10000000"):
        explain_checkpoint(str(tmp_path / "root"), str(tmp_path / "one"))
