"""How data replicas share what they read of the durable tier: the options. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

BroadcastMode = Literal["auto", "always", "never"]


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

    def ahead(self, width: int, replicas: int) -> int:
        """How many windows of `width` a process may have read and not sent: what is left of `host_bytes`, at least 2.

        Beside them stand, in host memory, what was received of `replicas` and two windows that are packed.
        """
        return max(2, self.host_bytes // width - replicas - 2)
