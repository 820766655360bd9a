"""Where pieces of an item end, and how many may be in flight: for any shapes, with any profile, without a byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import DurableProfile
from ckptkit.durable.cells.pieces import Pieces, _whole
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import LeafRecord

MB = 1 << 20
Share = list[tuple[LeafRecord, list[Box]]]

SIZES = st.integers(1, 1 << 14)
PROFILES = st.builds(
    DurableProfile,
    data_file_bytes=SIZES,
    in_flight_bytes=SIZES,
    copied_bytes=SIZES,
    compression=st.sampled_from([None, "zstd"]),
)
SHAPES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=30)


def share_of(shapes: Sequence[tuple[int, int]]) -> Share:
    """Leaves of so many rows, and so many of them in a cell: the last cell is padded where they do not fit."""
    share = []
    for index, (rows, cell_rows) in enumerate(shapes):
        leaf = LeafRecord(
            path=(f"w{index}",), keys="d", kind="jax", shape=(rows, 4), dtype="float32", cell=(cell_rows, 4)
        )
        share.append((leaf, [Box.whole(leaf.shape)]))
    return share


def sent(pieces: Pieces, share: Share, *, more: int = 0) -> tuple[list[int], int]:
    """The bytes of each piece, and the most that was held: what a writer does, with `more` that was not expected."""
    sizes, most_bytes = [], 0

    def send() -> None:
        while pieces.must_wait:
            pieces.finish_oldest()
        sizes.append(pieces.filled_bytes)
        pieces.send()

    for leaf, boxes in [*share, *share[:more]]:
        for part in (part for box in boxes for part in pieces.parts_of(leaf, box)):
            pieces.add(part)
            most_bytes = max(most_bytes, pieces.held_bytes)
            if pieces.is_full:
                send()
    pieces.expect_no_more()
    if not pieces.is_last:
        send()
    send()
    assert pieces.is_last
    return sizes, most_bytes


@given(shapes=SHAPES, profile=PROFILES, known=st.booleans(), more=st.integers(0, 3))
def test_held_bytes_are_bounded(shapes: list[tuple[int, int]], profile: DurableProfile, known: bool, more: int) -> None:
    """Memory in addition to the snapshot would grow with the state, or a wrong forecast would lose data."""
    share = share_of(shapes)
    wholes = [_whole(leaf, box, profile) for leaf, boxes in [*share, *share[:more]] for box in boxes]
    cell_bytes = max((leaf.cell_bytes for leaf, _ in share), default=0)
    sizes, held_bytes = sent(Pieces(profile, share if known else ()), share, more=more)
    assert sum(sizes) == sum(whole.nbytes for whole in wholes)
    cutter = Pieces(profile)
    parts = [part.nbytes for leaf, boxes in share for box in boxes for part in cutter.parts_of(leaf, box)]
    part_bytes = max(parts, default=0)  # a part is added whole
    assert part_bytes <= max(cell_bytes, profile.in_flight_bytes)
    assert max(sizes) <= 2 * profile.piece_bytes + max(cell_bytes, part_bytes)
    if known and not more:
        most_bytes = max(profile.in_flight_bytes, 3) * 4 / 3
        assert held_bytes <= most_bytes + 2 * cell_bytes


@pytest.mark.parametrize("rows", [5, 8], ids=["padded", "whole"])
def test_held_bytes_are_a_sixth_of_the_cells(rows: int) -> None:
    """Cells are held as they are stored: leaves of 5 rows in cells of 8 take as much as leaves of 8."""
    share = share_of([(rows * 1000, 8 * 1000)] * 1800)
    all_bytes = 1800 * 8 * 1000 * 16
    sizes, held_bytes = sent(Pieces(DurableProfile(), share), share)
    assert sizes == [all_bytes // 18] * 18
    assert held_bytes == all_bytes // 6


def test_metadata_does_not_split_the_last_piece() -> None:
    """Text of leaves, which is not expected, would cost a second tree, and a file for it."""
    profile = DurableProfile(write_bytes_per_s=20_000)
    share = share_of([(100, 100)] * 20)
    pieces = Pieces(profile, share)
    committed = 0
    for leaf, boxes in share:
        pieces.add_text(500)
        pieces.add(pieces.parts_of(leaf, boxes[0])[0])
        if pieces.is_full:
            assert not pieces.is_last
            pieces.send()
            committed += 1
    assert committed == 1
    assert pieces.is_last
    assert not pieces.is_full
