"""Whether data replicas share what they read of the durable tier: the options, and the cost model. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

BroadcastMode = Literal["auto", "always", "never"]

LEAST_BYTES = 32 << 20  # of one process: below, reading takes less than the meetings that sharing needs
STARTUP_S = 0.2  # to compile the collective and to connect: measured over TCP on loopback, on a busy machine
_LEAST_BUDGET_BYTES = 1 << 20
_ROUNDS = 8  # at least so many where there is enough: the reads of one are behind the transfer of another
_ALIGNED_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastOptions:
    """How a restore of several processes gets what data replicas have in common and only the durable tier holds.

    Each box is read by one of the processes that want it, and sent to the others by a collective over the devices:
    the storage is asked once for each byte, and not once for each replica. `auto` does so where the rates that the
    restore itself measures say that it is faster (`choose`), `always` wherever replicas have something in common,
    `never` lets each process read for itself. All processes give the same.

    `device_bytes` bounds the device memory of one process that the transfer takes (all its devices together), and
    `host_bytes` its host memory beside the restored arrays and what the durable tier reads ahead
    (`DurableProfile.read_ahead_bytes`), one cell more where a cell is larger than a transfer.
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

        On the devices stand what is sent and what is received, `replicas + 1` widths; in host memory two more that
        are read meanwhile, and one that is being packed. A multiple of what `links` devices of a process can share.
        """
        budget = min(self.device_bytes // (replicas + 1), self.host_bytes // (replicas + 4))
        unit = _ALIGNED_BYTES * links
        wanted = max(min(_LEAST_BUDGET_BYTES, longest_bytes + _ALIGNED_BYTES), -(-longest_bytes // _ROUNDS))
        return max(unit, min(budget // unit, -(-wanted // unit)) * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of one process, the slowest one's: from the storage while all read, and over the interconnect
    (all that is received, its own part and the vote before each round included). None: not measured."""

    storage: float | None = None
    interconnect: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether to share, and why, for events and logs."""

    broadcast: bool
    why: str


def choose(mode: BroadcastMode, left_bytes: int, replicas: int, rates: Rates) -> Choice:
    """Whether sharing the `left_bytes` that each process still wants is faster than that each reads them.

    Alone: left / storage. Shared: every replica reads an equal part and receives everything,
    left / (replicas x storage) + left / interconnect; the sum, for nothing says that the two do not share cores or
    links. That `storage` was measured while all processes read is what makes this hold for a storage that they share
    as for one that each has for itself: as many read in both. An interconnect that was never measured counts as free
    and takes `STARTUP_S`.
    """
    if mode != "auto":
        return Choice(broadcast=mode == "always", why=f"mode {mode!r}")
    if rates.storage is None:  # nothing is measured yet
        if left_bytes < LEAST_BYTES:
            return Choice(broadcast=False, why=f"{_mb(left_bytes)} for each process: less than {_mb(LEAST_BYTES)}")
        return Choice(broadcast=True, why=f"{_mb(left_bytes)} for each process")
    alone_s = left_bytes / rates.storage
    shared_s = alone_s / replicas
    over = f"{STARTUP_S:g} s to connect"
    if rates.interconnect is None:
        shared_s += STARTUP_S
    else:
        shared_s += left_bytes / rates.interconnect
        over = f"{_mb(rates.interconnect)}/s of interconnect"
    return Choice(
        broadcast=shared_s < alone_s,
        why=(
            f"{_mb(left_bytes)} for each process at {_mb(rates.storage)}/s of storage: alone {alone_s:.2f} s, shared "
            f"by {replicas} replicas with {over} {shared_s:.2f} s"
        ),
    )


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
