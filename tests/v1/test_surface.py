"""Orbax's v1 as it is installed: every name, argument and field is covered, refused, or listed in the departures."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as orbax

from ckptkit import v1 as ours
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.paths import SIDECAR_DIR
from ckptkit.model.policies import ProcessOptions
from ckptkit.v1.context import RULES, fields_of, manager_options, profile_of, restored_by_orbax
from tests.v1.test_context import context_with

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
DEPARTURES = Path(__file__).parents[2] / "docs" / "departures.md"
OLDER = {"save_pytree", "save_pytree_async", "load_pytree", "load_pytree_async", "pytree_metadata"}
saving, loading = "array.saving.", "array.loading."
sharing = loading + "load_and_broadcast_options."
# A value of each field that is not Orbax's default.
CHANGED: dict[str, Any] = {
    loading + "enable_padding_and_truncation": True,
    loading + "raise_array_data_missing_error": False,
    loading + "use_load_and_broadcast": True,
    sharing + "broadcast_memory_limit_bytes": 1 << 20,
    sharing + "broadcast_memory_scaling_factor": 0.5,
    sharing + "primary_replica_id": 1,
    sharing + "replica_axis_index": 1,
    saving + "array_metadata_store": None,
    saving + "enable_pinned_host_transfer": False,
    saving + "enable_post_merge_validation": False,
    saving + "enable_replica_parallel_separate_folder": True,
    saving + "enable_write_sharding_file": False,
    saving + "max_replicas_for_replica_parallel": 1,
    saving + "min_slice_bytes_for_replica_parallel": 1,
    saving + "ocdbt_target_data_file_size": 1 << 20,
    saving + "scoped_storage_options_creator": lambda key, value: None,
    saving + "storage_options.chunk_byte_size": 16,
    saving + "storage_options.dtype": jnp.bfloat16,
    saving + "storage_options.shard_axes": (0,),
    saving + "use_compression": False,
    saving + "use_ocdbt": False,
    saving + "use_replica_parallel": False,
    saving + "use_zarr3": False,
    "asynchronous.create_directories_asynchronously": False,
    "asynchronous.post_finalization_callback": lambda: None,
    "asynchronous.timeout_secs": 7,
    "atomicity.allow_legacy_atomic_rename": True,
    "atomicity.mode": orbax.options.AtomicityMode.COMMIT_FILE,
    "checkpoint_layout": orbax.options.CheckpointLayout.SAFETENSORS,
    "checkpointables.registry": orbax.handlers.local_registry(),
    "deletion.gcs_deletion_options.todelete_full_path": "trash",
    "file.path_class": Path,
    "file.path_permission_mode": 0o750,
    "file.skip_sync_file_validations": True,
    "memory.deepcopy_host_arrays": False,
    "memory.expected_surge_bytes": 1,
    "memory.is_prioritized_key_fn": lambda key: False,
    "memory.read_concurrent_bytes": 1 << 20,
    "memory.regulator_options": orbax.options.MemoryOptions.RegulatorOptions(
        max_memory_limit_gib=100.0,
        profiler=Mock(),
    ),
    "memory.serialization_status_callback": Mock(),
    "memory.transfer_concurrent_bytes": 1 << 20,
    "memory.write_concurrent_bytes": 1 << 20,
    "multiprocessing.active_processes": {0},
    "multiprocessing.barrier_sync_key_prefix": "a",
    "multiprocessing.primary_host": None,
    "pathways.checkpointing_impl": object(),
    "pytree.loading.partial_load": True,
    "pytree.saving.pytree_metadata_options.support_rich_types": True,
    "safetensors.max_over_read_ratio": 2.0,
    "safetensors.read_chunk_bytes": 1 << 20,
}


def by_rule(*rules: str) -> list[str]:
    return sorted(name for name, rule in RULES.items() if rule in rules)


def changed(name: str) -> Any:
    return context_with(**{name.replace(".", "__"): CHANGED[name]})


def public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(public(orbax)))
def test_every_public_name_of_orbax_exists(name: str) -> None:
    """A trainer that changes its import would end with AttributeError."""
    theirs, found = getattr(orbax, name), getattr(ours, name)
    if isinstance(theirs, ModuleType):
        assert set(public(theirs)) <= set(public(found))
    else:
        assert found is theirs


def test_checkpointer_takes_every_argument_of_orbax() -> None:
    """A call of a trainer would raise TypeError, or mean something else."""
    handed_on = {"save": "save_async", "save_checkpointables": "save_checkpointables_async"}
    found = set()
    for name, member in vars(orbax.training.Checkpointer).items():
        if name.startswith("_") and name != "__init__":
            continue
        found.add(name)
        assert name in vars(ours.Checkpointer), name
        if not inspect.isfunction(member) or name in OLDER:
            continue
        given = inspect.signature(getattr(ours.Checkpointer, handed_on.get(name, name))).parameters
        for each in inspect.signature(member).parameters.values():
            assert given[each.name].kind is each.kind, (name, each.name)
            assert given[each.name].default == each.default, (name, each.name)
    assert found >= OLDER


def test_every_field_of_the_context_has_a_rule() -> None:
    """A field of a newer Orbax would be ignored."""
    context = orbax.Context()
    held = {id(value) for value in vars(context).values()}
    groups = {name for name in dir(context) if name[0] != "_" and id(getattr(context, name)) in held}
    groups -= {name for name in groups if name.endswith("_options")}
    assert groups == {name.partition(".")[0] for name in RULES}
    assert len(groups) == len(vars(context))
    assert set(fields_of(context)) == set(RULES) == set(CHANGED)
    kinds = {type(getattr(context, group)) for group in groups}
    classes = {each for each in public(orbax.options).values() if dataclasses.is_dataclass(each)}
    assert classes <= kinds


@pytest.mark.parametrize("name", by_rule("refused"))
def test_refused_field_raises_its_name(tmp_path: Path, name: str) -> None:
    """It would be ignored."""
    with pytest.raises(ValueError, match=rf"Context\.{re.escape(name)}="):
        ours.Checkpointer(tmp_path, context=changed(name))


@pytest.mark.parametrize("name", by_rule("made"))
def test_field_of_the_constructor_is_refused_in_a_call(tmp_path: Path, name: str) -> None:
    """A timeout or a permission of an active context would be ignored."""
    with ours.Checkpointer(tmp_path) as checkpointer, changed(name), pytest.raises(ValueError, match=re.escape(name)):
        checkpointer.save(1, {"w": jnp.ones(2)})


@pytest.mark.parametrize("name", by_rule("save", "profile"))
def test_field_of_the_layout_is_obeyed(tmp_path: Path, name: str) -> None:
    """The step would have a layout that the caller did not ask for: our own writer has one."""
    context = changed(name)
    with ours.Checkpointer(tmp_path, context=context) as checkpointer:
        state = {"w": jnp.arange(4.0)}
        assert checkpointer.save(1, state)
        assert checkpointer.load(1, state)["w"].tolist() == [0, 1, 2, 3]
    written_by_us = (tmp_path / "1" / "state" / SIDECAR_DIR).exists()
    if RULES[name] == "save":
        assert not written_by_us
    else:  # our writer does as the profile of the constructor tells it, or leaves the step to Orbax
        unlike = profile_of(context, DurableProfile()) != DurableProfile()
        assert written_by_us == (unlike or name.endswith(("use_zarr3", "use_compression")))


@pytest.mark.parametrize("name", by_rule("restore"))
def test_field_of_loading_is_left_to_orbax(name: str) -> None:
    """An array of another size would be refused, or missing data an error, where the caller allows it."""
    assert restored_by_orbax(changed(name), DurableProfile())
    assert not restored_by_orbax(orbax.Context(), DurableProfile())


def test_replicas_share_what_they_read_where_the_context_asks() -> None:
    """Every replica would read the whole checkpoint."""
    context = changed(loading + "use_load_and_broadcast")
    context.array.loading.load_and_broadcast_options.broadcast_memory_limit_bytes = 1 << 20
    given = {"processes": ProcessOptions(close_timeout_s=7)}
    processes = manager_options(context, given)["processes"]
    assert (processes.broadcast.mode, processes.broadcast.device_bytes) == ("always", 1 << 20)
    assert processes.close_timeout_s == 7, "the caller's own options are kept"


@pytest.mark.parametrize("name", sorted(RULES))
def test_field_is_listed_in_the_departures(name: str) -> None:
    """A caller could not know what a field does here."""
    section = DEPARTURES.read_text().partition("## The newer style")[2]
    listed = set(re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", section))
    prefixes = {".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 2)}
    assert prefixes & listed
