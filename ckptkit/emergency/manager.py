"""`emergency.CheckpointManager`: the interface of Orbax's emergency manager over our tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbax_emergency
from orbax.checkpoint.experimental.emergency.checkpoint_manager import CheckpointManagerOptions

from ckptkit.errors import (
    ClosedAtEnd,
    CorruptCheckpointError,
    ItemNotFoundError,
    NoRestorableStepError,
    StepNotFoundError,
    TreeMismatchError,
)
from ckptkit.manager import CheckpointManager as TierManager
from ckptkit.model.policies import ProcessOptions
from ckptkit.model.tiers import EverySteps, KeepNewest, Tier, TierSavePolicy

_log = logging.getLogger("ckptkit")
STATE, DATASET, _RESERVED = "state", "dataset", "process_metadata"
_ARGS: Any = ocp.args
_REFUSED = {  # of `options.local`: what a fast tier cannot do, and what to give instead
    "save_decision_policy": "should_save_fn, or tiers=[Tier.ram(path, save=...)]",
    "preservation_policy": "max_to_keep, or tiers=[Tier.ram(path, keep=...)]",
    "debug_use_full_global_mesh": "nothing: every process saves what its devices hold",
}


@final
class CheckpointManager(ClosedAtEnd, orbax_emergency.CheckpointManager):
    """A drop-in for Orbax's emergency `CheckpointManager`: frequent saves to this host's ramdisk, rare ones to a
    durable root, and a restore from the copies that are left.

    A restore reads this host's ramdisk, then the ramdisks of other processes (another slice has the same boxes), then
    the durable root; every cell is compared with its digest. Any mesh will do: one slice, or slices of other sizes than
    those of the save. No device collective is launched while it saves. The durable root has the layout of Orbax's
    manager: the state is an unnamed item in a job of several slices, the item `state` in a job of one. Roots of either
    layout are read, and a root keeps the layout of the step that was restored.

    The arguments are Orbax's, and by keyword those of `ckptkit.CheckpointManager` (`host_id`, `events`, `durable`,
    `saving`, `processes`, `tiers`). `local_directory` becomes `Tier.ram(local_directory)` with the
    policies of `options.local`; `tiers` replaces it. A dataset is held by the same tiers as the state, and restored
    from the same step.

    Raises ValueError naming the fields of `options.local` that a fast tier cannot obey, FileNotFoundError for a local
    directory that is not there in a job of several slices, and what `ckptkit.CheckpointManager` raises.
    """

    def __init__(
        self,
        local_directory: str | os.PathLike[str],
        persistent_directory: str | os.PathLike[str],
        global_mesh: jax.sharding.Mesh,
        abstract_state: Any,
        *,
        options: orbax_emergency.CheckpointManagerOptions | None = None,
        metadata: dict[str, Any] | None = None,
        logger: Any = None,
        item_handlers: Any = None,
        handler_registry: Any = None,
        persistent_non_replicated_directory: str | os.PathLike[str] | None = None,
        tiers: Sequence[Tier] | None = None,
        **ours: Any,
    ):
        options = options or orbax_emergency.CheckpointManagerOptions()
        self._mesh, self._abstract_state = global_mesh, abstract_state
        slices = _slices(global_mesh, options.replica_axis_index)
        self._in_primary_slice = jax.process_index() in {device.process_index for device in slices[0]}
        if len(slices) > 1 and tiers is None and not os.path.isdir(local_directory):
            raise FileNotFoundError(f"local_directory {local_directory} is not there; create it on every host")
        if tiers is None:
            tiers = local_tiers(local_directory, options, self.latest_step)
        limits = options.multiprocessing_options or orbax_emergency.MultiprocessingOptions()
        ours.setdefault("processes", ProcessOptions(timeout_s=limits.coordination_timeout_secs))
        self._state = TierManager(
            persistent_directory,
            options=durable_options(options),
            metadata=metadata,
            logger=logger,
            tiers=tiers,
            **ours,
        )
        self._named = len(slices) == 1
        self._datasets: TierManager | None = None
        if persistent_non_replicated_directory is not None:
            self._datasets = TierManager(
                persistent_non_replicated_directory,
                options=durable_options(options),
                metadata=metadata,
                item_handlers=item_handlers,
                handler_registry=handler_registry,
                tiers=tiers,
                **ours,
            )

    @property
    def manager(self) -> TierManager:
        """The manager of the state: events, tiers, `steps()`, `scrub`."""
        return self._state

    @property
    def directory(self) -> Any:
        """The durable root."""
        return self._state.directory

    @property
    def in_primary_slice(self) -> bool:
        """Whether this process has a device of the first slice."""
        return self._in_primary_slice

    @property
    def global_mesh(self) -> jax.sharding.Mesh:
        """The mesh that the manager was made with."""
        return self._mesh

    def all_steps(self, read: bool | None = None) -> Sequence[int]:
        """Every step that some tier holds; with `read` the tiers are read again."""
        return self._state.all_steps(read=bool(read))

    def latest_step(self) -> int | None:
        """The newest step over all tiers."""
        return self._state.latest_step()

    def best_step(self) -> int | None:
        """See `ckptkit.CheckpointManager.best_step`; Orbax's manager has none."""
        return self._state.best_step()

    def reload(self) -> None:
        """Reads every tier again."""
        for manager in self._managers:
            manager.reload()

    def reached_preemption(self, step: int) -> bool:
        """Whether a preemption was announced and the processes agreed to save at `step`."""
        return self._state.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier."""
        return self._state.should_save(step)

    def delete(self, step: int) -> None:
        """Deletes a step from every tier; Orbax's manager cannot."""
        self._state.delete(step)
        if self._datasets is not None and step in self._datasets.all_steps():
            self._datasets.delete(step)

    def save(self, step: int, args: Any, *, force: bool = False, custom_metadata: dict[str, Any] | None = None) -> bool:
        """Takes a step for the tiers in which it is due; returns whether it was taken for any.

        `args` is a `Composite` with the item `state`, and `dataset` where there is a root for it. Returns once the
        caller may donate the state. Raises ValueError for other items, and what `ckptkit.CheckpointManager.save`
        raises.
        """
        items = self._checked(args)
        dataset = items.pop(DATASET, None)
        if dataset is not None and self._datasets is not None:
            self._datasets.save(step, args=dataset, force=force, custom_metadata=custom_metadata)
        state = _ARGS.Composite(**items) if self._named else items[STATE]
        return self._state.save(step, args=state, force=force, custom_metadata=custom_metadata)

    def restore(self, step: int | None, args: Any = None) -> Any:
        """A `Composite` with the `state` of `step`, or (None) of the newest step that verifies.

        As in Orbax, the state is restored as `abstract_state` describes it, and `args` do not change that.
        `args.dataset` restores the dataset of the same step: None is then the newest step of which both verify. Raises
        the errors of `ckptkit.CheckpointManager.restore`.
        """
        if args is None or DATASET not in args.keys():  # noqa: SIM118  a Composite is not a container
            return _ARGS.Composite(state=self._restored(step))
        if self._datasets is None:
            raise ValueError(_no_root_for_dataset())
        for each in self._steps_of_both(self._datasets) if step is None else [step]:
            try:
                state = self._restored(each)
                return _ARGS.Composite(state=state, dataset=self._datasets.restore(each, args=args.dataset))
            except (CorruptCheckpointError, NoRestorableStepError) as error:
                if step is not None:
                    raise
                _log.warning("step %d is not restored: %s", each, error)
        raise StepNotFoundError(
            f"no step of {self.directory} verifies that {self._datasets.directory} holds too: "
            f"{sorted(self.all_steps())} and {sorted(self._datasets.all_steps())}"
        )

    def item_metadata(self, step: int) -> Any:
        """See `ckptkit.CheckpointManager.item_metadata`; Orbax's manager has none."""
        return self._state.item_metadata(step)

    def metadata(self, step: int | None = None) -> Any:
        """See `ckptkit.CheckpointManager.metadata`; Orbax's manager has none."""
        return self._state.metadata(step)

    def metrics(self, step: int) -> Any:
        """See `ckptkit.CheckpointManager.metrics`; Orbax's manager has none."""
        return self._state.metrics(step)

    def wait_until_finished(self) -> None:
        """Waits until every save is in all its tiers; raises `SaveFailedError` if one is not."""
        for manager in self._managers:
            manager.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raises `SaveFailedError` for a background failure, once."""
        for manager in self._managers:
            manager.check_for_errors()

    def close(self) -> None:
        """Finishes the saves that are in flight; raises `SaveFailedError` if one has failed."""
        with ExitStack() as ends:
            for manager in self._managers:
                ends.callback(manager.close)

    @property
    def _managers(self) -> list[TierManager]:
        return [self._state] if self._datasets is None else [self._datasets, self._state]

    def _steps_of_both(self, datasets: TierManager) -> list[int]:
        """The steps that have a state and a dataset, newest first."""
        both = set(datasets.all_steps())
        return [step for step in reversed(self._state.all_steps()) if step in both]

    def _checked(self, args: Any) -> dict[str, Any]:
        """The items of a save by name; raises ValueError as Orbax does for others than it takes."""
        if not isinstance(args, ocp.args.Composite):
            raise ValueError(f"args must be an ocp.args.Composite, found {type(args).__name__}")
        items: dict[str, Any] = dict(args.items())
        if STATE not in items:
            raise ValueError(f"args must have the item {STATE!r}, found {sorted(items)}")
        if _RESERVED in items:
            raise ValueError(f"item {_RESERVED!r}: the name is reserved; rename the item")
        if DATASET in items and self._datasets is None:
            raise ValueError(_no_root_for_dataset())
        if others := sorted(set(items) - {STATE, DATASET}):
            raise ValueError(
                f"items {', '.join(others)}: a root of the emergency manager holds {STATE!r} and {DATASET!r} alone; "
                "put them into the state, or save them with ckptkit.CheckpointManager"
            )
        return items

    def _restored(self, step: int | None) -> Any:
        """The state, from a step of this root's layout or else of the other one, which the root then keeps."""
        try:
            return self._restored_as(self._named, step)
        except TreeMismatchError:
            raise
        except (ValueError, ItemNotFoundError) as error:
            try:
                state = self._restored_as(not self._named, step)
            except (ValueError, ItemNotFoundError) as other:
                raise (other if isinstance(other, TreeMismatchError) else error) from None
        self._named = not self._named
        return state

    def _restored_as(self, named: bool, step: int | None) -> Any:
        wishes = jax.tree.map(_wish, self._abstract_state)
        state = _ARGS.PyTreeRestore(item=self._abstract_state, restore_args=wishes)
        if named:
            return self._state.restore(step, args=_ARGS.Composite(state=state))[STATE]
        return self._state.restore(step, args=state)


