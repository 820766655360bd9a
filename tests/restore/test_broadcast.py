"""The division of reads among replicas, their windows, and whether it pays."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import BroadcastOptions
from ckptkit.errors import PeerUnreachableError
from ckptkit.events import EventLog
from ckptkit.job.coordination import Job, LocalCoordinator
from ckptkit.model.boxes import Box, missing_elements
from ckptkit.model.manifest import LeafKind
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast.coordinator import Broadcaster
from ckptkit.restore.broadcast.offer import SHARED_BYTES_MIN, judge
from ckptkit.restore.broadcast.schedule import Common, Groups, Piece, Stream, by_groups, groups_of, pieces_of, share_out
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.tree import Form, Target, boxes_needed

PAIRS: Groups = ((0, 2), (1, 3))
ALL: Groups = ((0, 1, 2, 3),)


def leaf(name: str, *shape: int, groups: Groups = PAIRS, cell: tuple[int, ...] = (4,), itemsize: int = 4) -> Common:
    boxes = (Box.whole(shape),)
    return Common(key=("s", (name,)), shape=shape, boxes=boxes, cell=cell, itemsize=itemsize, groups=groups)


@given(st.data())
def test_pieces_tile_a_box_and_each_lies_in_one_cell(data: st.DataObject) -> None:
    """An element would be restored from nowhere, or a cell be read twice."""
    ranks = data.draw(st.integers(0, 3))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))) for _ in range(ranks)]
    cell = tuple(data.draw(st.integers(1, 5)) for _ in range(ranks))
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    pieces = pieces_of(box, cell)
    assert sum(piece.size for piece in pieces) == box.size
    assert missing_elements(box, pieces) == 0
    cells = [tuple(a // rows for a, rows in zip(piece.start, cell, strict=True)) for piece in pieces]
    assert len(set(cells)) == len(cells)
    for piece in pieces:
        ends = zip(piece.start, piece.stop, cell, strict=True)
        assert all(a // rows == (b - 1) // rows for a, b, rows in ends)


def test_groups_have_one_size_and_include_every_process() -> None:
    """A process that is in no group, or in two, would wait for a collective that nobody else begins."""
    a, b, c = Box((0,), (1,)), Box((1,), (2,)), Box((2,), (3,))
    assert groups_of({a: (0, 2), b: (1, 3)}, 4) == PAIRS
    assert groups_of({a: (0, 2), b: (1, 3), c: (0, 2)}, 4) == PAIRS, "several boxes each"
    assert groups_of({a: (0, 1, 2, 3)}, 4) == ALL
    assert groups_of({a: (0,), b: (1,)}, 2) is None, "one replica"
    assert groups_of({a: (0, 1), b: (2,)}, 3) is None, "unequal"
    assert groups_of({a: (0, 1), b: (1, 2)}, 3) is None, "overlapping"
    assert groups_of({a: (0, 1)}, 3) is None, "process 2 holds none of it"


def test_small_leaves_join_the_group_of_a_large_leaf() -> None:
    """A step counter would cost a compilation and a round of its own."""
    large, counter = leaf("w", 1 << 20), leaf("count", groups=ALL, cell=())
    assert by_groups([counter, large]) == {PAIRS: [large, counter]}
    whole = leaf("embedding", 5 << 20, groups=ALL)
    assert by_groups([large, whole]) == {ALL: [whole], PAIRS: [large]}, "20 MB are read once, not by each pair"
    finer = leaf("w", 100, groups=PAIRS)
    assert by_groups([whole, finer]) == {ALL: [whole]}, "400 bytes that cannot be carried: each reads them"
    assert by_groups([finer]) == {PAIRS: [finer]}


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(2, 4), st.randoms(use_true_random=False))
def test_each_piece_is_read_once_by_the_least_loaded_process(sizes: list[int], count: int, rng: random.Random) -> None:
    """The storage would be asked twice for a byte, or one process for all of them while the others wait."""
    group = tuple(range(count))
    leaves = [leaf(f"{number}", size, groups=(group,)) for number, size in enumerate(sizes)]
    in_memory = {each.key: {process for process in group if rng.random() < 0.3} for each in leaves}
    streams = share_out(leaves, group, lambda key, process: process not in in_memory[key])
    read = [(piece.key, piece.box) for pieces in streams.values() for piece in pieces]
    assert sorted(read) == sorted((each.key, box) for each in leaves for box in pieces_of(each.boxes[0], each.cell))
    for process, pieces in streams.items():
        assert all(process in in_memory[piece.key] for piece in pieces if in_memory[piece.key])
    even = share_out(leaves, group, lambda key, process: True)
    loads = [sum(piece.nbytes for piece in pieces) for pieces in even.values()]
    assert max(loads) - min(loads) <= 2 * 16, "no piece is larger than a cell of 16 bytes"
    in_order = [piece for process in group for piece in even[process]]
    assert [(piece.key, piece.box.start) for piece in in_order] == sorted(
        ((piece.key, piece.box.start) for piece in in_order), key=lambda each: (int(each[0][1][0]), each[1])
    ), "each reads neighbours"


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 40))
def test_windows_cover_every_byte_once(sizes: list[int], width: int) -> None:
    """A window that is cut wrongly would put bytes into other leaves."""
    pieces = [Piece(("s", (str(n),)), Box((0,), (size,)), Box((0,), (size,)), size) for n, size in enumerate(sizes)]
    stream, whole, begun = Stream(pieces, width), bytearray(sum(sizes)), list[Piece]()
    offsets = (
        dict(zip((piece.key for piece in pieces), np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)) if sizes else {}
    )
    windows = -(-sum(sizes) // width)
    for number in range(windows):
        shown = stream.in_window(number)
        begun += stream.begins_in(number)
        assert sum(stop - start for _, start, stop, _ in shown) == stream.filled(number)
        for piece, start, stop, at in shown:
            assert offsets[piece.key] + start == number * width + at
            for index in range(offsets[piece.key] + start, offsets[piece.key] + stop):
                whole[index] += 1
    assert begun == pieces
    assert set(whole) <= {1}
    assert not stream.in_window(windows)
    assert stream.filled(windows) == 0


def test_pieces_are_accepted_once_in_any_order() -> None:
    """A piece that two have read would be counted for one that nobody has."""

    def on_host(name: str, kind: LeafKind, shape: tuple[int, ...], dtype: str) -> Target:
        boxes = boxes_needed(None, shape, 0)
        return Target(("s", (name,)), Form(kind=kind, shape=shape, dtype=dtype, sharding=None, boxes=boxes))

    host = on_host("w", "numpy", (6,), "int32")
    none = on_host("none", "numpy", (0, 3), "int8")
    number = on_host("n", "int", (), "int64")
    targets = {target.key: target for target in (host, none, number)}
    assembly = Assembly(targets, {host.key: (4,), none.key: (1, 3), number.key: ()})
    assert assembly.leaves[none.key].shape == (0, 3)
    last, first = Box((4,), (6,)), Box((0,), (4,))
    assembly.deliver(host.key, {last: np.array([4, 5], np.int32)})
    assembly.deliver(host.key, {last: np.array([9, 9], np.int32)})
    assert assembly.missing() == {host.key: [first], number.key: [Box((), ())]}
    assembly.deliver(host.key, {first: np.arange(4, dtype=np.int32)})
    assembly.deliver(number.key, {Box((), ()): np.array(7)})
    assert assembly.leaves[host.key].tolist() == [0, 1, 2, 3, 4, 5]
    assert assembly.leaves[number.key] == 7
    assert not assembly.missing()


@given(st.integers(0, 1 << 36), st.integers(2, 64), st.integers(1, 8))
def test_budget_bounds_the_bytes_per_round(longest: int, replicas: int, links: int) -> None:
    """A transfer would push the state that is being restored out of memory."""
    options = BroadcastOptions(device_bytes=8 << 20, host_bytes=16 << 20)
    width = options.width(longest, replicas, links)
    assert width % (512 * links) == 0
    assert (replicas + 1) * width <= options.device_bytes
    assert (replicas + 4) * width <= options.host_bytes


def offers(*wanted_bytes: int) -> list[Any]:
    return [["layout", each, True] for each in wanted_bytes]


def test_auto_shares_from_the_threshold_on() -> None:
    """A restore of a small state would wait for rounds that take longer than its reading, or a large one read the
    bucket once for each replica."""
    least = SHARED_BYTES_MIN
    assert judge(offers(least, 5), "auto") == {
        "go": True,
        "why": "mode 'auto': 64.0 MB in common",
        "needs": [True, True],
    }
    assert judge(offers(10_000_000, 5), "auto") == {
        "go": False,
        "why": "mode 'auto': 10.0 MB in common, less than 64.0 MB",
    }
    assert not judge(offers(least - 1, least - 1), "auto")["go"]
    assert judge(offers(1, 0), "always")["go"]


def test_sharing_needs_an_equal_wish_on_all_processes() -> None:
    """A process would be in a collective whose windows are those of another tree."""
    problem = judge([*offers(10**9), "a process has no device"], "always")
    assert problem == {"go": False, "why": "process 1: a process has no device"}
    other = judge([*offers(10**9), ["other", 10**9, True]], "always")
    assert other == {"go": False, "why": "the processes do not want the same tree in the same layout"}
    assert judge(offers(0, 0), "always") == {"go": False, "why": "fast tiers hold the boxes that the replicas share"}


@pytest.mark.parametrize(
    ("is_remote", "caller", "why"),
    [
        (False, None, "mode 'auto' shares only what is read over a network"),
        (True, CallerThread(), "mode 'auto' shares nothing in the background"),
        (True, None, "stock Orbax restores this step"),  # the next thing that is looked at
    ],
)
def test_auto_shares_reads_of_a_network_that_the_caller_waits_for(
    is_remote: bool, caller: CallerThread | None, why: str
) -> None:
    """A local disk would be read by rounds of collectives, or a restore behind a compilation stop at `host_bytes`."""

    def agree(channel: str, value: Any, decide: Any) -> Any:
        return decide([value, value])

    two: Any = SimpleNamespace(count=2, agree=agree)
    job = Job(coordinator=two, events=EventLog())
    caster = Broadcaster(BroadcastOptions(), SimpleNamespace(), job, is_remote=is_remote)  # pyright: ignore[reportArgumentType]
    shared, choice = caster.share(None, caller)
    assert (shared, choice.broadcast, choice.why) == (None, False, f"process 0: {why}")


def test_bad_options_are_refused() -> None:
    """A typing error would choose silently."""
    with pytest.raises(ValueError, match=r"mode='on'\): give one of auto, always, never"):
        BroadcastOptions(mode="on")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="host_bytes=5\\): give at least 1048576 bytes"):
        BroadcastOptions(host_bytes=5)


def test_unresponsive_process_ends_broadcast_not_restore() -> None:
    """A restore would fail on all where the durable tier has the step: only who reads alone reaches further."""

    def away(*_: Any) -> None:
        raise PeerUnreachableError("process 3 did not answer")

    job = Job(coordinator=LocalCoordinator(5.0), events=EventLog())
    caster = Broadcaster(BroadcastOptions(mode="always"), SimpleNamespace(), job, is_remote=False)  # pyright: ignore[reportArgumentType]
    shared, sends, reads = SimpleNamespace(failure=None), SimpleNamespace(rounds=2), SimpleNamespace(fill=away)
    problem = caster._run(ALL, 512, [[None]], sends, reads, shared, None)  # pyright: ignore[reportArgumentType]
    assert problem is not None
    assert "gave way to reading alone: process 0: PeerUnreachableError: process 3" in problem
