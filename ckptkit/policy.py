"""What is saved where, and what is kept: the declaration of tiers and their policies. Pure values."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args, runtime_checkable

from ckptkit import layout

Medium = Literal["ram", "peer", "ssd"]  # fastest first
DurableBusy = Literal["wait", "skip"]
_Save = TypeVar("_Save")
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "::0", "0", "*")
OnDifference = Literal["report", "keep", "stop"]


@runtime_checkable
class TierSavePolicy(Protocol):
    """Decides from the step alone, so that every process decides the same without talking."""

    def due(self, step: int) -> bool:
        """Whether a tier takes this step."""
        ...


@runtime_checkable
class TierClockPolicy(Protocol):
    """Decides from the time since the tier took its last step. Asked on process 0, whose word the others hear."""

    def due_after(self, passed_s: float | None) -> bool:
        """Whether a step is due `passed_s` after the last one that was taken or restored; None: there was none."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Takes every step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"EverySteps({self.steps}): a step interval is at least 1")

    def due(self, step: int) -> bool:
        """Whether `step` is a multiple of the interval."""
        return step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Takes a step once `seconds` have passed since the last one that the tier took, or that was restored.

    A run that has restored nothing takes its first step. The clock is process 0's: the others wait for its word at
    every step (one small read of the coordination service), and process 0 waits for nobody.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"EverySeconds({self.seconds}): give a number of seconds above 0")

    def due_after(self, passed_s: float | None) -> bool:
        """Whether a step is due `passed_s` after the last one; None: there was none."""
        return passed_s is None or passed_s >= self.seconds


@dataclass(frozen=True, slots=True)
class KeepNewest:
    """Keeps exactly the newest `count` steps that all processes have committed to the tier."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"KeepNewest({self.count}): the newest step is always kept, so the count is at least 1")

    def most(self, share_bytes: int) -> int:
        """How many steps are kept at most, where the largest share of a process takes `share_bytes` of a slot."""
        del share_bytes
        return self.count

    def kept(self, newest_first: Sequence[_Save], flushed: Collection[_Save], most: int) -> list[_Save]:
        """Which of the tier's saves are kept; `flushed` are those that the next slower tier holds too."""
        del flushed
        return list(newest_first[:most])


