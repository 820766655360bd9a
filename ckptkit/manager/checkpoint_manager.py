"""`CheckpointManager`: Orbax's words over ramdisk, SSD and durable tiers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.manager import refuse_options, refuse_part_of_job
from ckptkit.durable.orbax.reports import save_entry
from ckptkit.errors import ClosedAtEnd, SaveFailedError, plainly
from ckptkit.events import EventLog, default_log
from ckptkit.job.coordination import Job, make_coordinator, refuse_unjoined
from ckptkit.manager.build import make_components
from ckptkit.manager.catalog import Catalog
from ckptkit.manager.observers import observe_run
from ckptkit.manager.preemption import LastSaver
from ckptkit.manager.restore import Resumer
from ckptkit.manager.restore_handle import RestoreHandle
from ckptkit.manager.run_account import RunAccount
from ckptkit.manager.save import OrbaxArguments, Saver
from ckptkit.manager.scrub import SlotScrub, scrub_slots
from ckptkit.manager.settings import Settings, check_types
from ckptkit.manager.start_warnings import warn_of_overrides
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import SaveId
from ckptkit.model.paths import saved_step_number, step_number
from ckptkit.model.policies import ProcessOptions, SaveOptions
from ckptkit.model.tiers import DURABLE, Tier, checked_tiers
from ckptkit.save.book.ledger import StepRecord
from ckptkit.save.book.under_way import described, exit_drain
from ckptkit.save.last_save import LastSave
from ckptkit.store.roots import root_url
from ckptkit.util import clock
from ckptkit.util.clock import Deadline

_log = logging.getLogger("ckptkit")
_STALL_SPARE_S = 60.0  # a piece of a slow disk, a request that is sent again
_JOIN_S = 10.0  # for the threads of saves that hang


class CheckpointManager(ClosedAtEnd, ocp.AbstractCheckpointManager):
    """Saves and restores steps over fast tiers and a durable one: a drop-in for Orbax's `CheckpointManager`.

    `directory` is the durable tier: plain Orbax step directories, on a shared directory or `gs://`. `tiers` are
    this host's fast ones. `save` returns once the caller may donate the state, after one copy of this process's
    boxes; everything else happens in background threads, without device collectives. All processes make the
    manager, save and restore together. `docs/departures.md` lists the differences from Orbax's manager.

    Args:
      directory: durable root, a path, `gs://bucket/prefix`, or `s3://` with the extra `s3`.
      checkpointers, metadata, item_names, item_handlers, handler_registry: as in Orbax.
      options: Orbax's options; they rule the durable tier.
      logger: an `ocp.logging.AbstractLogger` that gets Orbax's entry for each save and restore.
      tiers: `Tier.ram(...)`, `Tier.ssd(...)`.
      host_id: names this host below a tier's path (default: the host's name); it must outlive a restart.
      events: where to record what happens (default: nowhere).
      durable: how the durable tier is written and read (`DurableProfile`, or `DurableProfile.load(file)`).
      saving: how a save keeps the state alive, waits for earlier ones, fails, and compares data replicas.
      processes: how the processes of a job wait and read for each other, and whether they show their progress.

    Raises the errors of Orbax's constructor for the shared arguments. Raises `TierUnusableError` for a tier that cannot
    be written, `StoreError` for a durable root that cannot be read, and `CoordinationError` if a process does not join.
    Raises `NotJoinedError` in a worker of `ckptkit run` that has not called `jax.distributed.initialize()`.
    """

    @plainly
    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: ocp.logging.AbstractLogger | None = None,
        handler_registry: Any = None,
        *,
        tiers: Sequence[Tier] = (),
        host_id: str | None = None,
        events: EventLog | None = None,
        durable: DurableProfile = DurableProfile(),  # noqa: B008  frozen
        saving: SaveOptions | None = None,
        processes: ProcessOptions | None = None,
    ):
        tiers = tuple(tiers) if isinstance(tiers, Iterable) and not isinstance(tiers, str) else tiers
        check_types(tiers, options=options, events=events, durable=durable, saving=saving, processes=processes)
        saving, processes = saving or SaveOptions(), processes or ProcessOptions()
        self._settings = Settings(
            options=options or ocp.CheckpointManagerOptions(),
            tiers=checked_tiers(tuple(tiers)),
            durable=durable,
            host_id=host_id or socket.gethostname(),
            events=events or default_log(),
            saving=saving,
            processes=processes,
        )
        self._options = self._settings.options
        self._logger = logger or ocp.logging.StandardLogger()
        self._account = RunAccount(self._settings.events, progress=processes.progress)
        refuse_options(self._options, root_url(directory))
        refuse_part_of_job(self._options, jax.process_count())
        if not self._options.read_only:
            refuse_unjoined()
        setup = {
            "checkpointers": checkpointers,
            "metadata": metadata,
            "item_names": item_names,
            "item_handlers": item_handlers,
            "handler_registry": handler_registry,
        }
        asynchronous = self._options.enable_async_checkpointing
        observe_run(self._settings.events, jax.process_index(), root_url(directory), asynchronous=asynchronous)
        job = Job(coordinator=make_coordinator(processes.timeout_s), events=self._settings.events)
        self._components = make_components(root_url(directory), self._settings, setup, job)
        self._durable, self._pipeline = self._components.storage.durable, self._components.pipeline
        self._ledger, self._metadata_index = self._components.history.ledger, self._components.history.metadata_index
        self._saver = Saver(self._settings, self._components)
        self._resumer = Resumer(self._settings, self._components, self._logger, self._account)
        self._last_saver = LastSaver(self._settings, self._components, self._saver)
        exit_drain.add(self._pipeline.under_way, processes.close_timeout_s)
        self.inner = self._catalog = Catalog(self._components, self._resumer)
        self._closed = False
        warn_of_overrides(type(self), CheckpointManager)
        self._saved_s: float | None = None  # when the last save began, monotonic
        self._account.opened(jax.process_index(), self._durable.url, self._settings.tiers, self._ledger.steps())

    # The interface of Orbax's managers.

    @property
    def directory(self) -> Any:
        """The durable root."""
        return self._durable.directory

    @property
    def is_read_only(self) -> bool:
        """Whether it saves and deletes nothing: Orbax's option `read_only`."""
        return self._options.read_only

    @plainly
    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Mapping[str, Any] | None = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Takes a step for the tiers in which it is due; returns whether it was taken.

        Returns once the caller may donate the state. The step is committed to a tier only after its `committed`
        event; one that came too early on some process is dropped on all, with a `save_skipped` event. Blocks for one
        copy of this process's boxes; when the durable tier is due, also for the previous durable save; with
        `enable_async_checkpointing=False`, until every tier has the step. A background failure is raised by
        `check_for_errors`, `wait_until_finished` or `close`.

        Orbax writes a step with an item that only its own handlers can hold, to the durable tier alone. Such a save
        blocks as long as those handlers block. It waits for the previous durable save with every value of
        `SaveOptions.durable_busy`. An event reports each such item once.

        A signal handler may save in the middle of a save. The interrupted one is dropped, with a `save_skipped` event,
        if it was not being copied yet.

        Raises `StepAlreadyExistsError` for a step that exists, ValueError and TypeError as Orbax does for arguments
        that cannot be saved, `SaveFailedError` by `FailurePolicy`, `CheckpointError` before `result()` of a
        `restore_async`.
        """
        start_s, step = clock.monotonic_s(), saved_step_number(step)
        with (
            self._account.saving(step, self._pipeline.under_way) as account,
            self._pipeline.entered(step) as call,
        ):
            self._resumer.refuse_while_pending("save")
            self._pipeline.outcomes.raise_failure(in_save=True)
            by_name, default_item = self._durable.stock.save_args(items, save_kwargs, args)
            arguments = OrbaxArguments(
                self._saver,
                step,
                by_name,
                default_item=default_item,
                metrics=metrics,
                force=bool(force),
                custom_metadata=custom_metadata,
            )
            account.taken = self._saver.take(call, arguments, start_s=start_s)
            if not account.taken:
                return False
        synchronous = not self._options.enable_async_checkpointing
        if synchronous:
            self.wait_until_finished()
        assert call.save is not None
        before_s, self._saved_s, spans = self._saved_s, start_s, call.save.spans
        if before_s is not None:
            spans.fields["time_between_consecutive_saves_sec"] = start_s - before_s
        self._logger.log_entry(save_entry(start_s, step, self.directory, spans, synchronous=synchronous))
        return True

    @plainly
    def prepare(self, args: Any) -> None:
        """Makes the slots of the fast tiers in the background, for saves of `args` (as given to `save`).

        Does not wait for the slots. Leaves may be abstract (`jax.ShapeDtypeStruct` with shardings), so it can be called
        right after the manager is made. Call it before the first save. That save otherwise pays for the first touch of
        its slot's memory (0.3 to 5 GB/s), and for the description of the leaves (15 microseconds each), which is done
        when this returns. `restore` makes the slots by itself: after the next step (the next `save` or `should_save`),
        5 s after the restore at the latest. Raises `StoreFullError` if a tier, or host memory, has no room for all its
        slots; the message has the bytes needed and free, and a remedy. Does nothing for items that slots cannot hold.
        """
        self._saver.prepare(args)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier. All processes ask together, as with `save`."""
        step = step_number(step)
        self._account.called(step, "should_save")
        return self._pipeline.is_due(step)

    @plainly
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
        *,
        certified: bool = False,
    ) -> Any:
        """The items of `step`, or (None) of the newest step that every process can have and that verifies completely.

        Every cell is checked against its digest before anything is placed on a device.
        A step of stock Orbax has no digests and is restored as by stock Orbax. Bytes come from this host's ramdisk,
        then its SSD, then other processes' tiers, then the durable one; with `directory`, from that durable root alone.
        Returns the same as Orbax: the tree of a step saved without names, else a `Composite`. Values are cast after
        they are verified, where a template or `restore_args` have another dtype. `certified`: the newest step that a
        replay came to (`ckptkit.guard.replay(record=True)`), for `step=None`; a damaged one is skipped for the next
        older.

        The run continues from the restored step. If it is not the newest one, a WARNING names the newer steps: the next
        save abandons them. A manager with Orbax's option `read_only` only looks.

        Raises `StepNotFoundError`, `ItemNotFoundError`, `CorruptCheckpointError` for a damaged `step` (with the other
        steps), `NoRestorableStepError` (with every candidate's reason), and `TreeMismatchError` (with all differences).
        Raises ValueError as Orbax does for arguments that do not go together. A tier that cannot be reached raises
        `StoreError` and does not fall back.
        """
        start_s = clock.monotonic_s()
        if certified and (step is not None or directory is not None):
            raise ValueError("restore(certified=True) chooses the step among this run's: give step=None, no directory")
        if certified:
            return self._resumer.restore_certified(lambda each: self.restore(each, items, restore_kwargs, args=args))
        with self._account.restoring(self._resumer.waiting_text):
            with self._resumer.entered("restore") as about:
                step = step_number(step)
                known = step if directory is None else None
                wanted = self._resumer.wanted(known, items, restore_kwargs, args)
            if directory is not None:
                return self._resumer.restore_elsewhere(root_url(directory), step, wanted, start_s, about)
            return self._resumer.restore(step, wanted, start_s, about)

    @plainly
    def restore_async(self, step: int | None, args: Any = None) -> RestoreHandle:
        """Begins `restore(step, args=args)` in the background, so that the caller compiles its step meanwhile.

        Returns a handle at once (after the saves in flight); its `result` returns or raises the same as `restore`. All
        processes call both together. Until `result` has returned or raised, `save`, `restore`, `reload`, `delete` and
        another `restore_async` raise `CheckpointError`; iterators in `args` belong to the restore. No device collective
        is launched in the background. If replicas share their reads (`broadcast`), the thread of `result` sends them,
        once all processes have called it. Items that only stock Orbax can read are read by stock Orbax, with its own
        behaviour.
        """
        start_s = clock.monotonic_s()
        with (
            self._account.restoring(self._resumer.waiting_text),
            self._resumer.entered("restore_async", kind="restore") as about,
        ):
            step = step_number(step)
            wanted = self._resumer.wanted(step, None, None, args)
        return self._resumer.restore_async(step, wanted, start_s, about)

    def latest_step(self) -> int | None:
        """The newest step over all tiers, as Orbax counts: a step in flight is listed, a failed one is not.

        After a `restore` it is the restored step, the same on every process: a loop from `latest_step() + 1` continues
        what was restored. A step that a restore found damaged is not listed. A save, or a newer step that `reload`
        finds, is the latest again.
        """
        return self._ledger.latest_step()

    def best_step(self) -> int | None:
        """The step with the best metrics by `best_fn`, the latest one without it; None where none has metrics.

        With `best_fn` only steps count that the durable root holds, or that are in flight to it: the fast tiers keep
        the newest steps, and would soon have lost the best one.
        """
        if self._options.best_fn is None:
            return self.latest_step()
        coming = self._pipeline.under_way.left()
        lasting = {
            record.step
            for record in self._ledger.records()
            if DURABLE in record.tiers or DURABLE in coming.get(record.step, ())
        }
        return self._metadata_index.best_of([step for step in self._ledger.steps() if step in lasting])

    def all_steps(self, read: bool = False) -> list[int]:
        """Every step in some tier or in flight, in Orbax's order; abandoned branches are left out.

        With `read`, the tiers are read again (`reload`).
        """
        if read:
            self.reload()
        return self._ledger.steps()

    @plainly
    def reload(self) -> None:
        """Reads every tier again: other processes may have written or removed steps. Waits for the saves in flight."""
        self._catalog.reload(self._resumer.enter("reload"))

    @plainly
    def delete(self, step: int) -> None:
        """Deletes a step from every tier; does nothing with the option `read_only`.

        Waits for the saves in flight. Raises `StepNotFoundError` for a step that is not there.
        """
        if self._options.read_only:
            _log.warning("%s is read only, delete will be skipped", self.directory)
            return
        about = self._resumer.enter("delete")
        self._catalog.delete(step_number(step), about)

    def item_metadata(self, step: int) -> Any:
        """Orbax's metadata of the items of a step: `metadata(step).item_metadata`."""
        if step is None:
            raise ValueError("`step` must be provided: item metadata is of one step, not of the root")
        return self.metadata(step).item_metadata

    @plainly
    def metadata(self, step: int | None = None) -> Any:
        """Orbax's `StepMetadata` of a step, `RootMetadata` of the whole without one.

        For a step that only fast tiers hold it is made of their manifests. Raises `StepNotFoundError`.
        """
        if step is None:
            return self._durable.stock.orbax.metadata()
        return self._metadata_index.metadata(step_number(step))

    def metrics(self, step: int) -> Any:
        """The metrics that a step was saved with, None where there are none."""
        return self._metadata_index.metrics(step_number(step))

    def reached_preemption(self, step: int) -> bool:
        """Whether a preemption was announced (SIGTERM) and the processes agreed to save at `step`, as Orbax's.

        All processes call it once per step; the answer is the same on all. Always False without `jax.distributed`.
        """
        self._account.called(step_number(step), "reached_preemption")
        self._last_saver.pace.asked(clock.monotonic_s())
        return self._durable.stock.orbax.reached_preemption(step)

    def is_saving_in_progress(self) -> bool:
        """Whether any tier is still being written."""
        return not self._pipeline.threads.idle

    @plainly
    def wait_until_finished(self) -> None:
        """Waits until every save that was taken is in all its tiers; raises `SaveFailedError` if one is not."""
        with self._account.waiting(self._pipeline.under_way):
            self._pipeline.threads.wait()
        self.check_for_errors()

    @plainly
    def check_for_errors(self) -> None:
        """Raises `SaveFailedError` for a background failure, once."""
        self._pipeline.outcomes.raise_failure()

    @plainly
    def close(self, *, remove_arenas: bool = False) -> None:
        """Finishes the saves in flight, then releases slots and threads; raises `SaveFailedError` if a save has failed.

        Waits as long as saves advance, and at most `ProcessOptions.timeout_s` plus a minute after the last progress.
        Then the saves in flight are lost, the error names them, and this process's slots stay locked until it ends.
        Arenas outlive the process: that is their purpose. `remove_arenas=True`, at a job's real end, deletes this
        process's slots.
        """
        if self._closed:
            return
        self._closed = True
        with self._account.closing(self._pipeline.under_way):
            self._close(remove_arenas=remove_arenas)
            self.check_for_errors()

    def _close(self, *, remove_arenas: bool) -> None:
        join_s = self._stall_s
        with ExitStack() as ends:  # last in, first out, also after an error
            ends.callback(lambda: self._close_storage(join_s, remove_arenas=remove_arenas))
            if self._components.storage.link is not None:
                ends.callback(self._components.storage.link.close)
            self._resumer.join(self._stall_s)
            if not self._pipeline.run(self._pipeline.threads.wait_or_stall(self._stall_s)):
                left, join_s = described(self._pipeline.under_way.left()), _JOIN_S
                raise SaveFailedError(
                    f"close: saves did not advance for {self._stall_s:g} s and are lost: {left}; look at the tier that "
                    "hangs, or raise ProcessOptions.timeout_s"
                )
            self._pipeline.threads.wait()
            self._resumer.warn_if_not_durable()

    @property
    def _stall_s(self) -> float:
        """Votes and retries end within the longest wait for other processes; writes of a tier advance more often."""
        return self._settings.processes.timeout_s + _STALL_SPARE_S

    def _close_storage(self, join_s: float, *, remove_arenas: bool) -> None:
        exit_drain.remove(self._pipeline.under_way)
        if not self._pipeline.close(Deadline(join_s)):
            _log.error("close: a thread of the manager still hangs; its slots stay locked until this process ends")
            return
        with ExitStack() as ends:
            for arena in self._components.storage.arenas.values():
                ends.callback(arena.close, remove=remove_arenas)
            ends.callback(self._durable.close)

    # The additions of ckptkit.

    def step(self, step: int) -> AbstractContextManager[None]:
        """Accounts the block as step `step` of the run, in `events`: `with manager.step(step): state = step_fn(state)`.

        For `ckptkit goodput`, which otherwise takes the steps from the calls of this manager. The block should end when
        the step is computed. Cost: one line of the log, 8 microseconds.
        """
        return self._settings.events.span("step", step_number(step))

    def steps(self) -> list[StepRecord]:
        """The records behind `all_steps`, oldest first: state, identity, tiers, bytes, when verified; and those of
        saves that failed (the last 100) or that a restore found damaged, which `all_steps` does not list."""
        ledger = self._ledger
        every = [*ledger.records(), *ledger.rejected(), *ledger.failed()]
        return sorted(every, key=lambda record: record.save_id)

    @property
    def restored_save_id(self) -> SaveId | None:
        """Which save was restored last, until the next save; None where none was."""
        return self._components.history.branch.base

    @plainly
    def save_last(
        self,
        step: int,
        args: Any,
        *,
        grace_s: float,
        metrics: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> LastSave:
        """Saves `step` where `reached_preemption(step)` was true, and waits for it, `grace_s` after the signal at most.

        The fastest tier is always saved to. A slower one is saved to if this run's earlier saves show that it fits into
        the rest of the grace period, or if nothing was measured (`ckptkit.save.last_save`). All processes call
        this together, and agree. The call may follow `save(step)`: it then waits for that save, and saves the step
        again to the planned tiers that lack it. `metrics` and `custom_metadata` are those of `save`. Items that only
        Orbax's own handlers hold are written by Orbax, which has no time limit. Raises the errors of `save`. Failures
        of background threads are in the result, and `check_for_errors` raises them.
        """
        self._resumer.refuse_while_pending("save_last")
        with self._account.saving(step_number(step)) as account:
            account.taken = True
            return self._last_saver.save(step, args, grace_s, metrics, custom_metadata)

    def scrub(self) -> SlotScrub:
        """Verifies every cell in this process's slots (copies for other hosts too), also while saves are in flight.

        Damage is in the result and in events. A damaged slot stays until the next save that takes it, which writes
        every byte of it; until then a restore reads its damaged cells from another copy. Each process calls it when it
        likes. Cost: a read of every slot. Raises `StoreError` if a slot may not be read.
        """
        return scrub_slots(self._components.storage.arenas.values(), self._settings.events)
