"""The processes' reports of the shares that they hold of each save, in a few bytes, and their evaluation. Pure.

A *share* is the part of one save that one process wrote. Within a save, the writer's index names the share and its
boxes. A process's report of a save is bounded (`REPORT_BYTES_MAX`). The boxes themselves are requested only for the
save that is restored, from the processes that hold them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xxhash

from ckptkit.errors import Reason
from ckptkit.model.boxes import Box, missing_elements
from ckptkit.model.manifest import Manifest, SaveId

REPORT_BYTES_MAX = 4096  # of one process's report of one save
_REFUSAL_CHARS_MAX = 500  # of a reason: escaped, six bytes of JSON for each at the most


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One process's report of one save: the shares that it can serve to others.

    It also has the reason why its own host alone lacks its own part (None: it has it, or has not looked).
    """

    save_id: SaveId
    count: int  # how many processes wrote it
    shares: tuple[tuple[int, str], ...] = ()  # writer, hash of its set of boxes
    tiers: tuple[str, ...] = ()
    refusal: Reason | None = None

    def to_json(self) -> list[Any]:
        """The report as plain values, at most `REPORT_BYTES_MAX` of JSON: shares that find no room are left out."""
        refusal = self.refusal and [self.refusal.text[:_REFUSAL_CHARS_MAX], self.refusal.causes]
        head = [self.save_id.to_list(), self.count, list(self.tiers), refusal]
        room = REPORT_BYTES_MAX - len(json.dumps([*head, []])) - 2
        shares = []
        for share in self.shares:
            room -= len(json.dumps(list(share))) + 2
            if room < 0:
                break
            shares.append(list(share))
        return [*head, shares]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Held:
        """The report of `to_json`."""
        named, count, tiers, refusal, shares = values
        return cls(
            save_id=_save_id(*named),
            count=count,
            shares=tuple(map(tuple, shares)),
            tiers=tuple(tiers),
            refusal=Reason.of_json(refusal),
        )


@lru_cache(maxsize=1024)
def _save_id(*named: Any) -> SaveId:
    """Thousands of processes report the same few values: one object, hashed once."""
    return SaveId.from_list(named)


ShareHolders = Mapping[int, tuple[int, ...]]  # share -> the processes that can give it


def box_set_hash(manifest: Manifest) -> str:
    """A hash of the names and boxes of a share's leaves, not of their bytes: equal for data replicas. 3 us per leaf."""
    boxes = [
        [item, leaf.path, leaf.shape, leaf.dtype, [[record.box.start, record.box.stop] for record in leaf.boxes]]
        for item, leaves in sorted(manifest.arrays.items())
        for leaf in leaves
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(boxes).encode())


def holders_of(reports: Sequence[Sequence[Held]], save_id: SaveId) -> dict[int, tuple[int, ...]]:
    """The processes that can serve each share of a save; `reports[p]` is the report of process `p`."""
    found: dict[int, list[int]] = {}
    for process, report in enumerate(reports):
        for held in report:
            if held.save_id == save_id:
                for writer, _ in held.shares:
                    found.setdefault(writer, []).append(process)
    return {share: tuple(found[share]) for share in sorted(found)}


def writers_of(reports: Sequence[Sequence[Held]], save_id: SaveId) -> int:
    """How many processes wrote a save; 1 if no process holds any of it."""
    return max((held.count for report in reports for held in report if held.save_id == save_id), default=1)


def is_whole(reports: Sequence[Sequence[Held]], save_id: SaveId) -> bool:
    """Whether each share of a save is held by at least one process."""
    counts = {held.count for report in reports for held in report if held.save_id == save_id}
    held = holders_of(reports, save_id)
    # Counted first: a manifest may hold any number.
    return len(counts) == 1 and min(counts) <= len(held) and all(share in held for share in range(min(counts)))


