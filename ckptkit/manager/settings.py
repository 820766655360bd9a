"""What the caller of a manager asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import orbax.checkpoint as ocp

from ckptkit.events import EventLog
from ckptkit.model import paths
from ckptkit.model.broadcast_options import BroadcastOptions
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.policies import Backpressure, FailurePolicy, PeerOptions, ReplicaPolicy
from ckptkit.model.tiers import Tier
from ckptkit.model.verify_mode import Verify, checked_verify
from ckptkit.snapshot.staging import checked_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller asked for, checked. `staging` is a choice of `ckptkit.snapshot.staging`."""

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
        paths.checked_name(self.host_id, "host_id")
        checked_choice(self.staging)
        checked_verify(self.verify)
        self.backpressure.check_tiers(self.tiers)
