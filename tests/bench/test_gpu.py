"""`python -m bench gpu` on virtual CPU devices: it runs anywhere, and its figures have their samples."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.figures import GPU_FIGURES
from bench.gpu import main
from bench.gpu_worker import STEPS_AFTER
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
    assert "so the whole state takes" in done.output
    result = json.loads(path.read_text())
    (state,) = result["states"].values()
    assert state["ended"] == {}
    samples = state["contenders"]["ckptkit_pinned_host"]
    missing = {name for name, _ in GPU_FIGURES.values()} - set(samples)
    assert missing == {"device_extra_bytes"}, "a CPU does not report its memory"
    assert samples["first_compiled_s"] == [0]
    assert len(samples["ready_s"]) == len(samples["restore_s"]) == len(samples["loss_s"]) == 1
    assert len(samples["inflation_s"]) == STEPS_AFTER
    assert state["device"]["count"] == 2
    assert {"d2h_pageable", "d2h_pinned", "h2d_pageable", "h2d_pinned"} == set(state["limits"])
    assert not list(tmp_path.glob("ckptkit-bench-*"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_virtual_devices_never_give_a_figure_of_a_gpu() -> None:
    """README would claim a figure of a GPU that was measured on a processor."""
    ours, theirs, slower = ({"loss_s": [value, value + 1, value + 2]} for value in (0.5, 4.0, 9.0))
    contenders = {"ckptkit": ours, "ckptkit_pinned_host": theirs, "orbax_v1": theirs, "orbax_sync": slower}
    result = {"benchmark": "gpu", "environment": {}, "states": {"1 GB, float32": {"contenders": contenders}}}
    (row,) = rows_of([{**result, "platform": "gpu"}])
    assert (row.ours, row.peer, row.peer_name, row.samples) == (1.5, 5.0, "orbax_v1", 3)
    assert "1 GB, float32" in readme_table([row])
    (virtual,) = rows_of([{**result, "platform": "cpu"}])
    assert virtual.benchmark == "gpu_on_cpu"
    assert "1 GB, float32" not in readme_table([virtual])


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of the process that measures."""

    def instead(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return instead


def run(tmp_path: Path, *more: str) -> dict[str, Any]:
    words = ["--platform", "cpu", "--gb", "0.01", "--ramdisk", str(tmp_path), "--json", str(tmp_path / "gpu.json")]
    done = CliRunner().invoke(main, [*words, *more])
    assert done.exit_code == 0, done.output
    return json.loads((tmp_path / "gpu.json").read_text())


def test_slow_contender_is_ended_and_keeps_its_samples(tmp_path: Path, worker: Callable[[str], None]) -> None:
    """A loan of a machine would be over in the first slow contender, and nothing of it be written."""
    worker("""case "$*" in
        *orbax_sync*) echo '{"ready_s": [2]}'; echo '{"ready_s": [2, 3]}'; echo '{"rea'; exec sleep 60;;
        *orbax_v1*) exec sleep 60;; *limits*) echo '{}';; *) echo 'of a library'; echo '{"ready_s": [1]}';; esac""")
    began_s = time.monotonic()
    result = run(tmp_path, "--minutes", "0.15")
    assert time.monotonic() - began_s < 30
    (state,) = result["states"].values()
    assert state["contenders"]["orbax_sync"] == {"ready_s": [2, 3]}
    assert state["contenders"]["ckptkit_block"] == {"ready_s": [1]}
    assert "orbax_v1" not in state["contenders"]
    alone = {"orbax_sync": {"ready_s": [2, 3]}}
    assert rows_of([{**result, "states": {"1 GB": {"contenders": alone}}}]) == [], "Orbax is not shown as ours"
    assert {who: why.split(" its ")[0] for who, why in state["ended"].items()} == dict.fromkeys(
        ("orbax_v1", "orbax_sync"), "ended after"
    )
    assert not list(tmp_path.glob("ckptkit-bench-*"))


def test_failed_contender_is_named(tmp_path: Path, worker: Callable[[str], None]) -> None:
    """All that was measured before it would be lost."""
    worker("""case "$*" in *orbax_v1*) exit 3;; *limits*) echo '{}';; *) echo '{"ready_s": [1]}';; esac""")
    (state,) = run(tmp_path)["states"].values()
    assert state["ended"] == {"orbax_v1": "ended with code 3; its output is above"}
    assert len(state["contenders"]) == 6
