"""Do data replicas agree? Asked at each save, after staging and before commit, by hashes that processes exchange."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from ckptkit.errors import CheckpointError, ReplicaMismatchError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import FILES, SaveId
from ckptkit.model.policies import DIFFERENCES_NAMED, ReplicaPolicy
from ckptkit.save.agreement.protocol import Agree, Effect, Veto
from ckptkit.save.book.outcomes import Outcomes
from ckptkit.save.records import Save
from ckptkit.snapshot.describe import Description, Digests
from ckptkit.snapshot.replicas import (
    BoxHolders,
    LocalReplica,
    LocalReplicasOf,
    ReplicaSet,
    Rotation,
    hash_of,
    minority,
    replica_sets,
    twin_shards,
)
from ckptkit.snapshot.shards import Held

FANOUT = 32  # into so many parts a differing range of boxes is cut
_SAID_HOLDERS = 16
_log = logging.getLogger("ckptkit")

_Range = tuple[str, int, int]  # of the boxes `start` to `stop` that the processes of a set of that name hold


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """The replicas in a description; cached, as descriptions are."""

    description: Description
    local_replicas: LocalReplicasOf
    sets: Mapping[str, ReplicaSet]


@final
class ReplicaComparison:
    """Compares the replicas of each save. `shards` belongs to the step loop, `compare` to the writer thread.

    Processes exchange one hash for each set of processes with common boxes (about 50 bytes each; one set per way of
    replication), whatever the number of leaves. Only if hashes differ, the processes of those sets exchange `FANOUT`
    hashes of each of at most `DIFFERENCES_NAMED` ranges (10 kB per process), until single boxes are named. No device
    collective is launched.
    """

    def __init__(self, policy: ReplicaPolicy | None, job: Job, outcomes: Outcomes, host: str):
        self._policy = policy
        self._coordinator = job.coordinator
        self._events = job.events
        self._outcomes = outcomes
        self._host = host
        self._rotation = None if policy is None else Rotation(policy)
        self._metadata_index: _Shared | None = None

    @property
    def refuses(self) -> bool:
        """Whether a save whose replicas differ is refused: then they are compared before anything is committed."""
        return self._policy is not None and self._policy.on_difference != "report"

    def shards(self, description: Description, trees: Mapping[str, Any]) -> tuple[tuple[LocalReplica, ...], list[Held]]:
        """The local copies that this save digests in addition to the stored boxes."""
        if self._rotation is None:
            return (), []
        local_replicas = self._rotation.choose(self._of(description).local_replicas)
        return local_replicas, twin_shards(description, trees, local_replicas)

    def ballot(
        self,
        description: Description,
        local_replicas: Sequence[LocalReplica],
        digests: Mapping[int, Digests] | None,
    ) -> dict[str, Any] | None:
        """This process's report of its boxes; None if nothing is compared, or nothing was staged."""
        if self._policy is None or digests is None:
            return None
        process, first = self._coordinator.process, len(description.extents)
        sets = {name: each for name, each in self._of(description).sets.items() if process in each.holders}
        differ = {
            each.number: each for at, each in enumerate(local_replicas) if digests[first + at] != digests[each.number]
        }
        local = list(differ.values())[:DIFFERENCES_NAMED]
        return {
            "sets": {name: hash_of(each.boxes, digests) for name, each in sets.items()},
            "local": [self._local(description, local_replicas, each, digests) for each in local],
        }

    def compare_before_commit(self, name: str, ballot: dict[str, Any] | None) -> Generator[Effect, Any, dict[str, Any]]:
        """The result of `first_look` on all ballots. One exchange, which ends early as soon as one process has staged
        nothing. Raises `CoordinationError`."""
        return (yield Agree("replicas", name, ballot, first_look, lambda each: each is None))

    def veto(self, name: str) -> Veto:
        """For a process that raises in the call `name`: the others wait for it in `compare_before_commit`."""
        return Veto("replicas", name, None, first_look)

    def follow_up(
        self,
        save_id: SaveId,
        name: str,
        description: Description,
        found: Mapping[str, Any],
        digests: Mapping[int, Digests] | None,
    ) -> Generator[Effect, Any, str | None]:
        """Names the boxes that differ; returns the first as a reason where the policy refuses the save.

        `found` is the result of `first_look` on process 0. `digests` None: this process has staged nothing.
        """
        if self._policy is None or not (found["sets"] or found["local"]):
            return None
        shared = self._of(description)
        ranges: list[_Range] = [(each, 0, len(shared.sets[each].boxes)) for each in found["sets"]]
        differences = [*found["local"], *(yield from self._look_into(save_id, name, shared, ranges, digests))]
        if self._policy.reported_max is not None and len(differences) > self._policy.reported_max:
            _log.debug("replicas differ in %d boxes or more: as by nondeterministic kernels", len(differences))
            return None
        for each in differences:
            self._events.emit(Kind.REPLICAS_DIFFER, step=save_id.step, policy=self._policy.on_difference, **each)
        if self._policy.on_difference == "report":
            return None
        words = [_words(each) for each in differences]
        if self._policy.on_difference == "stop":
            self._outcomes.stop(ReplicaMismatchError(words, step=save_id.step))
        return f"replicas differ: {words[0]}"

    def _of(self, description: Description) -> _Shared:
        if self._metadata_index is None or self._metadata_index.description is not description:
            self._metadata_index = _Shared(
                description=description,
                local_replicas=LocalReplicasOf(description),
                sets=replica_sets(description, self._coordinator.process),
            )
        return self._metadata_index

    def _look_into(
        self,
        save_id: SaveId,
        name: str,
        shared: _Shared,
        ranges: list[_Range],
        digests: Mapping[int, Digests] | None,
    ) -> Generator[Effect, Any, list[dict[str, Any]]]:
        """The boxes that differ in `ranges`, at most `DIFFERENCES_NAMED`. A channel of its own: if these exchanges
        fail, the next save's comparison is unaffected, and a difference is named by its processes alone."""
        found: list[dict[str, Any]] = []
        while ranges:
            asked = [*map(list, ranges)]
            mine = {"save": str(save_id), "ranges": asked, "host": self._host, "hashes": {}}
            if digests is not None:
                mine["hashes"] = self._hashes(shared, ranges, digests)
            try:
                verdict = yield Agree("replica-details", name, mine, partial(_narrowed, shared.sets))
            except CheckpointError as error:
                return [*found, *(_unnamed(shared.sets[name].holders, str(error)) for name, _, _ in ranges)]
            found += [_named(shared, each) for each in verdict["boxes"]]
            ranges = [(name, start, stop) for name, start, stop in verdict["ranges"]]
        return found[:DIFFERENCES_NAMED]

    def _hashes(self, shared: _Shared, ranges: Sequence[_Range], digests: Mapping[int, Digests]) -> dict[str, Any]:
        hashes = {}
        for at, (name, start, stop) in enumerate(ranges):
            holders, boxes = shared.sets[name]
            if self._coordinator.process in holders:
                hashes[str(at)] = [hash_of(boxes[a:b], digests) for a, b in _parts(start, stop)]
        return hashes

    def _local(
        self,
        description: Description,
        local_replicas: Sequence[LocalReplica],
        local_replica: LocalReplica,
        digests: Mapping[int, Digests],
    ) -> dict[str, Any]:
        """One box that differs between devices of this process, with every copy of it that this save digested."""
        first = len(description.extents)
        stored = description.items[local_replica.item][local_replica.leaf]
        (at,) = (i for i, record in enumerate(stored.record.boxes) if record.box == local_replica.box)
        held = {stored.devices[at].id: digests[local_replica.number]}
        held |= {
            each.device.id: digests[first + i]
            for i, each in enumerate(local_replicas)
            if each.number == local_replica.number
        }
        by_hash = {device: "+".join(cells) for device, cells in held.items()}
        process = self._coordinator.process
        suspects = [f"device {device} of {self._host}" for device in minority(by_hash)]
        holders = [
            {"process": process, "host": self._host, "device": device, "digest": digest[:32]}
            for device, digest in by_hash.items()
        ]
        return _difference(local_replica.item, local_replica.record.name, local_replica.box, holders, suspects)


