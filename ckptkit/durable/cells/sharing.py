"""The data files that the steps of one root share: those that the next step takes over, and their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from ckptkit.durable.cells.unchanged import (
    FileGroup,
    SharingPlan,
    UnchangedLeaves,
    can_share,
    groups_of,
    take_over,
    without,
)
from ckptkit.durable.cells.unchanged_record import found_again, record_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord, SaveId

Last = Callable[[], tuple[int, str] | None]  # the newest committed step of a root, and its URL


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
        self,
        item: str,
        leaves: Sequence[LeafRecord],
        place: str,
        below: str,
        profile: DurableProfile,
        ready: Callable[[], None],
    ) -> SharingPlan:
        """The plan for an item whose database will be `below` the step's `place`. The files of its groups are there
        already.

        Waits for `ready` if there are some. Raises `StoreError` if a bucket fails.
        """
        if item not in self._items:
            self._items[item] = self._found_again(item, below, profile) or UnchangedLeaves()
        known = self._items[item]
        plan = known.plan(leaves, profile)
        if (plan.taken or plan.apart) and not can_share(self._root):
            return replace(plan, taken=(), apart=frozenset())
        for group in plan.taken:
            assert known.directory is not None, "a group is of a committed step"
            ready()
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
