"""Everything the loop knows of checkpoints: make a manager, restore the newest step, save, wait, go back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ckptkit import BroadcastOptions, CheckpointManager, EventLog, EverySteps, LastSave, ProcessOptions, Tier
from ckptkit.guard import Alarm, Guard, GuardPolicy
from trainer.config import CheckpointConfig, GuardConfig, InputError
from trainer.data import Position, resume_position
from trainer.step import State
from trainer.stock import StockOrbax


def make_guard(config: GuardConfig | None, events: EventLog) -> Guard | None:
    """The guard of a run, or None when it has none."""
    if config is None:
        return None
    policy = GuardPolicy(
        margin_steps=config.margin_steps, skip_ahead_steps=config.skip_ahead_steps, retries_max=config.retries_max
    )
    return Guard(policy=policy, events=events)


def make_manager(config: CheckpointConfig, events: EventLog, guard: Guard | None = None) -> Any | None:
    """The checkpoint manager of a run, or None when it keeps no checkpoints. It keeps what `guard` may go back to.

    With one process the tiers `ram` and `ssd` need nothing of the others; with more, all processes call this together.
    """
    if config.directory is None:
        return None
    keep_durable: dict[str, Any] = {"max_to_keep": config.keep}
    if guard:
        policies = ocp.checkpoint_managers.preservation_policy
        either = [guard.preservation_policy(config.save_every), policies.LatestN(config.keep)]
        keep_durable = {"preservation_policy": policies.AnyPreservationPolicy(either)}
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=config.save_every,
        **keep_durable,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=config.manager != "orbax-sync",
    )
    if config.manager != "ckptkit":
        return StockOrbax(config.directory, options, events)

    tiers = []
    if config.ram is not None:
        save = EverySteps(config.ram_every)
        tiers.append(Tier.ram(config.ram, save=save, keep=guard.keep(config.ram_every) if guard else None))
    if config.peer_copies:
        tiers.append(Tier.peer(copies=config.peer_copies, save=EverySteps(config.ram_every)))
    if config.ssd is not None:
        save = EverySteps(config.ssd_every)
        tiers.append(Tier.ssd(config.ssd, save=save, keep=guard.keep(config.ssd_every) if guard else None))
    return CheckpointManager(
        config.directory,
        options=options,
        tiers=tiers,
        host_id=config.host_id,
        events=events,
        processes=ProcessOptions(broadcast=BroadcastOptions(mode=config.broadcast)),
    )


def restore_newest(
    manager: Any | None, abstract_state: State, start: Position
) -> Callable[[], tuple[State, Position] | None]:
    """Begin to restore the newest saved state; the result, to call once, waits for it.

    Returns the state, placed like `abstract_state`, and its position; None if nothing is saved.
    """
    if manager is None or manager.latest_step() is None:
        return lambda: None
    handle = manager.restore_async(None, args=wanted(abstract_state))

    def result() -> tuple[State, Position]:
        restored = handle.result()
        return restored["state"], resume_position(restored["data"], start)

    return result


def go_back(manager: Any, guard: Guard, alarm: Alarm, abstract_state: State, start: Position) -> tuple[State, Position]:
    """State and position of a save from before the alarm's trouble. All processes call this together.

    Raises:
        GuardStopError: the guard went back too often, or no save is old enough.
    """
    restored = guard.roll_back(manager, alarm, args=wanted(abstract_state))
    position = resume_position(restored["data"], start)
    guard.resume(position.guard)
    return restored["state"], replace(position, guard=guard.to_json())


def save(manager: Any | None, state: State, position: Position, *, force: bool = False) -> bool:
    """Saves under the number of finished steps if the manager's policy decides so; returns True if it did.

    Returns once the caller may donate `state`. The save is durable only after the manager reports it.
    """
    if manager is None:
        return False
    return bool(manager.save(position.step, args=_args(state, position), force=force))


def save_end(manager: Any | None, state: State, position: Position) -> None:
    """Make the end of a run durable if a restart found it in fast tiers alone: these are lost with their hosts.

    A step is saved once, so its copies there go first; a loss in between costs the steps since the save before it.
    All processes call this together.
    """
    if not isinstance(manager, CheckpointManager):
        return  # without fast tiers what was restored is durable
    found = [record.tiers for record in manager.steps() if record.step == position.step and record.tiers]
    if found and not any("durable" in tiers for tiers in found):
        manager.delete(position.step)
        save(manager, state, position, force=True)


class Preempted(Exception):
    """The cluster takes the machines back; `last` is what was saved before that, None without checkpoints."""

    def __init__(self, step: int, last: LastSave | None):
        self.last = last
        if last is None or not last.saved:
            super().__init__(f"preempted at step {step}: nothing was saved of it")
            return
        lacking = [f"{tier} left out: {why}" for tier, why in last.left_out.items()]
        lacking += [f"{tier} was not done in time" for tier in last.unfinished]
        super().__init__("; ".join([f"preempted: step {step} is saved in {', '.join(last.tiers)}", *lacking]))


def leave_if_preempted(manager: Any | None, state: State, position: Position, grace_s: float) -> None:
    """Raise `Preempted`, after a last save, at the step at which the processes agreed to; all call this each step."""
    if manager is None:
        if not jax.distributed.is_initialized() or not multihost_utils.reached_preemption_sync_point(position.step):
            return
        raise Preempted(position.step, None)
    if manager.reached_preemption(position.step):
        raise Preempted(position.step, manager.save_last(position.step, _args(state, position), grace_s=grace_s))


def prepare(manager: Any | None, state: State, position: Position) -> None:
    """Begin to make room for saves of this state, or abstract state, while the step compiles.

    Raises StoreFullError if the room is missing, before the run has cost any training time.
    """
    if manager is not None:
        manager.prepare(_args(state, position))


def wanted(abstract_state: State) -> Any:
    """The arguments that restore a state, placed like `abstract_state`, and its position."""
    return ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),  # pyright: ignore[reportCallIssue]
        data=ocp.args.JsonRestore(),
    )


def _args(state: State, position: Position) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
        data=ocp.args.JsonSave(position.to_json()),  # pyright: ignore[reportCallIssue]
    )


def check_writable(directory: str | None, flag: str, *, remote: bool = False) -> None:
    """Refuse a local directory that cannot be made or written, and a URL unless `remote`. The error names the flag.

    `remote`: a URL is accepted here; the code that writes to it checks it.
    """
    if directory is None or (remote and "://" in directory):
        return
    if "://" in directory:  # or it would be made below the working directory
        raise InputError(f"{flag} {directory}: give a directory of this host, no URL")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InputError(f"{flag} {directory}: {error}; give a directory that can be written") from error
