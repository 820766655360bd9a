"""From the arguments of Orbax's `save` to what a save holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import orbax.checkpoint as ocp

from ckptkit.durable.orbax.file_items import FilesSave, written_by
from ckptkit.durable.orbax.manager import DEFAULT_ITEM
from ckptkit.durable.orbax.preservation import by_metrics, prunes
from ckptkit.durable.write_step import refuse_unwritable
from ckptkit.events import Kind
from ckptkit.manager.build import Components
from ckptkit.manager.settings import Settings
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.save.pipeline import Call
from ckptkit.save.records import LastTurn, Save
from ckptkit.snapshot.copying import transfer_bytes
from ckptkit.snapshot.describe import Description
from ckptkit.snapshot.items import abstract_items, as_it_is, save_items
from ckptkit.snapshot.json_values import require_json, require_json_dict
from ckptkit.snapshot.shards import PINNED
from ckptkit.snapshot.small_items import INLINE_BYTES_MAX

_RESTORE_FOLLOWS_S = 1.0  # at most, after `prepare` of a run that has steps


class Saver:
    """Translates calls of `save` and `prepare`. Belongs to the step loop's thread."""

    def __init__(self, settings: Settings, components: Components):
        self.options, self.tiers = settings.options, settings.tiers
        self.events = components.job.events
        self.durable = components.storage.durable
        self.ledger = components.history.ledger
        self.metadata_index = components.history.metadata_index
        self.pipeline = components.pipeline
        self._pinned = settings.saving.staging == PINNED
        self.reported: set[str] = set()  # items reported as not held by fast tiers
        self.no_files: set[str] = set()  # items whose handlers write what is not made of files alone
        self._has_saved = False

    def take(self, call: Call, arguments: OrbaxArguments, *, start_s: float, last: LastTurn | None = None) -> bool:
        """Takes a step for the tiers in which it is due; returns whether it was taken. `start_s`: when the step loop
        was stopped (monotonic)."""
        save = Save(
            name=call.name,
            step=arguments.step,
            arguments=arguments,
            force=arguments.force,
            last=last,
            start_s=start_s,
        )
        taken = self.pipeline.save(call, save)
        if taken:
            save.spans.ended("checkpointer_blocking", save.turn_s)
        return taken

    def prepare(self, args: Any) -> None:
        """Makes the slots that saves of `args` need. See `CheckpointManager.prepare`."""
        if self.ledger.latest_step() is not None:
            self.pipeline.slots.hold(_RESTORE_FOLLOWS_S)
        default_item = not isinstance(args, ocp.args.Composite)
        by_name = {DEFAULT_ITEM: args} if default_item else dict(args.items())
        own = abstract_items(by_name) or save_items(by_name)
        if isinstance(own, str):
            return
        description = self.pipeline.describe(own.trees, chunk_bytes=own.chunk_bytes)
        is_ours = not self.durable.stock.has_given_handlers
        if is_ours and all(isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave) for arg in by_name.values()):
            self.durable.require_room(description.tree_bytes)
        transfers_bytes = transfer_bytes(description.extents, pinned=self._pinned)
        self.pipeline.slots.prepare(description.slot_bytes, description.share_bytes, transfers_bytes)

    def require_room(self, description: Description, *, by_orbax: bool) -> None:
        """At the first save of a run: raises `StoreFullError` where a tier has no room for its slots, or the durable
        directory for one step. Later ones degrade the tier. `by_orbax`: Orbax compresses, so the size is not known."""
        if self._has_saved:
            return
        self._has_saved = True
        self.pipeline.slots.size(description.slot_bytes, description.share_bytes)
        self.pipeline.slots.require_room(description.slot_bytes)
        if not by_orbax:
            self.durable.require_room(description.tree_bytes)


