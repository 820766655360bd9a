"""The checked settings of a manager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.events import EventLog
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.policies import ProcessOptions, SaveOptions
from ckptkit.model.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The caller's settings, checked."""

    options: ocp.CheckpointManagerOptions
    tiers: tuple[Tier, ...]  # fastest first
    durable: DurableProfile
    host_id: str
    events: EventLog
    saving: SaveOptions
    processes: ProcessOptions

    def __post_init__(self) -> None:
        if not isinstance(self.host_id, str):
            raise TypeError(f"CheckpointManager: host_id={self.host_id!r}, expected the name of this host as str")
        paths.checked_name(self.host_id, "host_id")
        self.saving.check_tiers(self.tiers)


_EXPECTED = {
    "options": (ocp.CheckpointManagerOptions, "orbax.checkpoint.CheckpointManagerOptions(...)"),
    "events": (EventLog, "ckptkit.EventLog(...)"),
    "durable": (DurableProfile, "ckptkit.DurableProfile(...), or DurableProfile.load(file)"),
    "saving": (SaveOptions, "ckptkit.SaveOptions(...)"),
    "processes": (ProcessOptions, "ckptkit.ProcessOptions(...)"),
}


def check_types(tiers: Any, **given: Any) -> None:
    """Raises TypeError for an argument of `CheckpointManager` of another type, with what is expected."""
    for name, value in given.items():
        kind, expected = _EXPECTED[name]
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"CheckpointManager: {name}={value!r} is of type {type(value).__name__}, expected {expected}"
            )
    if isinstance(tiers, str | Tier) or not isinstance(tiers, Iterable):
        raise TypeError(f"CheckpointManager: tiers={tiers!r}, expected a list: [ckptkit.Tier.ram(path), ...]")
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise TypeError(
                f"CheckpointManager: {tier!r} in tiers is of type {type(tier).__name__}, expected "
                "ckptkit.Tier.ram(path) or Tier.ssd(path)"
            )