def _slices(mesh: jax.sharding.Mesh, axis: int) -> list[np.ndarray]:
    """The devices of each slice; raises ValueError for an axis that the mesh does not have.

    A mesh of one axis is one slice, whatever the index: Orbax counts so too, and its layout of a root depends on it.
    """
    if mesh.devices.ndim == 1:
        return [mesh.devices]
    if not 0 <= axis < mesh.devices.ndim:
        raise ValueError(
            f"CheckpointManagerOptions.replica_axis_index is {axis}, and the mesh has the axes "
            f"{dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))}: give the index of one of them"
        )
    return list(np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1))


def _wish(leaf: Any) -> ocp.RestoreArgs:
    """How to restore a leaf of the abstract state."""
    if not hasattr(leaf, "sharding"):
        return ocp.RestoreArgs(restore_type=type(leaf))
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=None if is_key else leaf.dtype)


def _no_root_for_dataset() -> str:
    return f"item {DATASET!r} has no root: give persistent_non_replicated_directory to the manager"


@dataclass(frozen=True, slots=True)
class _AsDecided:
    """The caller's `should_save_fn`, which gets the latest step too."""

    decide: Callable[[int, int | None], bool]
    latest_step: Callable[[], int | None]

    def due(self, step: int) -> bool:
        """Whether a fast tier takes `step`."""
        return bool(self.decide(step, self.latest_step()))


