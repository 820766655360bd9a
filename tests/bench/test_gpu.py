"""`python -m bench gpu` on virtual CPU devices: it runs anywhere, and its figures have their samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.figures import GPU_FIGURES
from bench.gpu import main
from bench.render import readme_table
from bench.rows import rows_of


@pytest.mark.long
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
    assert {name for name, _ in GPU_FIGURES.values()} <= set(samples)
    assert samples["first_compiled_s"] == [0]
    assert len(samples["ready_s"]) == len(samples["restore_s"]) == 1
    assert state["device"]["count"] == 2
    assert {"d2h_pageable", "d2h_pinned", "h2d_pageable", "h2d_pinned"} == set(state["limits"])
    assert not list(tmp_path.glob("ckptkit-bench-*"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_virtual_devices_never_give_a_figure_of_a_gpu() -> None:
    """README would claim a figure of a GPU that was measured on a processor."""
    ours, theirs, slower = ({"ready_s": [value, value + 1, value + 2]} for value in (0.5, 4.0, 9.0))
    contenders = {"ckptkit": ours, "ckptkit_pinned_host": theirs, "orbax_v1": theirs, "orbax_sync": slower}
    result = {"benchmark": "gpu", "environment": {}, "states": {"1 GB, float32": {"contenders": contenders}}}
    (row,) = rows_of([{**result, "platform": "gpu"}])
    assert (row.ours, row.peer, row.peer_name, row.samples) == (1.5, 5.0, "orbax_v1", 3)
    assert "1 GB, float32" in readme_table([row])
    (virtual,) = rows_of([{**result, "platform": "cpu"}])
    assert virtual.benchmark == "gpu_on_cpu"
    assert "1 GB, float32" not in readme_table([virtual])


def test_time_that_is_over_is_reported(tmp_path: Path) -> None:
    """A short loan of a machine would be spent before anything is written."""
    path = tmp_path / "gpu.json"
    words = ["--platform", "cpu", "--gb", "0.01", "--minutes", "0.000001", "--ramdisk", str(tmp_path)]
    assert CliRunner().invoke(main, [*words, "--json", str(path)]).exit_code == 0
    assert json.loads(path.read_text())["states"] == {}
