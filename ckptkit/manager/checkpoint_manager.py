"""`CheckpointManager`: Orbax's words over ramdisk, SSD and durable tiers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ckptkit import clock, layout
from ckptkit.arena import Arena
from ckptkit.coordination import make_coordinator
from ckptkit.durable import DurableSteps, EpochRecords
from ckptkit.durable.stock import DEFAULT_ITEM, Setup, checked_options, restore_statistics, save_statistics
from ckptkit.errors import StepAlreadyExistsError, StepNotFoundError
from ckptkit.events import EventLog, Kind
from ckptkit.manager.asked import Choose, RestoreItems
from ckptkit.manager.book import Book, StepRecord
from ckptkit.manager.deciding import Decider, StepInfo
from ckptkit.manager.items import save_items
from ckptkit.manager.known import KnownSteps
from ckptkit.manager.opening import first_look, open_arenas, take_stock
from ckptkit.manager.restoring import Restored, Restorer
from ckptkit.manager.saving import SavePipeline
from ckptkit.manager.taken import DURABLE, MEMORY, Tiers
from ckptkit.manifest import SaveId, Writer
from ckptkit.policy import FailurePolicy, Tier, checked_tiers
from ckptkit.snapshot import Description
from ckptkit.staging import checked_choice
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

STORE_DEADLINE_S = 20.0  # for small reads and writes of the durable root: a restart should not hang on a dead bucket
_log = logging.getLogger("ckptkit")


class CheckpointManager(ocp.AbstractCheckpointManager):
    """Saves and restores steps over fast tiers and a durable one: a drop-in for Orbax's `CheckpointManager`.

    `directory` is the durable tier: plain Orbax step directories, on a shared directory or `gs://`. `tiers` are
    this host's fast ones. `save` returns once the caller may donate the state, after one copy of this process's
    boxes; everything else happens in background threads, without device collectives. All processes make the
    manager, save and restore together. Where it does not behave as Orbax's, `docs/departures.md` says so.

    Args:
      directory: durable root, a path or `gs://bucket/prefix`.
      checkpointers, metadata, item_names, item_handlers, handler_registry: as in Orbax.
      options: Orbax's options; they rule the durable tier.
      logger: an `ocp.logging.AbstractLogger` that gets Orbax's entry for each save and restore.
      tiers: `Tier.ram(...)`, `Tier.ssd(...)`.
      host_id: names this host below a tier's path (default: the host's name); it must outlive a restart.
      events: where to record what happens (default: nowhere).
      staging: how a save keeps the state alive (`ckptkit.staging`): `auto`, or a strategy by name. With `gate` the
        state may be donated only after `wait_until_staged`.
      timeout_s: the longest wait for other processes, and for the previous durable save.
      on_failure: what becomes of durable saves that fail.

    Raises what Orbax's constructor raises for the arguments that they share, `TierUnusableError` for a tier that
    cannot be written, `StoreError` for a durable root that cannot be read, `CoordinationError` where a process does
    not come.
    """

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
        staging: str = "auto",
        timeout_s: float = 600.0,
        on_failure: FailurePolicy = FailurePolicy(),  # noqa: B008  frozen
    ):
        self._options = checked_options(options or ocp.CheckpointManagerOptions())
        self._tiers = checked_tiers(tuple(tiers))
        self._events = events or EventLog()
        self._logger = logger or ocp.logging.StandardLogger()
        self._host_id = layout.checked_name(host_id or socket.gethostname(), "host_id")
        self._timeout_s = timeout_s
        self._staging = checked_choice(staging)
        self._on_failure = on_failure
        self._coordinator = make_coordinator()
        self._said: set[str] = set()  # items of which it was said that fast tiers do not hold them
        url = root_url(directory)
        # Asked first: its errors say what is wrong with the root, and nothing has been opened yet.
        self._epochs = EpochRecords(open_store(url, deadline_s=STORE_DEADLINE_S))
        ancestry = first_look(self._epochs, url, self._options, self._coordinator, timeout_s)
        setup = Setup(
            checkpointers=checkpointers,
            metadata=metadata,
            item_names=item_names,
            item_handlers=item_handlers,
            handler_registry=handler_registry,
        )
        self._durable = DurableSteps(url, self._options, self._coordinator, timeout_s=timeout_s, setup=setup)
        self._host_dirs = {
            tier.name: Path(tier.path) / layout.job_name(self._durable.url, tier.job) / self._host_id
            for tier in self._tiers
        }
        self._arenas = open_arenas(self._tiers, self._host_dirs, self._host_id, self._coordinator, timeout_s)
        self._restorer = Restorer(
            self._host_dirs, self._durable, self._epochs, self._coordinator, self._events, timeout_s
        )
        self._book = Book(ancestry)
        self._number = 0
        self._saved_in_epoch = False
        held, epoch = take_stock(self._restorer, self._durable, ancestry, self._coordinator, timeout_s)
        self._book.refill(held)
        self._epoch = epoch + 1
        self._known = KnownSteps(self._options, self._durable, self._restorer)
        self._known.refill(self._book.steps())
        self._decider = Decider(self._options, self._tiers, self._durable_infos(), self._coordinator, timeout_s)
        self._pipeline = self._make_pipeline()
        self._closed = False

    # What Orbax's managers offer.

    @property
    def directory(self) -> Any:
        """The durable root."""
        return self._durable.directory

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
        event. Blocks for one copy of this process's boxes; when the durable tier is due, also for the previous
        durable save; with `enable_async_checkpointing=False`, until every tier has the step. A background failure
        is raised by `check_for_errors`, `wait_until_finished` or `close`.

        A step with an item that only Orbax's own handlers can hold is written to the durable tier alone, by Orbax,
        which blocks for what its handlers block for (said once in an event for each such item).

        Raises `StepAlreadyExistsError` for a step that is there already, ValueError and TypeError as Orbax
        does for arguments that cannot be saved, `SaveFailedError` as `FailurePolicy` says.
        """
        start_s, start_wall_s = clock.monotonic_s(), clock.wall_s()
        by_name, default_item = self._durable.stock.save_args(items, save_kwargs, args)
        force = bool(force)
        due = self._due(step, force, says_why=True)
        if not due:
            return False
        if any(record.step == step for record in self._current_branch()):
            raise StepAlreadyExistsError(f"step {step} exists already in {self._durable.url} or its fast tiers")
        self._pipeline.raise_if_overdue(step, due)
        handlers = {name: self._durable.stock.handler(name, arg) for name, arg in by_name.items()}
        kept_metrics = None if self._options.best_fn is None or self._options.prevent_write_metrics else metrics
        captured = save_items(by_name, default_item=default_item, metrics=kept_metrics, custom_metadata=custom_metadata)
        foreign = [name for name, handler in handlers.items() if not self._durable.stock.is_plain(handler)]
        if isinstance(captured, str):
            due = self._durable_only(step, captured, due)
        description = None if isinstance(captured, str) else self._pipeline.describe(captured)
        if description is not None and DURABLE in due and not foreign:
            _refuse_empty_arrays(description)
        if not due:
            return False
        save_id = self._take(step, due, metrics)
        by_orbax = DURABLE in due and (isinstance(captured, str) or bool(foreign))
        if by_orbax:
            self._save_by_orbax(save_id, by_name, metrics, default_item, custom_metadata)
        if not isinstance(captured, str) and (fast := due - {DURABLE} if by_orbax else due):
            assert description is not None
            self._pipeline.submit(save_id, captured, description, fast, metrics, start_s)
        if by_orbax:
            self._pipeline.follow(save_id)
        if not self._options.enable_async_checkpointing:
            self.wait_until_finished()
        self._logger.log_entry(
            save_statistics(
                step=step,
                directory=str(self.directory),
                synchronous=not self._options.enable_async_checkpointing,
                checkpoint_manager_blocking_start_time=start_wall_s,
                checkpoint_manager_blocking_duration_secs=clock.monotonic_s() - start_s,
            )
        )
        return True

    def prepare(self, args: Any) -> None:
        """Makes the slots of the fast tiers in the background, for saves of `args` (as given to `save`).

        Returns at once. Call it after the state is made and before the first save, which otherwise pays for the first
        touch of its slot's memory (0.3 to 5 GB/s). `restore` does it by itself. Raises `StoreFullError` where a tier
        has no room for all its slots, with the bytes needed and free; does nothing for items that slots cannot hold.
        """
        default_item = not isinstance(args, ocp.args.Composite)
        captured = save_items({DEFAULT_ITEM: args} if default_item else dict(args.items()), default_item=default_item)
        if not isinstance(captured, str):
            self._pipeline.prepare(self._pipeline.describe(captured).slot_bytes)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier."""
        return bool(self._due(step, False))

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """The items of `step`, or (None) of the newest step that every process can have and that proves whole.

        Every cell is checked against its digest before anything is placed on a device; a step of stock Orbax has no
        digests and is restored as stock Orbax would. Bytes come from this host's ramdisk, then its SSD, then the
        durable tier; with `directory`, from that durable root alone. Returns what Orbax returns: the tree of a step
        saved without names, else a `Composite`.

        Raises `StepNotFoundError`, `ItemNotFoundError`, `NoRestorableStepError` (with every candidate's reason),
        `TreeMismatchError` (with all differences); a tier that cannot be reached raises `StoreError` rather than fall
        back; ValueError as Orbax does for arguments that do not go together.
        """
        start_s, start_wall_s = clock.monotonic_s(), clock.wall_s()
        self._pipeline.wait()
        wanted = self._wanted(items, restore_kwargs, args)
        if directory is None:
            restored = self._restorer.restore(step, wanted)
            self._continue_from(restored)
        else:
            restored = self._restore_elsewhere(root_url(directory), step, wanted)
        self._durable.stock.lock_default_item(restored.default_item)
        self._logger.log_entry(
            restore_statistics(
                step=restored.save_id.step,
                directory=str(directory or self.directory),
                checkpoint_manager_start_time=start_wall_s,
                checkpoint_manager_duration_secs=clock.monotonic_s() - start_s,
            )
        )
        if restored.default_item:
            return restored.items[DEFAULT_ITEM]
        return ocp.args.Composite(**dict(sorted(restored.items.items())))

    def latest_step(self) -> int | None:
        """The newest step over all tiers, as Orbax counts: one on its way is listed, a failed one is not."""
        return self._book.latest_step()

    def best_step(self) -> int | None:
        """The step with the best metrics by `best_fn`, the latest one without it; None where none has metrics."""
        if self._options.best_fn is None:
            return self.latest_step()
        return self._known.best_of(self._book.steps())

    def all_steps(self, read: bool = False) -> list[int]:
        """Every step that some tier holds or that is on its way, in Orbax's order; abandoned branches are left out.

        With `read`, the tiers are looked at afresh (`reload`).
        """
        if read:
            self.reload()
        return self._book.steps()

    def reload(self) -> None:
        """Looks at every tier afresh: steps that others wrote or removed. Waits for the saves that are on their way."""
        self._pipeline.wait()
        self._durable.reload()
        self._book.refill(
            take_stock(self._restorer, self._durable, self._book.ancestry, self._coordinator, self._timeout_s)[0]
        )
        self._known.refill(self._book.steps())
        self._decider.refill(self._durable_infos())

    def delete(self, step: int) -> None:
        """Deletes a step from every tier; nothing where the options say `read_only`.

        Waits for the saves that are on their way. Raises `StepNotFoundError` for a step that is not there.
        """
        if self._options.read_only:
            _log.warning("%s is read only, delete will be skipped", self.directory)
            return
        self._pipeline.wait()
        if step not in self._book.steps():
            raise StepNotFoundError(
                f"step {step} is in no tier of {self._durable.url}; it cannot be deleted", step=step
            )
        self._durable.delete(step)
        for arena in self._arenas.values():
            arena.forget_step(step)
        self._book.forget(step)
        self._decider.forget(step)

    def item_metadata(self, step: int) -> Any:
        """Orbax's metadata of the items of a step: `metadata(step).item_metadata`."""
        if step is None:
            raise ValueError("`step` must be provided: item metadata is of one step, not of the root")
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's `StepMetadata` of a step, `RootMetadata` of the whole without one.

        For a step that only fast tiers hold it is made of their manifests. Raises `StepNotFoundError`.
        """
        if step is None:
            return self._durable.stock.orbax.metadata()
        return self._known.metadata(step)

    def metrics(self, step: int) -> Any:
        """The metrics that a step was saved with, None where there are none."""
        return self._known.metrics(step)

    def reached_preemption(self, step: int) -> bool:
        """Whether a preemption was announced and the processes agreed to save at `step`."""
        return self._durable.stock.orbax.reached_preemption(step)

    def is_saving_in_progress(self) -> bool:
        """Whether any tier is still being written."""
        return self._pipeline.busy

    def wait_until_finished(self) -> None:
        """Waits until every save that was taken is in all its tiers; raises `SaveFailedError` if one is not."""
        self._pipeline.wait()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises `SaveFailedError` for a background failure, once."""
        self._pipeline.raise_failure()

    def close(self, *, remove_arenas: bool = False) -> None:
        """Finishes what is on its way and lets everything go; raises `SaveFailedError` if a save has failed.

        Arenas outlive the process (that is what they are for); `remove_arenas=True`, at a job's real end, deletes
        this process's slots.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:  # last in, first out, whatever raises
            for arena in self._arenas.values():
                ends.callback(arena.close, remove=remove_arenas)
            ends.callback(self._durable.close)
            ends.callback(self._pipeline.close)
            self._pipeline.wait()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it offers beside that.

    def steps(self) -> list[StepRecord]:
        """The records behind `all_steps`, oldest first: state, identity, tiers, bytes, when verified; and those of
        saves that failed (the last 100), which `all_steps` does not list."""
        return sorted([*self._book.records(), *self._book.failed()], key=lambda record: record.save_id)

    def step_times(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._book.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {step: int(at.timestamp() * 1e9) for step, at, _ in self._durable.stock.infos() if at}

    def known_metrics(self, step: int) -> Any:
        """The metrics of a step as far as they are known without reading; None for none."""
        return self._known.cached_metrics(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone: what fast tiers hold of it is not what it is any more."""
        for name, arena in self._arenas.items():
            arena.forget_step(step)
            self._book.keep_only(name, arena.held())

    @property
    def restored_save_id(self) -> SaveId | None:
        """Which save was restored last, until the next save; None where none was."""
        return self._base

    def restore_chosen(self, step: int | None, choose: Choose) -> Restored:
        """What `choose` picks of a step (None: of the newest that proves whole), proven as in `restore`.

        Only what is picked is read. `choose` is given the stored leaves by item and returns nested dicts of those
        that are wanted, on every process the same. The run does not go on from the step: this is a look, not a
        rollback. Raises what `restore` and `choose` raise.
        """
        self._pipeline.wait()
        return self._restorer.restore(step, RestoreItems(args=None, default_item=None, choose=choose))

    def wait_until_staged(self) -> None:
        """Returns once everything that `save` was given may be donated, also with `staging="gate"`: for a step that is
        split into gradient and donating update, to call between the two. Raises nothing: a save that failed while it
        was staged is reported as any other.
        """
        self._pipeline.wait_until_staged()

    # How it comes about.

    _base: SaveId | None = None  # what was restored last: the next save continues from it

    def _due(self, step: int, force: bool, *, says_why: bool = False) -> frozenset[str]:
        last = self._book.latest_step()
        refusal = self._decider.refusal(step, last=last, force=force)
        if refusal is not None:
            if says_why:
                _log.warning("step %d is not saved: %s", step, refusal)
                self._events.emit(Kind.SKIPPED, step=step, reason=refusal)
            return frozenset()
        reached = self.reached_preemption(step)
        return self._decider.due(
            step, last=last, reached_preemption=reached, force=force, is_saving=self._pipeline.busy
        )

    def _durable_only(self, step: int, item: str, due: frozenset[str]) -> frozenset[str]:
        """What is left of `due` for a step with an item that slots cannot hold."""
        if self._tiers and item not in self._said:
            self._said.add(item)
            reason = f"item {item!r} is of a kind that only Orbax's handlers hold: steps with it are durable-only"
            _log.warning("step %d: %s", step, reason)
            self._events.emit(Kind.DEGRADED, step=step, tier=self._tiers[0].name, reason=reason)
        return due & {DURABLE}

    def _take(self, step: int, due: frozenset[str], metrics: Any) -> SaveId:
        self._begin_epoch()
        save_id = SaveId(self._epoch, step, self._number)
        self._number += 1
        self._decider.taken(step, due, metrics)
        self._known.taken(step, metrics)
        return save_id

    def _save_by_orbax(
        self, save_id: SaveId, by_name: Mapping[str, Any], metrics: Any, default_item: bool, custom_metadata: Any
    ) -> None:
        self._pipeline.wait_durable_idle()
        self._book.begin(save_id)
        try:
            self._durable.save_by_orbax(
                save_id,
                by_name,
                metrics=metrics,
                default_item=default_item,
                ancestry=self._book.ancestry,
                custom_metadata=custom_metadata,
            )
        except BaseException:
            self._book.fail(save_id)
            self._decider.forget(save_id.step)
            raise

    def _wanted(self, items: Any, restore_kwargs: Any, args: Any) -> RestoreItems:
        stock = self._durable.stock
        by_name = stock.restore_args(items, restore_kwargs, args)
        default_item = stock.default_item
        if by_name is not None:
            if default_item is None:
                default_item = DEFAULT_ITEM in by_name and not isinstance(args, ocp.args.Composite)
            for name, arg in by_name.items():
                stock.handler(name, arg)
        return RestoreItems(args=by_name, default_item=default_item)

    def _continue_from(self, restored: Restored) -> None:
        self._base = restored.save_id
        self._book.verified(restored.save_id)
        if self._options.read_only:  # no save will follow: nothing to prepare
            return
        self._decider.continue_from(restored.save_id.step)
        for arena in self._arenas.values():
            if restored.save_id in arena.held():
                arena.protect(restored.save_id)
        self._pipeline.reserve(restored.slot_bytes)

    def _restore_elsewhere(self, url: str, step: int | None, wanted: RestoreItems) -> Restored:
        """From another durable root, which is only read; this run goes on from where it was."""
        options = ocp.CheckpointManagerOptions(
            read_only=True,
            step_prefix=self._options.step_prefix,
            step_format_fixed_length=self._options.step_format_fixed_length,
            step_name_format=self._options.step_name_format,
            lightweight_initialize=True,
        )
        epochs = EpochRecords(open_store(url, deadline_s=STORE_DEADLINE_S))
        with closing(DurableSteps(url, options, self._coordinator, timeout_s=self._timeout_s)) as durable:
            durable.stock.adopt_handlers(self._durable.stock)
            restorer = Restorer({}, durable, epochs, self._coordinator, self._events, self._timeout_s)
            return restorer.restore(step, wanted)

    def _durable_infos(self) -> list[StepInfo]:
        held = {record.step for record in self._book.records() if DURABLE in record.tiers}
        return [StepInfo(step, time, metrics) for step, time, metrics in self._durable.stock.infos() if step in held]

    def _make_pipeline(self) -> SavePipeline:
        disk = self._arenas.get("ssd")
        if "ram" in self._arenas:
            staging, name = self._arenas["ram"], "ram"
        else:
            staging, name = Arena(None, slots=3, synced=False), MEMORY
        tiers = Tiers(staging=staging, staging_name=name, disk=disk, durable=self._durable, epochs=self._epochs)
        writer = Writer(process=self._coordinator.process, count=self._coordinator.count, host=self._host_id)
        return SavePipeline(
            tiers,
            self._coordinator,
            writer,
            self._book,
            self._events,
            self._timeout_s,
            self._staging,
            on_failure=self._on_failure,
        )

    def _current_branch(self) -> list[StepRecord]:
        """The records that the next save would stand beside: without what a rollback is about to abandon."""
        records = self._book.records()
        if self._base is None:
            return records
        return [record for record in records if record.step <= self._base.step]

    def _begin_epoch(self) -> None:
        """The first save after a start or a rollback begins an epoch, and abandons what was above its base."""
        if self._saved_in_epoch and (self._base is None or self._is_newest(self._base)):
            self._base = None  # it is no rollback: the saves that follow abandon nothing
            return
        if self._saved_in_epoch:
            self._epoch += 1
        base_step = self._base.step if self._base is not None else None
        self._book.ancestry = self._book.ancestry.begin(self._epoch, base_step, self._book.stock_steps())
        self._saved_in_epoch = True
        self._base = None

    def _is_newest(self, save_id: SaveId) -> bool:
        records = self._book.records()
        return bool(records) and records[-1].step == save_id.step


def _refuse_empty_arrays(description: Description) -> None:
    """Orbax's steps cannot hold them: said by `save`, not by a failure in the background."""
    records = [source.record for sources in description.items.values() for source in sources]
    empty = [record.name for record in records if record.kind == "jax" and 0 in record.shape]
    if empty:
        raise ValueError(f"arrays without elements cannot be saved to the durable tier: {', '.join(sorted(empty))}")