@dataclass(frozen=True, slots=True)
class _Never:
    """A tier that is read, and takes no step."""

    def due(self, step: int) -> bool:
        """False."""
        del step
        return False


def local_tiers(
    directory: str | os.PathLike[str] | None,
    options: CheckpointManagerOptions,
    latest_step: Callable[[], int | None],
) -> list[Tier]:
    """The ramdisk tier that `options.local` describes; none without a directory.

    Raises ValueError naming each field that a fast tier cannot obey.
    """
    local = options.local
    refused = [f"{name} (give {instead})" for name, instead in _REFUSED.items() if getattr(local, name)]
    if refused:
        raise ValueError(f"emergency.CheckpointManager: a fast tier has no LocalCheckpointOptions.{'; '.join(refused)}")
    if not directory:
        return []
    save: TierSavePolicy = EverySteps(local.save_interval_steps)
    if local.should_save_fn is not None:
        save = _AsDecided(local.should_save_fn, latest_step)
    if local.read_only:
        save = _Never()
    return [Tier.ram(os.fspath(directory), save=save, keep=KeepNewest(max(1, local.max_to_keep or 1)))]


def durable_options(options: CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """The options of the durable tier that `options.persistent` describes."""
    persistent, more = options.persistent, dict[str, Any]()
    if options.async_options is not None:
        more["async_options"] = options.async_options
    return ocp.CheckpointManagerOptions(
        save_interval_steps=persistent.save_interval_steps,
        max_to_keep=persistent.max_to_keep,
        keep_period=persistent.keep_period,
        should_save_fn=persistent.should_save_fn,
        save_decision_policy=persistent.save_decision_policy,
        preservation_policy=persistent.preservation_policy,
        step_name_format=options.step_name_format,
        cleanup_tmp_directories=options.cleanup_tmp_directories,
        enable_async_checkpointing=options.enable_async_checkpointing,
        save_root_metadata=False,
        **more,
    )
