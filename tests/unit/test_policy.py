"""Tier declarations: what cannot work is refused when it is written down."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.policy import Backpressure, EverySteps, PeerOptions, Tier, checked_tiers


@given(interval=st.integers(1, 50), step=st.integers(0, 1000))
@settings(deadline=None)
def test_every_steps_takes_the_multiples(interval: int, step: int) -> None:
    """If it failed, a tier would save at other steps than the job asked for."""
    assert EverySteps(interval).due(step) == (step in range(0, 1001, interval))


@pytest.mark.parametrize("steps", [0, -1])
def test_an_interval_below_one_is_refused(steps: int) -> None:
    """If it failed, the first save would divide by zero in the middle of training."""
    with pytest.raises(ValueError, match=rf"EverySteps\({steps}\): a step interval is at least 1"):
        EverySteps(steps)


def test_one_slot_is_refused() -> None:
    """If it failed, the only save would be overwritten by the next one while it is written."""
    with pytest.raises(ValueError, match=r"Tier 'ram': slots=1, at least 2 are needed: the newest committed step"):
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


def test_the_same_tier_twice_is_refused() -> None:
    """If it failed, one of the two would silently never be written."""
    with pytest.raises(ValueError, match=r"tiers \['ram', 'ram'\]: at most one ram, one peer and one ssd tier"):
        checked_tiers((Tier.ram("/a"), Tier.ram("/b")))


def test_two_tiers_of_one_medium_are_refused_whatever_they_are_called() -> None:
    """If it failed, a tier with a name of its own would be opened and never be written."""
    own_name = Tier(name="scratch", medium="ram", path="/b", save=EverySteps(1), slots=2)
    with pytest.raises(ValueError, match=r"at most one ram, one peer and one ssd tier"):
        checked_tiers((Tier.ram("/a"), own_name))


def test_copies_on_other_hosts_are_of_the_ramdisk() -> None:
    """If it failed, a job would believe that its hosts keep copies of each other."""
    with pytest.raises(ValueError, match=r"tiers \['peer'\]: a peer tier keeps copies of the ramdisk's slots; add"):
        checked_tiers((Tier.peer(),))
    with pytest.raises(ValueError, match=r"Tier\.peer\(copies=0\): at least one copy, or leave the tier out"):
        Tier.peer(copies=0)
    tiers = checked_tiers((Tier.peer(copies=2, rack="r1"), Tier.ssd("/b"), Tier.ram("/a", slots=2)))
    assert [tier.name for tier in tiers] == ["ram", "peer", "ssd"]
    with pytest.raises(ValueError, match=r"needs Tier\.ram\(slots=3\) or more, found 2: .*copies on other hosts"):
        Backpressure().check_tiers(tiers)


def test_a_peer_is_waited_for_some_time() -> None:
    """If it failed, no process would ever be answered."""
    with pytest.raises(ValueError, match="timeout_s=0: give seconds above 0"):
        PeerOptions(timeout_s=0)
