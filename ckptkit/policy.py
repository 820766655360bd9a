"""What is saved where: the declaration of tiers and their save policies. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from ckptkit import layout

Medium = Literal["ram", "peer", "ssd"]  # fastest first
DurableBusy = Literal["wait", "skip"]


@runtime_checkable
class TierSavePolicy(Protocol):
    """Decides from the step alone, so that every process decides the same without talking."""

    def due(self, step: int) -> bool:
        """Whether a tier takes this step."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A fast tier of this host: a directory on a memory-backed mount or on a local disk, or other hosts' ramdisks.

    Use `Tier.ram(path)`, `Tier.ssd(path)` and `Tier.peer()`. `save` says which steps the tier takes, `slots` how many
    steps it has room for (a slot is as large as this process's share of the state), `job` names the job's directory.
    """

    name: str
    medium: Medium
    path: str
    save: TierSavePolicy
    slots: int
    job: str = "job"
    copies: int = 0  # of a peer tier
    rack: str | None = None

    def __post_init__(self) -> None:
        layout.checked_name(self.job, "job name")
        if self.slots < 2:
            raise ValueError(
                f"Tier {self.name!r}: slots={self.slots}, at least 2 are needed: the newest committed step must stay "
                "while the next one is written"
            )
        if self.medium == "peer":
            if self.copies < 1:
                raise ValueError(f"Tier.peer(copies={self.copies}): at least one copy, or leave the tier out")
        elif not self.path:
            raise ValueError(f"Tier {self.name!r} needs the path of a directory")

    @classmethod
    def ram(cls, path: str, *, save: TierSavePolicy | None = None, slots: int = 3, job: str = "job") -> Tier:
        """A ramdisk tier: any directory on a memory-backed mount. Never synced; lost with the host's memory."""
        return cls(name="ram", medium="ram", path=str(path), save=save or EverySteps(1), slots=slots, job=job)

    @classmethod
    def ssd(cls, path: str, *, save: TierSavePolicy | None = None, slots: int = 2, job: str = "job") -> Tier:
        """A local disk tier: synced before a step counts as committed, so it survives a power failure."""
        return cls(name="ssd", medium="ssd", path=str(path), save=save or EverySteps(10), slots=slots, job=job)

    @classmethod
    def peer(
        cls, *, copies: int = 1, save: TierSavePolicy | None = None, slots: int = 2, rack: str | None = None
    ) -> Tier:
        """Copies of each process's ramdisk slots in the ramdisks of so many other hosts: a fully sharded job survives
        the loss of as many without the durable tier.

        Needs a ramdisk tier with one slot more (3 or more), and room in it for `slots` of each process whose copies are
        kept: as many as `copies`. `rack` names what this host shares with those that it would be lost with; copies go
        elsewhere where that can be.
        """
        return cls(
            name="peer", medium="peer", path="", save=save or EverySteps(1), slots=slots, copies=copies, rack=rack
        )


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
        """Raises ValueError where the ramdisk tier has too few slots for what may be in flight."""
        kept = ["the newest committed step"]
        if any(tier.medium == "peer" for tier in tiers):
            kept.append("the newest one with copies on other hosts")
        for tier in tiers:
            if tier.medium == "ram" and tier.slots < self.in_flight_max + len(kept):
                raise ValueError(
                    f"in_flight_max={self.in_flight_max} needs Tier.ram(slots={self.in_flight_max + len(kept)}) or "
                    f"more, found {tier.slots}: one slot keeps {', one '.join(kept)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How the processes of a job give each other what their fast tiers hold.

    `host` is the address on which this process serves (None: that of the interface over which it reaches the job's
    coordinator); one that is not answered for `timeout_s` is given up.
    """

    host: str | None = None
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"PeerOptions: timeout_s={self.timeout_s}: give seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What becomes of a durable save that fails. A failed save never stops training by itself.

    A transient failure (a store that does not answer, throttles or drops the connection) is tried again up to
    `retries` times, after `retry_delay_s`, doubled each time. Any other one, or the last, drops the step and degrades
    the tier: it is said in events and raised by `check_for_errors`, `wait_until_finished` or `close`. Once every
    durable save has failed for longer than `durable_max_age_s` (None: never), the next `save` raises
    `SaveFailedError`.
    """

    retries: int = 3
    retry_delay_s: float = 1.0
    durable_max_age_s: float | None = None

    def __post_init__(self) -> None:
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError(
                f"FailurePolicy: retries={self.retries}, retry_delay_s={self.retry_delay_s}: give 0 or more"
            )
        if self.durable_max_age_s is not None and self.durable_max_age_s < 0:
            raise ValueError(f"FailurePolicy: durable_max_age_s={self.durable_max_age_s}: give 0 or more, or None")


def checked_tiers(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """The tiers, fastest first; raises ValueError when one is declared twice."""
    names = [tier.name for tier in tiers]
    if len({tier.medium for tier in tiers}) != len(tiers):
        raise ValueError(f"tiers {names}: at most one ram, one peer and one ssd tier")
    if "peer" in names and "ram" not in names:
        raise ValueError(f"tiers {names}: a peer tier keeps copies of the ramdisk's slots; add Tier.ram(...)")
    return tuple(sorted(tiers, key=lambda tier: get_args(Medium).index(tier.medium)))
