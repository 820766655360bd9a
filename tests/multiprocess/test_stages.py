"""Leaves on parts of a job's devices, as the stages of a pipeline: three processes, two devices each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import ExitCode, Launcher, RestartPolicy
from tests.multiprocess.stages_worker import DEVICES, PROCESSES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process of one job."""
    root: Path = tmp_path_factory.mktemp("stages")
    output: list[str] = []
    command = [sys.executable, "-m", "tests.multiprocess.stages_worker"]
    launcher = Launcher(
        [*command, "--process", "{process}", "--coordinator", "{coordinator}", str(root)],
        processes=PROCESSES,
        devices_per_process=DEVICES,
        policy=RestartPolicy(restarts=0),
        on_output=lambda process, line: output.append(f"{process}: {line}"),
        say=output.append,
    )
    assert launcher.run() == ExitCode.OK, "\n".join(output[-60:])
    return [json.loads((root / f"found-{process}.json").read_text()) for process in range(PROCESSES)]


def test_stages_without_own_devices_are_saved_and_restored(found: list[dict[str, Any]]) -> None:
    """A process without a device of a stage would raise alone, and no save of the job would be committed."""
    for process in found:
        assert "save_and_restore" not in process, process["save_and_restore"]
        assert process["saved"] == {"tiers": ["durable", "ram"], "ram": [True, True], "durable": [True, True]}


def test_stages_are_restored_on_other_meshes(found: list[dict[str, Any]]) -> None:
    """A job with other stages could not go on from the step, or only some of its processes could."""
    for process in found:
        assert "other_meshes" not in process, process["other_meshes"]
        expected = {"whole": True, "stage": True, "last": True, "no template": [True, True]}
        assert process["other meshes"] == expected


def test_meshes_of_each_process_alone_are_refused(found: list[dict[str, Any]]) -> None:
    """Every process would write its own values over those of the others, and all but one would be lost."""
    for process in found:
        assert "different shardings" in process["local meshes"]


def test_active_processes_of_a_part_are_refused_by_name(found: list[dict[str, Any]]) -> None:
    """The constructor would wait ten minutes for processes that never come."""
    for process in found:
        assert "active_processes" in process["active processes"]
