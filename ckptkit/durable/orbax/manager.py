"""Orbax's own `CheckpointManager`, made as the caller asked: its checks, handlers, metadata and reads are Orbax's.

The private names of Orbax that the drop-in needs are used in this package, and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint import options as _options
from orbax.checkpoint._src.metadata import sharding as orbax_sharding
from orbax.checkpoint._src.metadata import tree as orbax_tree
from orbax.checkpoint._src.path import deleter
from orbax.checkpoint.checkpoint_manager import CheckpointManager as OrbaxManager  # `patch_orbax` replaces `ocp`'s

from ckptkit.durable.lifecycle.listing import StepListing, committed_steps
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.orbax.v1 import carry_handlers
from ckptkit.model import paths
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.store.local import make_durable
from ckptkit.store.remote import forget_listings
from ckptkit.store.roots import root_url
from ckptkit.util.words import count_text


def make_root(url: str, options: ocp.CheckpointManagerOptions) -> None:
    """Makes the durable root, with the permissions that the options ask for. A power failure does not undo that. If it
    fails, the first read or write reports it. In a bucket there is nothing to make."""
    if not properties_of(url).file_system:
        return  # s3fs would make a bucket of a mistyped name, gcsfs would ask Google for the type of the bucket
    mode = options.file_options.path_permission_mode if options.file_options else None
    with suppress(OSError):
        make_durable(url.removeprefix("file://"), mode=0o777 if mode is None else mode)


def without_collectives(options: Any, count: int) -> Any:
    """With these two set, all of Orbax's barriers use the coordination service (FACTS 4)."""
    if count == 1:
        return options
    return dataclasses.replace(
        options,
        active_processes=options.active_processes or set(range(count)),
        barrier_sync_key_prefix=options.barrier_sync_key_prefix or "ckptkit",
    )


def read_by_one(options: ocp.CheckpointManagerOptions) -> dict[str, Any]:
    """Process 0 alone lists steps anyway, and sends them to the others without Orbax's broadcast between devices."""
    names = options.step_name_format
    if getattr(names, "single_host_load_and_broadcast", False):
        names = dataclasses.replace(names, single_host_load_and_broadcast=False)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return {"single_host_load_and_broadcast": False, "step_name_format": names}


def default_save_policy(options: ocp.CheckpointManagerOptions) -> Any:
    """The policy that Orbax builds from its options when no `save_decision_policy` is given."""
    return checkpoint_manager._get_default_save_decision_policy(options)


