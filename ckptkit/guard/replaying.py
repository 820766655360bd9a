"""`replay`: take the steps between two saves again, and compare. A run that is deterministic comes to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from ckptkit.errors import StepNotFoundError
from ckptkit.job.coordination import Coordinator, gather, make_coordinator
from ckptkit.manager import CheckpointManager
from ckptkit.snapshot.state_digest import BoxDigests, box_digests

StepFn = Callable[[Any, Any], Any]
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
        named = ", ".join(self.leaves[:_NAMED_MAX])
        more = f" and {len(self.leaves) - _NAMED_MAX} more" * (len(self.leaves) > _NAMED_MAX)
        where = ", ".join(map(str, self.processes))
        return (
            f"the replay differs from save {self.step} and agreed with save {self.after_step}: leaves {named}{more}, "
            f"on process {where}"
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


def replay(
    manager: CheckpointManager,
    make_step: Callable[[], StepFn],
    make_batches: Callable[[int, Any], Iterable[Any]],
    *,
    args: Any = None,
    state_of: Callable[[Any], Any] = lambda restored: restored["state"],
    first: int | None = None,
    last: int | None = None,
) -> Certificate:
    """Restores a saved step, takes the steps after it again, and compares the state with every save on the way.

    Where all digests agree, the run is deterministic between `first` and `last`, and no device changed a bit there. A
    difference names the first save that was not come to, and its leaves: a step that is not deterministic, or a device,
    a host or a program that computed something else. A replay on other devices tells these apart: what comes again
    there is the program's.

    `manager` is read only (`CheckpointManagerOptions(read_only=True)`): a replay moves no run. All processes call this
    together. Cost: the steps themselves, one restore for each save, and one more state in memory than a step.
    The mesh has to have the shape of the run's: another shape has other bits.

    Args:
      manager: where the saves are; the number of a save is that of steps done.
      make_step: gives the step, `(state, batch) -> state`; called once, so that it can compile.
      make_batches: gives the batches from a step on, `(step, restored items) -> batches`.
      args: as for `manager.restore`.
      state_of: the state among the restored items.
      first, last: the saves to begin and to end with (default: the last two).

    Raises ValueError for a manager that is not read only, or fewer than two saves; what `restore` raises.
    """
    if not manager.is_read_only:
        raise ValueError("replay: give a manager of its own, with CheckpointManagerOptions(read_only=True)")
    saves = _saves(manager, first, last)
    expected = {step: box_digests(state_of(manager.restore(step, args=args))) for step in saves[1:]}
    restored = manager.restore(saves[0], args=args)
    batches: Iterator[Any] = iter(make_batches(saves[0], restored))
    state, take_step = state_of(restored), make_step()
    del restored
    coordinator = make_coordinator()
    for before, save in pairwise(saves):
        for batch in islice(batches, save - before):
            state = take_step(state, batch)
        difference = _compared(coordinator, box_digests(state), expected[save], before, save)
        if difference is not None:
            return Certificate(steps=saves, steps_replayed=save - saves[0], difference=difference)
    return Certificate(steps=saves, steps_replayed=saves[-1] - saves[0])


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


def _compared(
    coordinator: Coordinator, found: BoxDigests, expected: BoxDigests, before: int, save: int
) -> Difference | None:
    """The same on all processes."""
    differ = [box for box in {**found, **expected} if (found.get(box) or _NONE)[0] != (expected.get(box) or _NONE)[0]]
    mine = [(found.get(box) or expected[box])[1] for box in differ]
    said = gather(coordinator, "replay", mine)
    if not any(said):
        return None
    return Difference(
        step=save,
        after_step=before,
        leaves=tuple(dict.fromkeys(name for names in said for name in names)),
        processes=tuple(process for process, names in enumerate(said) if names),
    )
