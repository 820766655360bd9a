"""The plan of a restore: the order of saves, and a source for every box or a refusal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CheckpointError, CorruptCheckpointError, Reason
from ckptkit.events import Event, EventLog, Kind
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.cells import copy_proven
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.restore.execute import LocalRead
from ckptkit.restore.local_tiers import LocalSave, LocalTiers, together
from ckptkit.restore.plan import Candidate, RestorePlan, Source, plan_restore, rank_candidates
from ckptkit.restore.read import execute

SAVES = st.builds(SaveId, st.integers(0, 3), st.integers(0, 5), st.integers(0, 2))
SAVE = SaveId(2, 7, 4)
ABSENT = Reason("absent")
KEY = ("state", ("w",))


def never(_: SaveId) -> bool:
    return False


def rows(*bounds: tuple[int, int]) -> list[Box]:
    """Boxes of a one-dimensional array."""
    return [Box((a,), (b,)) for a, b in bounds]


def manifest(boxes: Sequence[Box], shape: tuple[int, ...] = (8,), save: SaveId = SAVE, process: int = 0) -> Manifest:
    """A manifest that holds `boxes` of the array `w`, whose element i is i; offsets are not used."""
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    cell = tuple(max(1, n) for n in shape)
    records = tuple(
        BoxRecord(
            box=box, offset=0, digests=tuple(digest_of(values[c.slices()].tobytes()) for c in cells_of(box, cell))
        )
        for box in boxes
    )
    leaf = LeafRecord(path=("w",), keys="d", kind="jax", shape=shape, dtype="int32", cell=cell, boxes=records)
    return Manifest(
        save_id=save,
        writer=Writer(process=process, count=2, host="h"),
        slot="slot-0.bin",
        arrays={"state": (leaf,)},
        inline={},
    )


def restored(plan: RestorePlan, values: np.ndarray) -> dict[Box, np.ndarray]:
    """Executes a plan whose every source reads from `values`."""

    def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        assert item == "state"
        copy_proven(leaf, record, wanted, into, lambda cell, *_: values[cell.slices()], where="here")

    def rejected(tier: str, error: CheckpointError) -> None:
        raise AssertionError((tier, error))

    blocks: dict[Any, dict[Box, np.ndarray]] = {}
    execute(plan, [read] * len(plan.tiers), rejected, blocks.__setitem__)
    return blocks[KEY]


# Which save.


@given(
    fast=st.lists(
        st.dictionaries(SAVES, st.none() | st.just(Reason("box missing")), max_size=5), min_size=1, max_size=4
    ),
    durable=st.lists(SAVES, unique=True, max_size=5),
    gone=st.sets(SAVES, max_size=5),
    step=st.none() | st.integers(0, 5),
)
@settings(deadline=None, max_examples=200)
def test_candidates_are_newest_first_without_abandoned_ones(
    fast: list[dict[SaveId, Reason | None]], durable: list[SaveId], gone: set[SaveId], step: int | None
) -> None:
    """If it failed, a restart would resume from an old step, or from an abandoned branch."""
    ranked = rank_candidates(fast, durable, gone.__contains__, step)
    saves = [candidate.save_id for candidate in ranked]
    everything = set(itertools.chain(durable, *fast))
    assert set(saves) == {s for s in everything if s not in gone and (step is None or s.step == step)}
    assert saves == sorted(saves, key=lambda s: s.made, reverse=True)
    for candidate in ranked:
        everybody_has_it = all(report.get(candidate.save_id, ABSENT) is None for report in fast)
        somebody_has_it = any(report.get(candidate.save_id, ABSENT) is None for report in fast)
        assert candidate.durable == (candidate.save_id in durable)
        assert candidate.fast == somebody_has_it
        assert (candidate.refusal is None) == (candidate.durable or everybody_has_it)


def test_a_refusal_names_each_process_and_its_reason() -> None:
    """If it failed, nobody could tell which host lost its ramdisk."""
    reports = [{SAVE: None}, {}, {SAVE: Reason("nothing covers leaf state:w")}]
    (candidate,) = rank_candidates(reports, [], never)
    assert candidate == Candidate(
        save_id=SAVE,
        durable=False,
        fast=True,
        refusal=Reason("process 1: its host does not hold it; process 2: nothing covers leaf state:w"),
    )
    assert candidate.where == "fast"


def test_refusal_of_a_thousand_processes_fits_one_line() -> None:
    """If it failed, the error of a large job would be a megabyte."""
    (candidate,) = rank_candidates([{SAVE: None}, *[{}] * 999], [], never)
    assert candidate.refusal is not None
    assert candidate.refusal.text.endswith("process 4: its host does not hold it; and 995 more processes")
    assert len(candidate.refusal.text) < 300


def test_durable_save_is_not_refused() -> None:
    """If it failed, one wiped ramdisk would hide a good durable step."""
    (candidate,) = rank_candidates([{}, {SAVE: Reason("damaged")}], [SAVE], never)
    assert (candidate.refusal, candidate.where) == (None, "durable")
    (both,) = rank_candidates([{SAVE: None}, {}], [SAVE], never)
    assert (both.refusal, both.where) == (None, "fast+durable")


@given(
    fast=st.lists(
        st.dictionaries(SAVES, st.none() | st.just(Reason("box missing")), max_size=5), min_size=1, max_size=4
    ),
    durable=st.lists(SAVES, unique=True, max_size=5),
)
@settings(deadline=None, max_examples=50)
def test_linked_processes_accept_a_save_that_any_holds(
    fast: list[dict[SaveId, Reason | None]], durable: list[SaveId]
) -> None:
    """If it failed, a lost ramdisk would hide a save that the other hosts hold whole."""
    for candidate in rank_candidates(fast, durable, never, linked=True):
        assert candidate.refusal is None
        assert candidate.fast == any(candidate.save_id in report for report in fast)


# Which source.


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """All boxes of an array that is cut into a grid, at any cuts."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    axes = [list(itertools.pairwise(cut)) for cut in cuts]
    return [Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs)) for pairs in itertools.product(*axes)]


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_every_wanted_box_is_covered_exactly_or_refused(data: st.DataObject) -> None:
    """If it failed, a restore on another mesh would return memory that nobody wrote."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple))
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    sources = []
    for tier in ("ram", "ssd", "durable"):
        boxes = data.draw(grids(shape))
        held = data.draw(st.lists(st.sampled_from(boxes), unique=True))
        split = data.draw(st.integers(0, len(held)))
        sources.append(
            Source(tier=tier, manifests=(manifest(held[:split], shape), manifest(held[split:], shape, process=1)))
        )
    wanted = data.draw(grids(shape))
    covered_by = [{box for box in wanted if coverage(source, shape)[box.slices()].all()} for source in sources]
    if any(not any(box in covered for covered in covered_by) for box in wanted):
        first = next(box for box in wanted if not any(box in covered for covered in covered_by))
        with pytest.raises(CorruptCheckpointError) as caught:
            plan_restore(SAVE, {KEY: wanted}, sources)
        assert str(caught.value) == (
            f"save {SAVE}: no source that this process can reach covers leaf state:w, box {first.start} to {first.stop}"
        )
        return
    plan = plan_restore(SAVE, {KEY: wanted}, sources)
    assert [read.wanted for read in plan.reads] == wanted
    for read in plan.reads:
        assert [index for index, _ in read.sources] == [i for i in range(3) if read.wanted in covered_by[i]]
    for box, block in restored(plan, values).items():
        np.testing.assert_array_equal(block, values[box.slices()])


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_shares_of_several_processes_tile_every_wanted_box(data: st.DataObject) -> None:
    """If it failed, an elastic restore would leave a hole, read a piece twice, or take it from another place."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple))
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    cut = data.draw(grids(shape))
    owners = data.draw(st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=len(cut), max_size=len(cut)))
    shares = [manifest([b for b, o in zip(cut, owners, strict=True) if p in o], shape, process=p) for p in range(3)]
    read_by: dict[tuple[int, Box], list[Box]] = {}

    def reader(process: int) -> Any:
        def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
            assert process in owners[cut.index(record.box)], "asked for what it does not hold"
            assert record.box.intersect(wanted), "nothing of it is wanted"
            read_by.setdefault((process, record.box), []).append(wanted)
            copy_proven(leaf, record, wanted, into, lambda cell, *_: values[cell.slices()], where=item)

        return read

    joined, read = together(
        [(Source(tier="peer", manifests=(share,)), reader(p)) for p, share in enumerate(shares)],
        "peer",
    )
    wanted = data.draw(grids(shape))
    plan = plan_restore(SAVE, {KEY: wanted}, [joined])
    blocks: dict[Any, dict[Box, np.ndarray]] = {}
    execute(plan, [read], lambda *_: None, blocks.__setitem__)
    for box in wanted:
        np.testing.assert_array_equal(blocks[KEY][box], values[box.slices()])
    served = [(box, target) for (_, box), targets in read_by.items() for target in targets]
    assert len(served) == len(set(served)), "a piece was read twice"


