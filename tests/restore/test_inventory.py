"""The reports of processes stay small, and their evaluation is right."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import Reason
from ckptkit.model.manifest import SaveId
from ckptkit.restore.inventory import (
    REPORT_BYTES_MAX,
    Held,
    box_set_hash,
    distinct_shares,
    from_runs,
    holders_of,
    hole_in,
    in_batches,
    in_order_of_use,
    is_whole,
    part_of,
    to_runs,
    uncommitted_by,
)
from ckptkit.restore.plan import rank_candidates
from tests.restore.test_plan import manifest, never, rows

SAVE = SaveId(2, 7, 4)
SHARES = st.lists(st.tuples(st.integers(0, 10**6), st.text(max_size=40)), max_size=500).map(tuple)


@given(
    save=st.builds(SaveId, st.integers(0, 10**8), st.integers(0, 10**12), st.integers(0, 10**8)),
    shares=SHARES,
    refusal=st.none() | st.builds(Reason, st.text(max_size=5000), st.just(("damaged",))),
    tiers=st.lists(st.sampled_from(["ram", "ssd"]), unique=True).map(tuple),
)
@settings(deadline=None, max_examples=100)
def test_a_report_is_at_most_4_kib(
    save: SaveId, shares: tuple[tuple[int, str], ...], refusal: Reason | None, tiers: tuple[str, ...]
) -> None:
    """Ten thousand processes would send gigabytes through the coordination service."""
    held = Held(save_id=save, count=10**6, shares=shares, tiers=tiers, refusal=refusal)
    text = json.dumps(held.to_json())
    assert len(text) <= REPORT_BYTES_MAX
    again = Held.from_json(json.loads(text))
    assert again.shares == shares[: len(again.shares)]
    assert (again.save_id, again.count, again.tiers) == (save, 10**6, tiers)
    if len(json.dumps(shares)) < 1000 and (refusal is None or len(refusal.text) < 100):
        assert again == held


@given(st.dictionaries(st.integers(0, 30), st.sets(st.integers(0, 30), min_size=1).map(sorted).map(tuple)))
def test_runs_encode_the_holders(holders: dict[int, tuple[int, ...]]) -> None:
    """A process would ask another for what that one does not have."""
    assert from_runs(json.loads(json.dumps(to_runs(holders)))) == holders


def test_own_shares_are_encoded_as_one_run() -> None:
    """The message of process 0 would grow with the job."""
    assert to_runs({share: (share,) for share in range(10_000)}) == [[0, 0, 10_000]]


@given(
    shares=st.sets(st.integers(0, 40)),
    mine=st.integers(0, 7),
    count=st.sampled_from([4, 8, 41]),
    alike=st.lists(st.integers(0, 7), unique=True),
)
def test_every_share_is_examined_once_its_own_first(shares: set[int], mine: int, count: int, alike: list[int]) -> None:
    """A share that is left out would be a lost one; one that is asked for twice costs a restart its time."""
    order = in_order_of_use(shares, mine=mine, of=8, count=count, alike=alike)
    assert sorted(order) == sorted(shares)
    assert [share for batch in in_batches(order) for share in batch] == order
    if count == 8 and mine in shares:
        assert order[0] == mine


def test_replicas_are_preferred_to_neighbours() -> None:
    """A data replica's host would be asked last, after thousands that hold nothing of use."""
    assert in_order_of_use(range(8), mine=1, of=8, count=8, alike=[1, 5])[:3] == [1, 5, 0]
    assert in_order_of_use(range(4), mine=7, of=8, count=4)[0] == 3


@given(names=st.lists(st.from_regex(r"[0-9]{1,2}(\.[0-9])?|buddy-[0-9]-[0-9]|x", fullmatch=True)), of=st.integers(1, 5))
def test_each_directory_is_reported_by_one_process_of_its_host(names: list[str], of: int) -> None:
    """Others would request a share that a process never reported, or a share would count as lost."""
    for name in names:
        assert [part_of(name, rank, of) for rank in range(of)].count(True) == 1


def test_replicas_hash_equal_and_other_boxes_differ() -> None:
    """Process 0 would ask every replica for its boxes, or count a part as a copy."""
    assert box_set_hash(manifest(rows((0, 4)))) == box_set_hash(manifest(rows((0, 4)), process=1))
    assert box_set_hash(manifest(rows((0, 4)))) != box_set_hash(manifest(rows((4, 8))))


