"""Values in host memory (NumPy leaves, Python numbers, JSON) that the processes saved differently: all get process 0's.

Each process stores such values in its own share, so a restart that reads several shares may find several values.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptkit.job.coordination import Coordinator
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.restore.broadcast.coordinator import REPLICA
from ckptkit.restore.plan import Key, Source, plan_restore
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.read import OnRejected, execute

_log = logging.getLogger("ckptkit")
BYTES_MAX = 16 << 20  # of an item's NumPy leaves: the coordination service sends them to every process


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The values of one process, for all."""

    leaves: Mapping[Key, np.ndarray] = field(default_factory=dict)
    inline: Mapping[str, Any] = field(default_factory=dict)

    def put_into(self, prepared: Prepared) -> Prepared:
        """The same restore, with these values in place of those in the shares at hand."""
        if not self.leaves and not self.inline:
            return prepared

        def read_agreed(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
            del record
            into[...] = self.leaves[item, leaf.path][wanted.slices()]

        plan, holdings = prepared.plan, prepared.holdings
        reads = tuple(
            read._replace(
                sources=((0, read.sources[0][1]),)
                if read.key in self.leaves
                else tuple((source + 1, records) for source, records in read.sources)
            )
            for read in plan.reads
        )
        return replace(
            prepared,
            plan=replace(plan, tiers=(REPLICA, *plan.tiers), remote=(False, *plan.remote), reads=reads),
            holdings=replace(
                holdings,
                sources=(Source(tier=REPLICA, manifests=()), *holdings.sources),
                readers=(read_agreed, *holdings.readers),
            ),
            inline={name: self.inline.get(name, value) for name, value in prepared.inline.items()},
        )


def agreed(coordinator: Coordinator, prepared: Prepared | None, rejected: OnRejected) -> Told:
    """The values of the lowest process whose share anybody reads, of each item of which the shares differ.

    Called by all processes together. Cost: one exchange of a hash per item; where they differ, one of the values.
    Larger items than `BYTES_MAX`, and those that their process cannot read, are left as they are, with a warning.
    """
    if coordinator.count == 1:
        return Told()
    givers = coordinator.agree("host values", {} if prepared is None else _hashes(prepared), _givers)
    mine = [item for item, process in givers.items() if process == coordinator.process]
    if not givers:
        return Told()
    given = {} if prepared is None else {item: _values(prepared, item, rejected) for item in mine}
    values_of = coordinator.agree("told host values", given, lambda values: dict(ChainMap(*values)))
    for item in sorted(item for item, each in values_of.items() if each is None and coordinator.process == 0):
        _log.warning(
            "the processes saved different values in host memory (NumPy arrays, Python numbers, JSON) of item %r. "
            "Those of process %d cannot be read or have more than %d MiB, so each process gets those of a share that "
            "it reads",
            *(item, givers[item], BYTES_MAX >> 20),
        )
    found = {item: each for item, each in values_of.items() if each is not None}
    return Told(
        leaves={
            (item, tuple(path)): np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape)
            for item, each in found.items()
            for path, dtype, shape, text in each["leaves"]
        },
        inline={item: each["inline"] for item, each in found.items() if each["inline"] is not None},
    )


def _givers(values: list[Mapping[str, list[Any]]]) -> dict[str, int]:
    """The process whose values all get, of each item that differs."""
    by_item: dict[str, list[tuple[int, int, str]]] = {}
    for process, items in enumerate(values):
        for item, (writer, digest) in items.items():
            by_item.setdefault(item, []).append((writer, process, digest))
    differing = {item: each for item, each in by_item.items() if len({digest for *_, digest in each}) > 1}
    return {item: min(each)[1] for item, each in differing.items()}


def _hashes(prepared: Prepared) -> dict[str, list[Any]]:
    """For each item: the process that saved its values in host memory, and a hash of them."""
    found: dict[str, list[Any]] = {}
    for item in (*prepared.asked.trees, *prepared.inline):
        writers: list[int] = []
        parts: list[Any] = []
        for (_, path), (writer, leaf) in sorted(_host_leaves(prepared, item).items()):
            writers.append(writer)
            parts.append([path, [box.digests for box in leaf.boxes]])
        if item in _shared_inline(prepared):
            writers.append(min(m.writer.process for m in prepared.holdings.manifests if item in m.inline))
            parts.append(prepared.inline[item])
        if parts:
            found[item] = [max(writers), hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]]
    return found


def _shared_inline(prepared: Prepared) -> Iterable[str]:
    """The small items that are not each process's own."""
    return [name for name, stored in prepared.inline.items() if stored["kind"] != "grain"]


def _host_leaves(prepared: Prepared, item: str) -> dict[Key, tuple[int, LeafRecord]]:
    """The wanted leaves of an item that were saved from host memory, each with the lowest process that has it."""
    manifests = [m for m in prepared.holdings.manifests if item in m.arrays]
    if item not in prepared.asked.trees or all(leaf.kind == "jax" for m in manifests[:1] for leaf in m.arrays[item]):
        return {}
    wanted = {target.key for target in prepared.targets}
    found: dict[Key, tuple[int, LeafRecord]] = {}
    for manifest in sorted(manifests, key=lambda each: each.writer.process):
        for leaf in manifest.arrays[item]:
            if leaf.kind != "jax" and leaf.boxes and (item, leaf.path) in wanted:
                found.setdefault((item, leaf.path), (manifest.writer.process, leaf))
    return found


def _values(prepared: Prepared, item: str, rejected: OnRejected) -> dict[str, Any] | None:
    """The values of an item, as JSON; None where they are too large, or nothing holds them whole."""
    leaves = {key: leaf for key, (_, leaf) in _host_leaves(prepared, item).items()}
    if sum(Box.whole(leaf.shape).size * leaf.itemsize for leaf in leaves.values()) > BYTES_MAX:
        return None
    blocks: dict[Key, np.ndarray] = {}

    def proven(key: Key, found: Mapping[Box, np.ndarray]) -> None:
        (blocks[key],) = found.values()

    try:
        wanted = {key: (Box.whole(leaf.shape),) for key, leaf in leaves.items()}
        plan = plan_restore(prepared.plan.save_id, wanted, prepared.holdings.sources)
        execute(plan, prepared.holdings.readers, rejected, proven)
    except Exception as error:  # noqa: BLE001  the others wait for an answer
        _log.debug("the values of item %r in host memory are not given to the others: %s", item, error)
        return None
    return {
        "leaves": [
            [path, block.dtype.name, block.shape, base64.b64encode(block.tobytes()).decode()]
            for (_, path), block in blocks.items()
        ],
        "inline": prepared.inline.get(item),
    }
