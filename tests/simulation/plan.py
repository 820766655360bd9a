"""Plans of simulated jobs: their size, their pace and their faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

_KINDS = (
    "cut",
    "lost answers",
    "slow service",
    "slow service",
    "raise",
    "interrupt",
    "crash",
    "crash",
    "wipe",
    "full",
    "read only",
    "durable away",
    "durable slow",
)
_RAISING = ("user code", "stage", "take a slot", "copy to the disk", "commit here", "durable part", "finish staging")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a plan: what happens at `at_s` to `process`, for `seconds`."""

    at_s: float
    kind: str
    process: int
    seconds: float
    what: str = ""

    def __str__(self) -> str:
        what = f" in {self.what!r}" if self.what else ""
        return f"at {self.at_s:.2f} s: {self.kind}{what} on process {self.process} for {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a seed decides before the run; a smaller plan may fail in the same way (`shrunk`)."""

    seed: int
    processes: int
    peers: bool
    in_flight_max: int
    faults: tuple[Fault, ...]
    quick: bool
    """Steps are shorter than a vote, and most saves are due on the disk: the next one comes before the last one is
    decided, and finds the disk busy."""

    max_age_s: float | None
    """Of the `FailurePolicy`: how long a tier may be without a commit."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The plan of a seed."""
        rng = random.Random(seed)
        processes = rng.choice((2,) * 12 + (3,) * 5 + (4, 5, 8))
        until_s = rng.choice((1.0, 3.0, 3.0, 8.0))
        faults = [
            Fault(
                at_s=round(rng.uniform(0.0, until_s), 3),
                kind=rng.choice(_KINDS),
                process=rng.choice((0, rng.randrange(processes))),  # process 0 decides
                seconds=round(rng.choice((0.05, 0.5, 2.0, 8.0, 8.0)) * rng.uniform(0.5, 1.5), 3),
                what=rng.choice(_RAISING),
            )
            for _ in range(rng.choice((1, 1, 2, 3, 5)))
        ]
        return cls(
            seed=seed,
            processes=processes,
            peers=rng.random() < 0.3,
            in_flight_max=rng.choice((1, 1, 2)),
            faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
            quick=rng.random() < 0.15,
            max_age_s=rng.choice((None, 2.0, 5.0)),
        )
