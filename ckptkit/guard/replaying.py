"""`replay`: take the steps between two saves again, and compare. A run that is deterministic comes to the same bits.

`replay_new` does so for the saves of a running job, on spare devices, as they land.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import jax

from ckptkit.durable.lifecycle.root_record import certificate_key, certified_saves, shield_records
from ckptkit.errors import CorruptCheckpointError, StepNotFoundError
from ckptkit.job.coordination import Coordinator, gather, make_coordinator
from ckptkit.manager import CheckpointManager
from ckptkit.model.manifest import SaveId
from ckptkit.snapshot.state_digest import BoxDigests, box_digests
from ckptkit.store import Store, open_store
from ckptkit.store.roots import root_url
from ckptkit.util.words import count_text, first_of
from ckptkit.verification.follow import follow

StepFn = Callable[[Any, Any], Any]
MakeStep = Callable[[], StepFn]
MakeBatches = Callable[[int, Any], Iterable[Any]]
_NONE = ("", "")
_NAMED_MAX = 8  # leaves in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first save that a replay did not come to. The cause is in one of the steps from `after_step` to `step`."""

    step: int
    after_step: int
    leaves: tuple[str, ...]
    processes: tuple[int, ...]

    def __str__(self) -> str:
        where = ", ".join(map(str, self.processes))
        return (
            f"the steps from save {self.after_step} to save {self.step} differ from their replay: leaves "
            f"{first_of(self.leaves, _NAMED_MAX)}, on process {where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of a replay: every save in `steps` follows from the one before it, up to `difference`, if it is set.

    `steps_replayed` is how many steps were taken again.
    """

    steps: tuple[int, ...]
    steps_replayed: int
    difference: Difference | None = None

    @property
    def is_certified(self) -> bool:
        """Whether every save was come to, bit for bit."""
        return self.difference is None


def state_item(restored: Any) -> Any:
    """The state of a step that was saved with an item `state`."""
    return restored["state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The parts of a training program that a replay needs: arguments of `replay`, as the function returns them that
    `ckptkit certify --replay MODULE:FUNCTION` names."""

    make_step: MakeStep
    make_batches: MakeBatches
    args: Any = None
    state_of: Callable[[Any], Any] = state_item


def replay(
    manager: CheckpointManager,
    make_step: MakeStep,
    make_batches: MakeBatches,
    *,
    args: Any = None,
    state_of: Callable[[Any], Any] = state_item,
    first: int | None = None,
    last: int | None = None,
    record: bool = False,
) -> Certificate:
    """Restores a saved step, takes the steps after it again, and compares the state with every save on the way.

    Where all digests agree, the run is deterministic between `first` and `last`, and no device changed a bit there. A
    difference names the first save that was not come to, and its leaves: a step that is not deterministic, or a device,
    a host or a program that computed something else. A replay on other devices distinguishes these: what comes again
    there is the program's.

    `manager` is read only (`CheckpointManagerOptions(read_only=True)`): a replay moves no run. All processes call this
    together. Cost: the steps themselves, one restore for each save, and one more state in memory than a step.
    The mesh has to have the shape of the run's: another shape has other bits.

    Args:
      manager: where the saves are; the number of a save is that of steps done.
      make_step: gives the step, `(state, batch) -> state`; called once, so that it can compile.
      make_batches: gives the batches from a step on, `(step, restored items) -> batches`.
      args: as for `manager.restore`.
      state_of: the state among the restored items. Only its leaves are compared: what it leaves out is not certified.
      first, last: the saves to begin and to end with (default: the last two).
      record: certifies the saves that were come to, in the durable root: `restore(None, certified=True)` takes the
        newest of them, and `ckptkit steps` lists them so. Cost: a small write for each.

    Raises ValueError for a manager that is not read only, fewer than two saves, a state without leaves, batches that
    end before the last save, or steps of stock Orbax to record: they have no identity. Raises what `restore` raises.
    """
    if not manager.is_read_only:
        raise ValueError("replay: give a manager of its own, with CheckpointManagerOptions(read_only=True)")
    saves = _saves(manager, first, last)
    plan = ReplayPlan(make_step=make_step, make_batches=make_batches, args=args, state_of=state_of)
    expected: dict[int, BoxDigests] = {}
    save_ids: list[SaveId] = []
    for step in saves[1:]:  # before any step is taken: a job that runs may delete them meanwhile
        expected[step] = box_digests(_state(plan, manager.restore(step, args=args), step))
        save_ids.append(_identity(manager.restored_save_id, step, record))
    run = _Run(plan, make_coordinator())
    run.begin(saves[0], manager.restore(saves[0], args=args))
    difference, certified = None, 0
    for step in saves[1:]:
        difference = run.reach(step, expected[step])
        if difference is not None:
            break
        certified += 1
    if record:
        run.record(manager, save_ids[:certified])
    return Certificate(steps=saves, steps_replayed=run.step - saves[0], difference=difference)


def _state(plan: ReplayPlan, restored: Any, step: int) -> Any:
    """The state of a restored save. Raises ValueError if it has no leaf to compare: every save would be certified."""
    state = plan.state_of(restored)
    if not jax.tree.leaves(state):
        raise ValueError(
            f"replay: state_of returned {type(state).__name__} without leaves for step {step}, so there is nothing to "
            "compare; return the state that the step function updates"
        )
    return state


def _identity(found: SaveId | None, step: int, record: bool) -> SaveId:
    """Which save was restored as `step`. Raises ValueError where it is to be recorded and has no identity."""
    assert found is not None, "a restore sets it"
    if record and not found.ours:
        raise ValueError(
            f"replay: step {step} was written by stock Orbax, and has no identity to certify: record=False"
        )
    return found


def _saves(manager: CheckpointManager, first: int | None, last: int | None) -> tuple[int, ...]:
    """The saves from `first` to `last`, where these are None the last two."""
    known = sorted(manager.all_steps())
    for step in (first, last):
        if step is not None and step not in known:
            raise StepNotFoundError(f"replay: step {step} was not found; saved are {known}", step=step)
    until = [each for each in known if last is None or each <= last]
    saves = tuple(until[-2:] if first is None else [each for each in until if each >= first])
    if len(saves) < 2:
        raise ValueError(f"replay: give two saves, the first before the last; saved are {known}")
    return saves


@final
class _Run:
    """The replay of a run, which has come to the save `step`. It continues from its own state."""

    def __init__(self, plan: ReplayPlan, coordinator: Coordinator):
        self._plan, self._coordinator, self._take_step = plan, coordinator, plan.make_step()
        self.step = 0
        self._state: Any = None
        self._batches: Iterator[Any] = iter(())

    def begin(self, step: int, restored: Any) -> None:
        """Takes the state of a save, and the batches that follow."""
        self.step, self._batches = step, iter(self._plan.make_batches(step, restored))
        self._state = _state(self._plan, restored, step)

    def reach(self, save: int, expected: BoxDigests) -> Difference | None:
        """Takes the steps to a save; how the state differs from it, None where it does not. The same on all processes.

        Raises ValueError if the batches end before.
        """
        before = self.step
        for batch in islice(self._batches, save - before):
            self._state, self.step = self._take_step(self._state, batch), self.step + 1
        if self.step < save:
            raise ValueError(f"replay: make_batches gives no batch for step {self.step}, and save {save} needs it")
        found = box_digests(self._state)
        differ = [
            box for box in {**found, **expected} if (found.get(box) or _NONE)[0] != (expected.get(box) or _NONE)[0]
        ]
        said = gather(self._coordinator, "replay", [(found.get(box) or expected[box])[1] for box in differ])
        if not any(said):
            return None
        return Difference(
            step=save,
            after_step=before,
            leaves=tuple(dict.fromkeys(name for names in said for name in names)),
            processes=tuple(process for process, names in enumerate(said) if names),
        )

    def record(self, manager: CheckpointManager, saves: Sequence[SaveId]) -> None:
        """Certifies saves in the durable root; process 0 writes, and its error is raised on all."""
        held = [each.save_id for each in manager.steps()]

        def write() -> None:
            certify_saves(open_store(root_url(manager.directory)), saves, held=held)

        if saves:
            self._coordinator.ask_process_0("certified", write)


def certify_saves(store: Store, saves: Collection[SaveId], *, held: Collection[SaveId]) -> None:
    """Records that a replay came to `saves`; removes certificates of saves that are older than every save in `held`.

    Cost: a put for each, a listing. Raises `StoreError`.
    """
    shield_records(store)
    for save in saves:
        store.put(certificate_key(save), b"")
    known = (*held, *saves)
    for save in certified_saves(store) if known else ():
        if save < min(known):
            store.delete(certificate_key(save))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSave:
    """A save that has landed. `certificate` is the result of the replay to it; where it is None, `reason` is why the
    save was not replayed, and the next replay begins at it. Not at one that is `damaged` or was `deleted`: it is left
    out."""

    step: int
    certificate: Certificate | None = None
    reason: str = ""
    damaged: bool = False
    deleted: bool = False


def replay_new(
    root: str | os.PathLike[str],
    plan: ReplayPlan,
    *,
    steps_max: int,
    record: bool = True,
    poll_s: float = 5.0,
    idle_timeout_s: float | None = None,
) -> Iterator[NewSave]:
    """Follows the durable root of a running job, and replays the steps to each new save. Certifies those it comes to.

    It begins at the first save. It then continues from its own state, which has the bits of the last save. So a job may
    delete a save as soon as a newer one has landed. If several landed meanwhile, it takes the newest. A save that is
    more than `steps_max` steps after the last one is not replayed: it begins again there. So devices that are slower
    than the job cover a part of the steps. It also begins again at a save of another epoch: the job was restarted or
    went back, and may have left batches out. Ends after the first difference.

    Cost: `steps_max` steps at most and one restore for each save; one more state in memory than a step. All processes
    call it together.

    Args:
      root: the durable root; it need not exist yet.
      plan: of the training program.
      steps_max: the most steps that are replayed for one save.
      record: certify the saves in the root.
      poll_s, idle_timeout_s: as of `ckptkit.follow`.

    Raises ValueError for steps of stock Orbax to record, a state without leaves, and batches that end. Raises what
    `follow` and `restore` raise, except for a save that is damaged or deleted: it is left out.
    """
    run, last = _Run(plan, make_coordinator()), None
    for found in follow(root, newest_only=True, prove=False, poll_s=poll_s, idle_timeout_s=idle_timeout_s):
        save_id = _identity(found.save_id, found.step, record)
        try:
            restored = found.restore(plan.args)
        except (CorruptCheckpointError, StepNotFoundError) as error:
            is_deleted = isinstance(error, StepNotFoundError)
            yield NewSave(step=found.step, reason=str(error), damaged=not is_deleted, deleted=is_deleted)
            continue
        reason = _why_not(last, save_id, steps_max)
        last = save_id
        if reason:
            run.begin(found.step, restored)
            del restored
            yield NewSave(step=found.step, reason=reason)
            continue
        expected, before = box_digests(_state(plan, restored, found.step)), run.step
        del restored
        difference = run.reach(found.step, expected)
        if record and difference is None:
            run.record(found.manager, [save_id])
        certificate = Certificate(steps=(before, found.step), steps_replayed=found.step - before, difference=difference)
        yield NewSave(step=found.step, certificate=certificate)
        if difference is not None:
            return


def _why_not(last: SaveId | None, save: SaveId, steps_max: int) -> str:
    """Why a save is where the replay begins anew, after the save `last`; empty if it is replayed."""
    if last is None:
        return "the first save"
    if save.epoch != last.epoch or save.step <= last.step:
        return "the job was restarted or went back"
    if save.step - last.step > steps_max:
        return f"{count_text(save.step - last.step, 'step')} after save {last.step}, and {steps_max} are the most"
    return ""
