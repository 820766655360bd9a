"""Two loops that a save disturbs, both fixed and printed, with a save after the first step of every `steps`.

`compute`: a donating step that keeps every core busy. The save is issued while the step that makes the state still
runs, as in a loop that does not read its loss at once. The next step donates the very arrays that are being saved.
`idle_host`: the step sleeps. It represents an accelerator that computes on its own: the rest is the host's cost.

A save that is not committed when the segment ends is waited for, and the wait counts: in a loop that goes on, the
next save would wait for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from bench.contenders import Contender
from bench.measure import now_s
from bench.states import Step, Tree

LoopName = Literal["compute", "idle_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The times of one segment of a loop. `left_over_s`: the wait for the commit after the last step."""

    elapsed_s: float
    step_s: tuple[float, ...]
    blocked_s: float = 0.0
    left_over_s: float = 0.0


@dataclass(slots=True)
class ComputeLoop:
    """Real steps. `state` is always the newest; whoever else holds it loses it to the next step."""

    step: Step
    state: Tree
    steps: int = 4
    name: LoopName = "compute"

    def segment(self, saver: Contender | None = None, number: int = 0) -> Segment:
        """`steps` steps, with one save of the state under step `number` where there is a saver."""
        blocked_s, taken_s = 0.0, []
        start_s = last_s = now_s()
        for i in range(self.steps):
            self.state, loss = self.step(self.state)
            if i == 0 and saver is not None:
                blocked_s = _blocked_s(saver, number, self.state)
            loss.block_until_ready()
            taken_s.append(now_s() - last_s)
            last_s = now_s()
        return _segment(start_s, taken_s, blocked_s, saver)


@dataclass(slots=True)
class IdleLoop:
    """Steps that sleep; the state is at rest and is not donated."""

    state: Tree
    steps: int = 8
    sleep_s: float = 0.5
    name: LoopName = "idle_host"

    def segment(self, saver: Contender | None = None, number: int = 0) -> Segment:
        """See `ComputeLoop.segment`."""
        blocked_s, taken_s = 0.0, []
        start_s = last_s = now_s()
        for i in range(self.steps):
            if i == 0 and saver is not None:
                blocked_s = _blocked_s(saver, number, self.state)
            time.sleep(self.sleep_s)
            taken_s.append(now_s() - last_s)
            last_s = now_s()
        return _segment(start_s, taken_s, blocked_s, saver)


Loop = ComputeLoop | IdleLoop


def _blocked_s(saver: Contender, number: int, state: Any) -> float:
    start_s = now_s()
    saver.save(number, state)
    return now_s() - start_s


def _segment(start_s: float, taken_s: list[float], blocked_s: float, saver: Contender | None) -> Segment:
    end_s = now_s()
    left_over_s = max(0.0, saver.committed_s() - end_s) if saver is not None else 0.0
    if saver is not None:
        saver.settled()
    return Segment(
        elapsed_s=end_s - start_s + left_over_s, step_s=tuple(taken_s), blocked_s=blocked_s, left_over_s=left_over_s
    )
