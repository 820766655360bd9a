"""From the options of Orbax's emergency manager to a fast tier, and to options of the durable one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.emergency.checkpoint_manager import CheckpointManagerOptions

from ckptkit.model.tiers import EverySteps, KeepNewest, Tier, TierSavePolicy

_REFUSED = {  # of `options.local`: what a fast tier cannot do, and what to give instead
    "save_decision_policy": "should_save_fn, or tiers=[Tier.ram(path, save=...)]",
    "preservation_policy": "max_to_keep, or tiers=[Tier.ram(path, keep=...)]",
    "debug_use_full_global_mesh": "nothing: every process saves what its devices hold",
}


@dataclass(frozen=True, slots=True)
class _AsDecided:
    """The caller's `should_save_fn`, which gets the latest step too."""

    decide: Callable[[int, int | None], bool]
    latest_step: Callable[[], int | None]

    def due(self, step: int) -> bool:
        """Whether a fast tier takes `step`."""
        return bool(self.decide(step, self.latest_step()))


@dataclass(frozen=True, slots=True)
class _Never:
    """A tier that is read, and takes no step."""

    def due(self, step: int) -> bool:
        """False."""
        del step
        return False


def local_tiers(
    directory: str | os.PathLike[str] | None,
    options: CheckpointManagerOptions,
    latest_step: Callable[[], int | None],
) -> list[Tier]:
    """The ramdisk tier that `options.local` describes; none without a directory.

    Raises ValueError naming each field that a fast tier cannot obey.
    """
    local = options.local
    refused = [f"{name} (give {instead})" for name, instead in _REFUSED.items() if getattr(local, name)]
    if refused:
        raise ValueError(f"emergency.CheckpointManager: a fast tier has no LocalCheckpointOptions.{'; '.join(refused)}")
    if not directory:
        return []
    save: TierSavePolicy = EverySteps(local.save_interval_steps)
    if local.should_save_fn is not None:
        save = _AsDecided(local.should_save_fn, latest_step)
    if local.read_only:
        save = _Never()
    return [Tier.ram(os.fspath(directory), save=save, keep=KeepNewest(max(1, local.max_to_keep or 1)))]


def durable_options(options: CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """The options of the durable tier that `options.persistent` describes."""
    persistent, more = options.persistent, dict[str, Any]()
    if options.async_options is not None:
        more["async_options"] = options.async_options
    return ocp.CheckpointManagerOptions(
        save_interval_steps=persistent.save_interval_steps,
        max_to_keep=persistent.max_to_keep,
        keep_period=persistent.keep_period,
        should_save_fn=persistent.should_save_fn,
        save_decision_policy=persistent.save_decision_policy,
        preservation_policy=persistent.preservation_policy,
        step_name_format=options.step_name_format,
        cleanup_tmp_directories=options.cleanup_tmp_directories,
        enable_async_checkpointing=options.enable_async_checkpointing,
        save_root_metadata=False,
        **more,
    )
