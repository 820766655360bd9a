"""Whose copies go where: never to the own host, evenly, and to another rack where that can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.peers.ring import Seat, keepers, kept_for

RACKS = st.none() | st.sampled_from("abc")


@st.composite
def jobs(draw: st.DrawFn, equal: bool = False) -> list[Seat]:
    """The seats of a job: hosts of one rack each, with some processes on each, in any order."""
    racks = draw(st.lists(RACKS, min_size=1, max_size=8))
    count = draw(st.integers(1, 3))
    seats = [
        Seat(f"h{host}", rack)
        for host, rack in enumerate(racks)
        for _ in range(count if equal else draw(st.integers(1, 3)))
    ]
    return draw(st.permutations(seats))


@given(seats=jobs(), copies=st.integers(1, 4))
@settings(deadline=None)
def test_every_copy_is_on_a_host_of_its_own(seats: list[Seat], copies: int) -> None:
    """A host that is lost would take a share and its only copy with it."""
    hosts = {seat.host for seat in seats}
    for process, chosen in enumerate(keepers(seats, copies)):
        places = [seats[keeper].host for keeper in chosen]
        assert len(set(places)) == len(places) == min(copies, len(hosts) - 1)
        assert seats[process].host not in places


@given(seats=jobs(equal=True), copies=st.integers(1, 4))
@settings(deadline=None)
def test_every_process_keeps_as_many_copies_as_it_sends(seats: list[Seat], copies: int) -> None:
    """One ramdisk would fill up with everybody's copies."""
    kept = Counter(keeper for chosen in keepers(seats, copies) for keeper in chosen)
    expected = min(copies, len({seat.host for seat in seats}) - 1)
    assert set(kept.values()) <= {expected}
    assert len(kept) == (len(seats) if expected else 0)


@given(seats=jobs(), copies=st.integers(1, 4))
@settings(deadline=None)
def test_sender_and_keeper_agree_on_the_assignment(seats: list[Seat], copies: int) -> None:
    """A copy would be refused by the one that it is sent to."""
    chosen = keepers(seats, copies)
    for process in range(len(seats)):
        assert kept_for(seats, copies, process) == tuple(p for p, keep in enumerate(chosen) if process in keep)


@given(seats=jobs())
@settings(deadline=None)
def test_copies_are_on_another_rack_if_no_rack_has_a_majority(seats: list[Seat]) -> None:
    """A rack that loses its power would take shares and copies."""
    rack_of = {seat.host: seat.rack or seat.host for seat in seats}
    largest = max(Counter(rack_of.values()).values())
    if 2 * largest > len(rack_of):
        return
    for process, (keeper,) in enumerate(keepers(seats, 1)):
        assert rack_of[seats[process].host] != rack_of[seats[keeper].host]


def test_a_large_job_is_a_ring_of_its_hosts() -> None:
    """The choice for ten thousand processes would take longer than the restart."""
    seats = [Seat(f"h{process // 8:04}") for process in range(10_000)]
    assert keepers(seats, 1) == [((process + 8) % 10_000,) for process in range(10_000)]


def test_host_order_is_independent_of_process_order() -> None:
    """After a restart every host would keep other shares, and the copies that it has be of no use to its neighbour."""
    seats = [Seat("b"), Seat("a"), Seat("c")]
    assert [[seats[k].host for k in chosen] for chosen in keepers(seats, 1)] == [["c"], ["b"], ["a"]]
