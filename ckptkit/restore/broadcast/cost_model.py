"""Whether data replicas share what they read of the durable tier: the options, and the cost model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.model.policies import BroadcastMode

LEAST_BYTES = 32 << 20  # of one process: below, reading takes less time than the exchanges that sharing needs
STARTUP_S = 0.2  # to compile the collective and to connect: measured over TCP on loopback, on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastRates:
    """Bytes per second of the slowest process: from the storage while all read, and over the interconnect. The latter
    counts everything received, its own part, and the vote before each round. None: not measured."""

    storage: float | None = None
    interconnect: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """The remaining bytes of the process with the most."""

    wanted: int  # of what replicas share, by one process
    unread: int  # of its own part, that it reads for all of its group
    sent: int  # over the interconnect, to each process


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastChoice:
    """Whether to share, and why, for events and logs."""

    broadcast: bool
    why: str


def rate_of(some: tuple[int, float], more: tuple[int, float]) -> float:
    """Bytes per second of a storage that gave `more` (bytes, seconds) after `some`, each asked for at once.

    The wait for the first byte is in both, and so not in their difference: (more - some) / (seconds - seconds). At most
    half of the longer read counts as waiting, so that a delayed short read does not make a storage appear fast: the
    result is at most twice the observed rate. If `some` is not the smaller read, the result is the observed rate.
    """
    (some_bytes, some_s), (more_bytes, more_s) = some, more
    seen = more_bytes / max(more_s, 1e-9)
    if some_bytes >= more_bytes:
        return seen
    return min((more_bytes - some_bytes) / max(more_s - some_s, 1e-9), 2 * seen)


def choose(mode: BroadcastMode, left: Remaining, replicas: int, rates: BroadcastRates) -> BroadcastChoice:
    """Whether sharing what is `left` is faster than that each process reads all that it wants.

    Alone: wanted / storage. Shared: every replica reads the rest of its part and receives everything, unread / storage
    + sent / interconnect. It is a sum, because both may share cores or links. `storage` was measured while all
    processes read, so the formula holds for a shared storage and for separate ones: equally many processes read in both
    cases. An unmeasured interconnect counts as free and takes `STARTUP_S`. This time is spent to measure it, so the
    possible gain must be larger.
    """
    if mode != "auto":
        return BroadcastChoice(broadcast=mode == "always", why=f"mode {mode!r}")
    if rates.storage is None:  # nothing is measured yet
        if left.wanted < LEAST_BYTES:
            return BroadcastChoice(
                broadcast=False, why=f"{_mb(left.wanted)} for each process: less than {_mb(LEAST_BYTES)}"
            )
        return BroadcastChoice(broadcast=True, why=f"{_mb(left.wanted)} for each process")
    alone_s = left.wanted / rates.storage
    shared_s = left.unread / rates.storage
    if rates.interconnect is None:
        shared_s += STARTUP_S
        least_s, over = STARTUP_S, f"{STARTUP_S:g} s to connect"
    else:
        shared_s += left.sent / rates.interconnect
        least_s, over = 0.0, f"{_mb(rates.interconnect)}/s of interconnect"
    return BroadcastChoice(
        broadcast=shared_s + least_s < alone_s,
        why=(
            f"{_mb(left.wanted)} for each process at {_mb(rates.storage)}/s of storage: alone {alone_s:.2f} s, shared "
            f"by {replicas} replicas with {over} {shared_s:.2f} s"
        ),
    )


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
