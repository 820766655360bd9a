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
from ckptkit.model.manifest import LeafKind, SaveId
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast import stream as broadcast_stream
from ckptkit.restore.broadcast.coordinator import Broadcaster
from ckptkit.restore.broadcast.cost_model import LEAST_BYTES, STARTUP_S, BroadcastRates, Remaining, choose, rate_of
from ckptkit.restore.broadcast.schedule import Common, Groups, Piece, Stream, by_groups, groups_of, pieces_of, share_out
from ckptkit.restore.plan import BoxRead, RestorePlan
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
    assert assembly.missing_bytes() == 6 * 4 + 8
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


def whole(wanted: int, replicas: int = 2, unread: int | None = None) -> Remaining:
    """Nothing is sent yet; of its own part a process has read nothing, or all but `unread`."""
    return Remaining(wanted=wanted, unread=wanted // replicas if unread is None else unread, sent=wanted)


def test_faster_side_is_chosen() -> None:
    """A broadcast of a small state, or over a slow interconnect, would make the restart slower."""
    gigabyte = 10**9
    assert not choose("auto", whole(LEAST_BYTES - 1), 8, BroadcastRates()).broadcast
    assert choose("auto", whole(LEAST_BYTES), 8, BroadcastRates()).broadcast, "worth measuring"
    slow = choose("auto", whole(gigabyte), 2, BroadcastRates(storage=25e6))
    assert slow.broadcast
    assert slow.why == (
        "1000.0 MB for each process at 25.0 MB/s of storage: alone 40.00 s, shared by 2 replicas with 0.2 s to connect "
        "20.20 s"
    )
    assert choose("auto", whole(gigabyte), 2, BroadcastRates(storage=100e6, interconnect=400e6)).broadcast
    assert not choose("auto", whole(gigabyte), 2, BroadcastRates(storage=100e6, interconnect=150e6)).broadcast
    assert choose("auto", whole(gigabyte, 16), 16, BroadcastRates(storage=100e6, interconnect=150e6)).broadcast
    assert choose("always", whole(1), 2, BroadcastRates()) == choose(
        "always", whole(gigabyte), 2, BroadcastRates(storage=1e12)
    )
    assert not choose("never", whole(gigabyte), 2, BroadcastRates(storage=1.0)).broadcast


def test_already_read_bytes_count_in_the_choice() -> None:
    """A process that has read its part would be told that the others' half takes as long as before."""
    rates = BroadcastRates(storage=100e6, interconnect=300e6)
    assert choose("auto", Remaining(wanted=500, unread=0, sent=1000), 2, rates).broadcast, "5 against 3.3"
    assert not choose("auto", Remaining(wanted=500, unread=200, sent=1000), 2, rates).broadcast, "5 against 5.3"
    assert choose("auto", Remaining(wanted=500, unread=200, sent=500), 2, rates).broadcast, "5 against 3.7"


def test_broadcast_is_probed_only_if_the_gain_exceeds_startup() -> None:
    """A fast storage would be left for a collective that takes longer to begin than all of the reading."""
    nearly = Remaining(wanted=10**9, unread=0, sent=10**9)
    assert choose("auto", nearly, 2, BroadcastRates(storage=0.9 * 10**9 / (2 * STARTUP_S))).broadcast
    assert not choose("auto", nearly, 2, BroadcastRates(storage=1.1 * 10**9 / (2 * STARTUP_S))).broadcast
    assert choose("auto", nearly, 2, BroadcastRates(storage=3e9, interconnect=4e9)).broadcast, "nothing to find out"


@given(st.floats(1e6, 1e11), st.floats(1e6, 1e12), st.integers(2, 1000))
def test_more_replicas_never_disable_the_broadcast(storage: float, interconnect: float, replicas: int) -> None:
    """The model would turn round where it matters most."""
    rates = BroadcastRates(storage=storage, interconnect=interconnect)
    fewer, more = (choose("auto", whole(10**10, each), each, rates).broadcast for each in (replicas, replicas + 1))
    assert more or not fewer


@given(
    st.integers(1 << 16, 10**8),
    st.floats(1.5, 1000),
    st.floats(1e6, 1e11),
    st.floats(0, 10),
)
def test_latency_does_not_lower_the_measured_rate(some: int, times: float, rate: float, latency_s: float) -> None:
    """A bucket that answers after 50 ms would be called slow, and shared where reading alone is faster."""
    more = int(some * times) + 1
    found = rate_of((some, latency_s + some / rate), (more, latency_s + more / rate))
    seen = more / (latency_s + more / rate)
    if seen >= rate / 2:  # most of the time went into bytes
        assert found == pytest.approx(rate, rel=1e-3)
    else:
        assert found == pytest.approx(2 * seen)


def test_delayed_short_read_does_not_raise_the_measured_rate() -> None:
    """A hiccup of the first read would be subtracted from the long one, down to nothing."""
    assert rate_of((1, 5.0), (100, 4.0)) == 50.0
    assert rate_of((1, 0.0), (100, 0.0)) > 1e10, "no time at all, as a clock may show"
    assert rate_of((100, 1.0), (100, 2.0)) == 50.0, "two equal reads: no latency is known"
    assert rate_of((0, 0.0), (100, 2.0)) == 50.0


@pytest.mark.parametrize(("latency_s", "rate"), [(0.0, 20e6), (0.05, 200e6), (0.03, 1e9)])
def test_reader_measures_the_storage_rate(monkeypatch: pytest.MonkeyPatch, latency_s: float, rate: float) -> None:
    """The opening of the step, or one request's latency, would be measured instead: 35 MB/s were found, where 150 was
    true."""
    now_s, opened = 0.0, False

    def taking(plan: RestorePlan, readers: Any, rejected: Any, proven: Any) -> dict[str, int]:
        nonlocal now_s, opened
        nbytes = sum(read.nbytes for read in plan.reads)
        now_s += (latency_s if nbytes > 1024 else 0.0) + nbytes / rate + (0.0 if opened else 3.0)
        opened = True
        for read in plan.reads:
            proven(read.key, {read.wanted: np.zeros(read.nbytes, np.uint8)})
        return {"durable": nbytes}

    monkeypatch.setattr(broadcast_stream.clock, "monotonic_s", lambda: now_s)
    monkeypatch.setattr(broadcast_stream, "execute", taking)
    asked: list[int] = []  # at one time
    ask = broadcast_stream.StreamReader._announce_plan
    monkeypatch.setattr(
        broadcast_stream.StreamReader,
        "_announce_plan",
        lambda self, plan: asked.append(len(plan.reads)) or ask(self, plan),
    )
    boxes = [Box((0,), (size,)) for size in (8, 8, 4, *[2 << 20] * 31)]  # the small ones are in the tree
    pieces = [Piece(("s", (str(number),)), box, box, box.size) for number, box in enumerate(boxes)]
    reads = tuple(BoxRead(key=piece.key, wanted=piece.box, nbytes=piece.nbytes, sources=()) for piece in pieces)
    plan = RestorePlan(save_id=SaveId(1, 2, 3), tiers=("durable",), remote=(True,), reads=reads)
    monkeypatch.setattr(broadcast_stream, "plan_restore", lambda *_: plan)
    prepared: Any = SimpleNamespace(plan=plan, holdings=SimpleNamespace(readers=(), sources=(), expect=None))
    assembly: Any = SimpleNamespace(deliver=lambda *_: None)
    stream = Stream(pieces, 8 << 20)
    shared = broadcast_stream.Sending(group=(0, 1), streams={0: stream, 1: stream}, rounds=8, process=0)
    reader = broadcast_stream.StreamReader(shared, prepared, lambda *_: None, assembly, ahead=8)
    for number in range(8):
        reader.fill(number, np.empty((8 << 20) + broadcast_stream.DIGEST_BYTES, np.uint8))
    reader.close()
    assert reader.storage_rate == pytest.approx(rate, rel=0.01)
    assert 8 <= len(asked) <= 10, "a store would make one request of it, which shows what one gives"
    assert sum(asked) == len(pieces) - 2
    assert (reader.unread_bytes(), reader.read_bytes) == (0, {"durable": (62 << 20) + 20})


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
    caster = Broadcaster(BroadcastOptions(mode="always"), SimpleNamespace(), job)  # pyright: ignore[reportArgumentType]
    state = SimpleNamespace(shared=SimpleNamespace(failure=None), choice=None)
    sends, reads = SimpleNamespace(rounds=2), SimpleNamespace(fill=away)
    caster._run(ALL, 512, [[None]], sends, reads, state)  # pyright: ignore[reportArgumentType]
    assert state.choice is not None
    assert not state.choice.broadcast
    assert "gave way to reading alone: process 0: PeerUnreachableError: process 3" in state.choice.why
