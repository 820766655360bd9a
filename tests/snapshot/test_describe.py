"""The description of a state: what leaves have in common is worked out once, also ahead of the first save."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model.manifest import ManifestText, SaveId, Writer
from ckptkit.slots.arena import Arena
from ckptkit.snapshot import describe, staging
from ckptkit.snapshot.describe import Describer, Description, describe_items
from ckptkit.snapshot.items import abstract_items
from ckptkit.snapshot.replicas import LocalReplicasOf
from ckptkit.util.pages import PAGE_BYTES
from tests.states import abstract, make_state, put


def many() -> dict[str, Any]:
    """Several leaves of each form: alike in all but their names."""
    return {f"{number}": make_state(number) for number in range(2)} | {
        "large": [put(jnp.zeros((64, 1024)), axis) for axis in (None, "data", None, None)]
    }


def text_of(description: Description) -> bytes:
    """The manifest of a save whose digests are all `d`."""
    digests = [["d"] * len(extent.cells) for extent in description.extents]
    writer = Writer(process=0, count=1, host="h")
    return description.text.to_bytes(SaveId(1, 2, 3), writer, "slot-0", digests, {})


def test_leaves_described_together_are_those_described_alone() -> None:
    """A leaf would get the shape, boxes or digests of another one, and be restored as that."""
    state = many()
    together = describe_items({"state": state}, chunk_bytes={"state": [None, 8] * 14})
    alone, offset = [], 0
    for (keypath, leaf), limit in zip(jax.tree_util.tree_flatten_with_path(state)[0], [None, 8] * 14, strict=True):
        tree = {"state": {jax.tree_util.keystr(keypath): leaf}}
        found = describe_items(tree, chunk_bytes={"state": [limit]})
        (source,) = found.items["state"]
        alone.append((source.record.shape, source.record.cell, source.record.extra, source.holders, found.slot_bytes))
        offset += found.slot_bytes
    records = [source.record for source in together.items["state"]]
    assert len({record.path for record in records}) == len(alone)
    starts = [*(record.boxes[0].offset for record in records), together.slot_bytes]
    assert [
        (source.record.shape, source.record.cell, source.record.extra, source.holders, stop - start)
        for source, start, stop in zip(together.items["state"], starts[:-1], starts[1:], strict=True)
    ] == alone
    assert offset == together.slot_bytes
    made_anew = ManifestText({"state": tuple(records)})
    assert made_anew.size_bytes == together.text.size_bytes


def test_abstract_leaves_are_described_as_their_arrays() -> None:
    """The first save after `prepare` would describe the state again, or write a manifest of something else."""
    state = many()
    expected, found = (describe_items({"state": tree}) for tree in (state, abstract(state)))
    assert found == expected
    assert text_of(found) == text_of(expected)


def test_description_is_remembered_from_abstract_to_concrete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop would pay for the description in each save, or save a changed state by an old one."""
    state, described = make_state(0), list[Any]()

    def counted(*args: Any) -> Description:
        described.append(args)
        return describe_items(*args)

    monkeypatch.setattr(describe, "describe_items", counted)
    describer = Describer()
    first = describer({"state": abstract(state)})
    assert describer({"state": state}) is first
    assert describer({"state": make_state(1)}) is first
    changed = describer({"state": {**state, "b": put(jnp.zeros(4, jnp.float32))}})
    assert (changed != first, len(described)) == (True, 2)
    assert describer({"state": state}, chunk_bytes={"state": [8] * 12}) != changed


def test_first_save_after_prepare_describes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a state of many leaves would stall the step loop for the description of each."""
    state = make_state(0)
    args = ocp.args.PyTreeSave
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=64), state)
    with ckptkit.CheckpointManager(tmp_path / "root", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.prepare(args(abstract(state), save_args=save_args))
        monkeypatch.delattr(describe, "describe_items")
        assert manager.save(1, args=args(state, save_args=save_args))
        manager.wait_until_finished()
    assert manager.latest_step() == 1


def test_prepare_takes_abstract_leaves_without_a_sharding(tmp_path: Path) -> None:
    """A job whose mesh is not made yet could not make its slots ahead of the first save."""
    leaf = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    with ckptkit.CheckpointManager(tmp_path / "root", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.prepare(ocp.args.StandardSave({"w": leaf, "count": 3}))
    assert sum(path.stat().st_size for path in (tmp_path / "ram").rglob("slot-*")) >= 4 << 20


def test_slot_bytes_of_abstract_leaves_are_those_of_the_save() -> None:
    """`prepare` would make slots of another size than the first save needs, which would make them again."""

    def described(tree: Any) -> tuple[int, int]:
        items = abstract_items({"default": ocp.args.StandardSave(tree)})
        assert items is not None
        found = describe_items(items.trees)
        return found.slot_bytes, found.share_bytes

    state = make_state(0)
    expected = describe_items({"default": state})
    assert described(abstract(state)) == (expected.slot_bytes, expected.share_bytes)
    unplaced = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract(state["key"]))
    assert described({"key": unplaced}) == (PAGE_BYTES, PAGE_BYTES)


def test_local_replicas_are_every_copy_but_the_stored_one() -> None:
    """A damaged copy would never be compared, or one would be compared with another box."""
    description = describe_items({"host": {"n": np.zeros(3)}, "state": make_state(0)})
    found = LocalReplicasOf(description)
    expected, number = [], 0
    for item, sources in description.items.items():
        for leaf, source in enumerate(sources):
            for at, box in enumerate(source.record.boxes):
                others = source.local_replicas[at] if source.local_replicas else ()
                expected += [(number, item, leaf, box.box, device) for device in others]
                number += 1
    copies = [found[index] for index in range(len(found))]
    assert [(each.number, each.item, each.leaf, each.box, each.device) for each in copies] == expected
    assert all(each.nbytes == each.box.size * each.record.itemsize for each in copies)


def test_collector_pauses_in_a_save_that_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop would wait until the collector has looked through every object of the process. While a save waits
    for a slot, the collector runs: other threads may make garbage for minutes."""
    copying, waiting, held_arrays, acquire = list[bool](), list[bool](), staging.held_arrays, Arena.acquire

    def noted(*args: Any) -> Any:
        copying.append(gc.isenabled())
        return held_arrays(*args)

    def acquired(self: Arena, size_bytes: int, **more: Any) -> Any:
        waiting.append(gc.isenabled())
        return acquire(self, size_bytes, **more)

    monkeypatch.setattr(staging, "held_arrays", noted)
    monkeypatch.setattr(Arena, "acquire", acquired)
    with ckptkit.CheckpointManager(tmp_path / "root", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.save(1, args=ocp.args.StandardSave(make_state(0)))
        manager.wait_until_finished()
        manager.save(2, args=ocp.args.StandardSave(make_state(0)), force=True)  # may wait for long
        assert (copying, waiting, gc.isenabled()) == ([False, False], [True, True], True)


def test_python_int_changes_between_int64_and_uint64(tmp_path: Path) -> None:
    values = [1, 2**63, 2**63 - 1, 2**64 - 1, -1]
    with ckptkit.CheckpointManager(
        tmp_path / "root", host_id="host", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]
    ) as manager:
        for step, value in enumerate(values):
            assert manager.save(step, args=ocp.args.StandardSave({"n": value}), force=True)  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
        for step, value in enumerate(values):
            assert manager.restore(step, args=ocp.args.StandardRestore())["n"] == value  # pyright: ignore