def finishes_in_its_own_way(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether the options define how a step is committed: then Orbax writes it."""
    return options.temporary_path_class is not None or options.atomicity_options is not None


DEFAULT_ITEM = checkpoint_manager.DEFAULT_ITEM_NAME  # the item of a step that was saved without Composite
METRICS_ITEM = checkpoint_manager.METRIC_ITEM_NAME
_LOOKS = 5  # at steps that another process deletes meanwhile: each fails by another deletion
_KEY_HANDLERS = (ocp.handlers.JaxRandomKeyCheckpointHandler, ocp.handlers.NumpyRandomKeyCheckpointHandler)
_TREE_LAYOUT = ("_use_ocdbt", "_use_zarr3", "_type_handler_registry", "_primary_host", "_pytree_metadata_options")
_TREE_KINDS = {"StandardCheckpointHandler": ocp.args.StandardRestore, "PyTreeCheckpointHandler": ocp.args.PyTreeRestore}
_NAMING = ("_filename", "_checkpoint_name", "_key_name")  # the settings of the small handlers
_GIVEN_HANDLERS = ("checkpointers", "item_handlers", "handler_registry")  # arguments of Orbax's constructor

sharding_metadata = orbax_sharding.from_jax_sharding  # Orbax's record of a sharding
tree_metadata = orbax_tree.build_default_tree_metadata  # Orbax's record of the metadata of a tree


def refuse_options(options: ocp.CheckpointManagerOptions, url: str) -> None:
    """Raises ValueError for a combination that Orbax's constructor refuses, and for one by which no step of this root
    could be deleted."""
    if options.preservation_policy and (options.keep_time_interval or options.max_to_keep or options.keep_period):
        raise ValueError("`preservation_policy` and `delete options` are mutually exclusive - do not use together.")
    is_asked = options.todelete_full_path is not None and not options.read_only
    if is_asked and not properties_of(url).known_to_orbax:
        raise ValueError("todelete_full_path is for gs:// alone; take todelete_subdir")


def refuse_part_of_job(options: ocp.CheckpointManagerOptions, count: int) -> None:
    """Raises ValueError where the options name some of the `count` processes: the others would be waited for."""
    active = options.multiprocessing_options.active_processes
    if active is not None and set(active) != set(range(count)):
        raise ValueError(
            f"MultiprocessingOptions.active_processes is {sorted(active)}, and the job has "
            f"{count_text(count, 'process', 'processes')}: all of them make the manager, save and restore together. "
            "Leave it out, and keep what some processes alone save in a manager of stock Orbax"
        )


def step_names(options: ocp.CheckpointManagerOptions) -> Any:
    """How the options name steps."""
    return options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix, step_format_fixed_length=options.step_format_fixed_length
    )


def committed_by_mark(options: ocp.CheckpointManagerOptions, url: str) -> ocp.CheckpointManagerOptions:
    """`options` with commit markers, for a bucket that Orbax does not recognise, such as `s3://`. Without markers it
    would take every name there for a committed step, and rename its files object by object. The caller's choices stay.

    On a mount Orbax lists by names, and reads what it had renamed there, with or without a mark (see `_Manager`).
    """
    properties = properties_of(url)
    if properties.atomic_rename or properties.known_to_orbax:
        return options
    mark, names = ocp.path.atomicity.CommitFileTemporaryPath, step_names(options)
    chosen = options.temporary_path_class is not None or options.atomicity_options is not None
    if properties.file_system:
        marked = _options.AtomicityOptions(mode=_options.AtomicityMode.COMMIT_FILE, allow_legacy_atomic_rename=True)
        return dataclasses.replace(
            options, step_name_format=names, atomicity_options=options.atomicity_options if chosen else marked
        )
    if getattr(names, "temporary_path_cls", mark) is None and getattr(names, "atomicity_options", None) is None:
        names = dataclasses.replace(names, temporary_path_cls=mark)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return dataclasses.replace(
        options,
        step_name_format=names,
        temporary_path_class=options.temporary_path_class if chosen else mark,
    )


def has_standard_names(manager: ocp.CheckpointManager) -> bool:
    """Whether steps have one of Orbax's standard names, and are committed as their storage does by itself."""
    names = manager._step_name_format
    marked = ocp.path.atomicity.CommitFileTemporaryPath
    renamed = properties_of(root_url(str(manager.directory))).file_system
    return type(names) is type(ocp.path.step.standard_name_format()) and not (
        names.temporary_path_cls not in (None, None if renamed else marked) or names.atomicity_options  # pyright: ignore[reportAttributeAccessIssue]
    )


class _Manager(OrbaxManager):
    """Orbax's manager, which lists the steps again where one was deleted under the look: Orbax raises.

    Its books are without the directories that Orbax takes for steps by their names alone: its policies would count
    them, and delete them as old. In a bucket Orbax asks for a mark. Cost: on a disk or a mount a listing of each step.
    """

    def _load_checkpoint_infos(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for _ in range(_LOOKS - 1):
                with suppress(FileNotFoundError):
                    return self._steps_of(super()._load_checkpoint_infos(*args, **kwargs))
            return self._steps_of(super()._load_checkpoint_infos(*args, **kwargs))
        except RecursionError:  # Orbax takes other text that is not JSON for a step without metadata
            place = Place(open_store(root_url(str(self.directory))))
            for name in filter(paths.step_of_name, place.directories()):
                place.below(name).json(paths.STEP_METADATA)  # raises `CorruptCheckpointError` that names the file
            raise

    def _steps_of(self, infos: list[Any]) -> list[Any]:
        url = root_url(str(self.directory))
        if not (properties_of(url).file_system and has_standard_names(self)):
            return infos
        steps = committed_steps(url, self._step_name_format)
        return [info for info in infos if info.step in steps]


class StockManager:
    """A plain `ocp.CheckpointManager` over the durable root, and the questions that the drop-in has for it.

    Raises what Orbax's constructor raises, for the same arguments.
    """

    def __init__(self, url: str, options: ocp.CheckpointManagerOptions, setup: Mapping[str, Any]):
        """`setup`: the other arguments of Orbax's constructor, by name."""
        # It logs nothing: the manager logs each save and restore once, whichever code writes it.
        self.orbax = _Manager(url, options=options, logger=ocp.logging.CompositeLogger(), **setup)
        self.has_given_handlers = any(map(setup.get, _GIVEN_HANDLERS))
        carry_handlers(self.orbax)
        self._stale = False  # the books: a look after a failed save failed too
        self.unmanaged: set[int] = set()  # in a bucket: what has a mark, and was found to be no step of a manager

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

    @staticmethod
    def is_plain(handler: Any) -> bool:
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
        return type(ours) is type(plain) and all(getattr(ours, name) == getattr(plain, name) for name in _TREE_LAYOUT)

    def listed(self) -> StepListing:
        """The committed steps that the storage has now, ascending, with what was seen below them on the way; changes
        nothing that is cached.

        Cost: a listing, and in a bucket a look at each step that is not known here. A name format of the caller's
        own lists them itself.
        """
        root, names = self.orbax.directory, self.orbax._step_name_format
        if has_standard_names(self.orbax):
            found = committed_steps(root_url(str(root)), names, self.orbax.all_steps())
            return {step: below for step, below in found.items() if step not in self.unmanaged}
        return dict.fromkeys(sorted({found.step for found in names.find_all(root)})) if root.exists() else {}

    def look(self) -> None:
        """Has Orbax's books list the steps as the storage has them: in the order of their numbers. Raises what Orbax
        raises. From cached listings of a bucket, Orbax would never prune the steps that are not in them."""
        forget_listings(root_url(str(self.orbax.directory)))
        self.orbax.reload()
        self._stale = False

    def look_again(self) -> None:
        """After a save that failed: its step may be there all the same, and Orbax forgets others that are (FACTS 5).

        If looking fails too, it is left to the next save: the raised error must show why the save failed, and decides
        about a retry. A process that raises before a barrier would leave the others waiting. Cost: a listing under our
        limits of time, where Orbax's own have none.
        """
        self._stale = True
        with suppress(Exception):  # the storage is why the save failed
            forget_listings(root_url(str(self.orbax.directory)))
            if list(self.listed()) != sorted(self.orbax.all_steps()):
                self.look()
            self._stale = False

    def known(self) -> list[int]:
        """The steps in Orbax's books, after another look where the last one failed. Raises nothing."""
        if self._stale:
            self.look_again()
        return list(self.orbax.all_steps())

    def name(self, step: int) -> str:
        """The name of the directory in which a step is written."""
        return self.orbax._get_write_step_directory(step, self.orbax.directory).name

    def found_name(self, step: int) -> str:
        """The name of the directory of a step: a name format of the caller's own may know several."""
        if has_standard_names(self.orbax):
            return self.name(step)
        with suppress(ValueError):  # no step of any of its names
            return self.path(step).name
        return self.name(step)

    @property
    def stored_metrics(self) -> bool:
        """Whether a step's metrics are an item of it."""
        return bool(self.orbax._track_best and not self.orbax._options.prevent_write_metrics)

    def add(self, step: int, metrics: Any) -> None:
        """Books a step that was committed without Orbax."""
        self.orbax._add_checkpoint_info(step, metrics)

    def forget(self, steps: Collection[int]) -> None:
        """Removes steps from the books: they are deleted, or are about to be."""
        self.orbax._checkpoints.delete_if(lambda info: info.step in steps)

    def path(self, step: int) -> Any:
        """The directory of a step, under whichever of its names it has."""
        return self.orbax._get_read_step_directory(step, self.orbax.directory)

    def adopt_handlers(self, other: StockManager) -> None:
        """Restores through the handlers of `other`, as one manager does for another directory."""
        self.orbax._checkpointer = other.orbax._checkpointer
        self.orbax._default_item = other.orbax._default_item

    def infos(self) -> list[Any]:
        """`CheckpointInfo` (step, time, metrics) of each step that is known, in Orbax's order."""
        return list(self.orbax._checkpoints)

    def settle(self) -> None:
        """Waits for a save in flight, without raising: its failure was reported where it was waited for."""
        try:
            self.orbax.wait_until_finished()
        except Exception:  # noqa: BLE001  Orbax raises it once per thread; it was reported already
            self.look()

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


def delete_directory(path: str, options: ocp.CheckpointManagerOptions) -> None:
    """Deletes a directory of a disk, with the number of threads in the options."""
    target = epath.Path(path)
    deleter.PathDeleter(target.parent, num_threads=options.num_deletion_threads).delete(target)


def put_aside(step: int, url: str, options: ocp.CheckpointManagerOptions) -> bool:
    """Renames a step as `todelete_subdir` or `todelete_full_path` ask; False where it is to be deleted. Raises what
    Orbax raises."""
    bucket = properties_of(url).known_to_orbax and not properties_of(url).file_system
    if options.todelete_full_path is None and (options.todelete_subdir is None or bucket):
        return False
    deleter.StandardCheckpointDeleter(
        epath.Path(url),
        name_format=step_names(options),
        todelete_subdir=options.todelete_subdir,
        todelete_full_path=options.todelete_full_path,
    ).delete(step)
    return True
