"""The fields of Orbax's `Context`: each is obeyed, without effect by a named rule, or refused with a ValueError."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from orbax.checkpoint.experimental import v1 as orbax_v1

from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.policies import BroadcastOptions, ProcessOptions

Rule = Literal["save", "restore", "shared", "made", "profile", "call", "refused", "unused"]

_NO_LIMIT = 1 << 62
_READ = "memory.read_concurrent_bytes"

# How each field is obeyed where it is not Orbax's default:
#   save      Orbax's own handler writes the tree to the durable tier, without digests; fast tiers hold the tree.
#   restore   Orbax's own handler restores the tree from the durable tier.
#   shared    data replicas share the reading (`ProcessOptions.broadcast`); Orbax's handler obeys it for its own steps.
#   made      an option of the manager: a context that is active in a save has to agree with the one of the constructor.
#   profile   our own writer and reader obey what the constructor got; another value in a save counts as `save`.
#   call      obeyed by each call.
#   refused   a ValueError that names the field.
#   unused    without effect in Orbax, too, except a layout and a backend (Pathways) that are refused.
RULES: Final[Mapping[str, Rule]] = {
    "array.loading.enable_padding_and_truncation": "restore",
    "array.loading.load_and_broadcast_options.broadcast_memory_limit_bytes": "shared",
    "array.loading.load_and_broadcast_options.broadcast_memory_scaling_factor": "shared",
    "array.loading.load_and_broadcast_options.primary_replica_id": "shared",
    "array.loading.load_and_broadcast_options.replica_axis_index": "shared",
    "array.loading.raise_array_data_missing_error": "restore",
    "array.loading.use_load_and_broadcast": "shared",
    "array.saving.array_metadata_store": "save",
    "array.saving.enable_pinned_host_transfer": "save",
    "array.saving.enable_post_merge_validation": "save",
    "array.saving.enable_replica_parallel_separate_folder": "save",
    "array.saving.enable_write_sharding_file": "save",
    "array.saving.max_replicas_for_replica_parallel": "save",
    "array.saving.min_slice_bytes_for_replica_parallel": "save",
    "array.saving.ocdbt_target_data_file_size": "profile",
    "array.saving.scoped_storage_options_creator": "save",
    "array.saving.storage_options.chunk_byte_size": "call",
    "array.saving.storage_options.dtype": "save",
    "array.saving.storage_options.shard_axes": "save",
    "array.saving.use_compression": "profile",
    "array.saving.use_ocdbt": "save",
    "array.saving.use_replica_parallel": "save",
    "array.saving.use_zarr3": "profile",
    "asynchronous.create_directories_asynchronously": "made",
    "asynchronous.post_finalization_callback": "made",
    "asynchronous.timeout_secs": "made",
    "atomicity.allow_legacy_atomic_rename": "made",
    "atomicity.mode": "made",
    "checkpoint_layout": "call",
    "checkpointables.registry": "call",
    "deletion.gcs_deletion_options.todelete_full_path": "made",
    "file.path_class": "refused",
    "file.path_permission_mode": "made",
    "file.skip_sync_file_validations": "made",
    "memory.deepcopy_host_arrays": "save",
    "memory.expected_surge_bytes": "refused",
    "memory.is_prioritized_key_fn": "save",
    "memory.read_concurrent_bytes": "profile",
    "memory.regulator_options": "refused",
    "memory.serialization_status_callback": "save",
    "memory.transfer_concurrent_bytes": "save",
    "memory.write_concurrent_bytes": "profile",
    "multiprocessing.active_processes": "made",
    "multiprocessing.barrier_sync_key_prefix": "made",
    "multiprocessing.primary_host": "made",
    "pathways.checkpointing_impl": "unused",
    "pytree.loading.partial_load": "call",
    "pytree.saving.pytree_metadata_options.support_rich_types": "save",
    "safetensors.max_over_read_ratio": "unused",
    "safetensors.read_chunk_bytes": "unused",
}


def fields_of(context: orbax_v1.Context) -> dict[str, Any]:
    """Every field of a context, by its dotted name."""
    names = {name.partition(".")[0] for name in RULES}
    return {name: value for group in sorted(names) for name, value in _walk(group, getattr(context, group))}


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    # An option that is None by default may hold a record: it is one field.
    if not dataclasses.is_dataclass(value) or name in RULES:
        yield name, value
        return
    for field in dataclasses.fields(value):
        yield from _walk(f"{name}.{field.name}", getattr(value, field.name))


def changed_fields(context: orbax_v1.Context, base: orbax_v1.Context) -> dict[str, Any]:
    """The fields in which a context differs from another, with its own values."""
    bases = fields_of(base)
    return {name: value for name, value in fields_of(context).items() if not _same(value, bases[name])}


def _same(value: Any, base: Any) -> bool:
    # Contexts copy their options deeply, and some of those compare by identity.
    if type(value) is not type(base) or not hasattr(value, "__dict__") or type(value).__eq__ is not object.__eq__:
        return bool(value == base)
    mine, others = vars(value), vars(base)
    return value is base or (mine.keys() == others.keys() and all(_same(mine[name], others[name]) for name in mine))


def checked_context(context: orbax_v1.Context) -> orbax_v1.Context:
    """The context; raises ValueError for a field that a `Checkpointer` cannot obey."""
    changed = changed_fields(context, orbax_v1.Context())
    refused = {name for name, rule in RULES.items() if rule == "refused"}
    if orbax_v1.multihost.is_pathways_backend():  # MaxText sets the field on every backend
        refused.add("pathways.checkpointing_impl")
    for name, value in changed.items():
        if name in refused:
            raise ValueError(
                f"Context.{name}={value!r}: a ckptkit Checkpointer cannot obey it; leave it at Orbax's default, or use "
                "Orbax's own Checkpointer"
            )
    if context.checkpoint_layout is orbax_v1.options.CheckpointLayout.SAFETENSORS:
        raise ValueError(
            "Context.checkpoint_layout=SAFETENSORS: a Checkpointer reads and writes Orbax's layout; load such a "
            "directory with the free function load(path, abstract)"
        )
    return context


def in_job(context: orbax_v1.Context, processes: int) -> orbax_v1.Context:
    """The context for a job of several processes: all of Orbax's barriers use the coordination service."""
    if processes == 1:
        return context
    context = orbax_v1.Context(context)
    context.multiprocessing.active_processes = context.multiprocessing.active_processes or set(range(processes))
    context.multiprocessing.barrier_sync_key_prefix = context.multiprocessing.barrier_sync_key_prefix or "ckptkit"
    return context


