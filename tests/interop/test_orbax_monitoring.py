"""Collectors that listen for Orbax's names in `jax.monitoring` go on over a manager of ours."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jax import monitoring

import ckptkit
from tests.forked import run_forked

ORBAX = Path(ocp.__file__).parent
# Orbax's names of saves and restores begin with these; those that a manager does not use begin otherwise.
PREFIXES = ("/jax/orbax/write/", "/jax/orbax/read/", "/jax/checkpoint/write/", "/jax/checkpoint/read/")
ELSEWHERE = ("experimental", "testing", "layout")
# Names of Orbax's saves and restores that describe its own way to write or read, which is not ours.
NOT_TOLD = {
    "/jax/orbax/write/directory_creation_secs": "directories are made as files are written",
    "/jax/orbax/write/async_directory_creation_secs": "the same",
    "/jax/orbax/write/blocking_directory_creation_secs": "the same",
    "/jax/orbax/write/background_directory_creation_secs": "the same",
    "/jax/orbax/write/blocking_sync_item_duration_secs": "items are not saved one after the other",
    "/jax/orbax/write/background_item_finalize_secs": "the same",
    "/jax/orbax/write/background_finalize_secs": "one mark commits a step",
    "/jax/orbax/write/finalize_duration_secs": "the same",
    "/jax/orbax/write/blocking_tree_map_duration_secs": "a part of the copy into the slot",
    "/jax/orbax/write/blocking_d2h_duration_secs": "the same",
    "/jax/orbax/write/blocking_val_duration_secs": "the same",
    "/jax/orbax/write/checkpoint_start_sync_duration_secs": "no barrier before a save",
    "/jax/checkpoint/write/async/metadata_write_duration_secs": "metadata are files among the others",
    "/jax/orbax/write/background_meta_write_secs": "the same",
    "/jax/checkpoint/write/async/ocdbt_merge_duration_secs": "nothing is merged",
    "/jax/orbax/write/background_ocdbt_merge_secs": "the same",
    "/jax/orbax/write/merge_ocdbt_per_process_files_secs": "the same",
    "/jax/checkpoint/write/async/commit_future_count": "there are no such futures",
    "/jax/checkpoint/write/async/commit_duration_sec": "TensorStore's futures, which are not waited for by themselves",
    "/jax/orbax/write/background_ts_duration_secs": "the same",
    "/jax/checkpoint/write/old_steps_examined_count": "the policies are asked without Orbax's manager",
    "/jax/checkpoint/write/get_old_steps_duration_secs": "a background thread finds them",
    "/jax/checkpoint/write/remove_steps_duration_secs": "a background thread deletes them",
    "/jax/checkpoint/write/preempt/duration_saved_secs": "the same",
    "/jax/orbax/write/replicated_array_gb": "one replica writes, and every box is counted once",
    "/jax/orbax/write/sharded_array_gb": "the same",
    "/jax/orbax/write/preemption": "Orbax's half reports it",
    "/jax/checkpoint/read/load_all_step_metadata_duration_secs": "Orbax's half reports it",
    "/jax/checkpoint/read/primary_replica_deserialization_duration_secs": "of Orbax's broadcast; ours is an event",
    "/jax/checkpoint/read/broadcast_duration_secs": "the same",
}

SAVES = """
import sys, jax.numpy as jnp, orbax.checkpoint as ocp
from jax import monitoring
import ckptkit
seen = set()
def record(kind):
    return lambda name, *values, **labels: seen.add((kind, name, *sorted(labels.items())))
monitoring.register_event_listener(record("event"))
monitoring.register_event_duration_secs_listener(record("duration"))
monitoring.register_scalar_listener(record("scalar"))
kind, root, asynchronous = sys.argv[1:]
options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=asynchronous == "async")
state = {"w": jnp.zeros((64, 64))}
with {"stock": ocp, "ours": ckptkit}[kind].CheckpointManager(root, options=options) as manager:
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    manager.restore(2, args=ocp.args.StandardRestore(state))
print(repr(seen))
"""


def told_by(kind: str, root: Path, *, asynchronous: bool) -> set[tuple[Any, ...]]:
    """Kind, name and labels of all that a job of three saves and a restore tells, below Orbax's prefixes."""
    words = [kind, str(root / kind), "async" if asynchronous else "sync"]
    command = [sys.executable, "-c", SAVES, *words]
    done = run_forked(command, timeout=120, check=True)
    said = ast.literal_eval(done.stdout.splitlines()[-1])
    return {each for each in said if each[1].startswith(("/jax/orbax/", "/jax/checkpoint/"))}


