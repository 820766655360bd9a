"""Leaves on parts of a job's devices, as the stages of a pipeline: three processes, two devices each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.multiprocess.stages_worker import DEVICES, PROCESSES

pytestmark = pytest.mark.long  # one launched job


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process of one job."""
    root: Path = tmp_path_factory.mktemp("stages")
    output: list[str] = []
    command = [sys.executable, "-m", "tests.multiprocess.stages_worker"]
    launcher = Launcher(
        Workers(
            [*command, "--process", "{process}", "--coordinator", "{coordinator}", str(root)],
            processes=PROCESSES,
            devices_per_process=DEVICES,
            warm=WARM,
        ),
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
    )
    assert launch_forked(launcher) == ExitCode.OK, "\n".join(output[-60:])
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


@pytest.mark.parametrize("size", ["small", "large"])
def test_files_of_every_process_are_given_back_to_the_handler(size: str, found: list[dict[str, Any]]) -> None:
    """A step with such an item was in no fast tier, and a handler that finds a part of its files gives back a part."""
    notes = [{"all": f"step {n}", **{str(p): f"step {n}, process {p}" for p in range(PROCESSES)}} for n in (0, 1)]
    for process in found:
        assert "handler_files" not in process, process["handler_files"]
        said = process["handler files"]
        assert said[size] == [["durable", "ram"], ["durable", "ram"]]
        assert said[f"{size}, ram"] == said[f"{size}, ram alone"] == notes[1]
        assert said[f"{size}, flushed"] == [notes[1], "proven"], "saved again from the ramdisk"
        assert said[f"{size}, flushed state"]
        assert said[f"{size}, a host is lost"] == [notes[0], 0], "the share of one process is lost"
        assert said[f"{size}, durable"] == notes[0]


def test_close_does_not_wait_for_a_process_that_ends_with_an_error(found: list[dict[str, Any]]) -> None:
    """The others would wait ten minutes for its part of a flush, while the launcher waits for them."""
    for process in found:
        assert "one_ends_with_an_error" not in process, process["one_ends_with_an_error"]
        assert process["flushed without all"] is False


def test_replicated_keys_and_arrays_are_held_by_each_tier(found: list[dict[str, Any]]) -> None:
    """A random key next to the state kept every step of the job out of the ramdisk."""
    for process in found:
        assert "whole_values" not in process, process["whole_values"]
        expected = {"tiers": ["durable", "ram"], "ram": [True, True], "durable": [True, True]}
        assert process["whole values"] == expected


def test_handler_that_fails_on_one_process_drops_the_step_on_all(found: list[dict[str, Any]]) -> None:
    """The others would wait for the process that raised, or commit a step without its files."""
    for number, process in enumerate(found):
        assert "handler_fails" not in process, process["handler_fails"]
        *saves, committed = process["handler fails"]
        assert committed == [0, 3]
        assert [saves[0], saves[3]] == [True, True]
        if number == 1:
            assert "the handler raised" in saves[1]
            assert "left a link, an empty directory or a name that is not UTF-8 on process 1 of 3" in saves[2]


def test_meshes_of_each_process_alone_are_refused(found: list[dict[str, Any]]) -> None:
    """Every process would write its own values over those of the others, and all but one would be lost."""
    for process in found:
        assert "different shardings" in process["local meshes"]


def test_active_processes_of_a_part_are_refused_by_name(found: list[dict[str, Any]]) -> None:
    """The constructor would wait ten minutes for processes that never come."""
    for process in found:
        assert "active_processes" in process["active processes"]
