"""Leaves that did not change since the last save: which of them get data files of their own, and which files the next
step takes over instead of writing them again.

A later step takes a data file over by a hard link, or in a bucket by a copy within the service. So each step stays an
Orbax directory that needs no other. The reasons and the limits are in docs/decisions/0010-unchanged-leaves.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.ocdbt import places
from ckptkit.durable.cells.ocdbt_node import Placed
from ckptkit.durable.cells.tensorstore_wait import large_objects
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.paths import OCDBT_MANIFEST
from ckptkit.store import all_of
from ckptkit.store.backends import properties_of
from ckptkit.store.mounts import file_system_of

LEAF_BYTES_MIN = 64 << 10  # a smaller leaf is written with the rest: it saves nothing and costs a key range
GROUP_BYTES_MIN = 1 << 20  # for less, a data file of its own takes longer than the write
NODES = "n/"  # the trees of pieces and groups are in memory: only the item's, which joins them, is in the storage
_DATA = "d"  # the directory of a database that has its data files
_GROUPS_MAX = 8  # in one step: each costs a request or a link for each data file
_LIVE_SHARE_MIN = 0.75  # of a group's bytes: with less, too many bytes of changed leaves are kept

Written = tuple[LeafRecord, Sequence[tuple[Box, np.ndarray]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTree:
    """A database whose tree is in memory: its manifest, and its nodes by name."""

    manifest: bytes
    nodes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Data files with the cells of leaves that did not change.

    `leaves`: bytes by name. `files`: the bytes that are used of each, by path below the directory of the database; none
    where all cells are so small, compressed, that the trees hold them.
    `live`: the leaves that still have these bytes. `steps`: how many steps hold the files.
    """

    leaves: Mapping[str, int]
    trees: tuple[PieceTree, ...]
    files: Mapping[str, int]
    live: frozenset[str]
    steps: int = 1

    @property
    def live_bytes(self) -> int:
        """Bytes of the leaves that still have them."""
        return sum(self.leaves[name] for name in self.live)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the data files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPlan:
    """`taken`: groups of the last step whose files this one takes over. `apart`: leaves that are written to data files
    of their own. `signatures` is what each leaf is now."""

    taken: tuple[FileGroup, ...]
    apart: frozenset[str]
    signatures: Mapping[str, str]

    @property
    def taken_leaves(self) -> frozenset[str]:
        """Leaves that are not written."""
        return frozenset().union(*(group.live for group in self.taken))


NOTHING_SHARED: Final = SharingPlan(taken=(), apart=frozenset(), signatures={})


def group_of(trees: Sequence[PieceTree], leaves: Mapping[str, int]) -> FileGroup:
    """The data files that the trees of a step's own group refer to; `leaves` are in them. Touches no storage."""
    files: dict[str, int] = {}
    for tree in trees:
        look = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
        look.write(OCDBT_MANIFEST, tree.manifest).result()
        for name, node in tree.nodes.items():
            look.write(f"{NODES}{name}", node).result()
        for placed in places(look, lambda future: future.result()).values():
            if isinstance(placed, Placed):
                files[placed.path] = max(files.get(placed.path, 0), placed.start + placed.length)
    return FileGroup(leaves=leaves, trees=tuple(trees), files=files, live=frozenset(leaves))


@final
class UnchangedLeaves:
    """The memory of one process about its part of one item, from one committed step to the next. One thread."""

    def __init__(
        self,
        signatures: Mapping[str, str] = MappingProxyType({}),
        groups: tuple[FileGroup, ...] = (),
        directory: str | None = None,
    ) -> None:
        """`signatures` of the leaves in the last committed step, its `groups`, and the directory of its database."""
        self._signatures, self._groups, self.directory = signatures, groups, directory

    def plan(self, leaves: Iterable[LeafRecord], profile: DurableProfile) -> SharingPlan:
        """The leaves that the next step may share with the last one. Cost: a digest of each leaf's digests."""
        own = {
            leaf.name: (sign, leaf.held_bytes) for leaf in leaves if (sign := signature_of(leaf, profile)) is not None
        }
        signatures = {name: sign for name, (sign, _) in own.items()}
        if profile.shared_steps_max == 1:
            return SharingPlan(taken=(), apart=frozenset(), signatures=signatures)
        same = {name: own[name][1] for name, sign in signatures.items() if self._signatures.get(name) == sign}
        taken = [replace(group, live=group.live & same.keys()) for group in self._groups]
        taken = [group for group in taken if _is_worth_it(group, profile)]
        held = frozenset().union(*(group.live for group in taken))
        apart = {name: size for name, size in same.items() if name not in held}
        if sum(apart.values()) >= GROUP_BYTES_MIN and len(taken) == _GROUPS_MAX:
            smallest = min(taken, key=lambda group: group.live_bytes)
            taken.remove(smallest)
            apart |= {name: smallest.leaves[name] for name in smallest.live}
        if sum(apart.values()) < GROUP_BYTES_MIN:
            apart = {}
        return SharingPlan(taken=tuple(taken), apart=frozenset(apart), signatures=signatures)

    def committed(self, directory: str, plan: SharingPlan, written: FileGroup | None) -> None:
        """The step whose database is in `directory` was committed by this plan; `written` has its leaves `apart`."""
        self._groups = groups_of(plan, written)
        self._signatures, self.directory = plan.signatures, directory


