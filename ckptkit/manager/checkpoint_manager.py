"""`CheckpointManager`: Orbax's words over ramdisk, SSD and durable tiers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ckptkit import clock, layout
from ckptkit.arena import Arena
from ckptkit.coordination import gather, make_coordinator
from ckptkit.durable import DurableSteps, EpochRecords
from ckptkit.durable.epochs import Ancestry
from ckptkit.errors import CheckpointError, StepAlreadyExistsError, heard_from
from ckptkit.events import EventLog
from ckptkit.manager.book import Book, StepRecord
from ckptkit.manager.deciding import Decider
from ckptkit.manager.items import Choose, RestoreItems, restore_items, save_items
from ckptkit.manager.restoring import Restored, Restorer
from ckptkit.manager.saving import SavePipeline
from ckptkit.manager.taken import DURABLE, MEMORY, Tiers
from ckptkit.manifest import SaveId, Writer
from ckptkit.policy import Tier, checked_tiers
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
    ):
        self._options = options or ocp.CheckpointManagerOptions()
        self._tiers = checked_tiers(tuple(tiers))
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
        self._arenas = self._open_arenas()
        self._restorer = Restorer(
            self._host_dirs, self._durable, self._epochs, self._coordinator, self._events, timeout_s
        )
        self._book = Book(ancestry)
        self._number = 0
        self._saved_in_epoch = False
        self._epoch = self._take_stock()
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
        event. Blocks for one copy of this process's boxes; when the durable tier is due, also for the previous
        durable save. A background failure is raised by `check_for_errors`, `wait_until_finished` or `close`.

        Raises `StepAlreadyExistsError` for a forced save of a step that is there, `TypeError` and `ValueError`
        for items that cannot be saved.
        """
        start_s = clock.monotonic_s()
        if items is not None or save_kwargs is not None:
            raise ValueError("pass args=ocp.args.StandardSave(state) (or Composite); `items` is Orbax's legacy form")
        if args is None:
            raise ValueError("save needs args, such as ocp.args.StandardSave(state)")
        due = self._due(step, force)
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
        self._pipeline.submit(save_id, captured, description, due, metrics, start_s)
        return True

    def prepare(self, args: Any) -> None:
        """Makes the slots of the fast tiers in the background, for saves of `args` (as given to `save`).

        Returns at once. Call it after the state is made and before the first save, which otherwise pays for the first
        touch of its slot's memory (0.3 to 5 GB/s). `restore` does it by itself. Raises `StoreFullError` where a tier
        has no room for all its slots, with the bytes needed and free.
        """
        self._pipeline.prepare(self._pipeline.describe(save_items(args)).slot_bytes)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier."""
        return bool(self._due(step, False))

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
        self._pipeline.wait()
        restored = self._restorer.restore(step, restore_items(args))
        self._base = restored.save_id
        if not self._options.read_only:
            self._go_on_from(restored)
        if restored.default_item:
            return next(iter(restored.items.values()))
        return ocp.args.Composite(**restored.items)

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
        return self._restorer.restore(step, RestoreItems(abstract=None, inline={}, default_item=None, choose=choose))

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
            self._pipeline.wait()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How it comes about.

    _base: SaveId | None = None  # what was restored last: the next save continues from it

    def _first_look(self) -> Ancestry:
        """The epoch records, read by process 0. The first use of the durable root, so its errors come early."""

        def read(_: list[Any]) -> dict[str, Any]:
            ancestry = self._epochs.read()
            if self._options.create and not self._options.read_only:
                self._epochs.probe()
            return ancestry.to_json()

        return Ancestry.from_json(self._coordinator.agree("first-look", None, read, timeout_s=self._timeout_s))

    def _open_arenas(self) -> dict[str, Arena]:
        """Opens this process's slot directories; when one process cannot, all raise, so that none is left waiting."""
        hosts = gather(self._coordinator, "hosts", self._host_id, timeout_s=self._timeout_s)
        local_rank = hosts[: self._coordinator.process].count(self._host_id)
        arenas: dict[str, Arena] = {}
        failure: CheckpointError | None = None
        try:
            for tier in self._tiers:
                arenas[tier.name] = Arena.open(
                    self._host_dirs[tier.name], local_rank, slots=tier.slots, synced=tier.medium == "ssd"
                )
        except CheckpointError as error:
            failure = error
        mine = failure and [type(failure).__name__, str(failure)]
        said = gather(self._coordinator, "arenas", mine, timeout_s=self._timeout_s)
        failed = [process for process, why in enumerate(said) if why]
        if failed:
            for arena in arenas.values():
                arena.close()
            raise failure or heard_from(failed[0], *said[failed[0]])
        return arenas

    def _take_stock(self) -> int:
        """Fills the book with what all tiers hold, agreed by all processes; returns this run's epoch."""
        mine = [
            [save.epoch, save.step, save.number, tier]
            for save, held in self._restorer.local_saves().items()
            for tier, pairs in held.held.items()
            if any(self._wrote(manifest.writer) for _, manifest in pairs)
        ]

        def stock(reports: list[list[list[Any]]]) -> dict[str, Any]:
            seen = {tuple(entry[:3]) for report in reports for entry in report}
            common = [
                save
                for save in sorted(seen)
                if all(any(tuple(entry[:3]) == save for entry in report) for report in reports)
            ]
            tiers = {
                save: sorted({entry[3] for report in reports for entry in report if tuple(entry[:3]) == save})
                for save in common
            }
            newest = self._restorer_durable_steps()
            return {
                "fast": [[*save, tiers[save]] for save in common],
                "durable": newest,
                "epoch": max([self._book.ancestry.epoch, *(save[0] for save in seen), *(e for e, _, _ in newest)]),
            }

        agreed = self._coordinator.agree("stock", mine, stock, timeout_s=self._timeout_s)
        for epoch, step, number, tiers in agreed["fast"]:
            for tier in tiers:
                self._book.commit(SaveId(epoch, step, number), tier)
        for epoch, step, number in agreed["durable"]:
            self._book.commit(SaveId(epoch, step, number), DURABLE)
        return agreed["epoch"] + 1

    def _wrote(self, writer: Writer) -> bool:
        return writer.process == self._coordinator.process and writer.count == self._coordinator.count

    def _restorer_durable_steps(self) -> list[list[int]]:
        """Every durable save on process 0. Cost: a listing and a small read per step."""
        steps = self._durable.steps()
        saves = [self._restorer.identity(step, self._book.ancestry) for step in steps]
        return [[save.epoch, save.step, save.number] for save in saves]

    def _make_pipeline(self) -> SavePipeline:
        disk = self._arenas.get("ssd")
        if "ram" in self._arenas:
            staging, name = self._arenas["ram"], "ram"
        else:
            staging, name = Arena(None, slots=3, synced=False), MEMORY
        tiers = Tiers(staging=staging, staging_name=name, disk=disk, durable=self._durable, epochs=self._epochs)
        writer = Writer(process=self._coordinator.process, count=self._coordinator.count, host=self._host_id)
        return SavePipeline(tiers, self._coordinator, writer, self._book, self._events, self._timeout_s, self._staging)

    def _due(self, step: int, force: bool) -> frozenset[str]:
        reached = self._durable.orbax.reached_preemption(step)
        return self._decider.due(step, last=self._book.latest_step(), reached_preemption=reached, force=force)

    def _go_on_from(self, restored: Restored) -> None:
        """Prepares the saves that follow a restore."""
        self._decider.continue_from(restored.save_id.step)
        for arena in self._arenas.values():
            if restored.save_id in arena.held():
                arena.protect(restored.save_id)
        self._pipeline.reserve(restored.slot_bytes)

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
