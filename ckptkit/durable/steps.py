"""The steps of a durable root: written, listed and deleted by ckptkit, and booked in one manager of stock Orbax.

Stock Orbax writes the whole step where an item has a handler with a layout of its own, or where the options define how
a step is committed. Such a step has an identity and no digests.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from ckptkit.durable.abandoned import clean_left, clean_unmarked, left_behind
from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.lifecycle.classify import kind_of_item
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import PruneGuard, pinned_steps
from ckptkit.durable.lifecycle.listing import StepListing
from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.orbax.manager import (
    DEFAULT_ITEM,
    METRICS_ITEM,
    StockManager,
    committed_by_mark,
    delete_directory,
    finishes_in_its_own_way,
    make_root,
    read_by_one,
    step_names,
    without_collectives,
)
from ckptkit.durable.orbax.preservation import BranchPreservation, prunes, without_deletions
from ckptkit.durable.prune import Pruner, Report
from ckptkit.durable.read_step import DurableReader, identity_metadata
from ckptkit.durable.write_part import DurableItem
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import CorruptCheckpointError, StoreError, StoreFullError
from ckptkit.job.coordination import Coordinator, ScopedCoordinator
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import SaveId
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.store.local import lacking_room
from ckptkit.store.mounts import file_system_of
from ckptkit.store.remote import forget_listings
from ckptkit.store.roots import root_url
from ckptkit.util.words import command_line

_log = logging.getLogger("ckptkit")
_LEASE_DEADLINE_S = 20.0  # for small objects: a save that waits longer prunes nothing


def cleans_by_marks(url: str, options: ocp.CheckpointManagerOptions) -> bool:
    """Whether the options ask to delete what was not committed, where Orbax takes every directory without a mark for
    that: `clean_unmarked` deletes only steps."""
    return bool(options.cleanup_tmp_directories) and not properties_of(url).atomic_rename and not options.read_only


def prepare_root(url: str, options: ocp.CheckpointManagerOptions) -> None:
    """Makes the root where the options ask for it, and shields its records from `cleanup_tmp_directories`: Orbax's
    constructor deletes. Raises `StoreError` where they would be deleted and cannot be shielded."""
    if options.create:
        make_root(url, options)
    if options.read_only:
        return
    try:
        shield_records(open_store(url, deadline_s=_LEASE_DEADLINE_S), marked=finishes_in_its_own_way(options))
    except (StoreError, FileNotFoundError):  # a root that cannot be written, or is not there: the first save reports it
        if options.cleanup_tmp_directories:
            raise
    if cleans_by_marks(url, options):
        clean_unmarked(open_store(url, deadline_s=_LEASE_DEADLINE_S), step_names(options))


class DurableSteps:
    """Step directories under one root. Methods that save or restore are called by all processes together.

    Every barrier is one of the coordination service; nothing here launches a device collective while saving.
    """

    def __init__(
        self,
        directory: str,
        options: ocp.CheckpointManagerOptions,
        coordinator: Coordinator,
        *,
        setup: Mapping[str, Any] = MappingProxyType({}),
        profile: DurableProfile = DurableProfile(),  # noqa: B008  frozen
        report: Report = lambda step, reason: None,
        cleaned: Callable[[list[str]], None] = lambda names: None,
    ):
        """`setup`: further arguments of Orbax's constructor. `report` gets a committed step and the failure after its
        commit; `cleaned` gets removed leftovers."""
        self.profile = profile = profile.for_one_of(coordinator.count)
        self.url = root_url(directory)
        self._coordinator = coordinator
        self._tries = ScopedCoordinator(coordinator)  # to save: who misses one is there at the next
        self._identities: dict[int, SaveId | None] = {}  # of steps that this process has read or written
        self.seen: dict[int, SaveId] = {}  # the saves that steps counted as when they were looked at last
        coordinator.agree("durable-root", None, lambda _: prepare_root(self.url, options))
        self._report, self._cleaned = report, cleaned
        self._cleaned_epoch: int | None = None
        self._options = options
        self._store = open_store(self.url, deadline_s=_LEASE_DEADLINE_S)
        self._guard = PruneGuard(self._store)
        self._preservation = BranchPreservation(options, self.place_of) if prunes(options) else None
        self._abandoned: frozenset[int] = frozenset()  # set before each save, the same on every process
        asynchronous = options.async_options or ocp.AsyncOptions(timeout_secs=math.ceil(coordinator.timeout_s))
        orbax_options = dataclasses.replace(
            without_deletions(options),
            create=False,
            async_options=dataclasses.replace(asynchronous),  # Orbax edits it
            multiprocessing_options=without_collectives(options.multiprocessing_options, coordinator.count),
            **read_by_one(options),
            **({"cleanup_tmp_directories": False} if cleans_by_marks(self.url, options) else {}),
        )
        self.stock = StockManager(self.url, committed_by_mark(orbax_options, self.url), setup)
        mode = options.file_options.path_permission_mode if options.file_options else None
        self.pace = Pace(profile.write_bytes_per_s)
        self._read_pace = Pace(profile.read_bytes_per_s)
        # Of the last save, data files that this process took over from the step before: `shared_bytes`, `shared_from`.
        self.shared: Mapping[str, int] = {}
        self._step_writer = StepWriter(self.url, self._tries, profile, mode=mode, pace=self.pace)
        self._pruner = Pruner(self.url, self.stock, self._guard, options, leads=coordinator.process == 0, report=report)
        self._on_committed = asynchronous.post_finalization_callback

    @property
    def directory(self) -> Any:
        """The root, as Orbax's path."""
        return self.stock.orbax.directory

    def kept(self) -> list[int]:
        """The steps that are committed and not pruned, as the last save through this process left them."""
        return self.stock.known()

    def place_of(self, step: int) -> tuple[bool, SaveId]:
        """Sorts steps as they were saved; those that this process has not seen come last."""
        return step not in self.seen, self.seen.get(step, SaveId(0, step, -1))

    @property
    def writes_itself(self) -> bool:
        """Whether our own writer writes what it can; the caller's options may leave every step to Orbax."""
        return not finishes_in_its_own_way(self._options)

    def require_room(self, step_bytes: int) -> None:
        """Raises `StoreFullError` where the file system of the root cannot hold a step of `step_bytes`.

        Asks nothing of a bucket, or where cells are compressed. Warns only, where the step may share unchanged cells
        with one that is there, where leftovers go first, and on a mount whose numbers may mean something else.
        """
        if not properties_of(self.url).file_system or self.profile.compression is not None or not self.writes_itself:
            return
        why = lacking_room(self.url, step_bytes)
        if why is None:
            return
        doubt = None
        if self.kept() and self.profile.shared_steps_max > 1:
            doubt = "unless most leaves are unchanged"
        elif left_behind(self._store, self.kept()):
            doubt = "unless what an ended run left there frees enough"
        elif file_system_of(self.url).medium not in ("disk", "memory"):
            doubt = "if this mount reports its room as it is"
        if doubt is not None:
            _log.warning("%s: the next durable save fails, %s", why, doubt)
            return
        raise StoreFullError(f"{why}; free some space or take another directory", path=self.url)

    def reader(self, step: int) -> DurableReader:
        """A reader of one step, which compares every cell that it returns with its digest."""
        return DurableReader(self._step_url(step), step=step, profile=self.profile, pace=self._read_pace)

    def save_id(self, step: int) -> SaveId | None:
        """Which save a committed step is; None for one that stock Orbax wrote. Cost: a small read; of a step without a
        mark of ours, two listings and a read. Raises `CorruptCheckpointError` for a tree that was saved without a
        manager, which is not a step (`strike`)."""
        reader = self.reader(step)
        found = reader.save_id()
        if found is None and kind_of_item(reader.names()) == "arrays":
            self.strike([step])
            raise CorruptCheckpointError(
                f"{reader.url} is a tree that was saved without a manager; a manager does not restore it as a step",
                step=step,
                path=reader.url,
            )
        return found

    def strike(self, steps: Iterable[int]) -> None:
        """Strikes out of the books what Orbax takes for steps, and is none: it is not listed, counted or deleted."""
        self.stock.unmanaged.update(steps)

    @property
    def struck(self) -> list[int]:
        """The removed entries, ascending."""
        return sorted(self.stock.unmanaged)

    def save(
        self,
        save_id: SaveId,
        items: Mapping[str, DurableItem],
        *,
        metrics: Any,
        ancestry: Ancestry,
        custom_metadata: Mapping[str, Any] | None = None,
        check_epoch: Callable[[], None] = lambda: None,
        about: str = "",
    ) -> None:
        """Writes and commits one step; returns once it is committed. Runs on a background thread.

        `items` are trees of host memory (`host_tree`) and files. The memory that they view must not change until this
        returns. A step of the same number is replaced only if `ancestry` shows that it belongs to an abandoned branch.
        The epoch of `save_id` must be recorded in the root: uncommitted leftovers of earlier ones are removed first.
        `check_epoch` is called on process 0 right before the commit, and raises if a later epoch has begun. `about` is
        the key of this try's barriers (default: the save). If it raises, the step may be there all the same: the books
        are then read anew.
        """
        self._begin(save_id, about)
        self._clean_left(save_id)
        self._meet_abandoned(save_id.step, ancestry)
        step = save_id.step
        if step in self.stock.known():
            raise StepAlreadyExistsError(f"step {step} is in {self.url} already")
        if metrics is not None and self.stock.stored_metrics:
            text = json.dumps(metrics).encode()  # Orbax names the file after its item
            metrics_item = FilesSave(files={METRICS_ITEM: text}, handler=ocp.JsonCheckpointHandler.typestr())
            items = {**items, METRICS_ITEM: metrics_item}
        has_sidecars = any(isinstance(item, HostTreeSave) and item.sidecar is not None for item in items.values())
        properties = properties_of(self.url)
        # On a mount a step without its mark has to show that it is not one that stock Orbax has renamed there.
        named = not has_sidecars or (properties.file_system and not properties.atomic_rename)
        custom = {**(custom_metadata or {}), **(identity_metadata(save_id) if named else {})}
        try:
            name = self.stock.name(step)
            tidy = self._step_writer.write(name, save_id, items, custom, check_epoch, last=self._newest)
            self.shared = self._step_writer.shared
            forget_listings(self.url)  # of before the commit: Orbax's reads go by them
            self._identities[step] = self.seen[step] = save_id
            self.stock.add(step, metrics)
            self._prune(save_id.epoch, tidy)
        except BaseException:
            self.stock.look_again()
            raise
        if self._on_committed is not None:
            self._on_committed()

    def save_by_orbax(
        self,
        save_id: SaveId,
        args: Mapping[str, Any],
        *,
        metrics: Any,
        default_item: bool,
        ancestry: Ancestry,
        custom_metadata: Mapping[str, Any] | None,
    ) -> None:
        """Begins a save by stock Orbax, with the caller's own handlers and objects, on the caller's thread.

        Blocks as Orbax blocks and raises what Orbax raises; `finish_by_orbax` waits for the rest. The step has
        an identity and no digests. No other save may be in flight.
        """
        self.stock.settle()
        self._begin(save_id)
        self._meet_abandoned(save_id.step, ancestry)
        self.stock.known()
        self._identities[save_id.step] = self.seen[save_id.step] = save_id
        if self._coordinator.process == 0 and not self._store.properties.atomic_rename:
            # The sign of a deletion that was cut off: a prune would end that deletion during the save.
            name = step_names(self._options).build_name(save_id.step)
            self._store.delete(f"{paths.INTENTS_DIR}/{paths.going_name(name)}")
        self.stock.orbax.save(
            save_id.step,
            args=args[DEFAULT_ITEM] if default_item else ocp.args.Composite(**args),
            metrics=metrics,
            force=True,
            custom_metadata={**(custom_metadata or {}), **identity_metadata(save_id)},
        )

    def finish_by_orbax(self, save_id: SaveId) -> None:
        """Waits until the save that `save_by_orbax` began is committed, and begins to delete the steps that it has
        pushed out. The epoch of `save_id` must be recorded in the root. Raises what Orbax raises."""
        try:
            self.stock.orbax.wait_until_finished()
            self._clean_left(save_id)
            self._prune(save_id.epoch)
        except BaseException:
            self.stock.look_again()
            raise

    def _begin(self, save_id: SaveId, about: str = "") -> None:
        """Begins a try to save: earlier deletions have ended when it returns."""
        self._tries.begin(about or str(save_id))
        self.shared = {}
        self._pruner.wait()
        self._settle()

    def _prune(self, epoch: int, first: Callable[[], None] = lambda: None) -> None:
        """Begins to delete the steps that the policies do not keep, after `first`."""
        gone = frozenset[int]()
        self.stock.forget(self.stock.unmanaged)
        if self._preservation is not None:
            # One of unknown age (damaged, or deleted by another process before this one could look) does not count: it
            # would push out the good steps. It stays, as `ckptkit prune` leaves it.
            aged = [each for each in self.stock.infos() if each.step in self.seen or each.step in self._abandoned]
            gone = self._release(self._preservation.doomed(aged, self._abandoned), epoch)
            self.stock.forget(gone)
        self._pruner.prune(sorted(gone), first)

    def _newest(self) -> tuple[int, str] | None:
        """The newest step that is known here, and its directory; None without steps. It may have been deleted since."""
        steps = self.stock.known()
        return (max(steps), self._step_url(max(steps))) if steps else None

    def _step_url(self, step: int) -> str:
        return f"{self.url}/{self.stock.found_name(step)}"

    def _clean_left(self, save_id: SaveId) -> None:
        """Once in each epoch, on process 0. Leftovers that cannot be removed do not fail a save: they are reported, and
        left to the next one."""
        if self._coordinator.process != 0 or self._cleaned_epoch == save_id.epoch:
            return
        self._cleaned_epoch = save_id.epoch
        try:
            store = open_store(self.url, deadline_s=_LEASE_DEADLINE_S)
            names = clean_left(store, save_id.epoch, lambda place: delete_directory(place, self._options))
        except (StoreError, OSError) as error:
            reason = f"leftovers of earlier runs are not removed yet: {type(error).__name__}: {error}"
            self._report(save_id.step, reason)
        else:
            if names:
                self._cleaned(names)

    def delete(self, step: int, *, at_once: bool = False, about: str = "") -> None:
        """Deletes a committed step by the options; does nothing if it does not exist. No save may be in flight. With
        `at_once` it is deleted on return, even if the options delete in the background.

        Announced like a prune, so that no scrub takes what is half deleted for damaged; readers of the step were not
        asked. Raises `StoreError` where it cannot be announced: nothing is deleted then.
        """
        self.stock.settle()
        self._pruner.wait()
        if step not in self.stock.known():
            self.stock.look()  # puts the steps in order: Orbax prunes by it, and keeps them as they were saved
        waits = at_once or not self._options.enable_background_delete

        def begin(_: list[Any]) -> None:
            self._guard.announce({step})
            if waits:
                self._pruner.remove(step)

        if step in self.stock.known() and not self._options.read_only:
            # Of a step whose number is saved again: a part of that try.
            channel, meetings = ("delete-abandoned", self._tries) if at_once else ("delete", self._coordinator)
            try:
                meetings.agree(channel, None, begin, about=about)
            except BaseException:
                self.stock.look_again()
                raise
            self.stock.forget([step])
            forget_listings(self.url)
            if waits:
                self._settle()
            else:
                self._pruner.prune([step])
        self._identities.pop(step, None)
        self.seen.pop(step, None)

    def holds(self, save_id: SaveId) -> bool:
        """Whether the step is committed, and is this save. Cost: a listing and a small read."""
        found = save_id.step in self.steps() and self.save_id(save_id.step) == save_id
        if found:
            self.seen[save_id.step] = save_id  # committed by a try that failed after that: it counts
        return found

    def reload(self) -> None:
        """Lists the storage again. No save may be in flight."""
        self.stock.settle()
        self._pruner.wait()
        self._identities.clear()
        self.stock.look()

    def wait_until_pruned(self) -> None:
        """Waits until the steps that the last save has pushed out are deleted, or could not be."""
        self._pruner.wait()

    def steps(self) -> list[int]:
        """The committed steps, ascending, as the storage has them now. Cost: a listing."""
        return list(self.looked())

    def looked(self) -> StepListing:
        """The same, with the names that were seen below a step, where it was looked into."""
        return self.stock.listed()

    def _meet_abandoned(self, step: int, ancestry: Ancestry) -> None:
        """All processes learn from process 0 which steps are abandoned; one of the number to be saved is deleted."""
        self._pruner.forget(step)

        def abandoned(_: list[Any]) -> tuple[list[int], bool]:
            if not ancestry.rollbacks:  # no branch was ever left: nothing has to be looked at
                return [], False
            found = [each for each in self.steps() if self._is_abandoned(each, ancestry, replaced=each == step)]
            return found, step in found and step in pinned_steps(self._store)

        steps, pinned = self._tries.agree("abandoned", None, abandoned)
        if pinned:
            raise StepAlreadyExistsError(
                f"step {step} in {self.url} is of an abandoned branch, and pinned: it is not replaced. Save another "
                f"step, or take the pin out with `{command_line('unpin', self.url, step)}`"
            )
        # The one that takes its number is of this branch: without it here, its own save would prune it.
        self._abandoned = frozenset(steps) - {step}
        if step in steps:
            self.delete(step, at_once=True)

    def _release(self, doomed: list[int], epoch: int) -> frozenset[int]:
        """The steps to delete: those that process 0's policies release, by its clock and metrics, and that no process
        reads. None once an epoch after `epoch` has begun: it may have gone back to one of them. All processes get the
        list and take part, also where their own clocks and metrics differ."""

        def let_go(_: list[Any]) -> list[int]:
            free = set(doomed) - self._guard.spare(doomed)
            with suppress(StoreError):
                # Asked after the announcement: a rollback holds its step until its record is there.
                if free and EpochRecords(self._store).newest_epoch() <= epoch:
                    return sorted(free)
            if doomed:
                self._guard.settle()
            return []

        return frozenset(self._tries.agree("leases", None, let_go))

    def _settle(self) -> None:
        if self._coordinator.process == 0:
            self._guard.settle()

    def _is_abandoned(self, step: int, ancestry: Ancestry, *, replaced: bool) -> bool:
        """A step whose sidecar is damaged may be of this branch: it is deleted only if a new save takes its number."""
        try:
            if step not in self._identities:
                self._identities[step] = self.save_id(step)
            return ancestry.superseded(ancestry.identity(step, self._identities[step]))
        except CorruptCheckpointError:
            return replaced and ancestry.may_be_abandoned(step)

    def close(self) -> None:
        """Finishes deletions, and ends Orbax's manager."""
        self._pruner.close()
        self._guard.close()
        self.stock.close()