def refuse_unlike(context: orbax_v1.Context, made_with: orbax_v1.Context) -> None:
    """Raises ValueError where a context differs from the constructor's in an option of the manager."""
    for name, value in changed_fields(context, made_with).items():
        if RULES[name] == "made":
            raise ValueError(
                f"Context.{name}={value!r} is active, and the Checkpointer was made with "
                f"{fields_of(made_with)[name]!r}: pass Checkpointer(context=...) with the value that is meant, or make "
                "the active context from it, Context(context)"
            )


def profile_of(context: orbax_v1.Context, profile: DurableProfile) -> DurableProfile:
    """`profile`, as the context asks: the size of data files, bytes in flight, no compression."""
    saving, memory = context.array.saving, context.memory
    changes: dict[str, Any] = {}
    if saving.ocdbt_target_data_file_size is not None:
        changes["data_file_bytes"] = saving.ocdbt_target_data_file_size or _NO_LIMIT
    if memory.write_concurrent_bytes is not None:
        changes["in_flight_bytes"] = min(profile.in_flight_bytes, memory.write_concurrent_bytes)
    if memory.read_concurrent_bytes is not None:
        changes["read_ahead_bytes"] = min(profile.read_ahead_bytes, memory.read_concurrent_bytes)
    if not saving.use_compression:
        changes["compression"] = None
    return dataclasses.replace(profile, **changes)


def manager_options(context: orbax_v1.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's keywords for the manager, with those that the context asks for.

    With `use_load_and_broadcast`, data replicas share the reading of the durable tier wherever they can.
    `timeout_secs` is the time after which a process counts as lost; a caller's own `processes` is kept.
    """
    options = dict(given)
    loading, timeout_s = context.array.loading, context.asynchronous.timeout_secs
    if timeout_s != orbax_v1.Context().asynchronous.timeout_secs:
        options.setdefault("processes", ProcessOptions(timeout_s=timeout_s))
    if loading.use_load_and_broadcast:
        limit = loading.load_and_broadcast_options.broadcast_memory_limit_bytes
        shared = BroadcastOptions(mode="always", **({} if limit is None else {"device_bytes": limit}))
        options["processes"] = dataclasses.replace(options.get("processes", ProcessOptions()), broadcast=shared)
    return options


def saved_by_orbax(context: orbax_v1.Context, profile: DurableProfile) -> bool:
    """Whether the context asks for a durable layout that only Orbax's own handler writes."""
    changed = changed_fields(context, orbax_v1.Context())
    return any(
        RULES[name] == "save" or (RULES[name] == "profile" and not _done_by(profile, name, value))
        for name, value in changed.items()
        if name != _READ
    )


def restored_by_orbax(context: orbax_v1.Context, profile: DurableProfile) -> bool:
    """Whether the context asks for a restore that only Orbax's own handler does."""
    changed = changed_fields(context, orbax_v1.Context())
    return any(
        RULES[name] == "restore" or (name == _READ and not _done_by(profile, name, value))
        for name, value in changed.items()
    )


def _done_by(profile: DurableProfile, name: str, value: Any) -> bool:
    """Whether our own writer, or reader, does what a field asks."""
    match name:
        case "array.saving.ocdbt_target_data_file_size":
            return (value or _NO_LIMIT) == profile.data_file_bytes
        case "array.saving.use_compression":
            return profile.compression is None
        case "memory.write_concurrent_bytes":
            return value >= profile.in_flight_bytes
        case "memory.read_concurrent_bytes":
            return value >= profile.read_ahead_bytes
        case _:
            return True  # use_zarr3=False: cells are zarr 2
