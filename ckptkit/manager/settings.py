"""The checked settings of a manager, and the keywords of an older release for them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

import orbax.checkpoint as ocp

from ckptkit.events import EventLog
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.policies import (
    BroadcastOptions,
    DurableBusy,
    FailurePolicy,
    PeerOptions,
    ProcessOptions,
    ReplicaPolicy,
    RestoreOptions,
    SaveOptions,
    StagingChoice,
)
from ckptkit.model.tiers import Tier
from ckptkit.model.verify_mode import Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The caller's settings, checked."""

    options: ocp.CheckpointManagerOptions
    tiers: tuple[Tier, ...]  # fastest first
    durable: DurableProfile
    host_id: str
    events: EventLog
    saving: SaveOptions
    restoring: RestoreOptions
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
    "restoring": (RestoreOptions, "ckptkit.RestoreOptions(...)"),
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


class DeprecatedKeywords(TypedDict, total=False):
    """Keywords of `CheckpointManager` that are fields of its option records now. They work until the next release."""

    staging: StagingChoice
    in_flight_max: int
    host_bytes_max: int | None
    durable_busy: DurableBusy
    on_failure: FailurePolicy
    replicas: ReplicaPolicy | None
    verify: Verify
    broadcast: BroadcastOptions
    timeout_s: float
    peers: PeerOptions | None


DEPRECATED_KEYWORDS = tuple(DeprecatedKeywords.__annotations__)
_RECORDS = {"saving": SaveOptions, "restoring": RestoreOptions, "processes": ProcessOptions}


def option_records(
    saving: SaveOptions | None,
    restoring: RestoreOptions | None,
    processes: ProcessOptions | None,
    deprecated: DeprecatedKeywords,
) -> tuple[SaveOptions, RestoreOptions, ProcessOptions]:
    """The three records: those that are given, else made of `deprecated`, which is warned about once, with the new
    spelling.

    Raises TypeError for an unknown keyword, ValueError if a record is given together with a keyword that it contains.
    """
    given = {"saving": saving, "restoring": restoring, "processes": processes}
    left: dict[str, Any] = dict(deprecated)
    records, spelled = [], []
    for argument, record in _RECORDS.items():
        values = {name: left.pop(name) for name in record.__dataclass_fields__ if name in left}
        if values and given[argument] is not None:
            raise ValueError(f"{', '.join(values)}: given together with {argument}; put it into {argument} alone")
        if values:
            spelled.append(f"{argument}=ckptkit.{record.__name__}({', '.join(f'{name}=...' for name in values)})")
        records.append(given[argument] or record(**values))
    if left:
        raise TypeError(f"CheckpointManager: {', '.join(left)}: no such argument")
    if spelled:
        warnings.warn(
            f"CheckpointManager: {', '.join(deprecated)} are deprecated as arguments; write {', '.join(spelled)}",
            DeprecationWarning,
            stacklevel=_level_of_the_caller(),
        )
    return records[0], records[1], records[2]


def _level_of_the_caller() -> int:
    """The `stacklevel` for a warning of this module's function: the first frame outside ckptkit."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ckptkit."):
        level, frame = level + 1, frame.f_back
    return level
