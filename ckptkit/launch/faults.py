"""Plans of faults, from a seed: pure values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ckptkit.model.tiers import DURABLE, RAM, SSD

FaultKind = Literal["kill", "host", "freeze", "preempt", "fill", "outage"]
KINDS: Final = ("kill", "host", "freeze", "preempt", "fill", "outage")
LASTING: Final = frozenset({"freeze", "fill", "outage"})  # they end by themselves, and the job may live through them
ANY: Final = "any"
PLACES: Final = (RAM, SSD, DURABLE, ANY)  # of the victim, as its event log has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A directory, and the chance that a fault also damages it. In the path `{process}` is the number of the victim,
    and `{host}` that of its host. One of `PLACES` is the directory of the victim's tier, or of one of its tiers."""

    path: str
    chance: float

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ValueError(f"{self.path}: the chance is {self.chance:g}, expected 0 to 1")
        if self.path not in PLACES:
            checked_own(self.path)

    def path_of(self, victim: int, host: int) -> str:
        """The directory of a victim."""
        return self.path.replace("{process}", str(victim)).replace("{host}", str(host))


def is_own(path: str) -> bool:
    """Whether it is absolute, and not near the root of the file system."""
    return len(Path(path).parts) >= 3 and Path(path).is_absolute()


def checked_own(path: str) -> str:
    """The path. Raises `ValueError` for one that may not be the job's own."""
    if not is_own(path):
        raise ValueError(f"{path}: give a directory of the job's own, by its whole path")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, planned for `after_s` seconds after the job has made a step, or after its launch. `victims`: processes
    (all those of a host). `wipes`, `flips`: directories, or `PLACES`."""

    number: int
    after_s: float
    kind: FaultKind
    victims: tuple[int, ...]
    wipes: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()
    since: Literal["step", "launch"] = "step"

    @property
    def target(self) -> str:
        """Its victim: `process 3`."""
        return {
            "kill": f"process {self.victims[0]}",
            "host": f"the host of processes {', '.join(map(str, self.victims))}",
            "freeze": f"process {self.victims[0]}",
            "preempt": "the job",
            "fill": "the disk",
            "outage": "the bucket",
        }[self.kind]

    @property
    def text(self) -> str:
        """In words: `kill process 3`."""
        verb = {"host": "kill", "outage": "take away"}.get(self.kind, self.kind)
        return f"{verb} {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of a seed: `count` of them, on average `mtbf_s` apart. The same seed plans the same faults.

    `weights`: how often each kind is drawn, in relation to the others. `hosts`: the processes are taken as those of so
    many hosts. Raises `ValueError` for weights of other kinds, and where none is above 0.
    """

    seed: int
    mtbf_s: float
    count: int
    weights: Mapping[FaultKind, float] = field(default_factory=lambda: {"kill": 1.0})
    wipes: tuple[Hazard, ...] = ()
    flips: tuple[Hazard, ...] = ()
    hosts: int = 1

    def __post_init__(self) -> None:
        if set(self.weights) - set(KINDS) or min(self.weights.values()) < 0 or not sum(self.weights.values()):
            raise ValueError(f"choose among {', '.join(KINDS)}, with weights of which one is above 0")

    def faults(self, processes: int) -> Iterator[Fault]:
        """The faults of a job of so many processes, in order. Raises `ValueError` where they are not as many on each
        host."""
        if processes % self.hosts:
            raise ValueError(f"{processes} processes are not as many on each of {self.hosts} hosts")
        return self._faults(processes)

    def _faults(self, processes: int) -> Iterator[Fault]:
        chance = random.Random(f"chaos {self.seed}")
        kinds, weights = list(self.weights), list(self.weights.values())
        per_host = processes // self.hosts
        for number in range(self.count):
            after_s = chance.expovariate(1.0 / self.mtbf_s)
            kind = chance.choices(kinds, weights)[0]
            victim = chance.randrange(processes)
            host = victim // per_host
            wipes, flips = (
                tuple(each.path_of(victim, host) for each in hazards if chance.random() < each.chance)
                for hazards in (self.wipes, self.flips)
            )
            victims = tuple(range(host * per_host, (host + 1) * per_host)) if kind == "host" else (victim,)
            yield Fault(number=number, after_s=after_s, kind=kind, victims=victims, wipes=wipes, flips=flips)