def first_look(ballots: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """On process 0: the sets whose processes report different hashes, and the boxes that differ on one process."""
    said = [ballot for ballot in ballots if ballot is not None]
    sets: dict[str, set[str]] = {}
    for value in said:
        for name, found in value["sets"].items():
            sets.setdefault(name, set()).add(found)
    return {
        "sets": [name for name in sorted(sets) if len(sets[name]) > 1][:DIFFERENCES_NAMED],
        "local": [each for value in said for each in value["local"]][:DIFFERENCES_NAMED],
    }


def _narrowed(sets: Mapping[str, ReplicaSet], values: list[Any]) -> dict[str, Any]:
    """From the hashes of ranges to the parts that differ: ranges to be asked for next, and single boxes."""
    if any((value["save"], value["ranges"]) != (values[0]["save"], values[0]["ranges"]) for value in values):
        raise CheckpointError("the processes compare different saves: one of them was late")
    ranges: list[list[Any]] = []
    boxes: list[dict[str, Any]] = []
    for at, (name, start, stop) in enumerate(values[0]["ranges"]):
        columns = {p: values[p]["hashes"][str(at)] for p in sets[name].holders if str(at) in values[p]["hashes"]}
        for part, (a, b) in enumerate(_parts(start, stop)):
            held = {process: hashes[part] for process, hashes in columns.items()}
            if len(set(held.values())) < 2:
                continue
            if b - a > 1:
                ranges.append([name, a, b])
                continue
            # Those that differ from the others first: of thousands, only some are named.
            suspects = set(minority(held))
            said = sorted(held, key=lambda process: process not in suspects)[:_SAID_HOLDERS]
            who = [[process, values[process]["host"], held[process], process in suspects] for process in said]
            boxes.append({"set": name, "at": a, "held": who})
    return {"ranges": ranges[:DIFFERENCES_NAMED], "boxes": boxes[:DIFFERENCES_NAMED]}


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    """The range in at most `FANOUT` parts."""
    step = -(-(stop - start) // FANOUT)
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _named(shared: _Shared, found: Mapping[str, Any]) -> dict[str, Any]:
    box = shared.sets[found["set"]].boxes[found["at"]]
    holders = [{"process": process, "host": host, "digest": digest} for process, host, digest, _ in found["held"]]
    suspects = [f"host {host}" for _, host, _, suspected in found["held"] if suspected]
    return _difference(box.item, box.leaf, box.box, holders, suspects)


def _difference(
    item: str, leaf: str, box: Any, holders: Sequence[Mapping[str, Any]], suspects: Sequence[str]
) -> dict[str, Any]:
    return {
        "item": item,
        "leaf": leaf,
        "box": [list(box.start), list(box.stop)],
        "holders": list(holders[:_SAID_HOLDERS]),
        "suspects": list(dict.fromkeys(suspects))[:_SAID_HOLDERS],
    }


def _unnamed(processes: BoxHolders, why: str) -> dict[str, Any]:
    holders = [{"process": process} for process in processes[:_SAID_HOLDERS]]
    return {"item": None, "leaf": None, "box": None, "holders": holders, "suspects": [], "reason": why}


def _words(found: Mapping[str, Any]) -> str:
    if found["leaf"] is None:
        processes = [each["process"] for each in found["holders"]]
        return f"processes {processes} differ; in which boxes is not known: {found['reason']}"
    start, stop = found["box"]
    who = [
        f"process {each['process']} on {each['host']}"
        + (f", device {each['device']}" if "device" in each else "")
        + f" has {each['digest'][:12]}"
        for each in found["holders"][:4]
    ]
    return f"leaf {found['item']}:{found['leaf']}, box {tuple(start)} to {tuple(stop)}: {'; '.join(who)}"


def host_values(save: Save, digests: Mapping[int, Digests]) -> dict[str, str]:
    """A hash of what each item has in host memory (NumPy leaves, numbers, JSON), by item: at most 50 bytes each. A
    data iterator, and files that a handler wrote, are each process's own."""
    parts: dict[str, list[Any]] = {}
    for name, value in save.items.inline.items():
        if value["kind"] not in ("grain", FILES):
            parts.setdefault(name, []).append(value)
    numbers = iter(range(len(save.description.extents)))
    for name, sources in save.description.items.items():
        for source in sources:
            of_boxes = [digests.get(next(numbers)) for _ in source.record.boxes]
            if source.record.kind != "jax" and name not in save.items.files and of_boxes:
                parts.setdefault(name, []).append([*source.record.path, *(list(each or ()) for each in of_boxes)])
    return {name: hashlib.sha256(json.dumps(each).encode()).hexdigest()[:12] for name, each in parts.items()}


def differing_host_values(ballots: Sequence[Mapping[str, Any] | None]) -> dict[str, int]:
    """The items whose values in host memory are not those of process 0, each with the first process that differs."""
    first, *others = [(ballot or {}).get("host") or {} for ballot in ballots]
    found: dict[str, int] = {}
    for process, values in enumerate(others, start=1):
        for name in first.keys() & values.keys():
            if first[name] != values[name]:
                found.setdefault(name, process)
    return dict(sorted(found.items()))
