"""What the caller of a manager asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import orbax.checkpoint as ocp

from ckptkit import layout
from ckptkit.broadcast import BroadcastOptions
from ckptkit.events import EventLog
from ckptkit.policy import Backpressure, FailurePolicy, PeerOptions, ReplicaPolicy, Tier
from ckptkit.proving import Verify, checked_verify
from ckptkit.staging import checked_choice
from ckptkit.tuning import DurableProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller asked for, checked. `staging` is a choice of `ckptkit.staging`."""

    options: ocp.CheckpointManagerOptions
    tiers: tuple[Tier, ...]  # fastest first
    host_id: str
    events: EventLog
    staging: str
    timeout_s: float
    backpressure: Backpressure
    on_failure: FailurePolicy
    replicas: ReplicaPolicy | None
    verify: Verify
    durable: DurableProfile
    peers: PeerOptions | None = None  # None: no process reads another's tiers
    broadcast: BroadcastOptions = field(default_factory=BroadcastOptions)

    def __post_init__(self) -> None:
        layout.checked_name(self.host_id, "host_id")
        checked_choice(self.staging)
        checked_verify(self.verify)
        self.backpressure.check_tiers(self.tiers)