def groups_of(plan: SharingPlan, written: FileGroup | None) -> tuple[FileGroup, ...]:
    """The groups of a step that is committed by this plan; `written` has its leaves `apart`."""
    taken = tuple(replace(group, steps=group.steps + 1) for group in plan.taken)
    return taken if written is None else (*taken, written)


def without(plan: SharingPlan, group: FileGroup) -> SharingPlan:
    """The plan after the files of a group could not be linked: its leaves are written, apart from the others."""
    taken = tuple(each for each in plan.taken if each is not group)
    return replace(plan, taken=taken, apart=plan.apart | group.live)


def can_share(url: str) -> bool:
    """Whether a step at `url` can take over files of another step there: by hard links, or by a bucket's copy."""
    return not properties_of(url).file_system or file_system_of(url).hard_links


def take_over(root: str, group: FileGroup, source: str, target: str, profile: DurableProfile) -> bool:
    """Makes a group's files be in `target` too, directories of databases below `root`; False, and nothing is left, if
    `source` does not have them any more, or cut off, or they cannot be linked. True for a group without files.

    Cost: a link for each file; in a bucket a listing, and a request for each file that copies it there. Raises
    `StoreError` if a bucket fails.
    """
    if not group.files:
        return True
    if properties_of(target).file_system:
        return _link(group.files, source, target)
    return _copy(root, group.files, source.removeprefix(f"{root}/"), target.removeprefix(f"{root}/"), profile)


def _link(files: Mapping[str, int], source: str, target: str) -> bool:
    made: list[str] = []
    try:
        for path, size in files.items():
            os.makedirs(os.path.dirname(f"{target}/{path}"), exist_ok=True)
            os.link(f"{source}/{path}", f"{target}/{path}")
            made.append(f"{target}/{path}")
            if os.stat(made[-1]).st_size < size:  # TensorStore pads a large file to whole pages
                raise FileNotFoundError(f"{made[-1]} is cut off")
    except OSError:  # pruned meanwhile; too many links; no links on this mount: the bytes are written instead
        for each in made:
            with suppress(OSError):
                os.unlink(each)
        return False
    return True


def _copy(root: str, files: Mapping[str, int], source: str, target: str, profile: DurableProfile) -> bool:
    store = large_objects(root, profile, max(files.values()))
    found = store.stat_all(f"{source}/{_DATA}")
    if any((stat := found.get(f"{source}/{path}")) is None or stat.size_bytes < files[path] for path in files):
        return False

    def copied(path: str) -> bool:
        try:
            store.copy(f"{source}/{path}", f"{target}/{path}", mode="create")
        except FileNotFoundError:  # pruned meanwhile
            return False
        return True

    if all(all_of(root, [partial(copied, path) for path in files])):
        return True
    store.delete_many([f"{target}/{path}" for path in files])
    return False


def _is_worth_it(group: FileGroup, profile: DurableProfile) -> bool:
    enough = group.live_bytes >= _LIVE_SHARE_MIN * sum(group.leaves.values())
    return enough and group.steps < profile.shared_steps_max


def signature_of(leaf: LeafRecord, profile: DurableProfile) -> str | None:
    """Decides the stored bytes of this process's boxes of a leaf; None for a leaf that is always written."""
    if (
        leaf.held_bytes < LEAF_BYTES_MIN or not leaf.name or "/" in leaf.name
    ):  # keys of `a` would include those of `a/b`
        return None
    boxes = [(box.box.start, box.box.stop, box.digests) for box in leaf.boxes]
    if not all(digests for *_, digests in boxes):
        return None
    return digest_of(repr((leaf.dtype, leaf.shape, leaf.cell, profile.codec_of(leaf.cell_bytes), boxes)).encode())
