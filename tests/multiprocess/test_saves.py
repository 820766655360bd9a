"""Two processes that save and restore: what they agree on, and that no device collective is launched for it.

The same job is started by our launcher, by mpirun and by srun, where they are installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.multiprocess.save_worker import PROCESSES, STRATEGIES, make_abstract, make_state, same_here
from tests.multiprocess.starters import STARTERS, run, skip_without


@pytest.fixture(scope="module", params=["launcher", *(pytest.param(each, marks=pytest.mark.long) for each in STARTERS)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A job's directory, how it ended, and the end of its output; the same under all starters."""
    root: Path = tmp_path_factory.mktemp(f"saves-{request.param}")
    command = [sys.executable, "-m", "tests.multiprocess.save_worker"]
    if request.param in STARTERS:
        skip_without(request.param)
        code, said = run(request.param, [*command, str(root)], processes=PROCESSES, devices=2, root=root)
        return root, code, said[-8000:]
    output: list[str] = []
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
    return root, launch_forked(launcher), "\n".join(output[-60:])


@pytest.fixture
def found(job: tuple[Path, int, str]) -> list[dict[str, Any]]:
    """The records of each process until it ended."""
    return [json.loads((job[0] / f"found-{process}.json").read_text()) for process in range(PROCESSES)]


def test_job_exits_with_0(job: tuple[Path, int, str]) -> None:
    """A process would wait without an end for another that misses an exchange, or a collective."""
    _, code, output = job
    assert code == ExitCode.OK, output


def test_collective_counter_counts_a_real_collective(found: list[dict[str, Any]]) -> None:
    """A counter that counts nothing would prove nothing."""
    for process in found:
        first, second = process["collectives"]["sum"], process["collectives"]["sum again"]
        assert first["sent_bytes"] > 0
        assert len(first["programs"]) == 1
        assert second["sent_bytes"] > 0, "a program that is compiled already is seen by its bytes"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_launches_no_device_collective(found: list[dict[str, Any]], strategy: str) -> None:
    """From a background thread it would run in another order than the train step's on another process, and hang
    both."""
    for process in found:
        assert process["collectives"][f"save by {strategy}"] == {"sent_bytes": 0, "programs": []}
        assert process[f"saved by {strategy}"] == [
            [0, ["durable"]],
            [1, ["ram", "ssd"]],
            [2, ["durable", "ram", "ssd"]],
        ]


@pytest.mark.parametrize("step", [2, 0])
def test_background_restore_launches_no_device_collective(found: list[dict[str, Any]], step: int) -> None:
    """It would collide with the caller's work."""
    for process in found:
        assert process["collectives"][f"restore step {step}"] == {"sent_bytes": 0, "programs": []}
        assert process[f"restored step {step}"] is True
        assert process["sources"] == [["ram"], ["durable"]]


def test_step_vetoed_by_one_process_is_dropped_on_all(found: list[dict[str, Any]]) -> None:
    """A step that one process has and another has not would be taken for the newest."""
    for number, process in enumerate(found):
        veto = process["veto"]
        assert veto["save returned"] is True
        assert veto["staged"] == (11 if number == 0 else 10)
        assert veto["steps"] == [10]
        assert 11 not in veto["held"]
        assert veto["restored"] is True
        assert veto["steps after"] == 12
        ((step, tier, fields),) = veto["skipped"]
        assert (step, tier, fields["policy"]) == (11, "ram", "skip")
        assert fields["reason"].startswith("process 1: no free slot")


def test_save_that_raises_on_one_process_is_dropped_on_all(found: list[dict[str, Any]]) -> None:
    """They would wait for its vote, take the next one for it, and from then on agree on another step than it does."""
    assert [bool(process["veto"]["raised"]) for process in found] == [False, True]
    assert "deleted" in found[1]["veto"]["raised"]
    for process in found:
        assert process["veto"]["steps at last"] == [12, 14]


