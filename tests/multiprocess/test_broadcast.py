"""Data replicas that read the durable tier for each other: every bit, each byte once, and no process left waiting."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.multiprocess.broadcast_job import LARGE_BYTES, ROWS, ROWS_OF_A_CELL, SMALLEST

pytestmark = pytest.mark.long  # one launched job

PROCESSES = 4
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each process of one job, by act."""
    root, output = tmp_path_factory.mktemp("broadcast"), list[str]()
    command = [sys.executable, "-m", "tests.multiprocess.broadcast_job", "--process", "{process}"]
    launcher = Launcher(
        Workers(
            [*command, "--processes", str(PROCESSES), "--coordinator", "{coordinator}", str(root)],
            processes=PROCESSES,
            devices_per_process=2,
            warm=WARM,
        ),
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
    )
    assert launch_forked(launcher) == ExitCode.OK, "\n".join(output[-80:])
    return [json.loads((root / f"found-{process}.json").read_text()) for process in range(PROCESSES)]


def act(found: Found, name: str, *, broadcast: bool) -> Found:
    """An act that ended well, in the same way on all processes."""
    acts = [process[name] for process in found]
    for each in acts:
        assert "error" not in each, each["error"]
        assert each["bits"] == each["expected"], name
        assert each["broadcast"] is broadcast, each["why"]
        assert (each["step"], each["why"]) == (acts[0]["step"], acts[0]["why"])
    return acts


def durable_bytes(acts: Found) -> int:
    return sum(each["sources"].get("durable", 0) for each in acts)


def wanted_bytes(each: dict[str, Any]) -> int:
    return sum(each["sources"].values())


def test_rows_of_one_leaf_are_written_by_all_its_holders(found: Found) -> None:
    """One process would write all of a leaf of many GB, while the links of the others are idle; or stock Orbax would
    not read what several wrote."""
    step = Path(found[0]["rows"]["step"])
    written = [
        sum(file.stat().st_size for file in (step / f"default/ocdbt.process_{process}/d").iterdir())
        for process in range(PROCESSES)
    ]
    leaf_bytes, cell_bytes = math.prod(ROWS) * 4, ROWS_OF_A_CELL * ROWS[1] * 4
    records = 8192  # of the tree of each process
    assert max(written) <= leaf_bytes / PROCESSES + cell_bytes + records, written
    # The replicas are compared byte by byte, so each process has all of them: docs/decisions/0012.
    assert [each["rows"]["staged"] for each in found] == [leaf_bytes] * PROCESSES
    target = {"w": jax.ShapeDtypeStruct(ROWS, np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))}
    restored = ocp.StandardCheckpointer().restore(step / "default", target)["w"]
    assert (np.asarray(restored) == np.arange(math.prod(ROWS), dtype=np.float32).reshape(ROWS)).all()


def test_every_dtype_is_broadcast_bit_exact(found: Found) -> None:
    """-0.0, NaN payloads, booleans, small integers or keys would change, as they do where replicas are summed."""
    alone = act(found, "alone", broadcast=False)
    shared = act(found, "shared", broadcast=True)
    assert [each["bits"] for each in shared] == [each["bits"] for each in alone]
    assert len(shared[0]["bits"]) > 60


def test_each_byte_is_read_once(found: Found) -> None:
    """The bucket would be asked for the state once per replica."""
    for name, replicas in (("shared", 2), ("plain", 2), ("four", 4), ("eight", 4)):
        acts = act(found, name, broadcast=True)
        total, stored = durable_bytes(acts), sum(each["read_bytes"] for each in acts)
        assert LARGE_BYTES <= total <= 1.05 * LARGE_BYTES, name
        assert LARGE_BYTES <= stored <= 1.1 * LARGE_BYTES, f"{name}: {stored} bytes read from files"
        for each in acts:
            assert each["rounds"] >= 3
        assert max(each["sources"]["durable"] for each in acts) < 1.1 * LARGE_BYTES / 4, "the reading is shared out"
        assert wanted_bytes(acts[0]) >= LARGE_BYTES * replicas // PROCESSES
    plainly = [process["alone"] for process in found]
    assert durable_bytes(plainly) >= 2 * LARGE_BYTES


