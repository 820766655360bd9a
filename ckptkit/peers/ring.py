"""Assigns copies to hosts: a ring over the hosts of a job. Pure, and the same answer on every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHIFTS_MAX = 64  # how many rings are compared, besides the one that steps over the largest rack


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a process runs; `rack` None: not known, and then unlike every other."""

    host: str
    rack: str | None = None


def keepers(seats: Sequence[Seat], copies: int) -> list[tuple[int, ...]]:
    """For each process, the processes that keep a copy of its share: each on another host, none on its own.

    At most the number of other hosts. Every host keeps the shares of as many hosts as it sends its own to, in another
    rack if that is possible for all. Hosts of a rack are adjacent in the ring; a copy moves as many hosts along the
    ring as the largest rack has.
    """
    members: dict[str, list[int]] = {}
    for process, seat in enumerate(seats):
        members.setdefault(seat.host, []).append(process)
    ring = _ring(seats, members)
    racks = [_rack(seats[members[host][0]]) for host in ring]
    shifts = _shifts(racks, copies)
    at = {host: index for index, host in enumerate(ring)}
    chosen = []
    for process, seat in enumerate(seats):
        rank = members[seat.host].index(process)
        targets = [members[ring[(at[seat.host] + shift) % len(ring)]] for shift in shifts]
        chosen.append(tuple(target[rank % len(target)] for target in targets))
    return chosen


def kept_for(seats: Sequence[Seat], copies: int, process: int) -> tuple[int, ...]:
    """The processes whose copies `process` keeps, ascending."""
    return tuple(sender for sender, chosen in enumerate(keepers(seats, copies)) if process in chosen)


def _ring(seats: Sequence[Seat], members: dict[str, list[int]]) -> list[str]:
    """The hosts, those of a rack together, the largest rack first."""
    racks: dict[tuple[bool, str], list[str]] = {}
    for host, processes in members.items():
        racks.setdefault(_rack(seats[processes[0]]), []).append(host)
    ordered = sorted(racks, key=lambda rack: (-len(racks[rack]), rack))
    return [host for rack in ordered for host in sorted(racks[rack])]


def _rack(seat: Seat) -> tuple[bool, str]:
    return (False, seat.host) if seat.rack is None else (True, seat.rack)


def _shifts(racks: Sequence[tuple[bool, str]], copies: int) -> list[int]:
    hosts = len(racks)
    largest = max(racks.count(rack) for rack in set(racks)) if len(set(racks)) < hosts else 1
    considered = {*range(1, min(hosts, _SHIFTS_MAX)), *range(largest, min(hosts, largest + copies + 1))} - {0}

    def together(shift: int) -> int:
        return sum(rack == racks[(at + shift) % hosts] for at, rack in enumerate(racks))

    return sorted(considered, key=lambda shift: (together(shift), shift))[:copies]