def is_inside(name: str) -> bool:
    """Whether it tells of TensorStore's work on single arrays, which is Orbax's way to write and read."""
    return "/worker/" in name


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_and_restores_tell_what_orbax_tells(tmp_path: Path, asynchronous: bool) -> None:
    """Breaks when an alert on Orbax's names goes dark with the swap, or an event comes under a label of its own."""
    stock = told_by("stock", tmp_path, asynchronous=asynchronous)
    ours = told_by("ours", tmp_path, asynchronous=asynchronous)
    missing = {each for each in stock - ours if each[1] not in NOT_TOLD and not is_inside(each[1])}
    assert {name for _, name, *_ in missing} <= {"/jax/orbax/checkpoint_manager/standard_checkpoint_deleter/duration"}
    assert ours <= stock, "a name, a kind or a label that Orbax does not have"


def names_in_the_source() -> set[str]:
    """Every name below the prefixes in Orbax's source."""
    found: set[str] = set()
    for path in sorted(ORBAX.rglob("*.py")):
        if not set(ELSEWHERE).isdisjoint(path.relative_to(ORBAX).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PREFIXES):
                found.add(node.value)
    return {name for name in found if name not in PREFIXES}


def test_every_name_of_orbax_is_told_or_has_its_reason() -> None:
    """Breaks when an Orbax tells more than we know of, or a reason is left for a name that no longer exists."""
    ours = (Path(ckptkit.__file__).parent / "durable" / "orbax" / "reports.py").read_text()
    told = {name for name in names_in_the_source() if f'"{name}"' in ours.split("}", 1)[1] or _made(name, ours)}
    names = {name for name in names_in_the_source() if not is_inside(name) and "/read/async/" not in name}
    assert names - told == set(NOT_TOLD)


def _made(name: str, source: str) -> bool:
    """Whether the name is made of one of the two bases, for saves in the background and others."""
    for base in ("/jax/orbax/write/async/", "/jax/orbax/write/"):
        if name.startswith(base) and f'"{{base}}/{name.removeprefix(base)}"' in source:
            return True
    return False


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    names: list[tuple[str, dict[str, Any]]] = []

    def record(*told: Any, **labels: Any) -> None:
        names.append((told[0], labels))

    monitoring.register_event_listener(record)
    monitoring.register_event_duration_secs_listener(record)
    monitoring.register_scalar_listener(record)
    yield names
    monitoring.unregister_event_listener(record)
    monitoring.unregister_event_duration_listener(record)
    monitoring.unregister_scalar_listener(record)


@pytest.mark.disk
def test_events_of_ours_are_told_beside(tmp_path: Path, heard: list[tuple[str, dict[str, Any]]]) -> None:
    """Breaks when a commit to the ramdisk, or the stall of a save, cannot be seen in `jax.monitoring`."""
    events = ckptkit.EventLog()
    tiers = [ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1))]
    for name in ("a", "b"):  # two managers over one log tell everything once
        with ckptkit.CheckpointManager(tmp_path / name, tiers=tiers[: name == "a"], events=events) as manager:
            manager.save(1, args=ocp.args.StandardSave({"w": jnp.zeros(8)}))
    said = [name for name, labels in heard if labels == {"tier": "ssd"}]
    assert sorted(said) == ["/ckptkit/committed", "/ckptkit/committed/bytes", "/ckptkit/committed/duration_secs"]
    for name in ("/ckptkit/staged/stall_secs", "/ckptkit/opened", "/jax/orbax/write/success"):
        assert [each for each, _ in heard].count(name) == 2, name