def uncommitted_by(reports: Sequence[Sequence[Held]], save_id: SaveId) -> list[int]:
    """The processes that had not committed their share of a save when the job ended; none where the save lost a share.

    A process keeps its slot of an older save until all have committed the newer one. So if no process holds a share of
    the newer save, but the older share of the same process exists, the newer share was never committed.
    """
    held, count = holders_of(reports, save_id), writers_of(reports, save_id)
    if count > sum(len(each.shares) for report in reports for each in report):
        return []  # counted first: a manifest may hold any number
    lacking = [share for share in range(count) if share not in held]
    if not lacking:
        return []
    older = {
        share
        for report in reports
        for each in report
        if each.save_id < save_id and each.count == count
        for share, _ in each.shares
    }
    return lacking if older.issuperset(lacking) else []


def distinct_shares(reports: Sequence[Sequence[Held]], save_id: SaveId) -> list[tuple[int, int]]:
    """One `(holder, share)` for each different set of boxes of a save that a process holds."""
    chosen: dict[str, tuple[int, int]] = {}
    for process, report in enumerate(reports):
        for held in report:
            if held.save_id == save_id:
                for writer, boxes in held.shares:
                    chosen.setdefault(boxes, (process, writer))
    return sorted(chosen.values())


def hole_in(manifests: Sequence[Manifest]) -> str | None:
    """The first leaf that the shares together do not cover, with what is missing; None where they are the whole."""
    boxes: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], list[Box]]] = {}
    for manifest in manifests:
        for item, leaves in manifest.arrays.items():
            for leaf in leaves:
                _, held = boxes.setdefault((item, leaf.path), (leaf.shape, []))
                held.extend(record.box for record in leaf.boxes)
    for (item, path), (shape, held) in boxes.items():
        missing = missing_elements(Box.whole(shape), dict.fromkeys(held))
        if missing or not held:
            return f"{missing} elements of leaf {item}:{'.'.join(path)} are held by no process"
    return None


def to_runs(holders: ShareHolders) -> list[list[int]]:
    """The holders of shares, as `[holder, share, how many]`: both count up together. One run if every process holds its
    own."""
    runs: list[list[int]] = []
    for process, share in sorted((process, share) for share, given in holders.items() for process in given):
        last = runs[-1] if runs else None
        if last is not None and (process, share) == (last[0] + last[2], last[1] + last[2]):
            last[2] += 1
        else:
            runs.append([process, share, 1])
    return runs


def from_runs(runs: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The argument of `to_runs`."""
    found: dict[int, list[int]] = {}
    for process, share, length in runs:
        for more in range(length):
            found.setdefault(share + more, []).append(process + more)
    return {share: tuple(sorted(found[share])) for share in sorted(found)}


def in_order_of_use(shares: Iterable[int], *, mine: int, of: int, count: int, alike: Sequence[int] = ()) -> list[int]:
    """The order in which process `mine` of `of` processes looks into the shares of a save that `count` processes wrote.

    Its own index first, then `alike` (those that hold most of the wanted boxes), then by distance. A mesh is cut in
    order, so the wanted boxes are at about the process's own position.
    """
    at = mine * count / of
    preferred = dict.fromkeys([mine, *alike] if of == count else alike)
    first = {share: rank for rank, share in enumerate(preferred)}
    return sorted(shares, key=lambda share: (first.get(share, len(first)), abs(share + 0.5 - at - 0.5 * count / of)))


def in_batches(shares: Sequence[int]) -> Iterator[Sequence[int]]:
    """One share, then two, then four, ...: so few are requested if few are enough."""
    start, length = 0, 1
    while start < len(shares):
        yield shares[start : start + length]
        start, length = start + length, length * 2


def part_of(directory_name: str, rank: int, of: int) -> bool:
    """Whether process `rank` of `of` on a host is the one that reports a slot directory to the other processes."""
    number = re.search(r"\d+", directory_name)
    return (int(number[0]) if number else 0) % of == rank
