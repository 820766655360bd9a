"""The tiers of a last save, by the remaining time and the measured rates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.events import Event, Kind
from ckptkit.save.last_save import MARGIN, POLL_S, PreemptionPace, TierRates, plan_last_save

TIERS = ("ram", "peer", "ssd", "durable")


def committed(tier: str, size_bytes: int, duration_s: float) -> Event:
    fields = {"bytes": size_bytes, "duration_s": duration_s}
    return Event(kind=Kind.COMMITTED, at_s=0.0, process=0, step=1, tier=tier, fields=fields)


def test_grace_decides_the_tiers_and_reports_why() -> None:
    """Breaks when a bucket upload that cannot be done is begun, or the reader is not told why it was not."""
    needs_s = {"ram": 0.1, "peer": 2.0, "ssd": 4.0, "durable": 40.0}
    plan = plan_last_save(TIERS, needs_s, 30.0)
    assert plan.tiers == ("ram", "peer", "ssd")
    assert plan.left_out == {"durable": "needs 60.0 s by the rates of earlier saves, 30.0 s are left"}
    assert plan_last_save(TIERS, needs_s, 60.0).tiers == TIERS
    assert plan_last_save(TIERS, needs_s, 5.0).tiers == ("ram", "peer"), "other hosts before this one's disk"
    assert plan_last_save(TIERS, needs_s, 0.0).tiers == ("ram",), "the ramdisk always"


@given(
    st.lists(st.sampled_from(TIERS), min_size=1, max_size=4, unique=True),
    st.dictionaries(st.sampled_from(TIERS), st.floats(0.0, 1e4)),
    st.floats(0.0, 1e3),
)
def test_fastest_tier_is_always_tried_and_skips_are_reported(
    tiers: list[str], needs_s: dict[str, float], left_s: float
) -> None:
    """Breaks when a short grace saves nothing at all, or a tier is dropped without a message."""
    plan = plan_last_save(tiers, needs_s, left_s)
    assert plan.tiers[0] == tiers[0]
    assert {*plan.tiers, *plan.left_out} == set(tiers)
    assert not set(plan.tiers) & set(plan.left_out)
    for tier in plan.tiers[1:]:
        assert MARGIN * needs_s.get(tier, 0.0) <= left_s


def test_save_time_is_the_slowest_recent_rate_times_state_size() -> None:
    """Breaks when one lucky save makes the next look cheap, or a state that doubled is thought to take as long."""
    rates = TierRates()
    assert rates.needs_s(100) == {}
    for duration_s in (9.0, 1.0, 2.0, 4.0, 1.0, 1.0):  # the first is forgotten
        rates(committed("ssd", 100, duration_s))
    rates(committed("durable", 0, 7.0))  # by Orbax: its bytes are not known
    assert rates.needs_s(100) == {"ssd": 4.0, "durable": 7.0}
    assert rates.needs_s(250) == {"ssd": 10.0, "durable": 7.0}
    assert rates.needs_s(10)["ssd"] == 4.0


def test_spent_grace_is_estimated_as_two_steps_and_a_poll() -> None:
    """Breaks when a loop of long steps believes that its whole grace is left."""
    pace = PreemptionPace()
    assert pace.spent_s(5.0) == POLL_S
    for asked_s in (10.0, 13.0, 15.0):
        pace.asked(asked_s)
    assert pace.spent_s(15.5) == POLL_S + 2 * 3.0 + 0.5
