"""`python -m bench all`: what it runs, and its report of what it did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import __main__ as commands
from bench import everything


def test_every_benchmark_with_rows_is_run_by_all() -> None:
    """A benchmark that `all` forgets goes stale, and the report goes on to show its last figures."""
    from bench.readers import READERS

    run = {entry.name for entry in everything.ENTRIES}
    assert run | {"gpu"} == {"stall", "commit", "restore", "durable", *READERS}, "few machines have a GPU"
    assert set(everything.SMALL) == {entry.name for entry in everything.ENTRIES}


def test_help_lists_every_benchmark() -> None:
    """A reader would have to find the others in the sources."""
    shown = CliRunner().invoke(commands.main, ["--help"]).output
    listed = {line.split()[0] for line in shown.partition("Others,")[2].splitlines()[1:] if line.strip()}
    assert listed == set(commands._CAMPAIGNS)


@pytest.mark.parametrize("entry", everything.ENTRIES, ids=lambda entry: entry.name)
def test_every_campaign_entry_has_valid_arguments(entry: everything.Entry) -> None:
    """A renamed option would show after an hour, as one benchmark less."""
    command = commands._CAMPAIGNS.get(entry.name, commands.main)
    words = [*([entry.name] if command is commands.main else []), *entry.words, *everything.SMALL[entry.name]]
    command.make_context("bench", [*words, "--json", "never.json"])


def test_faults_are_measured_with_both_ways_of_stock_orbax() -> None:
    """The faster way could be left out, and the ratio would be over the slower one."""
    (entry,) = (entry for entry in everything.ENTRIES if entry.name == "faults")
    made = commands._CAMPAIGNS["faults"].make_context("bench", [*entry.words, "--json", "never.json"])
    assert set(made.params["asked"]) == {"ckptkit", "orbax", "orbax-sync"}


def test_skipped_and_failed_benchmarks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign begun with too little time ends with nothing; one that failed must not look done."""
    ran: list[tuple[str, tuple[str, ...]]] = []

    def run(entry: everything.Entry, directory: Path, limit_s: float, more: Any) -> str:
        del directory, limit_s, more
        ran.append((entry.name, entry.words))
        return "failed with code 1" if entry.name == "policy" else "done"

    monkeypatch.setattr(everything, "_run", run)
    words = ["--minutes", "5", "--only", "policy", "--only", "simulator", "--only", "gather", "--into", str(tmp_path)]
    done = CliRunner().invoke(everything.main, [*words, "--traces", str(tmp_path)])
    assert done.exit_code == 1
    assert ran == [("gather", ()), ("policy", ("--traces", str(tmp_path)))]
    assert "policy: failed with code 1" in done.output
    assert "simulator: left out: 5.0 minutes are left, it takes 12" in done.output


@pytest.mark.long
def test_policy_benchmark_writes_its_report(tmp_path: Path) -> None:
    """The glue: a process of its own, its JSON where the report finds it."""
    done = CliRunner().invoke(everything.main, ["--small", "--only", "policy", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "policy.json").read_text())["benchmark"] == "policy"
