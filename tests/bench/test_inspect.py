"""`python -m bench inspect`, on a few leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.inspect import main, names_of, orbax_ratio
from bench.rows import rows_of


def test_generated_leaf_names_are_unique() -> None:
    """Two leaves of one name would be one."""
    assert len(set(names_of(1000))) == 1000


@pytest.mark.long
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """The claims of the log could not be repeated."""
    path = tmp_path / "inspect.json"
    words = ["--leaves", "20", "--repeats", "1", "--case", "safetensors", "--case", "ocdbt", "--disk", str(tmp_path)]
    done = CliRunner().invoke(main, [*words, "--json", str(path)])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert set(result["cases"]) == {"safetensors", "ocdbt"}
    ratio = orbax_ratio(result["cases"]["ocdbt"])
    assert ratio is not None
    assert ratio > 0
    assert orbax_ratio(result["cases"]["safetensors"]) is None
    rows = {(row.case, row.peer_name) for row in rows_of([result])}
    assert rows == {("20 leaves, safetensors", ""), ("20 leaves, ocdbt", "orbax_call")}
    assert list(tmp_path.iterdir()) == [path], "checkpoints are left behind"
