"""The step loop's side of a save: is it due, who can hold it, is it time; then on to the pipeline, or to Orbax."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from ckptkit.durable.orbax.file_items import FilesSave, written_by
from ckptkit.durable.orbax.manager import DEFAULT_ITEM
from ckptkit.durable.orbax.preservation import prunes
from ckptkit.durable.orbax.reports import Spans
from ckptkit.durable.write_step import refuse_unwritable
from ckptkit.errors import CheckpointError
from ckptkit.events import Kind
from ckptkit.manager.build import Components
from ckptkit.manager.settings import Settings
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.save.ledger import OVERTAKEN, StepRecord
from ckptkit.save.records import Admission, Ticket
from ckptkit.snapshot.copying import abstract_slot_bytes, transfer_bytes
from ckptkit.snapshot.describe import Description
from ckptkit.snapshot.items import SaveItems, abstract_items, as_it_is, save_items
from ckptkit.snapshot.json_values import require_json, require_json_dict
from ckptkit.snapshot.shards import PINNED
from ckptkit.snapshot.small_items import INLINE_BYTES_MAX
from ckptkit.util import unproven
from ckptkit.util.clock import Deadline
from ckptkit.util.gc_pause import collection_paused

_RESTORE_FOLLOWS_S = 1.0  # at most, after `prepare` of a run that has steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTurn:
    """A save that no other follows: it is for these tiers alone, and waits for earlier ones until `deadline`. `again`:
    the step was saved before, to other tiers."""

    tiers: frozenset[str]
    deadline: Deadline
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `save`; `args` are Orbax's, by item."""

    step: int
    args: Mapping[str, Any]
    default_item: bool
    metrics: Any
    force: bool
    custom_metadata: dict[str, Any] | None
    start_s: float  # monotonic, when the step loop was stopped
    last: LastTurn | None = None