def test_no_broadcast_where_nothing_is_shared(found: Found) -> None:
    """A sharded job would wait for collectives that bring nothing."""
    for each in act(found, "one", broadcast=False):
        assert each["why"] == "process 0: no two processes want the same boxes"
    for each in act(found, "directory", broadcast=False):
        assert each["why"] == "process 0: mode 'auto' shares only what is read over a network"
    for each in act(found, "small", broadcast=False):
        assert each["why"].endswith("MB in common, less than 64.0 MB")


def test_auto_shares_a_bucket_from_the_threshold_on(found: Found) -> None:
    """Each replica would read a large state from the bucket."""
    for each in act(found, "enough", broadcast=True):
        assert each["why"] == "mode 'auto': 4.2 MB in common"
        assert each["rounds"] >= 3


def test_background_restore_broadcasts_once_all_call_result(found: Found) -> None:
    """Its collectives would cross those of the step, or a process that comes late would be waited for in one."""
    acts = act(found, "later", broadcast=True)
    assert LARGE_BYTES <= durable_bytes(acts) <= 1.05 * LARGE_BYTES
    assert all(each["rounds"] >= 3 for each in acts)


def test_late_result_call_finds_everything_read(found: Found) -> None:
    """A long compilation would be followed by a transfer that reading in its shadow makes needless."""
    for each in act(found, "late", broadcast=False):
        assert each["why"] == "process 0: mode 'auto' shares nothing in the background"
        assert (each["rounds"], each["sources"].get("replica", 0)) == (0, 0)


def test_process_that_never_calls_result_is_not_waited_for(found: Found) -> None:
    """A process that closes its manager would hang, and the others with it."""
    assert found[2]["gone"]["error"] == "RuntimeError: it leaves"
    for each in (found[process]["gone"] for process in (0, 1, 3)):
        assert (each["bits"], each["broadcast"]) == (each["expected"], False)
        assert each["why"] == "process 2 gave the restore up"


def test_damage_in_transit_is_detected_and_read_again(found: Found) -> None:
    """A wire that flips a bit would give one replica other weights than the rest."""
    acts = act(found, "flipped", broadcast=True)
    assert [bool(each["rejected"]) for each in acts] == [False, False, True, False]
    assert acts[2]["rejected"][0][0] == "replica"
    assert "has another digest here" in acts[2]["rejected"][0][1]


def test_failed_read_on_one_process_makes_all_read_directly(found: Found) -> None:
    """The others would hang in a collective to which it never comes."""
    for each in act(found, "failing", broadcast=False):
        assert "gave way to reading alone: process 1: CorruptCheckpointError: a cell that" in each["why"]
        assert each["rounds"] >= 1
        assert each["sources"]["replica"] > 0, "what had come by then is kept"
        assert wanted_bytes(each) <= 1.01 * LARGE_BYTES / 2, "and not read again"


def test_process_without_memory_makes_all_read_directly(found: Found) -> None:
    """The same, where it is the collective that one of them cannot have."""
    for each in act(found, "no_room", broadcast=False):
        assert each["why"] == "no collective: process 3: MemoryError: RESOURCE_EXHAUSTED"
        assert each["rounds"] == 0


def test_damaged_storage_makes_all_restore_the_older_step(found: Found) -> None:
    """Some would go on from one step, and some from another."""
    for each in act(found, "damaged", broadcast=True):
        assert each["step"] == 0
        assert "cell" in each["rejected"][-1][1]
        assert "has digest" in each["rejected"][-1][1]


def test_fatal_error_on_one_process_is_raised_on_all(found: Found) -> None:
    """A missing permission would look like a lost process to the others."""
    for process in found:
        assert process["denied"]["error"].startswith("StoreError:"), process["denied"]
        assert "PERMISSION_DENIED" in process["denied"]["error"]


def test_boxes_in_memory_are_not_read_from_the_bucket(found: Found) -> None:
    """The bucket would be read although a replica's ramdisk holds everything."""
    acts = act(found, "memory", broadcast=True)
    assert durable_bytes(acts) == 0
    assert all(each["sources"].get("ram", 0) > 0 for each in acts[:2])
    assert all("ram" not in each["sources"] for each in acts[2:])


def test_state_exceeds_the_smallest_budget() -> None:
    """The acts have windows of the smallest budget: more than one round is what they are about."""
    assert LARGE_BYTES > SMALLEST
