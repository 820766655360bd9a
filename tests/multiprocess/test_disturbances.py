"""Two processes of which one is disturbed for a moment: the saves after it are committed as before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.multiprocess.disturbed_worker import PROCESSES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of each process until it ended."""
    root: Path = tmp_path_factory.mktemp("disturbed")
    output: list[str] = []
    command = [sys.executable, "-m", "tests.multiprocess.disturbed_worker"]
    launcher = Launcher(
        Workers(
            [*command, "--process", "{process}", "--coordinator", "{coordinator}", str(root)],
            processes=PROCESSES,
            devices_per_process=2,
            warm=WARM,
        ),
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
    )
    code = launch_forked(launcher)
    assert code == ExitCode.OK, "\n".join(output[-60:])
    found = [json.loads((root / f"found-{process}.json").read_text()) for process in range(PROCESSES)]
    return [{**each, "root": root, "output": output} for each in found]


def test_saves_are_committed_after_the_service_was_away(found: list[dict[str, Any]]) -> None:
    """Two votes without a verdict would take every slot: the job would train on and never save again."""
    for process in found:
        away = process["service_away"]
        assert away["raised"] == ["", ""]
        assert [step for step, _, _ in away["held"]][-1] == 6
        assert away["leases"] == 0
    assert found[0]["service_away"]["held"] == found[1]["service_away"]["held"]


def test_save_that_raises_early_delays_no_other_process(found: list[dict[str, Any]]) -> None:
    """Step loops would wait for the whole timeout, save numbers differ, and no later save be committed."""
    for process in found:
        early = process["raises_early"]
        assert early["raised"] == ""
        assert early["longest_s"] < 10, "nobody waits for the process that raised"
        assert [step for step, _, _ in early["held"]] == [0, 4]
    assert found[0]["raises_early"]["held"] == found[1]["raises_early"]["held"]


def test_restore_after_a_missed_verdict_leaves_equal_epochs(found: list[dict[str, Any]]) -> None:
    """One process would begin another epoch than the other: no later save would be whole."""
    for process in found:
        missed = process["missed_verdict"]
        assert missed["restored"] == 2
        assert missed["after"] == [1, 2]
        assert missed["raised"] == ""
    assert found[0]["missed_verdict"]["missed"] == ""
    assert "process 0 did not answer" in found[1]["missed_verdict"]["missed"]
    assert found[0]["missed_verdict"]["held"] == found[1]["missed_verdict"]["held"]
    assert [step for step, _, _ in found[0]["missed_verdict"]["held"]][-1] == 3


def test_loop_that_only_saves_is_told_on_every_process(found: list[dict[str, Any]]) -> None:
    """A job would lose all its checkpoints for days without an exception."""
    told = [process["only_saves"] for process in found]
    assert all(each["step"] <= 6 and each["said"] for each in told), told
    assert "Input/output error" in told[1]["said"]


def test_processes_that_end_without_close_commit_their_save(found: list[dict[str, Any]]) -> None:
    """JAX would end its coordination service first, and the vote on the last save of the job with it."""
    for process in range(PROCESSES):
        lines = [line for line in found[0]["output"] if line.startswith(f"{process}: ")]
        assert any("the process ends without CheckpointManager.close()" in line for line in lines), lines[-20:]
        assert not any("lost at the end" in line for line in lines)
    assert (found[0]["root"] / "open" / "durable" / "1" / "default").is_dir()