@dataclass(slots=True)
class Call:
    """One call of `save`. `name` is that of its barriers; `handed_over`: the pipeline votes on it; `spans` are for
    Orbax's logger."""

    name: str
    handed_over: bool = False
    spans: Spans = field(default_factory=Spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """The content of a request. `held` None: only Orbax can hold all of it. `foreign`: Orbax writes the durable step,
    since a handler is not plain, or the options define how a step is committed."""

    held: SaveItems | None
    description: Description | None
    foreign: bool

    def by_orbax(self, due: frozenset[str]) -> bool:
        """Whether Orbax writes the durable step itself."""
        return DURABLE in due and (self.held is None or self.foreign)


class Saver:
    """Decides about saves and begins them. Belongs to the step loop's thread; called by all processes together."""

    def __init__(self, settings: Settings, components: Components):
        self._options = settings.options
        self._tiers = settings.tiers
        self._events = components.job.events
        self._timeout_s = components.job.coordinator.timeout_s
        self._durable = components.storage.durable
        self._decider = components.history.decider
        self._ledger = components.history.ledger
        self._branch = components.history.branch
        self._inventory = components.history.inventory
        self._metadata_index = components.history.metadata_index
        self._pipeline = components.pipeline
        self._pinned = settings.saving.staging == PINNED
        self._waits = settings.saving.durable_busy == "wait"
        self._one_caller = threading.RLock()  # a signal handler may save in the middle of a save
        self._said: set[str] = set()  # items reported as not held by fast tiers
        self._no_files: set[str] = set()  # items whose handlers write what is not made of files alone

    @contextmanager
    def entered(self, step: int) -> Iterator[Call]:
        """A call of `save`, from its first line on: where it raises, the other processes drop the save at once. Threads
        take turns."""
        with self._one_caller:
            call = Call(self._branch.enter(step))
            self._pipeline.slots.go_on()  # the step after a restore is done
            try:
                with self._decider.asked_in(call.name):
                    yield call
            except BaseException as error:
                if not call.handed_over:
                    self._pipeline.run(self._pipeline.veto(call.name, error))
                raise

    def is_due(self, step: int) -> bool:
        """Whether an un-forced save of `step` would be taken for any tier."""
        self._pipeline.slots.go_on()
        with self._decider.asked_in("asked." + self._branch.enter(step, "should_save")):
            if self._refusal(step, force=False) is not None:
                return False
            return bool(self._due(step, force=False, reached=self._reached_preemption(step)))

    def prepare(self, args: Any) -> None:
        """Makes the slots that saves of `args` need. See `CheckpointManager.prepare`."""
        if self._ledger.latest_step() is not None:
            self._pipeline.slots.hold(_RESTORE_FOLLOWS_S)
        default_item = not isinstance(args, ocp.args.Composite)
        by_name = {DEFAULT_ITEM: args} if default_item else dict(args.items())
        abstract = abstract_items(by_name)
        if abstract is not None and not _all_placed(abstract.trees):
            self._pipeline.slots.prepare(*abstract_slot_bytes(abstract.trees, pinned=self._pinned))
            return
        captured = abstract or save_items(by_name)
        if not isinstance(captured, str):
            description = self._pipeline.describe(captured.trees, chunk_bytes=captured.chunk_bytes)
            transfers_bytes = transfer_bytes(description.extents, pinned=self._pinned)
            self._pipeline.slots.prepare(description.slot_bytes, description.share_bytes, transfers_bytes)

    def take(self, request: Request, call: Call) -> bool:
        """Takes a step for the tiers in which it is due; returns whether it was taken. See `CheckpointManager.save`."""
        step, force = request.step, request.force
        refusal = self._refusal(step, force=force)
        if refusal is not None:
            self._events.emit(Kind.SKIPPED, step=step, reason=refusal)
            return False
        if step < 0:
            raise ValueError(f"step {step} cannot be saved: steps are 0 or more")
        self._check_items(request)
        reached = self._reached_preemption(step)
        due = self._due(step, force=force, reached=reached)
        if request.last is not None:
            due &= request.last.tiers
        if not due:
            return False
        self._pipeline.outcomes.health.raise_if_overdue(step)
        self._require_json(request)
        metrics, custom_metadata = as_it_is(request.metrics), as_it_is(request.custom_metadata)
        request = replace(request, metrics=metrics, custom_metadata=custom_metadata)
        if (
            request.last is None
            and self._decider.refusal(step, last=self._ledger.latest_step(), force=False) is not None
        ):
            # An earlier save of the step may be in flight, and may still fail: waits until all processes know its end.
            self._pipeline.run(self._pipeline.settle(Deadline(self._timeout_s)))
        self._pipeline.raise_if_closed()
        there = [record for record in self._branch.records() if record.step == step]
        if there and not self._may_repeat(request, there):
            raise StepAlreadyExistsError(
                f"step {step} exists already in {self._durable.url} or its fast tiers; restore an earlier step, or "
                f"call delete({step}), before it is saved again"
            )
        self._branch.refuse_to_start_anew(self._durable.url, self._inventory.repair_command)
        unproven.wait()
        _refuse_unordered(self._options, request.metrics)
        # The collector would look through thousands of objects of a save, none of which it may free.
        with ExitStack() as until_waiting:
            until_waiting.enter_context(collection_paused())
            captured, due = self._capture(request, due)
            if captured.by_orbax(due):  # what the pipeline takes it vetoes itself, where it has to
                self._pipeline.outcomes.raise_if_stopped()
            if not due:
                return False
            # Orbax writes on this thread, while no other save is in flight: such a save always waits.
            must_wait = force or reached or captured.by_orbax(due)
            last = None if request.last is None else request.last.deadline
            if must_wait or last is not None or self._pipeline.busy:
                until_waiting.close()
            with call.spans.measured("wait_for_prev"):
                turn = self._pipeline.run(self._pipeline.await_turn(due, must_wait=must_wait, last=last))
            ticket = Ticket(name=call.name, save_id=self._branch.next_save(call.name, step))
            self._decider.taken(step, due, request.metrics)
            if self._branch.is_overtaken(call.name):
                self._drop_overtaken(step, call)
                return False
            self._metadata_index.taken(step, request.metrics)
            with call.spans.measured("checkpointer_blocking"):
                self._begin(ticket, captured, due, request, turn, call)
        return True

    def _drop_overtaken(self, step: int, call: Call) -> None:
        """A signal handler saved in the middle of this call: the run has a later state, and continues from that one."""
        self._decider.forget(step)
        self._pipeline.run(self._pipeline.veto(call.name, CheckpointError(OVERTAKEN)))
        self._events.emit(Kind.SKIPPED, step=step, reason=OVERTAKEN)

    def _refusal(self, step: int, *, force: bool) -> str | None:
        return self._decider.refusal(step, last=self._ledger.latest_step(), force=force)

    def _check_items(self, request: Request) -> None:
        """Raises ValueError for items that would be committed, and that no restore would find."""
        _check_names(request.args)
        if not request.args and not self._keeps_metrics(request):
            raise ValueError(
                f"step {request.step} has no item to save: give args an item, as ocp.args.Composite(state=...)"
            )

    def _keeps_metrics(self, request: Request) -> bool:
        """Whether the metrics of a request are stored, as an item."""
        kept = self._options.best_fn is not None and not self._options.prevent_write_metrics
        return kept and request.metrics is not None

    def _require_json(self, request: Request) -> None:
        """Raises the errors of values that are stored as JSON, which would else end the save in the background."""
        if self._keeps_metrics(request):
            require_json(request.metrics, "metrics")
        require_json_dict(request.custom_metadata, "custom_metadata")
        for name, arg in request.args.items():
            if isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave) and arg.custom_metadata is not None:
                require_json(arg.custom_metadata, f"custom_metadata of item {name!r}")

    def _may_repeat(self, request: Request, there: Sequence[StepRecord]) -> bool:
        """Whether a step that was saved is saved again: with `force`, one that only fast tiers hold. A script that
        forces its last step counts on its being in the durable root, and knows nothing of the tiers."""
        if request.last is not None:
            return request.last.again
        fast_alone = all(record.state == "committed" and DURABLE not in record.tiers for record in there)
        return request.force and fast_alone

    def _begin(
        self,
        ticket: Ticket,
        captured: _Captured,
        due: frozenset[str],
        request: Request,
        turn: Admission,
        call: Call,
    ) -> None:
        """Begins a save that was taken: by Orbax, in the pipeline, or both."""
        by_orbax = captured.by_orbax(due)
        if by_orbax:
            self._begin_by_orbax(ticket.save_id, request)
        ours = due - {DURABLE} if by_orbax else due
        try:
            if ours and captured.held is not None and captured.description is not None:
                call.handed_over = True
                self._pipeline.run(
                    self._pipeline.submit(
                        ticket, captured.held, captured.description, ours, request.metrics, request.start_s, turn
                    )
                )
        except BaseException:
            if call.handed_over:
                call.handed_over = self._pipeline.take_back(ticket)
            if not by_orbax:
                self._decider.not_taken(ticket.save_id.step)
            raise
        finally:
            if by_orbax:
                self._pipeline.flusher.follow(ticket)

    def _due(self, step: int, *, force: bool, reached: bool) -> frozenset[str]:
        last, is_saving = self._ledger.latest_step(), self._pipeline.busy
        return self._decider.due(step, last=last, reached_preemption=reached, force=force, is_saving=is_saving)

    def _reached_preemption(self, step: int) -> bool:
        return bool(self._durable.stock.orbax.reached_preemption(step))

    def _capture(self, request: Request, due: frozenset[str]) -> tuple[_Captured, frozenset[str]]:
        """The content of the save, collected now, and those of the due tiers that can hold it."""
        stock = self._durable.stock
        handlers = {name: stock.handler(name, arg) for name, arg in request.args.items()}
        as_files: set[str] = set()

        def write_files(name: str, arg: Any) -> FilesSave | None:
            if not self._durable.writes_itself or name in self._no_files:
                return None
            found = written_by(handlers[name], arg, mapped_from=INLINE_BYTES_MAX, home=self._pipeline.directory)
            (self._no_files if found is None else as_files).add(name)
            return found

        held = save_items(
            request.args,
            metrics=request.metrics if self._keeps_metrics(request) else None,
            custom_metadata=request.custom_metadata,
            write_files=write_files,
        )
        foreign = not self._durable.writes_itself or any(
            name not in as_files and not stock.is_plain(handlers[name]) and getattr(arg, "by_handler", True)
            for name, arg in request.args.items()
        )
        if isinstance(held, str):
            captured = _Captured(held=None, description=None, foreign=foreign)
            return captured, self._durable_only(request.step, held, due)
        description = self._pipeline.describe(held.trees, held.files, held.chunk_bytes)
        if DURABLE in due and not foreign:
            refuse_empty_arrays(description, held, request.args)
        return _Captured(held=held, description=description, foreign=foreign), due

    def _durable_only(self, step: int, item: str, due: frozenset[str]) -> frozenset[str]:
        """The tiers of `due` that remain for a step with an item that slots cannot hold."""
        if self._tiers and item not in self._said:
            self._said.add(item)
            reason = f"item {item!r} is of a kind that only Orbax's handlers hold: steps with it are durable-only"
            self._events.emit(Kind.DEGRADED, step=step, tier=self._tiers[0].name, reason=reason)
        return due & {DURABLE}

    def _begin_by_orbax(self, save_id: SaveId, request: Request) -> None:
        self._ledger.begin(save_id)
        try:
            self._durable.save_by_orbax(
                save_id,
                request.args,
                metrics=request.metrics,
                default_item=request.default_item,
                ancestry=self._ledger.ancestry,
                custom_metadata=request.custom_metadata,
            )
        except BaseException:
            self._ledger.fail(save_id)
            self._decider.forget(save_id.step)
            raise


