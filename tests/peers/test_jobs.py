"""Jobs that restore from each other's fast tiers, bit-exact, what the durable tier does not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.peers.peer_job import ROWS

WHOLE = ROWS * 1024 * 4
SMALL = 8 + 8  # `b` and the number


def launch(root: Path, what: str, processes: int) -> list[dict[str, Any]]:
    """Runs the job; what each process found."""
    output: list[str] = []
    command = [sys.executable, "-m", "tests.peers.peer_job", "--process", "{process}", "--processes", str(processes)]
    launcher = Launcher(
        Workers(
            [*command, "--coordinator", "{coordinator}", what, str(root)],
            processes=processes,
            devices_per_process=2,
            warm=WARM,
        ),
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
    )
    assert launch_forked(launcher) == ExitCode.OK, "\n".join(output[-80:])
    return [json.loads((root / f"{what}-{process}.json").read_text()) for process in range(processes)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    return launch(root, "lose", 2)


def act(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    acts = [process[name] for process in found]
    assert all(each["same"] for each in acts), acts
    return acts


def test_lost_ramdisk_is_restored_from_another_host(found: list[dict[str, Any]]) -> None:
    """One lost host of a data-parallel job would throw everybody back to the bucket, an hour of training."""
    first, second = act(found, "lose_a_ramdisk")
    assert (first["latest"], first["step"]) == (second["latest"], second["step"]) == (1, 1)
    assert first["sources"] == {"ram": WHOLE + SMALL}
    assert second["sources"] == {"peer": WHOLE + SMALL}
    (planned,) = second["planned"]
    assert planned["sources"] == second["sources"], "every box once"


def test_lost_shard_is_refused_before_any_read(found: list[dict[str, Any]]) -> None:
    """A hole would be restored as random memory, or each host restore a step of its own."""
    first, second = act(found, "lose_a_shard")
    assert first["sources"] == {"ram": WHOLE // 2 + SMALL}
    assert second["sources"] == {"durable": WHOLE // 2, "peer": SMALL}, "what is whole elsewhere is not read there"
    for process in (first, second):
        assert (process["latest"], process["step"]) == (0, 0)
        (rejected,) = process["rejected"]
        assert "process 1: CorruptCheckpointError: save 1@1.1: no source that this process can reach covers" in rejected


def test_kill_between_two_commits_does_not_read_like_damage(found: list[dict[str, Any]]) -> None:
    """An ordinary kill would be taken for corruption, and a healthy host be replaced."""
    for process in act(found, "end_between_commits"):
        assert (process["latest"], process["step"]) == (0, 0)
        assert process["rejected"] == []
        assert process["incomplete"] == [
            "not complete on all processes when the job ended: process 1 had not committed it"
        ]


def test_swapped_hosts_restore_their_boxes_from_peers(found: list[dict[str, Any]]) -> None:
    """A scheduler that shuffles the hosts would cost every restart its fast tiers."""
    for process in act(found, "swap_hosts"):
        assert (process["latest"], process["step"]) == (1, 1)
        assert process["sources"]["peer"] == WHOLE // 2


def test_damage_is_repaired_from_another_host(found: list[dict[str, Any]]) -> None:
    """A flipped bit would cost a step, although another host has it whole."""
    first, second = act(found, "damage_a_slot")
    assert first["sources"] == {"ram": WHOLE + SMALL}
    assert second["sources"]["peer"] >= WHOLE
    assert any("has digest" in each for each in second["rejected"])
    assert len(second["rejected"]) == len(set(second["rejected"])), "each file once"
    assert second["rejected_in"] == ["ram"], "the tier that has the file"


def test_host_with_an_old_ramdisk_is_not_restored_from(found: list[dict[str, Any]]) -> None:
    """Step 3 of the abandoned branch is the higher number, and half of it is there."""
    first, second = act(found, "return_with_an_old_ramdisk")
    assert (first["latest"], first["step"], first["epoch"]) == (2, 2, 2)
    assert second["sources"] == {"peer": WHOLE + SMALL}


def test_zombie_of_an_earlier_run_is_not_restored_from(found: list[dict[str, Any]]) -> None:
    """Its step 5 is the higher number, whole, on a host that is alive, and has copies of its own."""
    first, second = act(found, "outlive_a_zombie")
    assert (first["latest"], first["step"], first["epoch"]) == (2, 2, 2)
    assert second["sources"] == {"peer": WHOLE // 2 + SMALL}


def test_two_runs_of_one_place_are_never_joined(found: list[dict[str, Any]]) -> None:
    """Each process would restore, and verify, its half of another run: digests are right, and the state is of no
    step."""
    assert [each["step"] for each in act(found, "make_the_root_again")] == [0, 0]
    for process in act(found, "the_removed_run_alone"):
        assert process["sources"].keys() == {"durable"}, "hosts that hold the removed run alone do not continue it"


def test_unrecorded_run_continues_until_another_has_begun(found: list[dict[str, Any]]) -> None:
    """A run that could not record its epoch would share it with the next one: two branches, one name."""
    assert [each["step"] for each in act(found, "continue_unrecorded")] == [2, 2]
    assert [each["step"] for each in act(found, "mix_unrecorded")] == [0, 0]
    assert [each["step"] for each in act(found, "unrecorded_too_late")] == [0, 0]


def test_step_that_is_saved_again_is_the_same_save_everywhere(found: list[dict[str, Any]]) -> None:
    """A process would commit new bytes under the identity of the first save of that step."""
    first, second = act(found, "save_a_step_again")
    assert first["books"] == second["books"]
    assert (first["step"], first["latest"], first["taken"]) == (110, 110, True)


def test_without_peers_all_restore_the_durable_step(found: list[dict[str, Any]]) -> None:
    """`peers=None` would serve all the same."""
    for process in act(found, "go_without_peers"):
        assert (process["latest"], process["step"]) == (0, 0)
        assert "peer" not in process["sources"]


def test_a_fully_sharded_job_survives_the_loss_of_a_host(found: list[dict[str, Any]]) -> None:
    """One lost host of a sharded job would throw everybody back to the bucket."""
    first, second = act(found, "keep_copies")
    assert (first["latest"], first["step"]) == (second["latest"], second["step"]) == (2, 2)
    assert first["sources"] == {"ram": WHOLE // 2 + SMALL}
    assert second["sources"] == {"peer": WHOLE // 2 + SMALL}
    assert first["committed"] == second["committed"] == [[step, "peer"] for step in range(3)]


def test_loss_of_both_hosts_restores_the_durable_step(found: list[dict[str, Any]]) -> None:
    """A copy of a lost host's copy would have to be invented."""
    for process in act(found, "lose_both"):
        assert (process["latest"], process["step"], set(process["sources"])) == (0, 0, {"durable"})


