"""The caller's side of a restore: the request, the root, and the step from which the run then continues."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.lifecycle.root_record import certified_saves
from ckptkit.durable.orbax.manager import DEFAULT_ITEM
from ckptkit.durable.orbax.reports import Spans, restore_entry
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ItemNotFoundError,
    NoRestorableStepError,
    StepNotFoundError,
)
from ckptkit.manager.build import Components
from ckptkit.manager.restore_handle import RestoreHandle
from ckptkit.manager.root import epoch_records
from ckptkit.manager.run_account import RunAccount, is_unwinding
from ckptkit.manager.settings import Settings
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.flow import Restore, RestoreFlow
from ckptkit.restore.records import Rejection, Restored
from ckptkit.restore.request import RestoreRequest, request_of
from ckptkit.store import open_store
from ckptkit.util import heartbeat
from ckptkit.util.words import command_line, on_each_host

_log = logging.getLogger("ckptkit")
_NAMED_MAX = 20  # steps, in one message
_FIRST_STEP_S = 5.0  # that the step after a restore has the processors for itself
_REASON_CHARS_MAX = 400  # of a rejection, in a log line; the event has all of it


class Resumer:
    """Begins restores and takes them over, and enters every call that all processes make together, apart from saves.
    Belongs to the step loop's thread; called by all processes together."""

    def __init__(
        self, settings: Settings, components: Components, logger: ocp.logging.AbstractLogger, account: RunAccount
    ):
        self._settings = settings
        self._account = account
        self._components = components
        self._logger = logger
        self._flow = components.restore_flow  # of the last restore
        self._pending: RestoreHandle | None = None  # a restore whose result() has not returned yet
        self._spans = Spans()  # of the last restore
        self._calls = itertools.count()

    @contextmanager
    def entered(self, call: str, *, kind: str | None = None) -> Iterator[str]:
        """A collective call, with the name of its barriers: its number, and `kind` if that is another word than `call`.

        It is counted at its entry, before anything can raise: a process whose call raised has the same names as the
        others at the next one. Where the body raises, the other processes raise at once. After the body every process
        has finished its saves, and knows what process 0 has decided of them. Raises `CheckpointError` before `result()`
        of a restore in the background, or where another process raised, `CoordinationError` where one did not come.
        """
        pipeline, name = self._components.pipeline, f"{kind or call}-{next(self._calls)}"
        try:
            self.refuse_while_pending(call)
            yield name
            pipeline.threads.wait()
        except BaseException as error:
            pipeline.run(pipeline.withdraw(name, error))
            raise
        pipeline.run(pipeline.synchronise(name))

    def enter(self, call: str, *, kind: str | None = None) -> str:
        """`entered` without a body: the name of the call's barriers."""
        with self.entered(call, kind=kind) as name:
            return name

    def restore(self, step: int | None, wanted: RestoreRequest, start_s: float, about: str) -> Any:
        """See `CheckpointManager.restore`. `about` names the call."""
        slots = self._components.pipeline.slots
        slots.hold()
        try:
            restored = self._restored(step, wanted, about)
        finally:
            slots.hold(_FIRST_STEP_S)
        if wanted.args is None:
            self._components.history.metadata_index.restored_as_saved()
        return self._take_over(restored, start_s)

    def restore_async(self, step: int | None, wanted: RestoreRequest, start_s: float, about: str) -> RestoreHandle:
        """See `CheckpointManager.restore_async`. `about` names the call."""
        self._components.pipeline.slots.hold()
        self._pending = RestoreHandle(
            lambda caller: self._restored(step, wanted, about, caller),
            lambda restored: self._take_over(restored, start_s),
            self._settled,
            lambda: self._account.restoring(self.waiting_text),
        )
        return self._pending

    def restore_elsewhere(self, url: str, step: int | None, wanted: RestoreRequest, start_s: float, about: str) -> Any:
        """A restore from the durable root at `url` alone, with this manager's step names and handlers. In its own
        root this run continues from where it was. `about` names the call."""
        options = self._settings.options
        read_only = ocp.CheckpointManagerOptions(
            read_only=True,
            step_prefix=options.step_prefix,
            step_format_fixed_length=options.step_format_fixed_length,
            step_name_format=options.step_name_format,
            lightweight_initialize=True,
        )
        with closing(DurableSteps(url, read_only, self._components.job.coordinator)) as durable:
            durable.stock.adopt_handlers(self._components.storage.durable.stock)
            job = self._components.job
            inventory = Inventory({}, durable, epoch_records(durable.url, job.events), job.events)
            self._flow = flow = RestoreFlow(inventory, job, self._settings.processes.broadcast)
            with self._spans.measured("checkpointer"):
                restored = flow.restore(Restore(step=step, wanted=wanted, about=about))
        self._components.history.branch.continue_from_elsewhere()
        return self._given(restored, restored.rejected, start_s, url)

    def restore_certified(self, restore: Callable[[int], Any]) -> Any:
        """The result of `restore` for the newest step that a replay came to, as process 0 knows them; a damaged one is
        skipped for the next older. Raises `StepNotFoundError` without any, and what `restore` raises."""
        url = self._components.storage.durable.url
        about = self.enter("restore", kind="certified")

        def known() -> list[int]:
            certified = certified_saves(open_store(url))
            records = reversed(self._components.history.ledger.records())
            return [record.step for record in records if record.save_id in certified]

        steps = self._components.job.coordinator.ask_process_0("certified", known, about=about)
        if not steps:
            raise StepNotFoundError(
                f"{url} has no certified step; `{command_line('certify', url, '--replay', 'MODULE:FUNCTION')}` "
                "certifies those that a replay comes to",
                path=url,
            )
        found, restored, damaged = restore_first(steps, restore)
        if found is None:
            raise damaged[0]
        return restored

    def wanted(self, step: int | None, items: Any, restore_kwargs: Any, args: Any) -> RestoreRequest:
        """The request in the arguments of `restore`; raises Orbax's errors for arguments that do not go together.

        If no tier holds `step`, that error is `StepNotFoundError` for every request. None: any step.
        """
        try:
            return request_of(self._components.storage.durable.stock, items, restore_kwargs, args)
        except ValueError as error:
            history, url = self._components.history, self._components.storage.durable.url
            if step is None:
                raise
            if step in history.ledger.steps():
                self._refuse_unknown_item(step, args, error)
                raise
            raise StepNotFoundError(f"step {step} was not found in {url}", step=step, path=url) from error

    def _refuse_unknown_item(self, step: int, args: Any, error: ValueError) -> None:
        """Raises `ItemNotFoundError` where `args` name an item that the step lacks. Waits for saves under way, and
        reads the metadata of the step."""
        self._components.pipeline.threads.wait()
        held = self._components.history.metadata_index.metadata(step).item_metadata
        if not isinstance(args, ocp.args.Composite) or not isinstance(held, Mapping):
            return
        if unknown := sorted(set(args.keys()) - set(held.keys())):
            url = self._components.storage.durable.url
            raise ItemNotFoundError(
                f'Item "{unknown[0]}" was not found in step {step} of {url}. Available items: {sorted(held.keys())}',
                step=step,
                path=url,
            ) from error

    def waiting_text(self) -> str:
        """The event that the restore under way waits for, as text."""
        return self._flow.waiting_text()

    def refuse_while_pending(self, what: str) -> None:
        """Raises `CheckpointError` before `result()` of a restore in the background."""
        if self._pending is not None:
            raise CheckpointError(
                f"{what}: a restore_async is unfinished; call result() of its handle first, on every process"
            )

    def join(self, timeout_s: float) -> None:
        """Waits for the end of a restore in the background, `timeout_s` at most; raises nothing."""
        if self._pending is not None:
            self._pending.join(timeout_s)

    def _settled(self, handle: RestoreHandle) -> None:
        if self._pending is handle:
            self._pending = None
            self._components.pipeline.slots.hold(_FIRST_STEP_S)

    def _restored(
        self, step: int | None, wanted: RestoreRequest, about: str, caller: CallerThread | None = None
    ) -> Restored:
        """The result of the flow. A damaged `step` raises a `CorruptCheckpointError` that names the other steps."""
        self._flow = flow = self._components.restore_flow
        ledger = self._components.history.ledger
        under_way = Restore(step=step, wanted=wanted, about=about, caller=caller)
        try:
            with self._spans.measured("checkpointer"):
                return flow.restore(under_way)
        except NoRestorableStepError as error:
            if step is None or not any(each.is_damage for each in under_way.rejected):
                raise
            others = [each for each in ledger.steps() if each != step]
            raise _damaged(step, under_way.rejected, others, error.path or "") from None
        finally:
            ledger.reject(each.save_id for each in under_way.rejected if each.is_damage)

    def _take_over(self, restored: Restored, start_s: float) -> Any:
        """The run continues from what was restored."""
        history, pipeline = self._components.history, self._components.pipeline
        if not self._settings.options.read_only:
            pipeline.slots.require_room(restored.slot_bytes)
        history.branch.continue_from(restored.save_id)
        pipeline.outcomes.go_on()
        heartbeat.resumed(restored.save_id.step)
        if restored.proven:
            history.ledger.verified(restored.save_id)
        if not self._settings.options.read_only:  # no save follows there: nothing to prepare
            history.decider.continue_from(restored.save_id.step)
            self._components.retention.restored(restored.save_id)
            pipeline.slots.reserve(restored.slot_bytes)
        for each in restored.rejected:
            if each.is_incomplete and self._components.job.coordinator.process == 0:
                _log.info(
                    "restore: step %d was %s. The run continues from step %d",
                    *(each.save_id.step, each.reason.text, restored.save_id.step),
                )
        rejected = [each for each in restored.rejected if not each.is_incomplete]
        repair = on_each_host(history.inventory.repair_command)
        if rejected and self._settings.options.read_only:
            _log.warning(
                "restore: step %d was read. Newer steps were rejected: %s%s",
                *(restored.save_id.step, _shown(rejected)),
                f". To repair them, run {repair}" if any(each.is_damage for each in rejected) else "",
            )
        elif rejected:
            _log.warning(
                "restore: the run continues from step %d. Newer steps were rejected: %s. The next save abandons them%s",
                *(restored.save_id.step, _shown(rejected)),
                f". To repair them, stop this job before that, run {repair}, and start it again"
                if any(each.is_damage for each in rejected)
                else "",
            )
        self._warn_of_newer(restored)
        if DURABLE in restored.damaged:
            _log.warning(
                "restore: step %d is damaged in the durable tier, and other copies replaced what is damaged. Repair it "
                "while they exist, %s",
                *(restored.save_id.step, repair),
            )
        return self._given(restored, rejected, start_s, self._components.storage.durable.directory)

    def warn_if_not_durable(self) -> None:
        """At the end of a run: a WARNING where the durable tier does not have its last step."""
        history = self._components.history
        base, every = history.branch.base, history.ledger.every()
        if self._settings.options.read_only or self._components.job.coordinator.process > 0:
            return
        heartbeat.ended(None)  # what an earlier manager of this process reported
        durable = max((record.save_id for record in every if DURABLE in record.tiers), default=None)
        has = "no step" if durable is None else f"step {durable.step}"
        if base is None:
            if history.branch.has_saved and not is_unwinding():
                self._warn_of_last(durable, has)
            return
        tiers = [tier for record in every if record.save_id == base for tier in record.tiers]
        if tiers and (durable is None or durable < base):
            _log.warning(
                "step %d is only in tier %s: the durable tier has %s. This run restored it and saved nothing after it, "
                "so the loss of these tiers loses the step. Start the run again, and call save(%d, ..., force=True) "
                "with the restored state before close()",
                *(base.step, " and ".join(tiers), has, base.step),
            )
            _report_behind(base.step, durable)

    def _warn_of_last(self, durable: SaveId | None, has: str) -> None:
        """The last line of a run that saved steps after the newest durable one, or lost them."""
        ledger = self._components.history.ledger
        records = [*ledger.records(), *ledger.failed()]
        later = [each for each in records if durable is None or each.save_id > durable]
        if not later:
            return
        last = max(later, key=lambda record: record.save_id)
        where, then = "is in no tier", "The warnings before this one have the reason"
        if last.tiers:
            where = f"is only in tier {' and '.join(last.tiers)}"
            then = "To keep the last step of a run, save it with force=True"
        _log.warning(
            "the run ends, and its last step %d %s: the durable tier has %s. %s", last.save_id.step, where, has, then
        )
        _report_behind(last.save_id.step, durable)

    def _warn_of_newer(self, restored: Restored) -> None:
        """The newer steps that the next save abandons though nothing is wrong with them: the caller chose `step`."""
        if self._settings.options.read_only or self._components.job.coordinator.process > 0:
            return
        step, rejected = restored.save_id.step, {each.save_id for each in restored.rejected}
        newer = [each.step for each in self._components.history.ledger.passed_over() if each.save_id not in rejected]
        if newer:
            _log.warning(
                "restore: the run continues from step %d, which is not the newest. The next save abandons newer steps: "
                "%s. Then no restart takes them, and the keep policies delete them. `%s` keeps a durable one, and its "
                "number cannot be saved anew. To only look at a step, open a manager with read_only=True",
                *(step, _newest_first(newer), command_line("pin", self._components.storage.durable.url, "STEP")),
            )

    def _given(self, restored: Restored, rejected: Sequence[Rejection], start_s: float, directory: Any) -> Any:
        """The restored items, as Orbax would return them."""
        count = self._components.job.coordinator.count
        sources = ", ".join(f"{tier} ({nbytes} bytes)" for tier, nbytes in restored.read_bytes.items())
        _log.log(
            logging.INFO if self._components.job.coordinator.process == 0 else logging.DEBUG,  # one line in a job
            "restore: step %d from %s in %.2f s; rejected: %s%s",
            restored.save_id.step,
            sources or "no tier (0 bytes)",
            restored.duration_s,
            _shown(rejected) or "none",
            f". These are the bytes of process 0 of {count}; each process logs the damage that it finds" * (count > 1),
        )
        self._components.storage.durable.stock.lock_default_item(restored.default_item)
        self._logger.log_entry(restore_entry(start_s, restored.save_id.step, directory, self._spans))
        if restored.default_item:
            return restored.items[DEFAULT_ITEM]
        return ocp.args.Composite(**dict(sorted(restored.items.items())))


