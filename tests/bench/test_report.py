"""The report: all printed figures are those of the stored results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

from bench.everything import ENTRIES, SMALL, run_all
from bench.everything import main as everything
from bench.figures import STRATEGIES
from bench.render import BEGIN, END, README_FIGURES, readme_table, report, with_table
from bench.row import Row, Source, spread_of
from bench.rows import by_figure_of, newest_results, rows_of

ROOT = Path(__file__).parents[2]


def test_readme_and_report_agree_with_the_stored_results() -> None:
    """A figure would stay that no measurement has any more: `make figures` writes both again."""
    rows = rows_of(newest_results())
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme, rows) == readme
    assert (ROOT / "bench" / "REPORT.md").read_text() == report(rows)
    assert len(readme.split(BEGIN)[1].split(END)[0].strip().splitlines()) >= 8


def test_hand_edited_figure_is_replaced() -> None:
    """The test above would let a changed table pass."""
    rows = [
        Row(
            benchmark="stall",
            case="125m@1",
            figure="blocking_ms.in_flight",
            meaning="m",
            ours=5.0,
            peer=20.0,
            peer_name="orbax_v1",
        )
    ]
    written = with_table(f"before\n{BEGIN}\n| typed |\n{END}\nafter", rows)
    assert "typed" not in written
    sentence = README_FIGURES["stall", "blocking_ms.in_flight"]
    assert f"| {sentence} | 1.5 GB, one process | 5 ms | 20 ms (Orbax, v1 API) | 4x better |" in written
    assert written.startswith("before\n")
    assert written.endswith("\nafter")
    assert with_table(written, rows) == written
    with pytest.raises(ValueError, match=r"README.md must have"):
        with_table("no marks", rows)


def test_readme_table_is_in_words_and_names_the_better_side() -> None:
    """A buyer would read `125m@1` and 0.4, and not know whether that is good."""
    table = readme_table(rows_of(newest_results()))
    assert not set("@_") & set(table.partition("\n\n")[0])
    both: dict[str, Any] = {"case": "many@1", "meaning": "m", "ours": 3.0, "peer": 2.0, "peer_name": "orbax_tuned"}
    commit = Row(benchmark="commit", figure="commit_gbps", **both)
    stall = Row(benchmark="stall", figure="blocking_ms.in_flight", **both)
    faster, slower = readme_table([commit, stall]).splitlines()[2:4]
    assert slower.endswith("| 4,000 arrays of 16 KB | 3 ms | 2 ms (Orbax, tuned) | 1.5x worse |")
    assert faster.endswith("| 4,000 arrays of 16 KB | 3 GB/s | 2 GB/s (Orbax, tuned) | 1.5x better |")


def compared(ours: list[float], peers: dict[str, list[float]], figure: str, at: str) -> dict[str, Any]:
    states = {"125m@1": {"samples": {figure: {"ckptkit": ours, **peers}}}}
    return {"benchmark": "commit", "environment": {"at": at, "load": [0.5, 0, 0]}, "states": states}


def test_report_uses_the_best_peer_mode_and_newest_result(tmp_path: Path) -> None:
    """We would be held against the peer's slow way, or shown with yesterday's figure."""
    peers = {"orbax_async": [1.0, 2.0, 3.0], "orbax_tuned": [4.0, 5.0, 6.0], "limit": [20.0]}
    for day, ours in (("2026-01-02", [10.0, 12.0, 11.0]), ("2026-01-01", [1.0])):
        (tmp_path / f"{day}-here").mkdir()
        text = json.dumps(compared(ours, peers, "commit_gbps", f"{day}T00:00:00Z"))
        (tmp_path / f"{day}-here" / "commit.json").write_text(text)
    (row,) = rows_of(newest_results(tmp_path))
    assert (row.ours, row.peer, row.peer_name, row.limit, row.samples) == (11.0, 5.0, "orbax_tuned", 20.0, 3)
    assert row.ratio == pytest.approx(2.2)
    slow = rows_of([compared([-3.0], peers, "stall_ms_per_save", "x")])[0]
    assert (slow.peer_name, slow.ratio) == ("orbax_async", None), "of a cost the least is best; below zero is noise"


def test_rows_that_the_newest_result_dropped_are_not_shown() -> None:
    """A figure that is no longer measured would stay, next to newer ones that contradict it."""
    peers = {"orbax_async": [1.0]}
    old = compared([184.0], peers, "blocking_ms.ready", "2026-01-01")
    old["states"]["many@1"] = old["states"]["125m@1"]
    new = compared([10.0], peers, "commit_gbps", "2026-01-02")
    assert [(row.case, row.figure, row.source.day) for row in rows_of([old, new])] == [
        ("125m@1", "commit_gbps", "2026-01-02"),
        ("many@1", "blocking_ms.ready", "2026-01-01"),
    ], "a state that the newest result does not have keeps its row, with its date"


def test_each_strategy_has_a_row_of_its_own_name() -> None:
    """The best of several strategies, chosen after the measurement, would be shown as the default one."""
    by_name = {"orbax_v1": [70.0], "limit": [147.0], "ckptkit_device_copy": [48.0]}
    result = compared([91.0], by_name, "stall_idle_ms_per_save", "x")
    shown = {row.figure: (row.ours, row.ratio) for row in rows_of([result])}
    assert shown == {
        "stall_idle_ms_per_save": (91.0, pytest.approx(91 / 70)),
        "stall_idle_ms_per_save.device_copy": (48.0, pytest.approx(48 / 70)),
    }
    before = compared([48.0], {**by_name, "ckptkit_auto": [91.0]}, "stall_idle_ms_per_save", "x")
    assert {row.figure: row.ours for row in rows_of([before])} == {figure: ours for figure, (ours, _) in shown.items()}
    staged = {"ckptkit": "slot_copy", "ckptkit_device_copy": "block"}
    result["states"]["125m@1"]["details"] = {"idle_host": {"strategies": staged}}
    with pytest.raises(ValueError, match="a save of ckptkit_device_copy was staged by block"):
        rows_of([result])


def test_stored_rows_of_stall_are_of_the_strategy_in_their_label() -> None:
    """README called another strategy what accelerators do by default, which is `device_copy`."""
    results = [result for result in newest_results() if result["benchmark"] == "stall"]
    states = results[-1]["states"]
    rows = [row for row in rows_of(results) if row.source == Source.of(results[-1])]
    assert {row.figure for row in rows} >= {"stall_ms_per_save", "stall_idle_ms_per_save.device_copy"}
    for row in rows:
        figure, _, strategy = row.figure.rpartition(".")
        by_name = states[row.case]["samples"][figure if strategy in STRATEGIES else row.figure]
        by_itself = by_name.get("ckptkit_auto", by_name["ckptkit"])
        assert row.ours == median(by_name[f"ckptkit_{strategy}"] if strategy in STRATEGIES else by_itself)
        label = README_FIGURES.get(("stall", row.figure), "")
        assert ("accelerators" in label) == (strategy == "device_copy" and bool(label)), label
        assert ("accelerators" in row.meaning) == (strategy == "device_copy"), row.meaning


def test_few_or_scattered_samples_are_shown_with_their_range() -> None:
    """A median of three runs, or of 5 that lie between -41 and 524, would look like a firm figure."""
    assert spread_of([1.0, 2.0, 3.0]) == (1.0, 3.0)
    assert spread_of([89.0, -41.0, 393.0, 524.0, 323.0]) == (-41.0, 524.0)
    assert spread_of([10.0, 10.5, 11.0, 11.5, 12.0]) is None
    peers = {"orbax_async": [20.0, 21.0, 25.0]}
    (row,) = rows_of([compared([4.0, 6.0], peers, "stall_ms_per_save", "x")])
    assert "|5 (4 to 6)|21 (orbax_async; 20 to 25)|" in report([row])
    for row in rows_of(newest_results()):
        if row.benchmark in ("faults", "stall", "commit", "restore", "convert") and not row.figure.endswith("_runs"):
            assert row.spread or row.samples >= 5, row


def test_date_and_commit_of_each_section_are_shown() -> None:
    """A table of several days and commits would be read as one run."""
    old = compared([1.0], {}, "commit_gbps", "2026-01-01T00:00:00Z")
    new = compared([2.0], {}, "commit_gbps", "2026-01-03T00:00:00Z")
    old["states"] = {"one@1": old["states"]["125m@1"]}
    new["environment"]["commit"] = "abc1234+"
    shown = rows_of([old, new])
    assert "- Measured 2026-01-01 at a commit that was not stored, load 0.5 (one@1).\n" in report(shown)
    assert "- Measured 2026-01-03 at abc1234, dirty (with changes that are in no commit), load 0.5" in report(shown)
    caption = readme_table([*shown[:1], replace(shown[1], benchmark="stall", figure="blocking_ms.in_flight")])
    assert "Measured 2026-01-01 to 2026-01-03; in 2 runs of 1 commit, results whose commit is dirty or" in caption


def test_torch_has_a_column_and_limits_are_never_beaten() -> None:
    """A reader would miss the widest-used peer, or see a save that is faster than what is called possible."""
    peers = {"orbax_v1": [70.0], "torch_dcp": [2476.0], "limit": [147.0]}
    (row,) = rows_of([compared([7.0], peers, "stall_idle_ms_per_save", "x")])
    assert (row.ours, row.torch, row.limit, row.limit_name) == (7.0, 2476.0, 0.0, "")
    peers["torch_checkpointing"] = [60.0]
    (row,) = rows_of([compared([7.0], peers, "stall_idle_ms_per_save", "x")])
    assert (row.torch, row.torch_name) == (60.0, "torch_checkpointing"), "the better one of two"
    (beaten,) = rows_of([compared([12.0], {"torch_dcp": [3.0], "limit": [11.0]}, "ssd_commit_gbps", "x")])
    assert (beaten.limit, beaten.limit_name) == (12.0, "ckptkit")
    assert "|12|3|12 (ckptkit)|1|" in report([beaten]), "without the columns that have no figure"
    for row in rows_of(newest_results()):
        seen = [value for value in (row.ours, row.peer, row.torch) if value is not None]
        if row.limit is not None and row.benchmark in ("stall", "commit", "restore", "durable"):
            best = max(seen) if row.figure.endswith("_gbps") else min(seen)
            assert best <= row.limit if row.figure.endswith("_gbps") else best >= row.limit, row


def test_readme_has_figures_at_which_ckptkit_loses() -> None:
    """A table of wins alone would not be believed, and rightly so."""
    rows = by_figure_of(rows_of(newest_results()))
    lost = {key for key in README_FIGURES if (row := rows[key]).peer is not None and row.ours > row.peer}
    assert ("stall", "blocking_ms.in_flight") in lost
    assert len(README_FIGURES) <= 8


def test_samples_that_overlap_or_are_below_zero_have_no_ratio() -> None:
    """README claimed 1.1 times where one run of each side contradicts it, and 4.8 times from delays below zero."""

    def ratio(ours: list[float], peers: list[float]) -> float | None:
        return rows_of([compared(ours, {"orbax_async": peers}, "stall_ms_per_save", "x")])[0].ratio

    assert ratio([1.0, 2.0], [3.0, 4.0]) == pytest.approx(1.5 / 3.5)
    assert ratio([1.0, 3.0], [3.0, 4.0]) is None
    assert ratio([-1.0, 2.0, 2.0], [3.0, 4.0]) is None
    assert ratio([2.0], [3.0, 4.0]) == pytest.approx(2 / 3.5), "counts and single samples have no range"


def test_first_screen_of_readme_has_stored_figures() -> None:
    """The figures above the table are typed by hand: they would stay when a newer result differs."""
    rows = by_figure_of(rows_of(newest_results()))
    screen = (ROOT / "README.md").read_text().partition(BEGIN)[0]
    loss, committed, restore = rows["gpu", "loss_s"], rows["gpu", "committed_s"], rows["gpu", "restore_s"]
    assert f"{loss.ours * 1000:.1f} ms instead of {(loss.peer or 0) * 1000:.0f} ms" in screen
    assert f"after {committed.ours:.1f} s instead of {committed.peer:.1f} s" in screen
    assert f"{restore.ours:.2f} s instead of {restore.peer:.2f} s" in screen
    wrong, held = rows["faults", "wrong_runs"], rows["stall", "blocking_ms.in_flight"]
    assert f"{wrong.ours:.0f} of {wrong.samples} trainings" in screen
    assert f"with stock Orbax (synchronous), {wrong.peer:.0f} of {wrong.samples}" in screen
    assert f"{held.ours:.0f} ms instead of {held.peer:.0f} ms" in screen
    on_gpu, lost = rows["gpu", "in_flight_s"], rows["crashpoints", "violations"]
    assert on_gpu.ours < (on_gpu.peer or 0), "the screen has that a save during a step is not slower there"
    assert lost.ours == 0
    assert f"crashes at {lost.samples:,} points" in screen


def test_every_kind_of_result_has_rows() -> None:
    """A benchmark that was run would not show."""
    spread = {"median": 0.5, "min": 0.4, "max": 0.6, "n": 3}
    own = {"goodput": spread, "lost_work_s": spread, "stall_ms": spread, "resume_s": spread}
    own |= {"wrong": 0, "unfinished": 0, "runs": 3}
    slow = {**own, "goodput": {**spread, "median": 0.3}}
    results: list[dict[str, Any]] = [
        {
            "benchmark": "faults",
            "settings": {"state": "tiny", "mtbf_s": 60.0},
            "summary": {
                "ceiling": {**spread, "median": 0.9},
                "contenders": {
                    "ckptkit": own,
                    "orbax": slow,
                    "orbax-sync": own,
                },
                "against": {"gap_closed": spread},
            },
            "runs": [
                {"contender": "ckptkit", "disruptions": 6, "resumes": 5},
                {"contender": "ckptkit", "disruptions": 2},
                {"contender": "orbax", "disruptions": 9},
            ],
        },
        {"benchmark": "crashpoints", "full": True, "violations": [], "rows": {"ram save": {"points": 7}}},
        {"benchmark": "gather", "processes": 100, "repeats": 2, "gather_s": 0.1},
    ]
    rows = {(row.benchmark, row.figure): row for row in rows_of(results)}
    goodput = rows["faults", "goodput"]
    assert (goodput.peer_name, goodput.limit, goodput.samples) == ("orbax-sync", 0.9, 3)
    assert (goodput.spread, goodput.peer_spread) == ((0.4, 0.6), (0.4, 0.6))
    assert rows["faults", "resume_s"].samples == 7, "losses, not runs"
    del results[0]["summary"]["contenders"]["orbax"]
    assert rows_of(results[:1])[0].peer_name == "only orbax-sync", "the other way may be faster"
    assert rows["faults", "gap_closed"].ours == 0.5
    assert rows["crashpoints", "violations"].samples == 7
    assert "|7|" in report(list(rows.values()))
    assert {entry.name for entry in ENTRIES} == SMALL.keys()


def test_benchmarks_beyond_the_time_budget_are_reported(tmp_path: Path) -> None:
    """`bench all` would run for hours, or end without a message."""
    told = run_all(ENTRIES, tmp_path, minutes=0.01, small=False)
    assert told.keys() == {entry.name for entry in ENTRIES}
    assert all(text.startswith("left out: 0.0 minutes are left, it takes ") for text in told.values())


@pytest.mark.long
def test_bench_all_stores_benchmark_results(tmp_path: Path) -> None:
    """A campaign of hours would leave nothing."""
    command = [sys.executable, "-m", "bench", "all", "--only", "gather", "--small", "--minutes", "5"]
    done = subprocess.run([*command, "--into", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gather: done" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gather.json"]
    environment = json.loads((tmp_path / "gather.json").read_text())["environment"]
    assert environment.keys() >= {"at", "commit", "load", "load_after"}, "without these the figures mean nothing"
    refused = CliRunner().invoke(everything, ["--small"])
    assert "--small measures nothing" in refused.output


def test_newest_schedule_of_faults_is_the_one_that_is_shown() -> None:
    """The README would show the most flattering of several schedules, or one of months ago."""
    rows = rows_of(newest_results())
    days = {row.source.day for row in rows if row.benchmark == "faults"}
    assert len(days) > 1
    assert by_figure_of(rows)["faults", "goodput"].source.day == max(days)
    assert by_figure_of(rows[::-1])["faults", "goodput"].source.day == max(days)
