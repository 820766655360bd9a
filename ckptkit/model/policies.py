"""What a job may say of saves that come early, that fail, or that differ, and of its peers. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ckptkit.model.tiers import Tier, kept_beside

DurableBusy = Literal["wait", "skip"]


_EVERY_INTERFACE = ("", "0.0.0.0", "::", "::0", "0", "*")


OnDifference = Literal["report", "keep", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backpressure:
    """What happens to a save that comes too early, and how much host memory snapshots may take.

    `in_flight_max` snapshots may be on their way to their first commit by all processes; one more is skipped.
    `host_bytes_max` bounds the bytes of one process's snapshots (ramdisk slots included; None: what control groups
    and the mount leave). `durable_busy` says what a save does that is due while the durable tier is still busy.
    """

    in_flight_max: int = 1
    host_bytes_max: int | None = None
    durable_busy: DurableBusy = "wait"

    def __post_init__(self) -> None:
        if self.in_flight_max < 1:
            raise ValueError(f"in_flight_max={self.in_flight_max}: at least one snapshot must be allowed")
        if self.host_bytes_max is not None and self.host_bytes_max < 1:
            raise ValueError(f"host_bytes_max={self.host_bytes_max}: give a number of bytes, or None for no setting")
        if self.durable_busy not in get_args(DurableBusy):
            raise ValueError(f"durable_busy {self.durable_busy!r}: give one of {', '.join(get_args(DurableBusy))}")

    def check_tiers(self, tiers: tuple[Tier, ...]) -> None:
        """Raises ValueError where a tier has too few slots for what may be in flight."""
        for tier in tiers:
            tier.check_slots(self.in_flight_max, beside=kept_beside(tier, tiers))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How the processes of a job give each other what their fast tiers hold.

    `host` is the one address on which this process serves (None: that of the interface over which it reaches the job's
    coordinator); one that is not answered for `timeout_s` is given up.
    """

    host: str | None = None
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.host is not None and self.host.strip("[]") in _EVERY_INTERFACE:
            raise ValueError(
                f"PeerOptions: host={self.host!r} is every interface; give the address of one that leads to the job's "
                "other hosts, or None"
            )
        if self.timeout_s <= 0:
            raise ValueError(f"PeerOptions: timeout_s={self.timeout_s}: give seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What becomes of a durable save that fails. A failed save never stops training by itself.

    A transient failure (a store that does not answer, throttles or drops the connection) is tried again up to
    `retries` times, after half to all of `retry_delay_s`, doubled each time. Any other one, or the last, drops the step
    and degrades the tier: it is said in events and raised by `check_for_errors`, `wait_until_finished` or `close`. From
    then on no save waits for the durable tier on the step loop. After `pause_after` failed saves in a row the tier is
    paused for `pause_s`: saves due in it fail at once. Then one is tried, without retries; where it fails too the next
    pause is twice as long, up to 16 times `pause_s`, and one that works ends it (`tier_recovered`). Forced saves and
    those of a preemption are tried also in a pause. Once every durable save has failed for longer than
    `durable_max_age_s` (None: never), the next `save` raises `SaveFailedError`.
    """

    retries: int = 3
    retry_delay_s: float = 1.0
    pause_after: int = 3
    pause_s: float = 60.0
    durable_max_age_s: float | None = None

    def __post_init__(self) -> None:
        if self.pause_after < 1 or self.pause_s < 0:
            raise ValueError(
                f"FailurePolicy: pause_after={self.pause_after}, pause_s={self.pause_s}: give a failure or more, and "
                "0 seconds or more"
            )
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError(
                f"FailurePolicy: retries={self.retries}, retry_delay_s={self.retry_delay_s}: give 0 or more"
            )
        if self.durable_max_age_s is not None and self.durable_max_age_s < 0:
            raise ValueError(f"FailurePolicy: durable_max_age_s={self.durable_max_age_s}: give 0 or more, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """What a save compares of data replicas, and what becomes of it where they differ.

    Compared at every save, in the background: each box that several processes hold, by the digests of what is stored;
    and of boxes that several devices of one process hold, as many other copies as fit into `local_bytes_max` (None:
    all; 0: none), in turn from save to save: reading these is what it costs, on the step loop where the save copies
    there. `report`: events say it, the save goes on. `keep`: the save is dropped everywhere, so that the last step
    whose replicas agreed stays the newest. `stop`: the same, and `save`, `check_for_errors`, `wait_until_finished`
    and `close` raise `ReplicaMismatchError`. All processes give the same.
    """

    on_difference: OnDifference = "report"
    local_bytes_max: int | None = 64 << 20

    def __post_init__(self) -> None:
        if self.on_difference not in get_args(OnDifference):
            raise ValueError(f"on_difference {self.on_difference!r}: give one of {', '.join(get_args(OnDifference))}")
        if self.local_bytes_max is not None and self.local_bytes_max < 0:
            raise ValueError(
                f"local_bytes_max={self.local_bytes_max}: give a number of bytes, 0 for none, None for all"
            )
