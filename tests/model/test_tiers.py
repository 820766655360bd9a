"""Tier declarations: what cannot work is refused when it is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.model.policies import PeerOptions, SaveOptions
from ckptkit.model.tiers import (
    EverySeconds,
    EverySteps,
    KeepBytes,
    KeepGood,
    KeepNewest,
    KeepUnflushed,
    Tier,
    TierKeep,
    checked_tiers,
    kept_beside,
)

KEEPS = (
    st.integers(1, 6).map(KeepNewest)
    | st.integers(1, 100).map(KeepBytes)
    | st.integers(1, 6).map(KeepUnflushed)
    | st.integers(1, 6).map(lambda count: KeepGood(count, lambda step: step % 3 == 0))
)


@given(interval=st.integers(1, 50), step=st.integers(0, 1000))
@settings(deadline=None)
def test_every_steps_saves_at_multiples(interval: int, step: int) -> None:
    """If it failed, a tier would save at other steps than the job asked for."""
    assert EverySteps(interval).due(step) == (step in range(0, 1001, interval))


@pytest.mark.parametrize("steps", [0, -1])
def test_an_interval_below_one_is_refused(steps: int) -> None:
    """If it failed, the first save would divide by zero in the middle of training."""
    with pytest.raises(ValueError, match=rf"EverySteps\({steps}\): a step interval is at least 1"):
        EverySteps(steps)


def test_one_slot_is_refused() -> None:
    """If it failed, the only save would be overwritten by the next one while it is written."""
    with pytest.raises(ValueError, match=r"Tier 'ram': slots=1, at least 2 are needed: 1 kept \(the newest committed"):
        Tier.ram("/dev/shm/x", slots=1)


def test_a_tier_needs_a_path_and_a_safe_job_name() -> None:
    """If it failed, slots would appear in the working directory, or outside the tier."""
    with pytest.raises(ValueError, match=r"Tier 'ssd' needs the path of a directory"):
        Tier.ssd("")
    with pytest.raises(ValueError, match=r"job name '\.\./x' cannot be a directory name"):
        Tier.ram("/dev/shm", job="../x")


def test_tiers_are_sorted_fastest_first() -> None:
    """If it failed, a restore would read the disk while the ramdisk holds the same bytes."""
    ram, ssd = Tier.ram("/a"), Tier.ssd("/b")
    assert checked_tiers((ssd, ram)) == (ram, ssd)
    assert checked_tiers(()) == ()


def test_same_tier_twice_is_refused() -> None:
    """If it failed, one of the two would silently never be written."""
    with pytest.raises(ValueError, match=r"tiers \['ram', 'ram'\]: at most one ram, one peer and one ssd tier"):
        checked_tiers((Tier.ram("/a"), Tier.ram("/b")))


def test_two_tiers_of_one_medium_are_refused() -> None:
    """If it failed, a tier with a name of its own would be opened and never be written."""
    own_name = Tier(name="scratch", medium="ram", path="/b", save=EverySteps(1), slots=2)
    with pytest.raises(ValueError, match=r"at most one ram, one peer and one ssd tier"):
        checked_tiers((Tier.ram("/a"), own_name))


@given(keep=KEEPS, held=st.sets(st.integers(0, 30)), flushed=st.sets(st.integers(0, 30)), share=st.integers(0, 40))
@settings(deadline=None)
def test_kept_steps_are_held_bounded_and_include_the_newest(
    keep: TierKeep, held: set[int], flushed: set[int], share: int
) -> None:
    """If it failed, the newest step could be released, or no slot would be left for the next save."""
    newest_first = sorted(held, reverse=True)
    most = keep.most(share)
    kept = keep.kept(newest_first, flushed, most)
    assert kept[:1] == newest_first[:1]
    assert kept == sorted(set(kept), reverse=True)
    assert set(kept) <= held
    assert len(kept) <= most
    assert Tier.ram("/r", keep=keep).slots_for(share, 2) == most + 3, "two in flight, one that is read"
    assert Tier.ssd("/s", keep=keep).slots_for(share, 2) == most + 1


@given(held=st.sets(st.integers(0, 30)), flushed=st.sets(st.integers(0, 30)), count=st.integers(1, 6))
@settings(deadline=None)
def test_each_policy_keeps_the_documented_steps(held: set[int], flushed: set[int], count: int) -> None:
    """If it failed, two policies would be the same, or one would keep older steps than it could."""
    newest_first = sorted(held, reverse=True)
    assert KeepNewest(count).kept(newest_first, flushed, count) == newest_first[:count]
    by_bytes = KeepBytes(count * 10 + 9)
    assert by_bytes.kept(newest_first, flushed, by_bytes.most(10)) == newest_first[:count], "a part of a step is none"
    good = KeepGood(count, lambda step: step % 3 == 0).kept(newest_first, flushed, count)
    assert good[: max(1, count - 1)] == newest_first[: max(1, count - 1)]
    if count > 1 and (older := newest_first[count - 1 :]):
        assert good[count - 1] == next((step for step in older if step % 3 == 0), older[0])
    unflushed = KeepUnflushed(count)
    kept = unflushed.kept(newest_first, flushed, unflushed.most(0))
    assert kept[1:] == [step for step in newest_first[1:] if step not in flushed][:count]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: EverySeconds(0), r"EverySeconds\(0\): give a number of seconds above 0"),
        (lambda: EverySeconds(float("inf")), r"EverySeconds\(inf\): give a number of seconds above 0"),
        (lambda: EverySeconds(float("nan")), r"EverySeconds\(nan\): give a number of seconds above 0"),
        (lambda: KeepNewest(0), r"KeepNewest\(0\): the newest step is always kept, so the count is at least 1"),
        (lambda: KeepBytes(0), r"KeepBytes\(0\): give the bytes"),
        (lambda: KeepGood(0, bool), r"KeepGood\(0\): the newest step is always kept, so the count is at least 1"),
        (lambda: KeepUnflushed(0), r"KeepUnflushed\(0\): give room for at least 1 step"),
        (
            lambda: Tier.ram("/r", save=cast(Any, 5)),
            r"Tier 'ram': save=5 is not a policy of a fast tier; give EverySteps",
        ),
        (
            lambda: Tier.ssd("/s", keep=cast(Any, 5)),
            r"Tier 'ssd': keep=5 is not a policy of a fast tier; give KeepNewest",
        ),
        (lambda: Tier.ram("/r", keep=KeepBytes(9), slots=4), r"slots=4 and KeepBytes\(bytes_max=9\): slots follow"),
        (
            lambda: Tier.ram("/r", keep=KeepNewest(count=3), slots=3),
            r"slots=3, at least 4 are needed: 3 kept \(KeepNewest\(count=3\)\) and 1 being written",
        ),
        (
            lambda: SaveOptions(in_flight_max=3).check_tiers((Tier.ram("/r", slots=3),)),
            r"slots=3, at least 4 are needed: 1 kept .* and 3 being written \(in_flight_max=3\)",
        ),
    ],
)
def test_invalid_tier_is_refused_at_construction(make: Callable[[], object], why: str) -> None:
    """If it failed, the mistake would be found in the middle of training, or never."""
    with pytest.raises(ValueError, match=why):
        make()


@given(seconds=st.floats(0.1, 100), passed=st.floats(0, 200))
@settings(deadline=None)
def test_every_seconds_saves_the_first_step_and_then_waits(seconds: float, passed: float) -> None:
    """If it failed, a tier would save at every step, or never."""
    assert EverySeconds(seconds).due_after(None)
    assert EverySeconds(seconds).due_after(passed) == (passed >= seconds)


def test_peer_tier_needs_a_ramdisk_tier() -> None:
    """If it failed, a job would believe that its hosts keep copies of each other."""
    with pytest.raises(ValueError, match=r"tiers \['peer'\]: a peer tier keeps copies of the ramdisk's slots; add"):
        checked_tiers((Tier.peer(),))
    with pytest.raises(ValueError, match=r"Tier\.peer\(copies=0\): at least one copy, or leave the tier out"):
        Tier.peer(copies=0)
    with pytest.raises(
        ValueError, match=r"Tier\.peer\(keep=KeepNewest\(count=2\)\): a peer tier keeps the newest step"
    ):
        Tier(name="peer", medium="peer", path="", save=EverySteps(1), copies=1, keep=KeepNewest(2))
    tiers = checked_tiers((Tier.peer(copies=2, rack="r1"), Tier.ssd("/b"), Tier.ram("/a", slots=2)))
    assert [tier.name for tier in tiers] == ["ram", "peer", "ssd"]
    with pytest.raises(
        ValueError, match=r"slots=2, at least 3 are needed: 1 kept .*, 1 with copies on other hosts and"
    ):
        SaveOptions().check_tiers(tiers)
    ram, peer = checked_tiers((Tier.ram("/a"), Tier.peer(save=EverySeconds(60))))
    SaveOptions().check_tiers((ram, peer))
    assert ram.slots_for(0, 1, beside=kept_beside(ram, (ram, peer))) == ram.slots_for(0, 1) + 1
    assert kept_beside(peer, (ram, peer)) == kept_beside(ram, (ram,)) == 0


def test_peer_timeout_of_zero_is_refused() -> None:
    """If it failed, no process would ever be answered."""
    with pytest.raises(ValueError, match="timeout_s=0: give seconds above 0"):
        PeerOptions(timeout_s=0)
