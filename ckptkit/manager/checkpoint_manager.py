"""`CheckpointManager`: Orbax's words over ramdisk, SSD and durable tiers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ckptkit import clock, layout
from ckptkit.arena import Arena
from ckptkit.coordination import make_coordinator
from ckptkit.durable import DurableSteps, EpochRecords
from ckptkit.durable.epochs import Ancestry
from ckptkit.errors import CheckpointError, StepAlreadyExistsError
from ckptkit.events import EventLog
from ckptkit.host_memory import HostMemory
from ckptkit.manager.book import Book, StepRecord
from ckptkit.manager.deciding import Decider
from ckptkit.manager.items import restore_items, save_items
from ckptkit.manager.opening import abstract_slot_bytes, open_arenas, take_stock
from ckptkit.manager.pending import RestoreHandle
from ckptkit.manager.restoring import Restored, Restorer
from ckptkit.manager.saving import SavePipeline
from ckptkit.manager.taken import DURABLE, MEMORY, Tiers
from ckptkit.manifest import SaveId, Writer
from ckptkit.policy import Backpressure, DurableBusy, Tier, checked_tiers
from ckptkit.snapshot import Description
from ckptkit.staging import checked_choice
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

STORE_DEADLINE_S = 20.0  # for small reads and writes of the durable root: a restart should not hang on a dead bucket


class CheckpointManager:
    """Saves and restores steps over fast tiers and a durable one; Orbax's `CheckpointManager` in its words.

    `directory` is the durable tier: plain Orbax step directories, on a shared directory or `gs://`. `tiers` are
    this host's fast ones. `save` returns once the caller may donate the state, after one copy of this process's
    boxes; everything else happens in background threads, without device collectives. All processes make the
    manager, save and restore together.

    Args:
      directory: durable root, a path or `gs://bucket/prefix`.
      options: Orbax's options; they rule the durable tier.
      tiers: `Tier.ram(...)`, `Tier.ssd(...)`.
      host_id: names this host below a tier's path (default: the host's name); it must outlive a restart.
      events: where to record what happens (default: nowhere).
      staging: how a save keeps the state alive (`ckptkit.staging`): `auto`, or a strategy by name. With `gate` the
        state may be donated only after `wait_until_staged`.
      timeout_s: the longest wait for other processes, and for the previous durable save.
      in_flight_max: how many snapshots may be on their way to their first commit by all processes. A save that comes
        while there are as many is skipped everywhere, with an event; one that is due in the durable tier waits.
        Without a ramdisk tier a snapshot is on its way until every tier has it, and this is how many there may be
        in memory.
      host_bytes_max: the most host memory that this process's snapshots may take, ramdisk slots included. The limit
        is the least of this, `memory.max` of every control group above the process, and what the mount has free.
      durable_busy: what a save does that is due in the durable tier while that is still busy: `wait` blocks and
        reports how long (`waited_s` of the `staged` event), `skip` leaves the step out of the durable tier. Forced
        saves and those of a preemption always wait.

    Raises `TierUnusableError` for a tier that cannot be written, `StoreError` for a durable root that cannot be
    read, `CoordinationError` where a process does not come.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        options: ocp.CheckpointManagerOptions | None = None,
        tiers: Sequence[Tier] = (),
        host_id: str | None = None,
        events: EventLog | None = None,
        staging: str = "auto",
        timeout_s: float = 600.0,
        in_flight_max: int = 1,
        host_bytes_max: int | None = None,
        durable_busy: DurableBusy = "wait",
    ):
        self._backpressure = Backpressure(
            in_flight_max=in_flight_max, host_bytes_max=host_bytes_max, durable_busy=durable_busy
        )
        self._options = options or ocp.CheckpointManagerOptions()
        self._tiers = checked_tiers(tuple(tiers))
        self._backpressure.check_tiers(self._tiers)
        self._events = events or EventLog()
        self._host_id = layout.checked_name(host_id or socket.gethostname(), "host_id")
        self._timeout_s = timeout_s
        self._staging = checked_choice(staging)
        self._coordinator = make_coordinator()
        url = root_url(directory)
        # Asked first: its errors say what is wrong with the root, and nothing has been opened yet.
        self._epochs = EpochRecords(open_store(url, deadline_s=STORE_DEADLINE_S))
        ancestry = self._first_look()
        self._durable = DurableSteps(url, self._options, self._coordinator, timeout_s=timeout_s)
        self._host_dirs = {
            tier.name: Path(tier.path) / layout.job_name(self._durable.url, tier.job) / self._host_id
            for tier in self._tiers
        }
        self._memory = HostMemory(host_bytes_max)
        self._arenas = open_arenas(
            self._tiers, self._host_dirs, self._host_id, self._memory, self._coordinator, timeout_s
        )
        self._restorer = Restorer(
            self._host_dirs, self._durable, self._epochs, self._coordinator, self._events, timeout_s
        )
        self._book = Book(ancestry)
        self._number = 0
        self._saved_in_epoch = False
        self._epoch = take_stock(self._book, self._restorer, self._durable, self._coordinator, timeout_s)
        self._decider = Decider(
            self._options, self._tiers, [r.step for r in self._book.records() if DURABLE in r.tiers]
        )
        self._pipeline = self._make_pipeline()
        self._closed = False

    # What Orbax's managers offer.

    @property
    def directory(self) -> Any:
        """The durable root."""
        return self._durable.orbax.directory

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Mapping[str, Any] | None = None,
        metrics: Any = None,
        force: bool = False,
        args: Any = None,
    ) -> bool:
        """Takes a step for the tiers in which it is due; returns whether it was taken.

        Returns once the caller may donate the state. The step is committed to a tier only after its `committed`
        event; one that came too early on some process is dropped on all, with a `save_skipped` event. Blocks for one
        copy of this process's boxes; when the durable tier is due, also for the previous durable save. A background
        failure is raised by `check_for_errors`, `wait_until_finished` or `close`.

        Raises `StepAlreadyExistsError` for a forced save of a step that is there, `TypeError` and `ValueError`
        for items that cannot be saved.
        """
        start_s = clock.monotonic_s()
        if items is not None or save_kwargs is not None:
            raise ValueError("pass args=ocp.args.StandardSave(state) (or Composite); `items` is Orbax's legacy form")
        if args is None:
            raise ValueError("save needs args, such as ocp.args.StandardSave(state)")
        self._refuse_while_restoring("save")
        reached = self._durable.orbax.reached_preemption(step)
        due = self._due(step, force, reached)
        if not due:
            return False
        if force and any(record.step == step for record in self._current_branch()):
            raise StepAlreadyExistsError(f"step {step} exists already in {self._durable.url} or its fast tiers")
        captured = save_items(args)
        description = self._pipeline.describe(captured)
        if DURABLE in due:
            _refuse_empty_arrays(description)
        self._begin_epoch()
        save_id = SaveId(self._epoch, step, self._number)
        self._number += 1
        self._decider.taken(step, due)
        self._pipeline.submit(save_id, captured, description, due, metrics, start_s, must_wait=force or reached)
        return True

    def prepare(self, args: Any) -> None:
        """Makes the slots of the fast tiers in the background, for saves of `args` (as given to `save`).

        Returns at once. Leaves may be abstract (`jax.ShapeDtypeStruct` with shardings), so that it can be called right
        after the manager is made; at the latest before the first save, which otherwise pays for the first touch of
        its slot's memory (0.3 to 5 GB/s). `restore` does it by itself. Raises `StoreFullError` where a tier, or host
        memory, has no room for all its slots, with the bytes needed and free, and what to do.
        """
        trees = save_items(args).trees
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(dict(trees))):
            self._pipeline.prepare(abstract_slot_bytes(trees))
        else:
            self._pipeline.prepare(self._pipeline.describe(save_items(args)).slot_bytes)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier."""
        return bool(self._due(step, False, self._durable.orbax.reached_preemption(step)))

    def restore(
        self, step: int | None, items: Any = None, restore_kwargs: Mapping[str, Any] | None = None, args: Any = None
    ) -> Any:
        """The items of `step`, or (None) of the newest step that every process can have and that proves whole.

        Every cell is checked against its digest before anything is placed on a device; a step of stock Orbax has no
        digests and is restored as stock Orbax would. Bytes come from this host's ramdisk, then its SSD, then the
        durable tier. Returns what Orbax returns: the tree of a step saved without names, else a `Composite`.

        Raises `StepNotFoundError`, `NoRestorableStepError` (with every candidate's reason), `TreeMismatchError`
        (with all differences); a tier that cannot be reached raises `StoreError` rather than fall back.
        """
        if items is not None or restore_kwargs is not None:
            raise ValueError("pass args=ocp.args.StandardRestore(abstract_state); `items` is Orbax's legacy form")
        self._refuse_while_restoring("restore")
        self._pipeline.wait()
        return self._adopt(self._restorer.restore(step, restore_items(args)))

    def restore_async(self, step: int | None, args: Any = None) -> RestoreHandle:
        """Begins `restore(step, args=args)` in the background, so that the caller compiles its step meanwhile.

        Returns a handle at once (after the saves that are under way); its `result` gives or raises what `restore`
        does. All processes call both together. Until `result` has returned or raised, `save`, `restore` and another
        `restore_async` raise `CheckpointError`; iterators in `args` belong to the restore. No device collective is
        launched (a step of stock Orbax is read by stock Orbax, which does as it does).
        """
        self._refuse_while_restoring("restore_async")
        wanted = restore_items(args)
        self._pipeline.wait()
        self._pending = RestoreHandle(lambda: self._restorer.restore(step, wanted), self._adopt, self._settled)
        return self._pending

    def latest_step(self) -> int | None:
        """The newest step over all tiers, as Orbax counts: one on its way is listed, a failed one is not."""
        return self._book.latest_step()

    def all_steps(self, read: bool = False) -> list[int]:
        """Every step that some tier holds or that is on its way, ascending; abandoned branches are left out."""
        del read
        return sorted({record.step for record in self._book.records()})

    def steps(self) -> list[StepRecord]:
        """The records behind `all_steps`: state, identity and the tiers that hold each."""
        return self._book.records()

    def reached_preemption(self, step: int) -> bool:
        """Whether a preemption was announced and the processes agreed to save at `step`."""
        return self._durable.orbax.reached_preemption(step)

    def wait_until_staged(self) -> None:
        """Returns once everything that `save` was given may be donated, also with `staging="gate"`: for a step that is
        split into gradient and donating update, to call between the two. Raises nothing: a save that failed while it
        was staged is reported as any other.
        """
        self._pipeline.wait_until_staged()

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
            if self._pending is not None:
                self._pending.join()
            self._pipeline.wait()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How it comes about.

    _pending: RestoreHandle | None = None  # a restore whose result was not taken over yet
    _base: SaveId | None = None  # what was restored last: the next save continues from it

    def _adopt(self, restored: Restored) -> Any:
        """The run goes on from what was restored; gives it as Orbax would."""
        self._base = restored.save_id
        self._decider.continue_from(restored.save_id.step)
        for arena in self._arenas.values():
            if restored.save_id in arena.held():
                arena.protect(restored.save_id)
        self._pipeline.reserve(restored.slot_bytes)
        if restored.default_item:
            return next(iter(restored.items.values()))
        return ocp.args.Composite(**restored.items)

    def _refuse_while_restoring(self, what: str) -> None:
        if self._pending is not None:
            raise CheckpointError(
                f"{what}: a restore_async has not been taken over; call result() of its handle first, on every process"
            )

    def _settled(self, handle: RestoreHandle) -> None:
        if self._pending is handle:
            self._pending = None

    def _first_look(self) -> Ancestry:
        """The epoch records, read by process 0. The first use of the durable root, so its errors come early."""

        def read(_: list[Any]) -> dict[str, Any]:
            ancestry = self._epochs.read()
            if self._options.create and not self._options.read_only:
                self._epochs.probe()
            return ancestry.to_json()

        return Ancestry.from_json(self._coordinator.agree("first-look", None, read, timeout_s=self._timeout_s))

    def _make_pipeline(self) -> SavePipeline:
        disk = self._arenas.get("ssd")
        if "ram" in self._arenas:
            staging, name = self._arenas["ram"], "ram"
        else:
            staging, name = (
                Arena(None, slots=self._backpressure.in_flight_max, synced=False, memory=self._memory),
                MEMORY,
            )
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
            self._backpressure,
        )

    def _due(self, step: int, force: bool, reached: bool) -> frozenset[str]:
        return self._decider.due(step, last=self._book.latest_step(), reached_preemption=reached, force=force)

    def _current_branch(self) -> list[StepRecord]:
        """The records that the next save would stand beside: without what a rollback is about to abandon."""
        records = self._book.records()
        if self._base is None or self._saved_in_epoch:
            return records
        return [record for record in records if record.step <= self._base.step]

    def _begin_epoch(self) -> None:
        """The first save after a start or a rollback begins an epoch, and abandons what was above its base."""
        if self._saved_in_epoch and (self._base is None or self._base.step == self._book.latest_step()):
            return
        if self._saved_in_epoch:
            self._epoch += 1
        base_step = self._base.step if self._base is not None else None
        self._book.ancestry = self._book.ancestry.begin(self._epoch, base_step, self._book.stock_steps())
        self._saved_in_epoch = True
        self._base = None


def _refuse_empty_arrays(description: Description) -> None:
    """Orbax's steps cannot hold them: said by `save`, not by a failure in the background."""
    records = [source.record for sources in description.items.values() for source in sources]
    empty = [record.name for record in records if record.kind == "jax" and 0 in record.shape]
    if empty:
        raise ValueError(f"arrays without elements cannot be saved to the durable tier: {', '.join(sorted(empty))}")
