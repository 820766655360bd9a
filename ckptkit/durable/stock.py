"""Orbax's own `CheckpointManager`, made as the caller asked: its checks, handlers, metadata and reads are Orbax's.

The private names of Orbax that the drop-in needs are used here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint._src.logging import step_statistics
from orbax.checkpoint._src.metadata import tree as orbax_tree

from ckptkit.layout import COMMIT_MARK, TEMPORARY
from ckptkit.store.roots import is_remote

DEFAULT_ITEM = checkpoint_manager.DEFAULT_ITEM_NAME  # the item of a step that was saved without Composite
METRICS_ITEM = checkpoint_manager.METRIC_ITEM_NAME
_KEY_HANDLERS = (ocp.handlers.JaxRandomKeyCheckpointHandler, ocp.handlers.NumpyRandomKeyCheckpointHandler)
_TREE_LAYOUT = ("_use_ocdbt", "_use_zarr3", "_type_handler_registry", "_primary_host", "_pytree_metadata_options")
_TREE_KINDS = {"StandardCheckpointHandler": ocp.args.StandardRestore, "PyTreeCheckpointHandler": ocp.args.PyTreeRestore}
_NAMING = ("_filename", "_checkpoint_name", "_key_name")  # the settings of the small handlers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What Orbax's constructor takes beside directory and options."""

    checkpointers: Any = None
    metadata: Mapping[str, Any] | None = None
    item_names: Any = None
    item_handlers: Any = None
    handler_registry: Any = None


class QuietLogger(ocp.logging.AbstractLogger):
    """Says nothing: the manager logs each save and restore once, whoever writes it."""

    def log_entry(self, entry: Any) -> None:
        """Drops the entry."""