@final
class OrbaxArguments:
    """The arguments of one call of `save`, by item (`ckptkit.save.records.Arguments`)."""

    def __init__(
        self,
        saver: Saver,
        step: int,
        args: Mapping[str, Any],
        *,
        default_item: bool,
        metrics: Any,
        force: bool,
        custom_metadata: dict[str, Any] | None,
    ):
        self._saver, self.step, self.args, self._default_item = saver, step, args, default_item
        self._metrics, self.force, self._custom_metadata = metrics, force, custom_metadata

    def check(self) -> None:
        """Raises ValueError for items that would be committed, and that no restore would find."""
        _check_names(self.args)
        if not self.args and not self._keeps_metrics:
            raise ValueError(
                f"step {self.step} has no item to save: give args an item, as ocp.args.Composite(state=...)"
            )

    def collect(self, save: Save) -> None:
        """See `Arguments`."""
        self._require_json()
        options, saver, stock = self._saver.options, self._saver, self._saver.durable.stock
        self._metrics, self._custom_metadata = as_it_is(self._metrics), as_it_is(self._custom_metadata)
        save.metrics = self._metrics
        _refuse_unordered(options, save.metrics)
        handlers = {name: stock.handler(name, arg) for name, arg in self.args.items()}
        plain = {name for name, handler in handlers.items() if stock.is_plain(handler)}
        as_files: set[str] = set()

        def write_files(name: str, arg: Any) -> FilesSave | None:
            if not saver.durable.writes_itself or name in saver.no_files:
                return None
            found = written_by(handlers[name], arg, mapped_from=INLINE_BYTES_MAX, home=saver.pipeline.directory)
            (saver.no_files if found is None else as_files).add(name)
            return found

        held = save_items(
            self.args,
            metrics=save.metrics if self._keeps_metrics else None,
            custom_metadata=self._custom_metadata,
            write_files=write_files,
            plain=plain,
        )
        foreign = not saver.durable.writes_itself or any(
            name not in as_files and name not in plain and getattr(arg, "by_handler", True)
            for name, arg in self.args.items()
        )
        if isinstance(held, str):
            self._report_durable_only(held)
            save.due &= {DURABLE}
            save.by_orbax = DURABLE in save.due
            return
        save.items, save.description = held, saver.pipeline.describe(held.trees, held.files, held.chunk_bytes)
        save.by_orbax = DURABLE in save.due and foreign
        if DURABLE in save.due and not foreign:
            # An empty file of a handler is written as a file.
            names = save.description.items.keys() - held.files
            refuse_unwritable(source.record for name in names for source in save.description.items[name])
        if save.last is None:
            saver.require_room(save.description, by_orbax=foreign)

    def taken(self) -> None:
        """See `Arguments`."""
        self._saver.metadata_index.taken(self.step, self._metrics)

    def begin_by_orbax(self, save_id: SaveId) -> None:
        """See `Arguments`."""
        self._saver.durable.save_by_orbax(
            save_id,
            self.args,
            metrics=self._metrics,
            default_item=self._default_item,
            ancestry=self._saver.ledger.ancestry,
            custom_metadata=self._custom_metadata,
        )

    @property
    def _keeps_metrics(self) -> bool:
        """Whether the metrics are stored, as an item."""
        options = self._saver.options
        return options.best_fn is not None and not options.prevent_write_metrics and self._metrics is not None

    def _require_json(self) -> None:
        """Raises the errors of values that are stored as JSON, which would else end the save in the background."""
        if self._keeps_metrics:
            require_json(self._metrics, "metrics")
        require_json_dict(self._custom_metadata, "custom_metadata")
        for name, arg in self.args.items():
            if isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave) and arg.custom_metadata is not None:
                require_json(arg.custom_metadata, f"custom_metadata of item {name!r}")

    def _report_durable_only(self, item: str) -> None:
        """An event for an item that slots cannot hold, once."""
        saver = self._saver
        if saver.tiers and item not in saver.reported:
            saver.reported.add(item)
            reason = f"item {item!r} is of a kind that only Orbax's handlers hold: steps with it are durable-only"
            saver.events.emit(Kind.DEGRADED, step=self.step, tier=saver.tiers[0].name, reason=reason)


def _check_names(items: Iterable[str]) -> None:
    """An item is one directory of a step: with another name it would be committed, and never found again."""
    for name in items:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"item {name!r} cannot be saved: give it a name without slash and backslash")


def _refuse_unordered(options: Any, metrics: Any) -> None:
    """Raises what `best_fn` raises for metrics by which steps are to be kept, and TypeError where it makes no number of
    them: the step would count as one without metrics."""
    if metrics is not None and options.best_fn is not None and prunes(options):
        by_metrics(options.best_fn, minimum=options.best_mode == "min")(metrics)