@dataclass(frozen=True, slots=True)
class KeepBytes:
    """Keeps the newest steps that together take at most `bytes_max` of a process's slots; the newest one always.

    A step counts as the largest share of any process, so that all processes keep the same steps.
    """

    bytes_max: int

    def __post_init__(self) -> None:
        if self.bytes_max < 1:
            raise ValueError(f"KeepBytes({self.bytes_max}): give the bytes that kept steps may take in each process")

    def most(self, share_bytes: int) -> int:
        """See `KeepNewest.most`."""
        return max(1, self.bytes_max // max(1, share_bytes))

    def kept(self, newest_first: Sequence[_Save], flushed: Collection[_Save], most: int) -> list[_Save]:
        """See `KeepNewest.kept`."""
        del flushed
        return list(newest_first[:most])


@dataclass(frozen=True, slots=True)
class KeepUnflushed:
    """Keeps the newest step, and of the others those that the next slower tier does not hold: the newest `count`.

    The next slower tier of a ramdisk is the SSD where there is one, else the durable tier. A step goes as soon as
    that tier has it; one that never reaches it stays until `count` newer ones are in its place.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"KeepUnflushed({self.count}): give room for at least 1 step")

    def most(self, share_bytes: int) -> int:
        """See `KeepNewest.most`."""
        del share_bytes
        return self.count + 1

    def kept(self, newest_first: Sequence[_Save], flushed: Collection[_Save], most: int) -> list[_Save]:
        """See `KeepNewest.kept`."""
        del most
        others = [save for save in newest_first[1:] if save not in flushed]
        return [*newest_first[:1], *others[: self.count]]


TierKeep = KeepNewest | KeepBytes | KeepUnflushed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A fast tier of this host: a directory on a memory-backed mount or on a local disk, or other hosts' ramdisks.

    Use `Tier.ram(path)`, `Tier.ssd(path)` and `Tier.peer()`. `save` says which steps the tier takes (`EverySteps`,
    `EverySeconds`), `keep` which of them it keeps (`KeepNewest`, `KeepBytes`, `KeepUnflushed`), `slots` how many steps
    it has room for (a slot is as large as this process's share of the state), `job` names the job's directory.

    Without `keep` the newest step that all processes have committed is kept, and others until their slots are needed.
    Without `slots` there are as many as are kept, one for each snapshot that may be in flight (on an SSD one), and on
    a ramdisk one that slower tiers may still be reading, and one more where a peer tier copies it: `slots_for`.
    """

    name: str
    medium: Medium
    path: str
    save: TierSavePolicy | TierClockPolicy
    slots: int | None = None
    keep: TierKeep | None = None
    job: str = "job"
    copies: int = 0  # of a peer tier
    rack: str | None = None

    def __post_init__(self) -> None:
        layout.checked_name(self.job, "job name")
        if self.medium == "peer":
            if self.copies < 1:
                raise ValueError(f"Tier.peer(copies={self.copies}): at least one copy, or leave the tier out")
            if self.keep is not None:
                raise ValueError(
                    f"Tier.peer(keep={self.keep}): a peer tier keeps the newest step of which every process has its "
                    "copies; say with keep= of Tier.ram what ramdisks keep beside it"
                )
        elif not self.path:
            raise ValueError(f"Tier {self.name!r} needs the path of a directory")
        if not isinstance(self.save, TierSavePolicy | TierClockPolicy):
            raise ValueError(
                f"Tier {self.name!r}: save={self.save!r} is no policy of a fast tier; give EverySteps(steps) or "
                "EverySeconds(seconds); Orbax's policies rule the durable tier, in its options"
            )
        if self.keep is not None and not isinstance(self.keep, TierKeep):
            raise ValueError(
                f"Tier {self.name!r}: keep={self.keep!r} is no policy of a fast tier; give KeepNewest(count), "
                "KeepBytes(bytes_max) or KeepUnflushed(count); Orbax's policies rule the durable tier, in its options"
            )
        if self.slots is not None and isinstance(self.keep, KeepBytes):
            raise ValueError(
                f"Tier {self.name!r}: slots={self.slots} and {self.keep}: slots follow from the bytes, give one of both"
            )
        self.check_slots(1)

    @classmethod
    def ram(
        cls,
        path: str,
        *,
        save: TierSavePolicy | TierClockPolicy | None = None,
        slots: int | None = None,
        keep: TierKeep | None = None,
        job: str = "job",
    ) -> Tier:
        """A ramdisk tier: any directory on a memory-backed mount. Never synced; lost with the host's memory."""
        save = EverySteps(1) if save is None else save
        return cls(name="ram", medium="ram", path=str(path), save=save, slots=slots, keep=keep, job=job)

    @classmethod
    def ssd(
        cls,
        path: str,
        *,
        save: TierSavePolicy | TierClockPolicy | None = None,
        slots: int | None = None,
        keep: TierKeep | None = None,
        job: str = "job",
    ) -> Tier:
        """A local disk tier: synced before a step counts as committed, so it survives a power failure."""
        save = EverySteps(10) if save is None else save
        return cls(name="ssd", medium="ssd", path=str(path), save=save, slots=slots, keep=keep, job=job)

    def kept_max(self, share_bytes: int) -> int:
        """How many steps are kept at most, for states whose largest share takes `share_bytes` of a slot."""
        return self.keep.most(share_bytes) if self.keep is not None else 1

    def slots_for(self, share_bytes: int, in_flight_max: int, *, beside: int = 0) -> int:
        """How many slots the tier uses for such states: `slots`, or kept + in flight + 1 that is read (a ramdisk).

        `beside` are those that `kept_beside` counts.
        """
        if self.slots is not None:
            return self.slots
        return self.kept_max(share_bytes) + beside + (in_flight_max + 1 if self.medium == "ram" else 1)

    def check_slots(self, in_flight_max: int, *, beside: int = 0) -> None:
        """Raises ValueError where `slots` are too few for what is kept and for what may be in flight."""
        if self.slots is None:
            return
        kept, written = self.kept_max(0), in_flight_max if self.medium == "ram" else 1
        needed = kept + beside + written
        if self.slots < needed:
            copied = f", {beside} with copies on other hosts" if beside else ""
            raise ValueError(
                f"Tier {self.name!r}: slots={self.slots}, at least {needed} are needed: {kept} kept "
                f"({self.keep or 'the newest committed step'}){copied} and {written} being written"
                + (f" (in_flight_max={written})" if written > 1 else "")
            )

    @classmethod
    def peer(
        cls,
        *,
        copies: int = 1,
        save: TierSavePolicy | EverySeconds | None = None,
        slots: int = 2,
        rack: str | None = None,
    ) -> Tier:
        """Copies of each process's ramdisk slots in the ramdisks of so many other hosts: a fully sharded job survives
        the loss of as many without the durable tier.

        Needs a ramdisk tier with one slot more (3 or more), and room in it for `slots` of each process whose copies are
        kept: as many as `copies`. Kept is the newest step of which every process has its copies. `rack` names what this
        host shares with those that it would be lost with; copies go elsewhere where that can be.
        """
        save = EverySteps(1) if save is None else save
        return cls(name="peer", medium="peer", path="", save=save, slots=slots, copies=copies, rack=rack)


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


def kept_beside(tier: Tier, tiers: Sequence[Tier]) -> int:
    """How many steps a tier keeps beside what its own policy says: a ramdisk, the newest with copies on other hosts."""
    return int(tier.medium == "ram" and any(each.medium == "peer" for each in tiers))


def checked_tiers(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """The tiers, fastest first; raises ValueError when one is declared twice."""
    names = [tier.name for tier in tiers]
    if len({tier.medium for tier in tiers}) != len(tiers):
        raise ValueError(f"tiers {names}: at most one ram, one peer and one ssd tier")
    if "peer" in names and "ram" not in names:
        raise ValueError(f"tiers {names}: a peer tier keeps copies of the ramdisk's slots; add Tier.ram(...)")
    return tuple(sorted(tiers, key=lambda tier: get_args(Medium).index(tier.medium)))
