"""A hand-made account of a run, which our events have no part in.

The device is slow on purpose, and writes down when it computes; a wrapper writes down how long the calls of the manager
take. Each start of the run appends its lines `NAME BEGIN_S END_S`, in wall-clock seconds.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np

CALLS = ("save", "restore", "wait_until_finished", "close")
_START, _COMPUTE, _CALL = "start", "compute", "call"


class Notebook:
    """Takes down what one start of the run does, at the end of `path`."""

    def __init__(self, path: Path, step_s: float):
        self._path, self._step_s = path, step_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self.note(_START, time.time())

    def note(self, name: str, begin_s: float) -> None:
        """Something that ends now."""
        with self._path.open("a") as file:
            file.write(f"{name} {begin_s:.6f} {time.time():.6f}\n")

    def watch(self, manager: type) -> None:
        """Takes down the calls of all managers of the class."""
        for call in CALLS:
            setattr(manager, call, self._noted(getattr(manager, call)))

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.time()
            try:
                return call(*args, **kwargs)
            finally:
                self.note(_CALL, begin_s)

        return noted

    def computed(self, value: jax.Array) -> jax.Array:
        """The same value, once the device has computed for the time of a step."""

        def compute(_: Any) -> np.ndarray:
            begin_s = time.time()
            time.sleep(self._step_s)
            self.note(_COMPUTE, begin_s)
            return np.zeros((), np.float32)

        some = jax.lax.stop_gradient(value.ravel()[0])
        return value + jax.pure_callback(compute, jax.ShapeDtypeStruct((), np.float32), some).astype(value.dtype)

    def slow(self, optimizer: Any) -> Any:
        """The optax optimizer, whose updates take the device the time of a step."""
        import optax  # a trainer without it has another way to be slow

        inner = optax.with_extra_args_support(optimizer)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            first, *others = jax.tree.leaves(updates)
            updates = jax.tree.unflatten(jax.tree.structure(updates), [self.computed(first), *others])
            return inner.update(updates, state, params, **more)

        return optax.GradientTransformationExtraArgs(inner.init, update)


def goodput_by_hand(path: Path, kept: Sequence[int], *, computations: int = 1) -> float:
    """The share of the run in which steps ran that were kept: `kept` of each start, the first ones.

    A step of so many computations lasts until the calls of the manager behind it are over, and begins where the one
    before it ends; calls are left out. Trainers compile in the first one of a start and behind it: it counts as the
    mean of the others.
    """
    starts: list[list[tuple[str, float, float]]] = []
    for line in path.read_text().splitlines():
        name, begin, end = line.split()
        if name == _START:
            starts.append([])
        starts[-1].append((name, float(begin), float(end)))
    assert len(starts) == len(kept)
    wall_s = max(end_s for *_, end_s in starts[-1]) - starts[0][0][1]
    return sum(_kept_s(start, steps, computations) for start, steps in zip(starts, kept, strict=True)) / wall_s


def _kept_s(start: Sequence[tuple[str, float, float]], kept: int, computations: int) -> float:
    computed_s = [end_s for name, _, end_s in start if name == _COMPUTE][computations - 1 :: computations]
    calls = sorted((begin_s, end_s) for name, begin_s, end_s in start if name == _CALL)
    between = pairwise([*computed_s, math.inf])
    ends_s = [max([from_s, *(e for b, e in calls if from_s < e and b < to_s)]) for from_s, to_s in between]
    ends_s[-1] = min([b for b, _ in calls if b > computed_s[-1]], default=computed_s[-1])  # behind it is the run's end
    lasted_s = [end_s - begin_s - _held_s(calls, begin_s, end_s) for begin_s, end_s in pairwise(ends_s)]
    assert len(ends_s) >= kept > 1
    return fmean(lasted_s) + sum(lasted_s[: kept - 1])


def _held_s(calls: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    """The time between two moments that is in calls, some of which are made in others."""
    held_s = 0.0
    for begin_s, end_s in calls:
        begin_s, end_s = max(begin_s, from_s), min(end_s, to_s)
        held_s += max(0.0, end_s - begin_s)
        from_s = max(from_s, end_s)
    return held_s