def restore_first(
    steps: Sequence[int], restore: Callable[[int], Any]
) -> tuple[int | None, Any, Sequence[CheckpointError]]:
    """The first of `steps` that `restore` can restore, with its result and the errors of those before it.

    None if all are damaged or missing; all processes come to the same result. Raises any other error of `restore`.
    """
    damaged: list[CheckpointError] = []
    for step in steps:
        try:
            return step, restore(step), damaged
        except (CorruptCheckpointError, NoRestorableStepError, StepNotFoundError) as error:
            damaged.append(error)
    return None, None, damaged


def _damaged(step: int, rejected: Sequence[Rejection], others: Sequence[int], url: str) -> CorruptCheckpointError:
    """The error for a damaged step that was asked for by its number."""
    named = _newest_first(others) or "none"
    return CorruptCheckpointError(
        f"step {step} of {url} is damaged:\n"
        + "".join(f"  {each}\n" for each in rejected)
        + f"Nothing was deleted. Other committed steps, newest first: {named}. restore(None) restores the newest step "
        "that is whole.",
        step=step,
        path=url,
    )


def _newest_first(steps: Iterable[int]) -> str:
    """`steps` are in the order in which they were saved."""
    found = list(dict.fromkeys(steps))[::-1]
    return ", ".join(map(str, found[:_NAMED_MAX])) + f" and {len(found) - _NAMED_MAX} older" * (len(found) > _NAMED_MAX)


def _shown(rejected: Sequence[Rejection]) -> str:
    return "; ".join(f"{each}"[:_REASON_CHARS_MAX] for each in rejected)


def _report_behind(step: int, durable: SaveId | None) -> None:
    """For the agent of `ckptkit run`, which reports it once more at the end of the job."""
    heartbeat.ended(heartbeat.Behind(step=step, durable=None if durable is None else durable.step))
