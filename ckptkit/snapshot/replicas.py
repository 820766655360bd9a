"""Silent corruption of a replica: which copies of the same box a save compares, by the digests that it takes anyway.

Devices that hold the same box of a global array hold the same bits: JAX replicates arrays by computing them alike, or
by copying them. Where they differ, a device, a host's memory or a wire has changed something, and training goes on
with a model that is several models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax

from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.policies import ReplicaPolicy
from ckptkit.snapshot.describe import Description, Digests, LeafSource, SlotExtent
from ckptkit.snapshot.shards import Held, by_device, unusual_kind

COPIES_MAX = 512  # of a save: each costs the step loop some 50 microseconds, however small it is
BoxHolders = tuple[int, ...]  # processes, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReplica:
    """A second local copy of box `number` of a save, on `device`. `leaf` counts the leaves of `item`."""

    number: int
    item: str
    leaf: int
    record: LeafRecord
    box: Box
    device: Any
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBox:
    """A box that several processes hold; `number` is that of this process's save, None where it holds none of it."""

    item: str
    leaf: str
    box: Box
    number: int | None


class ReplicaSet(NamedTuple):
    """The boxes that these processes hold, and no others."""

    holders: BoxHolders
    boxes: list[SharedBox]


@final
class LocalReplicasOf:
    """Every local copy of every box except the stored one, in the order of the boxes.

    Each record is made when it is asked for: eight devices hold seven copies of every replicated leaf, and a save
    compares `COPIES_MAX` of them at most.
    """

    def __init__(self, description: Description):
        self._boxes: list[tuple[int, str, int, LeafSource, int]] = []
        self._before: list[int] = []  # copies of the boxes before each of `_boxes`
        self._count = number = 0
        for item, sources in description.items.items():
            for leaf, source in enumerate(sources):
                for at, others in enumerate(source.local_replicas):
                    if others:
                        self._boxes.append((number + at, item, leaf, source, at))
                        self._before.append(self._count)
                        self._count += len(others)
                number += len(source.record.boxes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> LocalReplica:
        place = bisect_right(self._before, index) - 1
        number, item, leaf, source, at = self._boxes[place]
        held = source.record.boxes[at]
        return LocalReplica(
            number=number,
            item=item,
            leaf=leaf,
            record=source.record,
            box=held.box,
            device=source.local_replicas[at][index - self._before[place]],
            nbytes=held.box.size * source.record.itemsize,
        )


def replica_sets(description: Description, process: int) -> dict[str, ReplicaSet]:
    """The boxes of the global state that several processes hold, by the name of the set of their holders. The same on
    every process except for `SharedBox.number`, because it is made of the global shardings alone."""
    shared: dict[BoxHolders, list[SharedBox]] = {}
    number = 0
    for item, sources in description.items.items():
        for source in sources:
            mine = {record.box: number + at for at, record in enumerate(source.record.boxes)}
            number += len(mine)
            if source.record.kind != "jax":
                continue
            for box, holders in source.holders.items():
                if len(holders) > 1 and box.size:
                    known = mine.get(box) if process in holders else None
                    found = SharedBox(item=item, leaf=source.record.name, box=box, number=known)
                    shared.setdefault(holders, []).append(found)
    return {_name_of(holders): ReplicaSet(holders, boxes) for holders, boxes in sorted(shared.items())}


def _name_of(holders: BoxHolders) -> str:
    """A set of processes in 16 letters: thousands of processes share the scalars, and each sends the set at each
    save."""
    return digest_of(",".join(map(str, holders)).encode())[:16]


@final
class Rotation:
    """Chooses which local copies the next save digests: at most `local_bytes_max` and `COPIES_MAX` of them, each after
    all others.

    A copy that alone is larger is taken alone. So every copy is looked at once in
    `ceil(bytes of all copies / local_bytes_max)` saves or so, and all of them at every save where they are no more.
    """

    def __init__(self, policy: ReplicaPolicy):
        self._bytes_max = policy.local_bytes_max
        self._next = 0

    def choose(self, local_replicas: LocalReplicasOf | Sequence[LocalReplica]) -> tuple[LocalReplica, ...]:
        """The copies of the next save."""
        count, left = len(local_replicas), self._bytes_max
        chosen: list[LocalReplica] = []
        for at in range(count if left != 0 else 0):
            each = local_replicas[(self._next + at) % count]
            if left is not None:
                if chosen and (each.nbytes > left or len(chosen) == COPIES_MAX):
                    break
                left = max(0, left - each.nbytes)
            chosen.append(each)
        self._next = (self._next + len(chosen)) % max(1, count)
        return tuple(chosen)


def twin_shards(
    description: Description, trees: Mapping[str, Any], local_replicas: Sequence[LocalReplica]
) -> list[Held]:
    """The boxes that `Stager.begin` digests for `local_replicas`: number `i` is box `len(description.extents) + i`.

    Moves no bytes.
    """
    held: list[Held] = []
    leaves: dict[str, Any] = {}
    local: dict[tuple[str, int], Mapping[Any, Any]] = {}
    for at, local_replica in enumerate(local_replicas):
        key = (local_replica.item, local_replica.leaf)
        if key not in local:
            if local_replica.item not in leaves:
                leaves[local_replica.item] = jax.tree.leaves(trees[local_replica.item])
            local[key] = by_device(
                description.items[local_replica.item][local_replica.leaf],
                leaves[local_replica.item][local_replica.leaf],
            )
        kept = description.extents[local_replica.number]
        extent = SlotExtent(
            len(description.extents) + at,
            kept.offset,
            kept.stop,
            kept.cells,
            kept.device and local_replica.device,
            kept=False,
        )
        sharding = description.items[local_replica.item][local_replica.leaf].sharding
        kind = unusual_kind(sharding, local_replica.device)
        held.append(Held(local[key][local_replica.device], (local_replica.device,), (extent,), kind))
    return held


def hash_of(boxes: Iterable[SharedBox], digests: Mapping[int, Digests]) -> str:
    """One hash for many boxes: that of their digests. Cost: 60 nanoseconds per cell."""
    return digest_of("\n".join(",".join(digests[box.number]) for box in boxes if box.number is not None).encode())


def minority(held: Mapping[Any, str]) -> list[Any]:
    """Those that differ from the majority; all without a majority (with two, it is unknown which is right)."""
    votes = list(held.values())
    most = max(set(votes), key=votes.count)
    if votes.count(most) * 2 <= len(votes):
        return list(held)
    return [holder for holder, digest in held.items() if digest != most]