@pytest.mark.parametrize("order", [("ram", "ssd"), ("ssd", "ram")])
def test_a_box_of_several_shares_is_read_from_the_first_tier(tmp_path: Path, order: tuple[str, str]) -> None:
    """A plan named the last tier for what the first one holds, and so did the event of the restore."""
    held: dict[str, list[tuple[Path, Manifest]]] = {}
    for tier in order:
        for process, boxes in enumerate([rows((0, 4)), rows((4, 8))]):
            (directory := tmp_path / tier / str(process)).mkdir(parents=True)
            (directory / "slot-0.bin").write_bytes(bytes(64))
            held.setdefault(tier, []).append((directory, manifest(boxes, process=process)))
    local = LocalTiers({}, EventLog())
    holdings = local.holdings(LocalSave(save_id=SAVE, held=held))
    assert plan_restore(SAVE, {KEY: rows((0, 8), (4, 8))}, holdings.sources).bytes_by_tier() == {order[0]: 48}
    parts = LocalSave(save_id=SAVE, held={order[0]: held[order[0]][:1], order[1]: held[order[1]][1:]})
    plan = plan_restore(SAVE, {KEY: rows((0, 8), (0, 4))}, local.holdings(parts).sources)
    assert plan.bytes_by_tier() == {order[1]: 32, order[0]: 16}, "a box in both tiers counts for the slower one"


