"""The data files that the steps of one root share: those that the next step takes over, and their records."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from ckptkit.durable.cells.tensorstore_wait import small_objects
from ckptkit.durable.cells.unchanged import (
    FileGroup,
    PieceTree,
    SharingPlan,
    UnchangedLeaves,
    can_share,
    group_of,
    groups_of,
    signature_of,
    take_over,
    without,
)
from ckptkit.durable.sidecars import marked_save
from ckptkit.errors import CheckpointError
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord, Manifest, SaveId
from ckptkit.store import all_of
from ckptkit.util.gc_pause import collection_paused

Last = Callable[[], tuple[int, str] | None]  # the newest committed step of a root, and its URL
_FORMAT = 1  # another one where the databases of `CellWriter` are configured otherwise: it opens the trees anew
_DATA_FILE = re.compile(r"d/unchanged\.[0-9A-Za-z]+")


@final
class Sharing:
    """The files that the steps of one root share, on process `process` of `count`: `UnchangedLeaves` of each item. One
    thread."""

    def __init__(self, root: str, process: int, count: int):
        self._root, self._process, self._count = root, process, count
        self._items: dict[str, UnchangedLeaves] = {}
        self._wrote: dict[str, tuple[str, SharingPlan, FileGroup | None]] = {}  # by item, of the step being written
        self._last_step = -1  # that was committed
        self.shared: Mapping[str, int] = {}  # fields of the event `committed`, of the step that was committed last

    def begin(self, save_id: SaveId, last: Last) -> None:
        """A step is begun: nothing of it is written yet. `last` is asked about items that this process has not written
        before."""
        self._wrote.clear()
        self._save_id, self._last = save_id, last

    def take_over(
        self, item: str, leaves: Sequence[LeafRecord], place: str, below: str, profile: DurableProfile
    ) -> SharingPlan:
        """The plan for an item whose database will be `below` the step's `place`. The files of its groups are there
        already. Raises `StoreError` if a bucket fails."""
        if item not in self._items:
            self._items[item] = self._found_again(item, below, profile) or UnchangedLeaves()
        known = self._items[item]
        plan = known.plan(leaves, profile)
        if (plan.taken or plan.apart) and not can_share(self._root):
            return replace(plan, taken=(), apart=frozenset())
        for group in plan.taken:
            assert known.directory is not None, "a group is of a committed step"
            if not take_over(self._root, group, known.directory, place + below, profile):
                plan = without(plan, group)
        return plan

    def wrote(self, item: str, below: str, plan: SharingPlan, group: FileGroup | None) -> bytes | None:
        """An item is written. Its database is `below` the step's directory, and its leaves `apart` are in `group`.
        Returns the record of its groups, for the next process of this number; None where it has none."""
        self._wrote[item] = below, plan, group
        groups = groups_of(plan, group)
        return record_of(self._save_id, self._process, self._count, groups, plan.signatures) if groups else None

    def committed(self, url: str, step: int) -> None:
        """The step, at this URL, is committed: the next one takes files over from it."""
        shared_bytes = 0
        for item, (below, plan, group) in self._wrote.items():
            self._items[item].committed(url + below, plan, group)
            shared_bytes += sum(taken.stored_bytes for taken in plan.taken)
        self.shared = {"shared_bytes": shared_bytes, "shared_from": self._last_step} if shared_bytes else {}
        self._last_step = step

    def _found_again(self, item: str, below: str, profile: DurableProfile) -> UnchangedLeaves | None:
        if profile.shared_steps_max == 1 or not can_share(self._root) or (last := self._last()) is None:
            return None
        step, url = last
        if self._last_step < 0:
            self._last_step = step
        return found_again(url, item, below, self._process, self._count, profile)


def record_of(
    save_id: SaveId, process: int, count: int, groups: Sequence[FileGroup], signatures: Mapping[str, str]
) -> bytes:
    """The record of the groups that one process of `count` has in an item of a step. `signatures` are those of its
    leaves."""
    described = [
        {
            "leaves": dict(group.leaves),
            "live": {name: signatures[name] for name in group.live},
            "steps": group.steps,
            "trees": [
                {"manifest": _text(tree.manifest), "nodes": {name: _text(node) for name, node in tree.nodes.items()}}
                for tree in group.trees
            ],
        }
        for group in groups
    ]
    record = {**_head(save_id, process, count), "groups": described}
    return _dumps({**record, "digest": _digest(record)})


def found_again(
    url: str, item: str, below: str, process: int, count: int, profile: DurableProfile
) -> UnchangedLeaves | None:
    """The memory that process `process` of `count` had of its part of an item, after the committed step at `url`. The
    database of that part is `below` the step's directory. None where the step does not show it, or was deleted.

    Cost: three small reads at the same time, and the time to parse a sidecar.
    """
    store = small_objects(url, profile)
    names = (paths.sidecar_name(process), paths.unchanged_name(process))
    keys = [paths.COMMIT_MARK, *(f"{item}/{paths.SIDECAR_DIR}/{name}" for name in names)]

    def read(key: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return store.get(key)
        return None

    with suppress(CheckpointError, OSError), collection_paused():
        mark, sidecar, record = all_of(url, [partial(read, key) for key in keys])
        if mark is None or sidecar is None:
            return None
        manifest = Manifest.from_bytes(sidecar, path=f"{url}/{keys[1]}")
        if manifest.save_id != marked_save(mark) or (manifest.writer.process, manifest.writer.count) != (
            process,
            count,
        ):
            return None
        signatures = {
            leaf.name: sign
            for leaf in manifest.arrays.get(item, ())
            if (sign := signature_of(leaf, profile)) is not None
        }
        groups, of_groups = _unsealed(record or b"", _head(manifest.save_id, process, count))
        return UnchangedLeaves({**signatures, **of_groups}, groups, f"{url}{below}")
    return None


def _unsealed(data: bytes, head: Mapping[str, Any]) -> tuple[tuple[FileGroup, ...], dict[str, str]]:
    """The groups of a record, and the signatures of their leaves: bytes are encoded as they were then. Both are empty
    where the record does not begin with `head`."""
    try:
        found = json.loads(data)
        digest = found.pop("digest")
        if _digest(found) != digest or {name: found[name] for name in head} != head:
            return (), {}
        groups = tuple(map(_group, found["groups"]))
        if any(_DATA_FILE.fullmatch(path) is None for group in groups for path in group.files):
            return (), {}
        return groups, {name: sign for each in found["groups"] for name, sign in each["live"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # TensorStore raises ValueError
        return (), {}


def _group(found: Mapping[str, Any]) -> FileGroup:
    trees = [
        PieceTree(
            manifest=base64.b64decode(tree["manifest"]),
            nodes={name: base64.b64decode(node) for name, node in tree["nodes"].items()},
        )
        for tree in found["trees"]
    ]
    return replace(group_of(trees, found["leaves"]), live=frozenset(found["live"]), steps=found["steps"])


def _head(save_id: SaveId, process: int, count: int) -> dict[str, Any]:
    return {"format": _FORMAT, "save_id": save_id.to_list(), "process": process, "count": count}


def _digest(record: dict[str, Any]) -> str:
    return digest_of(_dumps(record))


def _dumps(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
