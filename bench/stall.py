"""The time that a save takes from the step loop: segments with a save minus segments without, contenders
alternating."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.contenders import Contender
from bench.contenders_ours import CkptKit, StagedBy
from bench.figures import Measured, Recorder
from bench.limits import MemoryLimit
from bench.loops import ComputeLoop, IdleLoop, Loop, Segment
from bench.measure import settle
from bench.runs import Run
from bench.states import assert_same_bits, host_copy

_STALL = {"compute": "stall_ms_per_save", "idle_host": "stall_idle_ms_per_save"}
_BLOCKING = {"compute": "blocking_ms.in_flight", "idle_host": "blocking_ms.ready"}
_FIRST_STEPS = {"compute": 1, "idle_host": 1_000_000}  # the loops share the contenders, and steps only grow
_TINY_SCALE = 0.2  # below it, a run tests the benchmark and not the machine: idle steps are short then


def measure(run: Run) -> Measured:
    """`stall_ms_per_save`, `stall_idle_ms_per_save` and `blocking_ms` of the case.

    ckptkit takes part as it stages by itself (`ckptkit`), and once more with each strategy that accelerators have, as a
    contender with the strategy's name (`ckptkit_device_copy`). Nothing is chosen after it was measured.
    """
    recorder = Recorder()
    compute = ComputeLoop(run.case.step, run.case.make())
    details: dict[str, Any] = {}
    with run.saving() as contenders, run.memory_limit(compute.state) as limit:
        run_loop(run, compute, _with(contenders, "device_copy"), limit, recorder, details)
        idle = IdleLoop(compute.state)
        if run.scale < _TINY_SCALE:
            idle.steps, idle.sleep_s = 3, 0.05
        run_loop(run, idle, _with(contenders, "device_copy"), limit, recorder, details)
    return Measured(samples=recorder.samples, details=details)


def run_loop(
    run: Run,
    loop: Loop,
    contenders: list[Contender],
    limit: MemoryLimit,
    recorder: Recorder,
    details: dict[str, Any],
) -> None:
    """All rounds of one loop: without a save, with a save of each contender, and the floor of one plain copy."""
    base: list[Segment] = []
    saves: dict[str, list[Segment]] = {contender.name: [] for contender in contenders}
    strategies: dict[str, str] = {}
    first = _FIRST_STEPS[loop.name]
    for number in run.rounds(loop.name, warm_up=isinstance(loop, ComputeLoop)):
        settle()
        segment = loop.segment()
        if number:
            base.append(segment)
        for turn, contender in enumerate(contenders):
            step = first + number * len(contenders) + turn
            settle()
            if number:
                saves[contender.name].append(loop.segment(contender, step))
            elif isinstance(loop, ComputeLoop):
                prove(run, loop, contender, step)
            if isinstance(contender, CkptKit | StagedBy):
                strategies[contender.name] = contender.strategy
            contender.forget(step)
        if run.limited and number:
            measure_floor(loop, limit, recorder)
    base.append(loop.segment())
    record(loop, base, saves, recorder)
    details[loop.name] = described(loop, base, saves) | {"strategies": strategies}


def prove(run: Run, loop: ComputeLoop, contender: Contender, step: int) -> None:
    """A save of a state that the next step donates: what is restored must be, bit for bit, what was saved."""
    loop.state, loss = loop.step(loop.state)
    loss.block_until_ready()
    expected = host_copy(loop.state)
    contender.save(step, loop.state)
    loop.state, _ = loop.step(loop.state)
    contender.committed_s()
    contender.settled()
    assert_same_bits(contender.restore(step, run.case.abstract), expected, contender.name)


def measure_floor(loop: Loop, limit: MemoryLimit, recorder: Recorder) -> None:
    """One plain copy of the state into a warm mapping: what a save that copies cannot be below."""
    for name, threads in (("limit", 2), ("limit_1_thread", 1)):
        copied_ms = limit.copy_in(loop.state, threads=threads) * 1e3
        recorder.add(_STALL[loop.name], name, copied_ms)
        if loop.name == "idle_host":
            recorder.add(_BLOCKING[loop.name], name, copied_ms)


def record(loop: Loop, base: list[Segment], saves: Mapping[str, list[Segment]], recorder: Recorder) -> None:
    """A stall is a segment against the mean of the two without a save that bracket its round.

    The machine drifts: against one median for the whole run, whoever met a quiet minute would have a negative stall.
    """
    for name, segments in saves.items():
        for segment, before, after in zip(segments, base, base[1:], strict=False):
            without_s = (before.elapsed_s + after.elapsed_s) / 2
            recorder.add(_STALL[loop.name], name, (segment.elapsed_s - without_s) * 1e3)
            recorder.add(_BLOCKING[loop.name], name, segment.blocked_s * 1e3)
    if loop.name == "compute":
        for taken_s in (taken_s for segment in base for taken_s in segment.step_s):
            recorder.add(_BLOCKING[loop.name], "step", taken_s * 1e3)


def described(loop: Loop, base: list[Segment], saves: Mapping[str, list[Segment]]) -> dict[str, Any]:
    """The loop as it was run, and the parts of every segment."""
    return {
        "steps_per_save": loop.steps,
        "segment_without_s": [segment.elapsed_s for segment in base],
        "step_ms": [_ms(segment.step_s) for segment in base],
        "step_with_save_ms": {name: [_ms(each.step_s) for each in segments] for name, segments in saves.items()},
        "left_over_ms": {name: _ms(each.left_over_s for each in segments) for name, segments in saves.items()},
    }


def _with(contenders: list[Contender], *strategies: str) -> list[Contender]:
    """The contenders, and ckptkit once more with each of the strategies."""
    ours = [each for each in contenders if isinstance(each, CkptKit)]
    return [*contenders, *(StagedBy(each, strategy) for each in ours for strategy in strategies)]


def _ms(seconds: Iterable[float]) -> list[float]:
    return [each * 1e3 for each in seconds]