def checked_options(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """`options`; raises ValueError for a combination that Orbax's constructor refuses."""
    if options.preservation_policy and (options.keep_time_interval or options.max_to_keep or options.keep_period):
        raise ValueError("`preservation_policy` and `delete options` are mutually exclusive - do not use together.")
    return options


def delete_mark_first(manager: ocp.CheckpointManager) -> None:
    """Makes a manager take the mark of a commit away before the bytes, where it deletes a step for good.

    Orbax removes a directory file by file, and a run that dies meanwhile leaves what looks like a committed step. On a
    disk the mark is the name, on a bucket an object.
    """
    deleter: Any = manager._checkpoint_deleter
    deleter = getattr(deleter, "_standard_deleter", deleter)  # the one that deletes in the background holds another
    delete = deleter._delete_step_permanently
    deleter._delete_step_permanently = lambda step, path: delete(step, _unmarked(path))


def _unmarked(path: Any) -> Any:
    """Where the step stands once it is no committed one."""
    if is_remote(str(path)):
        (path / COMMIT_MARK).unlink(missing_ok=True)
        return path
    doomed = path.with_name(f"{path.name}{TEMPORARY}")  # as if it had never been finished: the next save replaces it
    if doomed.exists():
        doomed.rmtree()
    return path.rename(doomed)


class StockManager:
    """A plain `ocp.CheckpointManager` over the durable root, and the questions that the drop-in has for it.

    Raises what Orbax's constructor raises, for the same arguments.
    """

    def __init__(self, url: str, options: ocp.CheckpointManagerOptions, setup: Setup):
        self.orbax = ocp.CheckpointManager(
            url,
            setup.checkpointers,
            options=options,
            metadata=setup.metadata,
            item_names=setup.item_names,
            item_handlers=setup.item_handlers,
            handler_registry=setup.handler_registry,
            logger=QuietLogger(),
        )
        delete_mark_first(self.orbax)

    @property
    def default_item(self) -> bool | None:
        """Whether steps have one unnamed item; None while that is open."""
        return self.orbax._default_item.get()

    def lock_default_item(self, default_item: bool) -> None:
        """Settles `default_item` for good, if it is open."""
        self.orbax._default_item.set_if_none(default_item)

    def save_args(self, items: Any, save_kwargs: Any, args: Any) -> tuple[dict[str, Any], bool]:
        """The arguments of a save by item, and whether it is one unnamed item; raises as Orbax's `save` does."""
        if items is None and args is None:
            raise ValueError("Must provide `args` for `save`.")
        self.lock_default_item(checkpoint_manager.determine_default_item_mode_from_args(args))
        default_item = bool(self.default_item)
        self.orbax._validate_args(items, args)
        if args is None:
            return self._legacy(items, save_kwargs, default_item, for_save=True), default_item
        return ({DEFAULT_ITEM: args} if default_item else dict(args.items())), default_item

    def restore_args(self, items: Any, restore_kwargs: Any, args: Any) -> dict[str, Any] | None:
        """The arguments of a restore by item, None for every item of the step; raises as Orbax's `restore` does."""
        default_item = self.default_item
        if default_item is not None or not isinstance(args, ocp.args.CheckpointArgs):
            self.orbax._validate_args(items, args)
        if args is None:
            if items is None and restore_kwargs is None:
                return None
            return self._legacy(items, restore_kwargs, bool(default_item), for_save=False)
        if not isinstance(args, ocp.args.Composite):
            return {DEFAULT_ITEM: args}
        return dict(args.items()) or None

    def handler(self, item: str, args: Any) -> Any:
        """Orbax's handler for an item, remembered as after a save or restore of it.

        Raises ValueError as Orbax does, for arguments that go with none.
        """
        return self.orbax._checkpointer.handler._get_or_set_handler(item, args)  # pyright: ignore[reportAttributeAccessIssue]

    def learn_kinds(self, kinds: Any) -> None:
        """Settles the handlers of trees that have none yet, by the kinds that a step's metadata names."""
        for item, kind in (kinds if isinstance(kinds, Mapping) else {DEFAULT_ITEM: kinds or ""}).items():
            if (args := _TREE_KINDS.get(kind.rsplit(".", 1)[-1])) is not None:
                with suppress(ValueError):  # the caller gave another handler
                    self.handler(item, args())

    def is_plain(self, handler: Any) -> bool:
        """Whether our own writer writes what this handler would: one of Orbax's kinds (or Grain's), as it comes."""
        kind = type(handler)
        if kind in (ocp.JsonCheckpointHandler, ocp.ArrayCheckpointHandler, *_KEY_HANDLERS):
            return all(getattr(handler, name, None) == getattr(_plain(kind), name, None) for name in _NAMING)
        if kind.__module__.split(".")[0] == "grain":
            return True
        tree = handler._impl if kind is ocp.StandardCheckpointHandler else handler
        if type(tree) is not ocp.PyTreeCheckpointHandler:
            return False
        ours, plain = tree._handler_impl, _plain(ocp.PyTreeCheckpointHandler)._handler_impl
        return all(getattr(ours, name) == getattr(plain, name) for name in _TREE_LAYOUT)

    def listed(self) -> list[int]:
        """The committed steps that the storage has now, ascending. Cost: a listing; changes nothing that is cached."""
        root = self.orbax.directory
        return sorted({found.step for found in self.orbax._step_name_format.find_all(root)}) if root.exists() else []

    def path(self, step: int) -> Any:
        """The directory of a step, under whichever of its names it has."""
        return self.orbax._get_read_step_directory(step, self.orbax.directory)

    def adopt_handlers(self, other: StockManager) -> None:
        """Restores through the handlers of `other`, as one manager does for another directory."""
        self.orbax._checkpointer = other.orbax._checkpointer
        self.orbax._default_item = other.orbax._default_item

    def infos(self) -> list[tuple[int, Any, Any]]:
        """Step, commit time and metrics of each step that is known, in Orbax's order."""
        return [(info.step, info.time, info.metrics) for info in self.orbax._checkpoints]

    def settle(self) -> None:
        """Waits for a save that is on its way, without raising: its failure was reported where it was waited for."""
        try:
            self.orbax.wait_until_finished()
        except Exception:  # noqa: BLE001  Orbax raises it once per thread; it was said already
            self.orbax.reload()

    def close(self) -> None:
        """Ends Orbax's manager."""
        self.settle()
        self.orbax.close()

    def _legacy(self, items: Any, kwargs: Any, default_item: bool, *, for_save: bool) -> dict[str, Any]:
        """The arguments of the form without `args`, as Orbax makes them from the handlers that it was given."""
        items = {DEFAULT_ITEM: items} if default_item and items is not None else items or {}
        kwargs = {DEFAULT_ITEM: kwargs} if default_item and kwargs is not None else kwargs or {}
        made = {}
        for name in items if for_save else {**items, **kwargs}:
            kinds = checkpoint_manager._get_args_for_key(self.orbax._checkpointer.handler, name)
            made[name] = kinds[0 if for_save else 1](items.get(name), **(kwargs.get(name) or {}))  # pyright: ignore[reportCallIssue]
        return made


@lru_cache(maxsize=8)
def _plain(kind: Any) -> Any:
    """A handler of a kind as it comes, made once: it is compared with at every save."""
    return kind()


def step_metadata(**known: Any) -> Any:
    """Orbax's record of what is known of a step."""
    return checkpoint_manager.StepMetadata(**known)


def sharding_metadata(sharding: jax.sharding.Sharding) -> Any:
    """Orbax's words for a sharding; None for the kinds that it has none for."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    return None


def tree_metadata(tree: Any) -> Any:
    """Orbax's record of the metadata of a tree."""
    return orbax_tree.build_default_tree_metadata(tree)


def save_statistics(**known: Any) -> dict[str, Any]:
    """The entry that Orbax's managers give their logger after each save."""
    return dataclasses.asdict(step_statistics.SaveStepStatistics(**known))


def restore_statistics(**known: Any) -> dict[str, Any]:
    """The entry that Orbax's managers give their logger after each restore."""
    return dataclasses.asdict(step_statistics.RestoreStepStatistics(**known))