def test_save_is_complete_if_every_share_is_held() -> None:
    """A fully sharded save of which one host is lost would be called restorable."""
    first = Held(save_id=SAVE, count=2, shares=((0, "a"),))
    second = Held(save_id=SAVE, count=2, shares=((1, "b"),))
    assert is_whole([[first], [second]], SAVE)
    assert is_whole([[], [first, second]], SAVE)
    assert not is_whole([[first], [first]], SAVE)
    assert not is_whole([], SAVE)
    assert holders_of([[first], [first, second]], SAVE) == {0: (0, 1), 1: (1,)}
    local_replica = Held(save_id=SAVE, count=2, shares=((1, "a"),))
    assert distinct_shares([[first], [local_replica]], SAVE) == [(0, 0)]


def test_save_of_impossibly_many_processes_is_incomplete() -> None:
    """A manifest that somebody has made up would take all memory of process 0 at the start of every job there."""
    assert not is_whole([[Held(save_id=SAVE, count=10**17, shares=((0, "a"),))]], SAVE)


def test_share_that_was_never_committed_differs_from_a_lost_one() -> None:
    """An ordinary kill between two commits would read like damage, and a host would be replaced for it."""
    older = SaveId(SAVE.epoch, SAVE.step - 1, 0)

    def report(process: int, *saves: SaveId, count: int = 2) -> list[Held]:
        return [Held(save_id=save, count=count, shares=((process, "a"),)) for save in saves]

    assert uncommitted_by([report(0, older), report(1, older, SAVE)], SAVE) == [0]
    assert uncommitted_by([report(0, older, SAVE), report(1, older, SAVE)], SAVE) == [], "it is complete"
    assert uncommitted_by([[], report(1, older, SAVE)], SAVE) == [], "the host of process 0 has lost everything"
    assert uncommitted_by([report(0, SAVE), report(1, older)], older) == [], "newer slots tell nothing"
    assert uncommitted_by([report(0, older, count=1), report(1, SAVE)], SAVE) == [], "of a smaller job"
    assert uncommitted_by([report(0, older), report(1, SAVE, count=10**17)], SAVE) == [], "of nobody's job"


def test_missing_box_error_names_its_leaf() -> None:
    """A lost shard would be restored as random memory."""
    assert hole_in([manifest(rows((0, 5))), manifest(rows((4, 8)))]) is None
    assert (
        hole_in([manifest(rows((0, 5))), manifest(rows((6, 8)))]) == "1 elements of leaf state:w are held by no process"
    )
    assert hole_in([manifest([])]) == "8 elements of leaf state:w are held by no process"


@pytest.mark.long
def test_inventory_of_ten_thousand_processes_is_gathered() -> None:
    """A restart of a large job would wait for its own bookkeeping. Figures: bench/LOG.md."""
    saves = [SaveId(3, 1000 + step, step) for step in range(5)]
    count, lost = 10_000, 4321
    texts = [
        json.dumps(
            [
                Held(
                    save_id=save,
                    count=count,
                    shares=((process, f"{process:016x}"),),
                    tiers=("ram", "ssd"),
                    refusal=None if process != lost else Reason("the slots of the save are missing"),
                ).to_json()
                for save in saves
                if process != lost or save != saves[-1]
            ]
        )
        for process in range(count)
    ]
    assert max(map(len, texts)) <= REPORT_BYTES_MAX * len(saves)
    assert sum(map(len, texts)) < 8 << 20
    began_s = time.process_time()
    reports = [[Held.from_json(values) for values in json.loads(text)] for text in texts]
    fast = [{held.save_id: held.refusal for held in report} for report in reports]
    ranked = rank_candidates(fast, [], never, linked=True)
    assert [candidate.save_id for candidate in ranked] == saves[::-1]
    assert [is_whole(reports, save) for save in saves] == [True] * 4 + [False]
    runs = to_runs(holders_of(reports, saves[-1]))
    assert runs == [[0, 0, lost], [lost + 1, lost + 1, count - lost - 1]]
    assert time.process_time() - began_s < 6, "of CPU; `python -m bench gather` measures the whole"