def test_copies_are_made_again_after_a_loss(found: list[dict[str, Any]]) -> None:
    """The second loss of a run would cost what the first did not."""
    first, second = act(found, "go_on_after_a_loss")
    assert first["first"]["same"]
    assert second["first"]["same"]
    assert first["first"]["step"] == 1
    assert (first["latest"], first["step"], first["epoch"]) == (6, 6, 2)
    assert first["sources"] == {"peer": WHOLE // 2 + SMALL}
    assert second["sources"] == {"ram": WHOLE // 2 + SMALL}


def test_last_save_is_copied_to_other_hosts(found: list[dict[str, Any]]) -> None:
    """A preempted job would lose the step with the first host, because the copy before was still in flight."""
    for process in found:
        assert process["save_last"] == {"tiers": ["ram", "peer", "durable"], "unfinished": [], "left_out": {}}
    first, second = act(found, "restore_last")
    assert (first["latest"], first["step"]) == (second["latest"], second["step"]) == (2, 2)
    assert second["sources"] == {"peer": WHOLE // 2 + SMALL}


def test_slow_peer_does_not_delay_the_last_save(found: list[dict[str, Any]]) -> None:
    """A lost host would cost the others their last step, or the same wait at every preemption."""
    for process in found:
        said = process["save_last_beside_a_slow_peer"]
        assert said["tiers"] == ["ram", "durable"]
        assert said["unfinished"] == ["peer"]
        assert said["then"][0] == "ram"
        assert "peer" in said["then_left_out"], "it took seconds the last time"


def test_scrub_of_a_running_job_finds_damage_in_its_slots(found: list[dict[str, Any]]) -> None:
    """A bit that flipped in a running job's ramdisk would be met at the restart, when its other copy may be gone."""
    first, second = (process["scrub"] for process in found)
    assert first["found"] == {"checked": 4, "damaged": []}
    assert second["found"] == {"checked": 4, "damaged": [1, 1]}, "its own slot, and the copy of the other host's"
    assert second["events"] == [1, 1]
    assert first["then"]["damaged"] == second["then"]["damaged"] == [], "newer saves have replaced it"
    act(found, "restore_scrubbed")


def test_three_processes_restore_a_save_of_two(root: Path, found: list[dict[str, Any]]) -> None:
    """An elastic restart would go back to the bucket while everything is in memory."""
    assert found
    for process in act(launch(root, "grow", 3), "grow"):
        assert (process["latest"], process["step"]) == (1, 1)
        assert "durable" not in process["sources"]
