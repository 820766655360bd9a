"""The declaration of tiers, and their policies for saving and keeping steps. Pure values."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckptkit.model import paths

RAM, PEER, SSD, DURABLE = "ram", "peer", "ssd", "durable"
FAST_TIERS = (RAM, PEER, SSD)  # fastest first; the durable tier is slower than any of them
TIERS_ENTRY = "tiers"  # of a save's provenance: the text of `places_text`
MEMORY = "memory"  # the name of the staging area of a run without a fast tier
_Save = TypeVar("_Save")


@runtime_checkable
class TierSavePolicy(Protocol):
    """Decides from the step alone, so that every process decides the same without talking."""

    def due(self, step: int) -> bool:
        """Whether a tier takes this step."""
        ...


@runtime_checkable
class TierClockPolicy(Protocol):
    """Decides from the time since the tier took its last step. Asked on process 0, which announces the answer to the
    others."""

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

    A run that has restored nothing takes its first step. The clock is process 0's: the others wait for its decision at
    every step (one small read of the coordination service). Process 0 waits for no other process.
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


@dataclass(frozen=True, slots=True)
class KeepGood:
    """Keeps `count` steps: the newest ones, and in the place of the oldest of them the newest good one from there on.

    So one good step with `count - 1` newer ones is kept until a newer step is in its place. `is_good` gets a save (with
    its `step`) and has to return the same on all processes. Without any good step the newest ones are kept.
    """

    count: int
    is_good: Callable[[Any], bool] = field(repr=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"KeepGood({self.count}): the newest step is always kept, so the count is at least 1")

    def most(self, share_bytes: int) -> int:
        """See `KeepNewest.most`."""
        del share_bytes
        return self.count

    def kept(self, newest_first: Sequence[_Save], flushed: Collection[_Save], most: int) -> list[_Save]:
        """See `KeepNewest.kept`. The newest step is always kept."""
        del flushed
        newest, older = newest_first[: max(1, most - 1)], newest_first[max(1, most - 1) :]
        if most == 1:
            return list(newest)
        good = next((save for save in older if self.is_good(save)), None)
        return [*newest, good] if good is not None else [*newest, *older[:1]]


TierKeep = KeepNewest | KeepBytes | KeepUnflushed | KeepGood


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A fast tier of this host: a directory on a memory-backed mount or on a local disk, or other hosts' ramdisks.

    Use `Tier.ram(path)`, `Tier.ssd(path)` and `Tier.peer()`. `save` chooses the steps that the tier takes
    (`EverySteps`, `EverySeconds`), `keep` those that it keeps (`KeepNewest`, `KeepBytes`, `KeepUnflushed`). `slots` is
    the number of steps that it has room for; a slot is as large as this process's share of the state. `job` names the
    job's directory.

    Without `keep` the newest step that all processes have committed is kept, and others until their slots are needed.
    Without `slots`, `slots_for` computes the number: one for each kept step, and one for each snapshot that may be in
    flight (one on an SSD). A ramdisk gets one more for slower tiers that may still be reading, and one more if a peer
    tier copies it.
    """

    name: str
    medium: str  # one of `FAST_TIERS`
    path: str
    save: TierSavePolicy | TierClockPolicy
    slots: int | None = None
    keep: TierKeep | None = None
    job: str = "job"
    copies: int = 0  # of a peer tier
    rack: str | None = None

    def __post_init__(self) -> None:
        paths.checked_name(self.job, "job name")
        if self.medium == PEER:
            if self.copies < 1:
                raise ValueError(f"Tier.peer(copies={self.copies}): at least one copy, or leave the tier out")
            if self.keep is not None:
                raise ValueError(
                    f"Tier.peer(keep={self.keep}): a peer tier keeps the newest step of which every process has its "
                    "copies; set the other steps that ramdisks keep with keep= of Tier.ram"
                )
        elif not self.path:
            raise ValueError(f"Tier {self.name!r} needs the path of a directory")
        elif "://" in self.path:
            raise ValueError(
                f"Tier {self.name!r}: {self.path} is not a directory of this host; give it as `directory` of the "
                "manager, whose durable tier may be a bucket"
            )
        if not isinstance(self.save, TierSavePolicy | TierClockPolicy):
            raise ValueError(
                f"Tier {self.name!r}: save={self.save!r} is not a policy of a fast tier; give EverySteps(steps) or "
                "EverySeconds(seconds); Orbax's policies apply to the durable tier only"
            )
        if self.keep is not None and not isinstance(self.keep, TierKeep):
            raise ValueError(
                f"Tier {self.name!r}: keep={self.keep!r} is not a policy of a fast tier; give KeepNewest(count), "
                "KeepBytes(bytes_max) or KeepUnflushed(count); Orbax's policies apply to the durable tier only"
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
        return cls(name=RAM, medium=RAM, path=_fixed(path), save=save, slots=slots, keep=keep, job=job)

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
        return cls(name=SSD, medium=SSD, path=_fixed(path), save=save, slots=slots, keep=keep, job=job)

    def kept_max(self, share_bytes: int) -> int:
        """How many steps are kept at most, for states whose largest share takes `share_bytes` of a slot."""
        return self.keep.most(share_bytes) if self.keep is not None else 1

    def slots_for(self, share_bytes: int, in_flight_max: int, *, beside: int = 0) -> int:
        """How many slots the tier uses for such states: `slots`, or kept + in flight + 1 that is read (a ramdisk).

        `beside`: see `kept_beside`.
        """
        if self.slots is not None:
            return self.slots
        return self.kept_max(share_bytes) + beside + (in_flight_max + 1 if self.medium == RAM else 1)

    def check_slots(self, in_flight_max: int, *, beside: int = 0) -> None:
        """Raises ValueError where `slots` are too few for what is kept and for what may be in flight."""
        if self.slots is None:
            return
        kept, written = self.kept_max(0), in_flight_max if self.medium == RAM else 1
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
        return cls(name=PEER, medium=PEER, path="", save=save, slots=slots, copies=copies, rack=rack)


def places_text(places: Mapping[str, str]) -> str:
    """The directories of fast tiers by their names, as the provenance of a save has them: `ram=/dev/shm/run`."""
    return shlex.join(f"{name}={path}" for name, path in places.items())


def places_of_text(text: str) -> dict[str, str]:
    """The names of fast tiers by their directories, from `places_text`; empty for other text, which anybody may have
    written."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    return {path: name for name, _, path in pairs if name in FAST_TIERS and os.path.isabs(path)}


def _fixed(path: str | os.PathLike[str]) -> str:
    """The same directory also after the job changes its own. A URL or an empty name is refused later, as it is."""
    path = os.fspath(path)
    return os.path.abspath(path) if path and "://" not in path else path


def kept_beside(tier: Tier, tiers: Sequence[Tier]) -> int:
    """How many steps a tier keeps in addition to its own policy: a ramdisk, the newest one with copies on other
    hosts."""
    return int(tier.medium == RAM and any(each.medium == PEER for each in tiers))


def checked_tiers(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """The tiers, fastest first; raises ValueError when one is declared twice."""
    names = [tier.name for tier in tiers]
    if len({tier.medium for tier in tiers}) != len(tiers):
        raise ValueError(f"tiers {names}: at most one ram, one peer and one ssd tier")
    if PEER in names and RAM not in names:
        raise ValueError(f"tiers {names}: a peer tier keeps copies of the ramdisk's slots; add Tier.ram(...)")
    return tuple(sorted(tiers, key=lambda tier: FAST_TIERS.index(tier.medium)))
