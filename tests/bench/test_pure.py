"""Computations of the benchmarks without measurements: names, medians, bars, shares of a copy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.bars import ratios
from bench.cases import ALL_CASES, CaseName
from bench.figures import KEYS, medians
from bench.limits import _shares  # pyright: ignore[reportPrivateUsage]
from bench.states import assert_same_bits, make_case


def test_case_names_round_trip() -> None:
    # `--full` and `--state` would measure different things under one name.
    assert [CaseName.parse(str(case)) for case in ALL_CASES] == list(ALL_CASES)
    assert CaseName.parse("many") == CaseName("many", 1)


def test_unknown_state_error_lists_known_states() -> None:
    # Somebody would have to read the source to find a state's name.
    with pytest.raises(ValueError, match=r"unknown state '125m@3'; choose among 125m@1, 125m@8, many@1"):
        CaseName.parse("125m@3")


def test_unmeasured_values_are_null() -> None:
    # An absent measurement must not look like a zero.
    found = medians({"commit_gbps": {"limit": [3.0, 1.0, 2.0]}}, ("ckptkit", "limit"))
    assert tuple(found) == KEYS
    assert found["commit_gbps"] == {"ckptkit": None, "limit": 2.0}
    assert found["blocking_ms"]["limit"] == {"ready": None, "in_flight": None}


def test_bar_is_a_ratio_of_medians() -> None:
    # The report would praise, or blame, the wrong side.
    samples = {"commit_gbps": {"ckptkit": [8.0, 8.0, 1.0], "orbax_tuned": [2.0], "limit": [0.0]}}
    found = ratios(CaseName("125m", 1), samples)
    assert [(each["against"], each["ratio"], each["met"]) for each in found] == [
        ("orbax_tuned", 4.0, True),
        ("limit", None, None),
    ]


def test_negative_stall_gives_no_ratio() -> None:
    # On a noisy machine the loop with saves is at times the faster one; that is nothing to be proud of.
    samples = {"stall_ms_per_save": {"ckptkit": [-23.0], "orbax_tuned": [1619.0]}}
    [found] = ratios(CaseName("125m", 1), samples)
    assert (found["ratio"], found["met"]) == (None, None)


def test_bars_of_staging_name_their_strategy_before_the_measurement() -> None:
    # The best of several strategies would be held against the peer.
    samples = {"blocking_ms.ready": {"ckptkit": [90.0], "ckptkit_device_copy": [40.0]}}
    samples["blocking_ms.ready"]["orbax_async"] = [100.0]
    (found,) = ratios(CaseName("125m", 1), samples)
    assert (found["contender"], found["ratio"]) == ("ckptkit_device_copy", 0.4)


def test_shares_cover_every_byte_once() -> None:
    # The limit would copy less than the state, and no contender could reach it.
    copies = [(0, 1000, 10), (10, 2000, 1), (11, 3000, 90)]
    for threads in (1, 2):
        shares = _shares(copies, threads)
        assert len(shares) == threads
        covered = sorted((target, size) for share in shares for target, _, size in share)
        assert sum(size for _, size in covered) == 101
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(covered))


def test_large_states_have_the_sizes_in_their_names() -> None:
    # Bars hold for these sizes alone. Nothing is allocated here.
    cases = {name: make_case(CaseName(name, 1)) for name in ("125m", "many", "one")}
    assert (cases["125m"].leaves, cases["125m"].state_bytes) == (590, 1_493_710_856)
    assert (cases["many"].leaves, cases["many"].state_bytes) == (4000, 4000 * 16_384)
    assert (cases["one"].leaves, cases["one"].state_bytes) == (1, 1 << 30)


def test_different_bits_are_detected() -> None:
    # A contender that restores wrongly would be measured as a fast one.
    assert_same_bits({"a": np.float32(0.0)}, {"a": np.float32(0.0)}, "x")
    with pytest.raises(AssertionError, match=r"x restored other bits in \['a'\]"):
        assert_same_bits({"a": np.float32(0.0)}, {"a": np.float32(-0.0)}, "x")
