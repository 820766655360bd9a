"""Policies of a job for saves, restores, failures, replicas and peers. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptkit.model.tiers import DURABLE, Tier, kept_beside

BroadcastMode = Literal["auto", "always", "never"]
_LEAST_BUDGET_BYTES = 1 << 20
_ROUNDS = 8  # at least so many where there is enough: the reads of one are behind the transfer of another
_ALIGNED_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastOptions:
    """How a restore of several processes gets what data replicas have in common and only the durable tier holds.

    Each box is read by one of the processes that want it, and sent to the others by a collective over the devices. So
    the storage serves each byte once, not once for each replica. `auto` does so if the durable tier is a bucket and a
    process wants at least 64 MB that other replicas want too, except in `restore_async`. `always` does so whenever
    replicas share boxes. With `never` each process reads for itself. All processes must give the same value.

    64 MB is the smallest measured state that two replicas share in no more time than each reads it, from a bucket that
    gives both together 400 MB/s (`bench/LOG.md`, 2026-11-28). From a slower one, or for more replicas, it is faster.

    `device_bytes` bounds the device memory of one process for the transfer, over all its devices. `host_bytes` bounds
    its host memory, apart from the restored arrays and the durable tier's read-ahead
    (`DurableProfile.read_ahead_bytes`); one cell more if a cell is larger than a transfer.
    """

    mode: BroadcastMode = "auto"
    device_bytes: int = 256 << 20
    host_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if self.mode not in get_args(BroadcastMode):
            raise ValueError(f"BroadcastOptions(mode={self.mode!r}): give one of {', '.join(get_args(BroadcastMode))}")
        for name in ("device_bytes", "host_bytes"):
            if (size := getattr(self, name)) < _LEAST_BUDGET_BYTES:
                raise ValueError(f"BroadcastOptions({name}={size}): give at least {_LEAST_BUDGET_BYTES} bytes")

    def width(self, longest_bytes: int, replicas: int, links: int) -> int:
        """Bytes that each process contributes to one round, where one contributes `longest_bytes` in all.

        The devices hold the sent and the received data, `replicas + 1` widths. Host memory holds two more that are read
        meanwhile, and one that is being packed. A multiple of what `links` devices of a process can share.
        """
        budget = min(self.device_bytes // (replicas + 1), self.host_bytes // (replicas + 4))
        unit = _ALIGNED_BYTES * links
        wanted = max(min(_LEAST_BUDGET_BYTES, longest_bytes + _ALIGNED_BYTES), -(-longest_bytes // _ROUNDS))
        return max(unit, min(budget // unit, -(-wanted // unit)) * unit)

    def ahead(self, width: int, replicas: int) -> int:
        """How many windows of `width` a process may have read and not sent: what is left of `host_bytes`, at least 2.

        Host memory also holds the data received from `replicas`, and two windows that are packed.
        """
        return max(2, self.host_bytes // width - replicas - 2)


Strategy = Literal["slot_copy", "device_copy", "pinned_host", "block"]  # see `ckptkit.snapshot.staging`
StagingChoice = Strategy | Literal["auto"]
DurableBusy = Literal["wait", "skip"]
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "::0", "0", "*")
OnDifference = Literal["report", "keep", "stop"]
DIFFERENCES_NAMED = 8  # of those between replicas of one save, of each kind: more are not looked into


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How the processes of a job give each other what their fast tiers hold.

    `host` is the one address on which this process serves; None: that of the interface over which it reaches the job's
    coordinator. A request without an answer fails after `timeout_s`.
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
    """The consequences of failed saves. A failed save stops training only if this policy requires it.

    A failure of a durable save is transient if the store does not answer, throttles or drops the connection. Such a
    save is tried again up to `retries` times, after half to all of `retry_delay_s`, doubled each time. Any other
    failure, or the last one, drops the step and degrades the tier. From then on no save waits for the durable tier on
    the step loop. After `pause_after` failed saves in a row the tier is paused for `pause_s`: saves due in it fail at
    once. Then one save is tried, without retries. If it fails too, the next pause is twice as long, up to 16 times
    `pause_s`. A successful save ends the pause (`tier_recovered`). Forced saves and those of a preemption are tried
    even in a pause.

    Every lost save is a warning in the log and an event, on every process. `check_for_errors`, `wait_until_finished`
    and `close` raise it, once in each thread that waits. `raise_in_save` chooses the losses that the next `save` raises
    too. `lost` (the default): saves that no tier holds, so that training continues through an outage of the bucket
    while a ramdisk has the step. `all`: every loss, as Orbax does. `never`: none.

    `save` raises `SaveFailedError` after `skipped_max` saves in a row that no tier has committed; saves that came too
    early do not count. It also raises it when a save is lost more than `max_age_s` after the first lost one, with no
    commit between them: a run that saves less often than that has one more try. A number for `max_age_s` applies to the
    durable tier and to all tiers together; a mapping names tiers (`any tier` for all together). The defaults are 10
    saves and half an hour. Ten losses in a row are not a short disturbance, and half an hour is the risk between two
    checkpoints of jobs without fast tiers. None turns a limit off.
    """

    retries: int = 3
    retry_delay_s: float = 1.0
    pause_after: int = 3
    pause_s: float = 60.0
    skipped_max: int | None = 10
    max_age_s: float | Mapping[str, float] | None = 1800.0
    raise_in_save: Literal["lost", "all", "never"] = "lost"

    @property
    def age_limits_s(self) -> Mapping[str, float]:
        """The longest time without a commit, by tier."""
        if isinstance(self.max_age_s, Mapping):
            return self.max_age_s
        return {} if self.max_age_s is None else {DURABLE: self.max_age_s, "any tier": self.max_age_s}

    def __post_init__(self) -> None:
        if self.skipped_max is not None and self.skipped_max < 1:
            raise ValueError(f"FailurePolicy: skipped_max={self.skipped_max}: give 1 or more, or None")
        if any(not limit_s > 0 for limit_s in self.age_limits_s.values()):
            raise ValueError(f"FailurePolicy: max_age_s={self.max_age_s}: give seconds above 0, or None")
        if self.raise_in_save not in ("lost", "all", "never"):
            raise ValueError(f"FailurePolicy: raise_in_save={self.raise_in_save!r}: give lost, all or never")
        if self.pause_after < 1 or self.pause_s < 0:
            raise ValueError(
                f"FailurePolicy: pause_after={self.pause_after}, pause_s={self.pause_s}: give a failure or more, and "
                "0 seconds or more"
            )
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError(
                f"FailurePolicy: retries={self.retries}, retry_delay_s={self.retry_delay_s}: give 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """The comparison of data replicas at each save, and the consequence of a difference.

    Every save compares, in the background, each box that several processes hold, by the digests of the stored bytes. Of
    boxes that several devices of one process hold, it compares as many other copies as fit into `local_bytes_max`, at
    most 512 (None: all; 0: none), rotating from save to save. The cost is reading these copies, on the step loop if
    the save copies there. `report`: an event reports a difference, and the save continues. `keep`: the save is dropped
    everywhere, so that the last step whose replicas agreed stays the newest. `stop`: the same, and `save`,
    `check_for_errors`, `wait_until_finished` and `close` raise `ReplicaMismatchError`. All processes give the same.

    `reported_max` is for runs with nondeterministic kernels (GPUs without `--xla_gpu_deterministic_ops`), whose
    replicas differ although no device is broken. They differ in many boxes at once, a broken device in few. A save
    whose replicas differ in more boxes than `reported_max` (1 to 7) reports none of them. Only with `report`.
    """

    on_difference: OnDifference = "report"
    local_bytes_max: int | None = 64 << 20
    reported_max: int | None = None

    def __post_init__(self) -> None:
        if self.reported_max is not None:
            if not 1 <= self.reported_max < DIFFERENCES_NAMED:
                raise ValueError(
                    f"reported_max={self.reported_max}: give 1 to {DIFFERENCES_NAMED - 1} boxes, or None to report all"
                )
            if self.on_difference != "report":
                raise ValueError(
                    f"on_difference={self.on_difference!r} refuses a save before it is known how many boxes differ: "
                    "give reported_max=None, or on_difference='report'"
                )
        if self.on_difference not in get_args(OnDifference):
            raise ValueError(f"on_difference {self.on_difference!r}: give one of {', '.join(get_args(OnDifference))}")
        if self.local_bytes_max is not None and self.local_bytes_max < 0:
            raise ValueError(
                f"local_bytes_max={self.local_bytes_max}: give a number of bytes, 0 for none, None for all"
            )


def _check_kind(record: object, name: str, kind: type, *, optional: bool = False) -> None:
    """Raises TypeError where a field of a record is of another type."""
    value = getattr(record, name)
    if not isinstance(value, kind) and not (optional and value is None):
        raise TypeError(
            f"{type(record).__name__}({name}={value!r}): expected ckptkit.{kind.__name__}(...)"
            + " or None" * optional
            + f", found {type(value).__name__}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a manager saves.

    Args:
      staging: how a save keeps the state alive (`ckptkit.snapshot.staging`): `auto`, or a strategy by name.
      in_flight_max: how many snapshots may be in flight, that is, before their first commit by all processes. A save
      beyond this limit is skipped everywhere, with an event; a save that is due in the durable tier waits. Without a
      ramdisk tier a snapshot is in flight until every tier has it, so this limits the snapshots in memory.
      host_bytes_max: the most host memory that this process's snapshots may take, ramdisk slots included. The limit
        is the least of this, `memory.max` of every control group above the process, and what the mount has free. Pinned
        memory counts while it is in use: JAX keeps it afterwards, on a GPU up to 1.5 GB.
      device_copy_bytes_max: the most memory of each accelerator that copies of saves may take; None: what
        `ckptkit.snapshot.device_room` finds free, 0: none. `save` waits for the transfer of the part of a state that
        has no room there.
      durable_busy: the behaviour of a save that is due in the durable tier while that tier is busy. `wait` blocks and
        reports how long (`waited_s` of the `staged` event). `skip` leaves the step out of the durable tier. Forced
        saves and those of a preemption always wait.
      on_failure: the consequences of failed durable saves.
      replicas: the comparison of data replicas at each save; None: no comparison.
      revision: that of the caller's source, for the provenance of each save; None: the environment variable
        `CKPTKIT_REVISION`.
      record_command: whether the provenance has the command line of the process. Turn it off if that has secrets.

    Raises ValueError for a value that is not one of these.
    """

    staging: StagingChoice = "auto"
    in_flight_max: int = 1
    host_bytes_max: int | None = None
    device_copy_bytes_max: int | None = None
    durable_busy: DurableBusy = "wait"
    on_failure: FailurePolicy = field(default_factory=FailurePolicy)
    replicas: ReplicaPolicy | None = field(default_factory=ReplicaPolicy)
    revision: str | None = None
    record_command: bool = True

    def __post_init__(self) -> None:
        strategies = (*get_args(Strategy), "auto")
        if self.staging not in strategies:
            raise ValueError(f"staging {self.staging!r}: give one of {', '.join(strategies)}")
        if self.in_flight_max < 1:
            raise ValueError(f"in_flight_max={self.in_flight_max}: at least one snapshot must be allowed")
        if self.host_bytes_max is not None and self.host_bytes_max < 1:
            raise ValueError(f"host_bytes_max={self.host_bytes_max}: give a number of bytes, or None for no setting")
        if self.device_copy_bytes_max is not None and self.device_copy_bytes_max < 0:
            raise ValueError(
                f"device_copy_bytes_max={self.device_copy_bytes_max}: give a number of bytes, 0 for none, or None"
            )
        if self.durable_busy not in get_args(DurableBusy):
            raise ValueError(f"durable_busy {self.durable_busy!r}: give one of {', '.join(get_args(DurableBusy))}")
        if not isinstance(self.revision, str | None):
            raise ValueError(f"revision={self.revision!r}: give the revision as text, or None")
        _check_kind(self, "on_failure", FailurePolicy)
        _check_kind(self, "replicas", ReplicaPolicy, optional=True)

    def check_tiers(self, tiers: tuple[Tier, ...]) -> None:
        """Raises ValueError where a tier has too few slots for what may be in flight."""
        for tier in tiers:
            tier.check_slots(self.in_flight_max, beside=kept_beside(tier, tiers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """How the processes of a job work together.

    Args:
      timeout_s: the longest wait for other processes, and for the previous durable save.
      peers: how the processes of a job of several read each other's fast tiers at a restore; None: they do not.
      broadcast: whether, at a `restore`, data replicas read the durable tier for each other.
      close_timeout_s: how long a process that ends without `close` waits for the saves in flight. Saves
          that are not written by then are lost, and an error in the log names them.
      progress: shows on a terminal or in a notebook how far a save, a restore or a wait of more than 5 s has come.

    Raises ValueError for seconds that are not above 0.
    """

    timeout_s: float = 600.0
    close_timeout_s: float = 60.0
    peers: PeerOptions | None = field(default_factory=PeerOptions)
    broadcast: BroadcastOptions = field(default_factory=BroadcastOptions)
    progress: bool = True

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or not self.close_timeout_s > 0:
            given = f"timeout_s={self.timeout_s}, close_timeout_s={self.close_timeout_s}"
            raise ValueError(f"ProcessOptions: {given}: give seconds above 0")
        _check_kind(self, "peers", PeerOptions, optional=True)
        _check_kind(self, "broadcast", BroadcastOptions)
