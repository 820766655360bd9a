"""The job that is simulated: its tiers with what they cost and survive, and what a restart takes.

Every default is a statement about a machine; each can be set, and `ckptkit simulate --json` prints all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptkit.model.tiers import DURABLE, PEER, RAM, SSD

Failure = Literal["process", "host", "job"]
FAILURES: tuple[Failure, ...] = get_args(Failure)
TIER_NAMES = (RAM, SSD, PEER, DURABLE)

# The failures that a copy in a tier survives: of a process, of a host with its disk, of every host of a job.
_SURVIVES: Mapping[str, frozenset[Failure]] = {
    RAM: frozenset({"process"}),
    SSD: frozenset({"process"}),
    PEER: frozenset({"process", "host"}),
    DURABLE: frozenset(FAILURES),
}
_RATE_PER_HOST: Mapping[str, float] = {RAM: 8e9, SSD: 2e9, PEER: 5e9, DURABLE: 0.5e9}  # bytes/s
_DURABLE_RATE_MAX = 200e9  # bytes/s that one bucket gives a job, however many hosts it has
_COPY_RATE = 10e9  # bytes/s from device to host, per host
_COPY_CONTENTION = 0.1  # share of that copy that the step loop feels: an overlapped copy takes memory bandwidth
_STALL_MIN_S = 0.01  # what a save takes from the step loop however small it is
_RESTORE_MIN_S = 2.0  # listing, planning, agreeing
TIER_ASSUMPTIONS = (
    "assumed, where no time is given: each host writes "
    + ", ".join(f"{rate / 1e9:g} GB/s to {name}" for name, rate in _RATE_PER_HOST.items())
    + f" (all together {_DURABLE_RATE_MAX / 1e9:g} GB/s at most); a save stalls for {_COPY_CONTENTION:g} of its copy "
    f"from the devices at {_COPY_RATE / 1e9:g} GB/s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel:
    """One tier. `stall_s`: what a save into it takes from the step loop, on top of the faster tiers' saves.

    `persist_s`: until the save counts as committed; the next one cannot be committed sooner after it.
    `restore_s`: reading the state back from it. `survives`: the failures after which its copies are still there.
    """

    name: str
    stall_s: float
    persist_s: float
    restore_s: float
    survives: frozenset[Failure]

    def __post_init__(self) -> None:
        for name in ("stall_s", "persist_s", "restore_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"tier {self.name}: {name} is {getattr(self, name)}: give 0 or more seconds")
        unknown = sorted(set(self.survives) - set(FAILURES))
        if unknown or not self.survives:
            raise ValueError(f"tier {self.name} survives {unknown or 'nothing'}: choose among {', '.join(FAILURES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The job. `shares`: how failures divide into kinds. `restart_s`: from a failure to the start of the restore
    (noticing it, starting again, compiling). `step_s` bounds how often a save can be made.
    """

    hosts: int
    tiers: tuple[TierModel, ...]
    restart_s: float = 180.0
    step_s: float = 5.0
    shares: Mapping[Failure, float] = field(default_factory=lambda: {"process": 0.5, "host": 0.45, "job": 0.05})

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.step_s <= 0 or self.restart_s < 0:
            raise ValueError(
                f"hosts={self.hosts}, step_s={self.step_s}, restart_s={self.restart_s}: "
                "give at least one host, a step of more than 0 s, and a restart of 0 s or more"
            )
        if not self.tiers or self.tiers[-1].survives != frozenset(FAILURES):
            raise ValueError("the last tier must survive every failure (durable): without one, a run would never end")
        if any(not faster.survives < slower.survives and faster.survives != slower.survives
               for faster, slower in zip(self.tiers, self.tiers[1:], strict=False)):  # fmt: skip
            raise ValueError(
                "tiers must be in order: each survives at least the failures that the one before it survives"
            )
        if set(self.shares) - set(FAILURES) or min(self.shares.values(), default=0) < 0 or not self.shares:
            raise ValueError(f"shares {dict(self.shares)}: give a weight of 0 or more to each of {', '.join(FAILURES)}")
        if sum(self.shares.values()) <= 0:
            raise ValueError("the shares of failures add up to nothing")

    def levels(self) -> tuple[int, ...]:
        """For each kind of failure, in the order of `FAILURES`, the fastest tier that survives it."""
        return tuple(next(i for i, tier in enumerate(self.tiers) if kind in tier.survives) for kind in FAILURES)

    def level_shares(self) -> tuple[float, ...]:
        """For each tier, the share of failures that it survives and no faster one does. Adds up to 1."""
        total = sum(self.shares.values())
        found = [0.0] * len(self.tiers)
        for kind, level in zip(FAILURES, self.levels(), strict=True):
            found[level] += self.shares.get(kind, 0.0) / total
        return tuple(found)