def test_differing_replicas_are_named_and_the_save_dropped(found: list[dict[str, Any]]) -> None:
    """One host's broken memory would go into the next restart, on every host, depending on which one is read."""
    assert found[0]["collectives"]["replicas"] == {"sent_bytes": 0, "programs": []}
    for process in found:
        assert process["replicas"]["steps"] == [0, 3], "what differs is never committed"
    assert found[0]["replicas"]["events"] == found[1]["replicas"]["events"], "all receive the same"
    events = found[0]["replicas"]["events"]
    assert [(step, fields["leaf"]) for step, fields in events] == [(1, "leaf 41"), (2, "leaf 3"), (2, "leaf 69")]
    for _, fields in events:
        assert fields["item"] == "default"
        assert fields["box"] == [[0, 0], [3, 2]]
        assert fields["policy"] == "keep"
        assert [(each["process"], each["host"]) for each in fields["holders"]] == [(0, "host-0"), (1, "host-1")]
        assert len({each["digest"] for each in fields["holders"]}) == 2
        assert fields["suspects"] == ["host host-0", "host host-1"], "of two, nobody knows which one is right"


def test_process_0_decides_which_steps_are_deleted(found: list[dict[str, Any]]) -> None:
    """Clocks differ by milliseconds. By `keep_time_interval` one process would delete a step that another keeps, and
    wait at a barrier that the other does not join, at that save and every later one."""
    for process in found:
        assert process["policies"] == {"steps": [3], "failures": []}


def flip_in(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def scrubbed(root: Path, host: int, *, repair: bool = True) -> list[tuple[int, str, str, bool]]:
    tiers = [str(root / "ram"), str(root / "ssd")]
    found = ckptkit.scrub(str(root / "slot_copy"), tiers, repair=repair, host_id=f"host-{host}")
    return [(each.step, each.kind, each.act, each.done) for each in found.treatments]


@pytest.mark.parametrize("process", range(PROCESSES))
@pytest.mark.parametrize("how", ["sidecar and data", "sidecar", "sidecar gone"])
def test_share_of_one_process_is_repaired_from_its_slot(job: tuple[Path, int, str], how: str, process: int) -> None:
    """Sidecars are the only proof of a durable step: a step of several processes would be lost with one of them."""
    item = job[0] / "slot_copy" / "2" / "default"
    sidecar = item / "_ckptkit" / f"process-{process}.json"
    sidecar.unlink() if how == "sidecar gone" else flip_in(sidecar)
    data = item / f"ocdbt.process_{process}" / "d"  # until the first repair, which writes one tree
    for path in data.iterdir() if how == "sidecar and data" and data.is_dir() else ():
        flip_in(path)
    assert {proof.state for proof in ckptkit.verify(str(item.parent)).steps} == {"corrupt"}
    other = 1 - process
    if process == 0 or how == "sidecar gone":  # then the joined record is not read
        assert scrubbed(job[0], other) == [(2, "durable", "leave", False)], "its slots are not on this host"
        assert scrubbed(job[0], process, repair=False) == [(2, "durable", "repair", False)]
        assert scrubbed(job[0], process) == [(2, "durable", "repair", True)]
    else:
        assert scrubbed(job[0], other) == [(2, "durable", "repair", True)], "the joined record has the sidecar"
    assert {proof.state for proof in ckptkit.verify(str(job[0] / "slot_copy")).steps} == {"proven"}
    names = ["joined.jsonl.z", "process-0.json", "process-1.json"]
    assert sorted(path.name for path in (item / "_ckptkit").iterdir()) == names
    with ocp.CheckpointManager(job[0] / "slot_copy") as manager:
        found = manager.restore(2, args=ocp.args.StandardRestore(make_abstract()))  # pyright: ignore[reportCallIssue]
    assert same_here(found, make_state(2))


def test_step_that_no_single_host_can_repair_is_kept(job: tuple[Path, int, str]) -> None:
    """One host would take away what the hosts together still have."""
    item = job[0] / "slot_copy" / "2" / "default"
    kept = {path: path.read_bytes() for path in (item / "_ckptkit").iterdir()}
    for path in kept:
        flip_in(path)
    for host in range(PROCESSES):
        assert scrubbed(job[0], host) == [(2, "durable", "leave", False)]
    for path, data in kept.items():
        path.write_bytes(data)
    assert {proof.state for proof in ckptkit.verify(str(job[0] / "slot_copy")).steps} == {"proven"}
