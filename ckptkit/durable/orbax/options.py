"""What a durable tier makes of Orbax's options: its root, and how Orbax's managers are to meet."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.store.schemes import properties_of


def make_root(url: str, options: ocp.CheckpointManagerOptions) -> None:
    """Makes the durable root, with the permissions that the options ask for. One that cannot be made is left to the
    first read or write to say so."""
    properties = properties_of(url)
    if not (properties.file_system or properties.known_to_orbax):
        return  # s3fs would make the bucket: of a name that was mistyped, too
    mode = options.file_options.path_permission_mode if options.file_options else None
    with suppress(OSError):
        ocp.path.step.epath.Path(url).mkdir(parents=True, exist_ok=True, mode=mode)


def without_collectives(options: Any, count: int) -> Any:
    """With these two set, all of Orbax's barriers use the coordination service (FACTS 4)."""
    if count == 1:
        return options
    return dataclasses.replace(
        options,
        active_processes=options.active_processes or set(range(count)),
        barrier_sync_key_prefix=options.barrier_sync_key_prefix or "ckptkit",
    )


def read_by_one(options: ocp.CheckpointManagerOptions) -> dict[str, Any]:
    """Process 0 alone lists steps anyway, and tells the others without Orbax's broadcast between devices."""
    names = options.step_name_format
    if getattr(names, "single_host_load_and_broadcast", False):
        names = dataclasses.replace(names, single_host_load_and_broadcast=False)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return {"single_host_load_and_broadcast": False, "step_name_format": names}


def finishes_in_its_own_way(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether the options say how a step becomes a step: then Orbax writes it."""
    return options.temporary_path_class is not None or options.atomicity_options is not None
