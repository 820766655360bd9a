"""`Checkpointer`: the words of `orbax.checkpoint.v1.training.Checkpointer` over `CheckpointManager`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, Generic, TypeVar, final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.experimental import v1 as orbax_v1
from orbax.checkpoint.experimental.v1.training import CheckpointMetadata, RootMetadata, errors
from orbax.checkpoint.experimental.v1.training import preservation_policies as preserving
from orbax.checkpoint.experimental.v1.training import save_decision_policies as deciding
from typing_extensions import deprecated

from ckptkit.durable.read_step import DurableReader, without_identity
from ckptkit.errors import ClosedAtEnd, ItemNotFoundError, StepNotFoundError
from ckptkit.manager import CheckpointManager
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.v1 import orbax_private
from ckptkit.v1.arguments import METRICS, restore_args, save_args
from ckptkit.v1.context import checked_context, in_job, manager_options, profile_of, refuse_unlike

STATE = "state"

Step = int | CheckpointMetadata | None
T = TypeVar("T")


@final
class Checkpointer(ClosedAtEnd):
    """A sequence of checkpoints in a training loop, as `orbax.checkpoint.v1.training.Checkpointer`, with fast tiers.

    Takes what Orbax's takes, and by keyword what `CheckpointManager` adds (`tiers`, `host_id`, `events`, `durable`,
    `saving`, `processes`). A thin facade: its saves and restores have that manager's guarantees and costs.
    `context` is obeyed, or raises ValueError that names the field (`ckptkit.v1.context`); a context that is active in a
    call is used instead, as in Orbax. Steps have Orbax's v1 layout, and either reads what the other wrote. Not safe
    for several threads; all processes call it together.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        **ours: Any,
    ):
        plain = orbax_v1.Context()
        context = orbax_v1.Context(context or orbax_private.active_context(plain))
        context = in_job(checked_context(context), jax.process_count())
        default_policy = deciding.AnySavePolicy(
            [
                deciding.InitialSavePolicy(),
                deciding.ContinuousCheckpointingPolicy(),
                deciding.PreemptionCheckpointingPolicy(),
            ]
        )
        self._names = step_name_format or ocp.path.step.standard_name_format()
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=save_decision_policy or default_policy,
            preservation_policy=preservation_policy or preserving.PreserveAll(),
            step_name_format=step_name_format,
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            max_to_keep=None,
            best_fn=_unranked,  # Orbax keeps the metrics of a step only where it could rank it
            todelete_full_path=context.deletion_options.gcs_deletion_options.todelete_full_path,
            async_options=context.async_options.v0(),
            file_options=context.file_options.v0(),
            multiprocessing_options=context.multiprocessing_options.v0(),
            # Any options have Orbax write the step: by default our own writer does.
            atomicity_options=None if context.atomicity == plain.atomicity else context.atomicity.v0(),
        )
        self._context = context
        self._profile = profile_of(context, ours.pop("durable", DurableProfile()))
        ours = {**manager_options(context, ours), "durable": self._profile}
        self._manager = CheckpointManager(directory, options=options, metadata=custom_metadata, logger=logger, **ours)
        self._manager.inner.name_items()

    @property
    def manager(self) -> CheckpointManager:
        """The manager behind it: events, tiers, `steps()`."""
        return self._manager

    @property
    def directory(self) -> Any:
        """The durable root."""
        return self._manager.directory

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The checkpoint of the highest step, None where there is none."""
        checkpoints = self.checkpoints
        return checkpoints[-1] if checkpoints else None

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata[None]]:
        """Every step that a tier holds or that is in flight, ascending; reads nothing of them."""
        times = self._manager.inner.step_times()
        return [
            CheckpointMetadata[None](
                step,
                path=self._path(step),
                metadata=None,
                metrics=self._manager.inner.known_metrics(step),
                commit_timestamp_nsecs=times.get(step),
            )
            for step in sorted(self._manager.all_steps())
        ]

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would take the step for any tier."""
        return self._manager.should_save(_number(step))

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves `state` if it is due, and waits until every tier has it; returns whether it was taken.

        `options` are those of `save_async`. Raises what that raises, and `SaveFailedError`.
        """
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> Response[bool] | None:
        """Begins to save `state` if it is due; None where it is not. Returns once the caller may donate the state.

        With `overwrite`, an existing step is deleted first. Raises `StepAlreadyExistsError` (Orbax's, a
        `FileExistsError`) for a step that exists, ValueError for what cannot be saved. A failure in the background
        is raised by the response, or by `wait` and `close`.
        """
        orbax_private.check_state(state)
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_checkpointables(self, step: int, checkpointables: dict[str, Any], **options: Any) -> bool:
        """Saves several checkpointables as one step, and waits; see `save_checkpointables_async`."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> Response[bool] | None:
        """Begins to save several checkpointables, by name, as one step; see `save_async`.

        A checkpointable is a tree of arrays, numbers and text, a Grain iterator, a `StatefulCheckpointable`, or what a
        handler in `context.checkpointables.registry` takes. Raises ValueError for a field of the active context that
        is an option of the manager and differs from the constructor's.
        """
        orbax_private.check_checkpointables(checkpointables)
        if overwrite:
            with suppress(StepNotFoundError):
                self._manager.delete(step)
        elif not force and step in self._manager.all_steps():
            raise errors.StepAlreadyExistsError(f"Step {step} already exists.")
        context = self._active_context()
        refuse_unlike(context, self._context)
        args = save_args(context, checkpointables, self._profile)
        with context:
            try:
                taken = self._manager.save(
                    step, args=args, metrics=metrics, force=force, custom_metadata=custom_metadata
                )
            except StepAlreadyExistsError as error:  # also with `force`, where the durable tier has the step
                raise errors.StepAlreadyExistsError(f"Step {step} already exists.") from error
        return Response(self._finished) if taken else None

    def load(self, step: Step = None, abstract_state: Any = None, *, checkpointable_name: str = STATE) -> Any:
        """The state of `step`, or (None) of the newest step that verifies.

        Raises `StepNotFoundError` (Orbax's), KeyError for a name that the step has not, and what
        `CheckpointManager.restore` raises.
        """
        orbax_private.check_abstract_state(abstract_state)
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[checkpointable_name]

    def load_checkpointables(
        self, step: Step = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The checkpointables of `step` by name: those that are asked for, or (None) all; see `load`."""
        orbax_private.check_abstract_checkpointables(abstract_checkpointables)
        return self._load(step, abstract_checkpointables, self._active_context())

    def load_async(self, step: Step = None, abstract_state: Any = None) -> Response[Any]:
        """`load` in the background. Make no other call until the response is done."""
        orbax_private.check_abstract_state(abstract_state)
        context = self._active_context()  # the thread is in no `with` block
        return Response(lambda: self._load(step, {STATE: abstract_state}, context)[STATE])

    def load_checkpointables_async(
        self, step: Step = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> Response[dict[str, Any]]:
        """`load_checkpointables` in the background. Make no other call until the response is done."""
        orbax_private.check_abstract_checkpointables(abstract_checkpointables)
        context = self._active_context()
        return Response(lambda: self._load(step, abstract_checkpointables, context))

    def metadata(self, step: Step = None) -> CheckpointMetadata[Any]:
        """Orbax's metadata of the state of a durable step (None: the latest): shapes, dtypes, shardings, times."""
        number = self._existing(step)
        return self._described(number, orbax_v1.metadata(self._path(number)))

    def checkpointables_metadata(self, step: Step = None) -> CheckpointMetadata[dict[str, Any]]:
        """Orbax's metadata of every checkpointable of a durable step (None: the latest)."""
        number = self._existing(step)
        return self._described(number, orbax_v1.checkpointables_metadata(self._path(number)))

    def root_metadata(self) -> RootMetadata:
        """The custom metadata that the constructor of the sequence was given."""
        found = self._manager.metadata(None)
        return RootMetadata(directory=self.directory, custom_metadata=found.custom_metadata)

    def delete(
        self, step: int | CheckpointMetadata, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Deletes a step from every tier, or one checkpointable of it; returns whether there was something.

        Waits for saves that are in flight. A step that loses a checkpointable is held by the durable tier alone.
        Raises `StepNotFoundError` (Orbax's), FileNotFoundError for the checkpointable, ValueError for the last one.
        """
        number = _number(step)
        refuse_unlike(self._active_context(), self._context)
        orbax_private.check_deletion(number, checkpointable_name, missing_ok)
        self._manager.wait_until_finished()
        if number not in self._manager.all_steps():
            if missing_ok:
                return False
            raise errors.StepNotFoundError(f"No checkpoint found at step {number}.")
        if checkpointable_name is None:
            self._manager.delete(number)
            return True
        with self._context:
            path = self._path(number)
            deleted = orbax_v1.delete(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        self._manager.inner.forget_in_fast_tiers(number)
        return deleted

    def delete_async(
        self, step: int | CheckpointMetadata, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> Response[bool]:
        """`delete`; it is done when this returns, so that no later call has to wait for it."""
        deleted = self.delete(step, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
        return Response(lambda: deleted)

    def cancel(self, step: Step = None) -> None:
        """Waits for the saves in flight, then deletes `step` if it exists."""
        self._manager.wait_until_finished()
        if step is not None:
            with suppress(StepNotFoundError):
                self._manager.delete(_number(step))

    def reload(self) -> None:
        """Reads every tier again."""
        self._manager.reload()

    def is_saving_in_progress(self) -> bool:
        """Whether any tier is still being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until every save is in all its tiers; raises `SaveFailedError` if one is not."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes what is in flight; raises `SaveFailedError` if a save has failed."""
        self._manager.close()

    @deprecated("Use `save` instead.")
    def save_pytree(self, *args: Any, **kwargs: Any) -> bool:
        """Orbax's older name of `save`."""
        return self.save(*args, **kwargs)

    @deprecated("Use `save_async` instead.")
    def save_pytree_async(self, *args: Any, **kwargs: Any) -> Response[bool] | None:
        """Orbax's older name of `save_async`."""
        return self.save_async(*args, **kwargs)

    @deprecated("Use `load` instead.")
    def load_pytree(self, *args: Any, **kwargs: Any) -> Any:
        """Orbax's older name of `load`."""
        return self.load(*args, **kwargs)

    @deprecated("Use `load_async` instead.")
    def load_pytree_async(self, *args: Any, **kwargs: Any) -> Response[Any]:
        """Orbax's older name of `load_async`."""
        return self.load_async(*args, **kwargs)

    @deprecated("Use `metadata` instead.")
    def pytree_metadata(self, *args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
        """Orbax's older name of `metadata`."""
        return self.metadata(*args, **kwargs)

    def _active_context(self) -> orbax_v1.Context:
        """As in Orbax: the context of the `with` block that the caller is in, else the constructor's."""
        # A copy: a context that is entered twice at once is left for good by the first exit.
        context = orbax_v1.Context(orbax_private.active_context(self._context))
        return in_job(checked_context(context), jax.process_count())

    def _load(self, step: Step, abstract: dict[str, Any] | None, context: orbax_v1.Context) -> dict[str, Any]:
        number = None if step is None else _number(step)
        recorded = self._manager.inner.recorded_items(number)
        if recorded is None:
            raise _not_found(number)
        args = restore_args(context, abstract, recorded, self._profile)
        try:
            with context:
                found = self._manager.restore(number, args=args)
        except ItemNotFoundError as error:
            raise KeyError(f"{error}; load a name that the step has") from error
        return {name: value for name, value in dict(found.items()).items() if name != METRICS}

    def _finished(self) -> bool:
        self._manager.wait_until_finished()
        return True

    def _path(self, step: int) -> Any:
        return self.directory / self._names.build_name(step)

    def _existing(self, step: Step) -> int:
        steps = self._manager.all_steps()
        number = self._manager.latest_step() if step is None else _number(step)
        if number is None or number not in steps:
            raise _not_found(number)
        return number

    def _described(self, step: int, found: Any) -> CheckpointMetadata[Any]:
        DurableReader(str(self._path(step)), step=step).check_custom(found.custom_metadata)
        return CheckpointMetadata[Any](
            step=step,
            path=found.path,
            metadata=found.metadata,
            init_timestamp_nsecs=found.init_timestamp_nsecs,
            commit_timestamp_nsecs=found.commit_timestamp_nsecs,
            custom_metadata=without_identity(found.custom_metadata) or None,
            metrics=self._manager.inner.known_metrics(step),
        )


def _not_found(step: int | None) -> errors.StepNotFoundError:
    if step is None:
        return errors.StepNotFoundError("Specified `step=None`, but no checkpoints were found.")
    return errors.StepNotFoundError(f"No checkpoint found at step {step}.")


def _number(step: int | CheckpointMetadata) -> int:
    return step.step if isinstance(step, CheckpointMetadata) else step


def _unranked(metrics: Any) -> float:
    """The rank of steps that are not ranked."""
    del metrics
    return 0.0


orbax_v1.training.Checkpointer.register(Checkpointer)  # trainers ask `isinstance(m, ocp.training.Checkpointer)`


class Response(Generic[T]):
    """The result of `work`, which runs in a thread of its own (`ckptkit-response`) from now on."""

    def __init__(self, work: Callable[[], T]):
        self._future: Future[T] = Future()
        self._thread = Thread(target=self._run, args=(work,), name="ckptkit-response", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the work raised, TimeoutError after `timeout` seconds."""
        return self._future.result(timeout=timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback` with the result once it is there; not where the work has failed."""

        def call(future: Future[T]) -> None:
            if future.exception() is None:
                callback(future.result())

        self._future.add_done_callback(call)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001  the top of a thread: raised by `result`
            self._future.set_exception(error)
        else:
            self._future.set_result(found)