def _check_names(items: Iterable[str]) -> None:
    """An item is one directory of a step: with another name it would be committed, and never found again."""
    for name in items:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"item {name!r} cannot be saved: give it a name without slash and backslash")


def _all_placed(trees: Mapping[str, Any]) -> bool:
    """Whether a save of arrays like these leaves is described by them: an abstract leaf may have no sharding."""
    leaves = jax.tree.leaves(dict(trees))
    return all(leaf.sharding is not None for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))


def _refuse_unordered(options: Any, metrics: Any) -> None:
    """Raises what `best_fn` raises for metrics by which steps are to be kept: later it would end every save."""
    if metrics is not None and options.best_fn is not None and prunes(options):
        value = options.best_fn(metrics)
        _ = value < value  # as sorting will ask


def refuse_empty_arrays(description: Description, items: SaveItems, args: Mapping[str, Any]) -> None:
    """Orbax's steps cannot hold them: `save` raises this, instead of a failure in the background. An empty file of a
    handler is written as a file."""
    records = [source.record for name in description.items.keys() - items.files for source in description.items[name]]
    refuse_unwritable(records)
    empty = [record.name for record in records if 0 in record.shape]
    empty += [name for name, arg in args.items() if _is_empty_array(arg)]
    if empty:
        raise ValueError(f"arrays without elements cannot be saved to the durable tier: {', '.join(sorted(empty))}")


def _is_empty_array(arg: Any) -> bool:
    """Whether a small item of arrays has one without elements."""
    kinds = ocp.args.ArraySave | ocp.args.JaxRandomKeySave | ocp.args.NumpyRandomKeySave
    return isinstance(arg, kinds) and any(0 in getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(arg.item))
