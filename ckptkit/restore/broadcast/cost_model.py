"""Whether data replicas share what they read of the durable tier: the options, and the cost model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.model.policies import BroadcastMode

LEAST_BYTES = 32 << 20  # of one process: below, reading takes less than the meetings that sharing needs
STARTUP_S = 0.2  # to compile the collective and to connect: measured over TCP on loopback, on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastRates:
    """Bytes per second of one process, the slowest one's: from the storage while all read, and over the interconnect
    (all that is received, its own part and the vote before each round included). None: not measured."""

    storage: float | None = None
    interconnect: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is still to be had, in bytes, of the process that has most of it."""

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

    What waits for the first byte is in both, and so not in their difference: (more - some) / (seconds - seconds).
    At most half of the longer read is taken for waiting, so that a short read that was held up by something else does
    not make a storage appear fast: what is returned is at most twice what was seen. As it was seen where `some` is not
    the smaller read.
    """
    (some_bytes, some_s), (more_bytes, more_s) = some, more
    seen = more_bytes / max(more_s, 1e-9)
    if some_bytes >= more_bytes:
        return seen
    return min((more_bytes - some_bytes) / max(more_s - some_s, 1e-9), 2 * seen)


def choose(mode: BroadcastMode, left: Remaining, replicas: int, rates: BroadcastRates) -> BroadcastChoice:
    """Whether sharing what is `left` is faster than that each process reads all that it wants.

    Alone: wanted / storage. Shared: every replica reads what is left of its part and receives everything,
    unread / storage + sent / interconnect; the sum, for nothing says that the two do not share cores or links. That
    `storage` was measured while all processes read is what makes this hold for a storage that they share as for one
    that each has for itself: as many read in both. An interconnect that was never measured counts as free and takes
    `STARTUP_S`; this is spent to find out, so the most that there is to win must be more than that.
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
