"""`python -m bench gpu` on virtual CPU devices: it runs anywhere, and its figures have their samples."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench.gpu import FIGURES, main


def test_every_figure_has_its_samples(tmp_path: Path) -> None:
    """Where a GPU is lent for minutes, the benchmark would fail, or its JSON would lack what the table shows."""
    path = tmp_path / "gpu.json"
    words = ["--platform", "cpu", "--devices", "2", "--gb", "0.02", "--weights", "bfloat16", "--repeats", "1"]
    words += ["--contender", "ckptkit_pinned_host", "--ramdisk", str(tmp_path), "--json", str(path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    (state,) = result["states"].values()
    samples = state["contenders"]["ckptkit_pinned_host"]
    assert {name for name, _ in FIGURES.values()} <= set(samples)
    assert samples["first_compiled_s"] == [0]
    assert len(samples["ready_s"]) == len(samples["restore_s"]) == 1
    assert state["device"]["count"] == 2
    assert {"d2h_pageable", "d2h_pinned", "h2d_pageable", "h2d_pinned"} == set(state["limits"])
    assert not list(tmp_path.glob("ckptkit-bench-*"))


def test_time_that_is_over_is_reported(tmp_path: Path) -> None:
    """A short loan of a machine would be spent before anything is written."""
    path = tmp_path / "gpu.json"
    words = ["--platform", "cpu", "--gb", "0.01", "--minutes", "0.000001", "--ramdisk", str(tmp_path)]
    assert CliRunner().invoke(main, [*words, "--json", str(path)]).exit_code == 0
    assert json.loads(path.read_text())["states"] == {}