def test_damage_found_by_a_sample_is_not_masked() -> None:
    """Cells outside the sample would be taken from a source that is known to be damaged."""
    whole = Box.whole((8,))

    def damaged(*_: Any) -> None:
        raise CorruptCheckpointError("flipped")

    def fine(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        into[...] = 7

    pairs: list[Any] = [
        (Source(tier="peer", manifests=(manifest([whole], process=p),)), r) for p, r in enumerate((damaged, fine))
    ]
    into = np.zeros(8, np.int32)
    leaf = manifest([whole]).arrays["state"][0]
    together(pairs, "peer")[1]("state", leaf, leaf.boxes[0], whole, into)
    assert into.tolist() == [7] * 8


def coverage(source: Source, shape: tuple[int, ...]) -> np.ndarray:
    held = np.zeros(shape, bool)
    for each in source.manifests:
        for record in each.arrays["state"][0].boxes:
            held[record.box.slices()] = True
    return held


def test_overlapping_boxes_do_not_hide_a_hole() -> None:
    """If it failed, two overlapping boxes would be counted twice, and a hole be restored as random memory."""
    overlapping = Source(tier="ram", manifests=(manifest(rows((0, 5), (1, 4))),))
    with pytest.raises(CorruptCheckpointError, match=r"no source that this process can reach covers leaf state:w"):
        plan_restore(SAVE, {KEY: rows((0, 8))}, [overlapping])


def test_sources_are_ordered_by_cost_and_bytes_counted_at_first() -> None:
    """If it failed, a restart would read the bucket while the ramdisk holds the bytes."""
    sources = [
        Source(tier="ram", manifests=(manifest(rows((0, 4))),)),
        Source(tier="ssd", manifests=(manifest(rows((0, 8))),)),
    ]
    plan = plan_restore(SAVE, {KEY: rows((0, 4), (4, 8))}, sources)
    assert [[i for i, _ in read.sources] for read in plan.reads] == [[0, 1], [1]]
    assert plan.bytes_by_tier() == {"ram": 16, "ssd": 16}
    assert json.loads(json.dumps(plan.to_json())) == {
        "save_id": [2, 7, 4],
        "boxes": [
            {"item": "state", "leaf": "w", "start": [0], "stop": [4], "tier": "ram"},
            {"item": "state", "leaf": "w", "start": [4], "stop": [8], "tier": "ssd"},
        ],
        "bytes_by_tier": {"ram": 16, "ssd": 16},
    }


def test_replicas_of_a_box_are_read_once() -> None:
    """If it failed, a data-parallel restore would read every replica."""
    local_replicas = Source(tier="ram", manifests=(manifest(rows((0, 8))), manifest(rows((0, 8)), process=1)))
    (read,) = plan_restore(SAVE, {KEY: rows((0, 8))}, [local_replicas]).reads
    assert len(read.sources) == 1
    assert len(read.sources[0][1]) == 1


@pytest.mark.parametrize("other", [SaveId(2, 7, 5), SaveId(1, 7, 4), SaveId(2, 6, 4)])
def test_two_saves_are_never_mixed(other: SaveId) -> None:
    """If it failed, half of the weights could be of another step."""
    mixed = Source(tier="ram", manifests=(manifest(rows((0, 4))), manifest(rows((4, 8)), save=other)))
    with pytest.raises(AssertionError, match="two saves are never mixed"):
        plan_restore(SAVE, {KEY: rows((0, 8))}, [mixed])
    alone = Source(tier="peer", manifests=(manifest(rows((0, 8)), save=other),))
    with pytest.raises(AssertionError, match="two saves are never mixed"):
        plan_restore(SAVE, {KEY: rows((0, 8))}, [alone])


def test_leaf_without_a_source_is_named() -> None:
    """If it failed, a new layer of the model would be restored as nothing."""
    with pytest.raises(
        CorruptCheckpointError, match=r"^save 7@2\.4: no source .* covers leaf state:opt\.mu, box"
    ) as caught:
        plan_restore(SAVE, {("state", ("opt", "mu")): rows((0, 8))}, [Source(tier="ram", manifests=(manifest([]),))])
    assert caught.value.step == 7


def test_empty_arrays_are_restored_on_any_mesh() -> None:
    """If it failed, one array without elements would make a whole step unrestorable on another mesh."""
    saved = Source(tier="ram", manifests=(manifest([Box((0, 0), (0, 8))], (0, 8)),))
    wanted = [Box((0, 0), (0, 4)), Box((0, 4), (0, 8))]
    plan = plan_restore(SAVE, {KEY: wanted}, [saved])
    blocks = restored(plan, np.zeros((0, 8), np.int32))
    assert {box: block.shape for box, block in blocks.items()} == dict.fromkeys(wanted, (0, 4))


def test_damaged_source_is_replaced_by_the_next_of_the_same_save() -> None:
    """If it failed, one flipped bit in a ramdisk would cost a step although the disk has it whole."""
    source = Source(tier="ram", manifests=(manifest(rows((0, 8))),))
    plan = plan_restore(SAVE, {KEY: rows((0, 8))}, [source, replace(source, tier="ssd")])
    values = np.arange(8, dtype=np.int32)
    bad = values ^ 1

    def read_from(stored: np.ndarray):
        def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
            del item
            copy_proven(leaf, record, wanted, into, lambda cell, *_: stored[cell.slices()], where="there")

        return read

    told = []
    blocks: dict[Any, dict[Box, np.ndarray]] = {}
    readers = [read_from(bad), read_from(values)]
    read_bytes = execute(plan, readers, lambda tier, _: told.append(tier), blocks.__setitem__)
    np.testing.assert_array_equal(blocks[KEY][Box((0,), (8,))], values)
    assert (told, read_bytes) == (["ram"], {"ssd": 32})
    with pytest.raises(CorruptCheckpointError, match=r"^there: leaf w, cell \(0,\) to \(8,\) has digest"):
        execute(plan, [read_from(bad)] * 2, lambda *_: None, lambda *_: None)


def test_damage_is_reported_once_and_for_the_tier_that_has_it() -> None:
    """One damaged cell would be counted again at every try, and for another host, which has nothing to do with it."""
    events: list[Event] = []
    log = EventLog()
    log.observe(events.append)

    def damaged(*_: Any, **__: Any) -> None:
        raise CorruptCheckpointError("slot-0.bin: cell 0 has digest 1, not 2")

    ssd = Source(tier="ssd", manifests=(manifest(rows((0, 8))),))
    _, read = together([(ssd, damaged)], "peer", remote=True)
    leaf = ssd.manifests[0].arrays["state"][0]
    reading = LocalRead(None, log)
    for restore in (1, 2):
        reading.begin()
        report = reading.rejected(SAVE)
        for _ in range(3):
            with pytest.raises(CorruptCheckpointError) as caught:
                read("state", leaf, leaf.boxes[0], leaf.boxes[0].box, np.empty(8, np.int32))
            report("peer", caught.value)
        assert [(event.kind, event.tier) for event in events] == [(Kind.REJECTED, "ssd")] * restore
        assert reading.damaged == {"ssd"}