def default_tier(name: str, *, hosts: int, state_bytes: float) -> TierModel:
    """A tier of a job with `state_bytes` in total, spread over `hosts`.

    Rates per host: 8 GB/s into memory, 2 to an SSD, 5 to a peer, 0.5 to a bucket that gives a job 200 at most. A save
    is copied once from the device at 10 GB/s; a tenth of that time stalls the step loop. Every tier adds 10 ms.
    """
    share = state_bytes / hosts
    rate = _RATE_PER_HOST[name] if name != DURABLE else min(_RATE_PER_HOST[name], _DURABLE_RATE_MAX / hosts)
    copied_s = _COPY_CONTENTION * share / _COPY_RATE if name in (RAM, DURABLE) else 0.0
    return TierModel(
        name=name,
        stall_s=_STALL_MIN_S + copied_s,
        persist_s=share / rate,
        restore_s=_RESTORE_MIN_S + share / rate,
        survives=_SURVIVES[name],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The start values of a simulation; every one can be overridden."""

    hosts: int
    days: float
    mtbf_host_h: float
    state_bytes: float
    shares: Mapping[Failure, float]
    outage_s: float
    source: str


PRESETS: Mapping[str, Preset] = {
    "llama3-405b": Preset(
        hosts=2048,
        days=54,
        mtbf_host_h=2048 * 54 * 24 / 419,
        state_bytes=405e9 * 14,
        shares={"process": 0.21, "host": 0.78, "job": 0.01},
        outage_s=0.0,
        source=(
            "Llama 3 405B on 16,384 H100 (2,048 hosts): 419 unexpected interruptions in 54 days, about 78 % of them "
            "hardware (A. Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5). Assumed: "
            "14 bytes of state per parameter, spare hosts at hand, 1 % of failures that take every host."
        ),
    ),
    "tpu-pod": Preset(
        hosts=2240,
        days=60,
        mtbf_host_h=1000 * 24 / 2.34,
        state_bytes=1e12 * 14,
        shares={"process": 0.5, "host": 0.45, "job": 0.05},
        outage_s=0.0,
        source=(
            "One TPU v5p pod (8,960 chips, 2,240 hosts). No failure rate of a pod is published: the rate is that of "
            "2.34 failures per 1,000 node-days (A. Kokolis et al., Revisiting Reliability in Large-Scale Machine "
            "Learning Research Clusters, HPCA 2025). Assumed: 1e12 parameters, the division of failures."
        ),
    ),
    "spot": Preset(
        hosts=64,
        days=14,
        mtbf_host_h=32.0,
        state_bytes=70e9 * 14,
        shares={"process": 0.04, "host": 0.95, "job": 0.01},
        outage_s=600.0,
        source=(
            "A spot fleet: 4 spot machines were together for 4.7 h (us-west-2c) to 11.5 h (us-east-2a) on average in "
            "the traces of Z. Wu et al., Can't Be Late, NSDI 2024: 19 to 46 h per machine. Assumed: 70e9 parameters, "
            "a replacement after 10 minutes, the division of failures."
        ),
    ),
}
