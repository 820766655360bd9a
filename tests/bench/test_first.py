"""`python -m bench first`: cold processes, the first save apart from the later ones, and rows for the report."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench import first
from bench.rows import rows_of

SAMPLES = [
    {"save_s": [0.3, 9.0, 0.1, 0.2], "step_s": [1.0, 9.0, 0.5, 0.5], "committed_s": [4.0, 9.0, 2.0, 3.0]},
    {"save_s": [0.5, 9.0, 0.1, 0.2], "step_s": [2.0, 9.0, 0.5, 0.5], "committed_s": [5.0, 9.0, 2.0, 3.0]},
]


def test_first_save_is_apart_from_the_later_ones() -> None:
    """At the second save slots are still being made: in either figure it would hide what people wait for."""
    found = first.figures(SAMPLES)
    assert found["first_save_ms"] == [300.0, 500.0]
    assert [round(each, 6) for each in found["later_save_ms"]] == [150.0, 150.0]
    assert found["first_committed_s"] == [4.0, 5.0]


def test_rows_compare_each_way_of_ours_with_the_fastest_of_stock() -> None:
    """The report would show the slower way of stock Orbax."""
    slower = [{name: [2 * each for each in values] for name, values in one.items()} for one in SAMPLES]
    samples = {"ckptkit": slower, "ckptkit_prepared": slower, "orbax_async": SAMPLES, "orbax_sync": slower}
    rows = rows_of([{"benchmark": "first", "gb": 4.0, "samples": samples}])
    assert {row.case for row in rows} == {"4 GB, a ramdisk", "4 GB, a ramdisk, after `prepare`"}
    (row,) = (row for row in rows if (row.figure, row.case) == ("first_save_ms", "4 GB, a ramdisk"))
    assert (row.ours, row.peer, row.peer_name, row.samples) == (800.0, 400.0, "orbax_async", 2)


def test_cold_process_is_measured_and_its_bits_are_compared(tmp_path: Path) -> None:
    """The benchmark would time a save that saved something else."""
    words = ["--gb", "0.002", "--repeats", "1", "--contender", "ckptkit_prepared", "--ramdisk", str(tmp_path)]
    done = CliRunner().invoke(first.main, [*words, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    ((sample,),) = json.loads((tmp_path / "found.json").read_text())["samples"].values()
    assert {name: len(values) for name, values in sample.items()} == dict.fromkeys(sample, first.SAVES)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"], "a run leaves nothing behind"
    refused = CliRunner().invoke(first.main, ["--contender", "limit"])
    assert (refused.exit_code, "choose among" in refused.output) == (2, True)
