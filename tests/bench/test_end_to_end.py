"""Each benchmark end to end on a tiny state: the JSON has every key, and ratios come from the samples next to them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.bars import bars_of
from bench.cases import CaseName
from bench.figures import available

ROOT = Path(__file__).parent.parent.parent
KEYS = (
    "blocking_ms",
    "stall_ms_per_save",
    "stall_idle_ms_per_save",
    "cpu_s_per_gb",
    "commit_gbps",
    "restore_gbps",
    "peak_extra_bytes",
)
RUNS = {
    "stall": ("125m@1", ["--scale", "0.002", "--contender", "ckptkit", "--contender", "orbax_v1"]),
    "commit": ("many@8", ["--scale", "0.005"]),
    "restore": ("one@8", ["--scale", "0.005"]),
}
MEASURED = {
    "stall": ("blocking_ms.ready", "blocking_ms.in_flight", "stall_ms_per_save", "stall_idle_ms_per_save"),
    "commit": ("commit_gbps", "cpu_s_per_gb", "peak_extra_bytes"),
    "restore": ("restore_gbps",),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long) for name in ("restore", "commit", "stall")]
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one tiny run, made the way a person makes it."""
    place = tmp_path_factory.mktemp(request.param)
    state, options = RUNS[request.param]
    command = [sys.executable, "-m", "bench", request.param, "--state", state, "--repeats", "2", *options]
    command += ["--json", str(place / "out" / "result.json"), "--ramdisk", str(place), "--disk", str(place)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]
    assert state in done.stdout, "the table names the state"
    assert [path.name for path in place.iterdir()] == ["out"], "a run leaves nothing behind"
    return json.loads((place / "out" / "result.json").read_text())


def only_state(result: dict[str, Any]) -> tuple[CaseName, dict[str, Any]]:
    [(name, state)] = result["states"].items()
    return CaseName.parse(name), state


def test_every_key_and_contender_is_present_or_null(result: dict[str, Any]) -> None:
    # A reader of the JSON would have to know which benchmark wrote it.
    _, state = only_state(result)
    assert set(available()) >= {"ckptkit", "orbax_async", "orbax_tuned", "orbax_v1", "orbax_sync", "limit"}
    for key in KEYS:
        assert set(state[key]) == set(available()), key
    assert all(set(parts) == {"ready", "in_flight"} for parts in state["blocking_ms"].values())


def test_medians_are_those_of_the_samples(result: dict[str, Any]) -> None:
    # A figure could be of other samples than those that are kept.
    _, state = only_state(result)
    for figure in MEASURED[result["benchmark"]]:
        key, _, part = figure.partition(".")
        for contender in available():
            samples = state["samples"][figure].get(contender)
            found = state[key][contender][part] if part else state[key][contender]
            assert found == (statistics.median(samples) if samples else None), (figure, contender)


def test_every_repeat_is_kept(result: dict[str, Any]) -> None:
    # A warm-up among the samples, or a lost repeat, would shift the median.
    _, state = only_state(result)
    for figure in MEASURED[result["benchmark"]]:
        assert len(state["samples"][figure]["ckptkit"]) == result["repeats"] == 2
        least, most = state["spread"][figure]["ckptkit"]
        assert least <= most


def test_ratios_are_computed_from_the_samples(result: dict[str, Any]) -> None:
    # A bar could be called met on numbers that were never measured.
    case, state = only_state(result)
    assert state["ratios"], "at least one bar is measured by each benchmark"
    bars = {(bar.figure, bar.against): bar for bar in bars_of(case)}
    for each in state["ratios"]:
        samples = state["samples"][each["figure"]]
        ours, theirs = (statistics.median(samples[who]) for who in (each["contender"], each["against"]))
        if ours < 0 or theirs <= 0:  # noise
            assert each["ratio"] is each["met"] is None
            continue
        assert each["ratio"] == pytest.approx(ours / theirs)
        bar = bars[each["figure"], each["against"]]
        reached = each["ratio"] <= bar.value if bar.bound == "at most" else each["ratio"] >= bar.value
        assert each["met"] == reached


def test_environment_records_where_it_was_measured(result: dict[str, Any]) -> None:
    # Numbers without a machine cannot be compared with anything.
    environment = result["environment"]
    assert environment["cores"] >= 1
    assert environment["packages"]["orbax-checkpoint"]
    assert {"at", "cpu", "kernel", "load", "load_after", "ramdisk", "disk", "memory_bytes"} <= set(environment)


@pytest.mark.parametrize("result", [pytest.param("stall", marks=pytest.mark.long)], indirect=True)
def test_loops_are_fixed_and_recorded(result: dict[str, Any]) -> None:
    # A stall per save means nothing without the loop it was measured in.
    _, state = only_state(result)
    for loop in ("compute", "idle_host"):
        found = state["details"][loop]
        assert found["steps_per_save"] >= 2
        assert len(found["segment_without_s"]) == 3, "one before each round and one at the end"
        assert set(found["left_over_ms"]) >= {"ckptkit", "orbax_v1", "ckptkit_device_copy"}
        assert found["strategies"]["ckptkit"] == "slot_copy", "what a CPU backend takes by itself"
        assert found["strategies"]["ckptkit_device_copy"] == "device_copy"
