"""The cost of an account: it grows with the events, and not with their square, and is the same account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import SupportsIndex, overload

import pytest

from ckptkit.events import Event, Kind
from ckptkit.goodput import Disruption, Part, goodput_report
from ckptkit.goodput.parts import Interval, sum_parts
from ckptkit.goodput.runs import Attempt, attempts_of, lost_attempts
from tests.goodput.test_goodput import at, span


class Counted(int):
    """A number of a step that counts how often it is compared or hashed."""

    uses = 0

    def __lt__(self, other: float) -> bool:
        Counted.uses += 1
        return int(self) < other

    def __gt__(self, other: float) -> bool:
        Counted.uses += 1
        return int(self) > other

    def __ge__(self, other: float) -> bool:
        Counted.uses += 1
        return int(self) >= other

    def __le__(self, other: float) -> bool:
        Counted.uses += 1
        return int(self) <= other

    def __hash__(self) -> int:
        Counted.uses += 1
        return hash(int(self))


def life(number: int, begin_s: float, steps: Sequence[int], length_s: float = 1.0) -> list[Event]:
    spans = [span("step", begin_s + k * length_s, begin_s + (k + 1) * length_s, step=s) for k, s in enumerate(steps)]
    return [at(Kind.STARTED, begin_s, attempt=number), *spans]


def one_loss(size: int) -> list[list[Event]]:
    return [
        life(0, 0.0, [Counted(k) for k in range(size)]),
        life(1, 2.0 * size, [Counted(k) for k in range(size - 2, 2 * size)]),
    ]


def many_losses(size: int) -> list[list[Event]]:
    return [
        life(k, 100.0 * k, [Counted(step) for step in range(18 * k, 18 * k + 20)]) for k in range(max(2, size // 20))
    ]


def many_rollbacks(size: int) -> list[list[Event]]:
    log = [at(Kind.STARTED, 0.0, attempt=0)]
    for k in range(size // 20):
        log += life(0, 100.0 * k, [Counted(step) for step in range(18 * k, 18 * k + 20)])[1:]
        log.append(at(Kind.ROLLED_BACK, 100.0 * k + 90.0, step=18 * k + 18))
    return [log]


def uses_of(logs: list[list[Event]]) -> int:
    Counted.uses = 0
    goodput_report(logs)
    return Counted.uses


@pytest.mark.parametrize(("logs_of", "size"), [(one_loss, 200), (many_losses, 200), (many_rollbacks, 3000)])
def test_work_of_a_report_grows_with_the_events(logs_of: Callable[[int], list[list[Event]]], size: int) -> None:
    """Breaks when a report compares each step with all others: 40,000 steps with one loss took 15 s."""
    small, large = uses_of(logs_of(size)), uses_of(logs_of(2 * size))
    assert 0 < small < large < 3 * small  # twice, and a little more for the logarithm; quadratic is four times


class Read(list[Interval]):
    """Segments that count how many of them are read."""

    reads = 0

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> Interval: ...
    @overload
    def __getitem__(self, place: slice, /) -> list[Interval]: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> Interval | list[Interval]:
        self.reads += 1
        return super().__getitem__(place)

    def __iter__(self):
        self.reads += len(self)
        return super().__iter__()


def test_parts_of_a_short_time_are_summed_from_its_segments() -> None:
    """Breaks when each loss reads all segments of the run: 1,000 losses are 1,000 passes."""
    segments = Read(Interval(k, k + 1.0, Part.PRODUCTIVE if k % 2 else Part.OTHER, 1) for k in range(4096))
    found = sum_parts(segments, 2000.5, 2003.25)
    assert {part: s for part, s in found.items() if s} == {Part.OTHER: 1.5, Part.PRODUCTIVE: 1.25}
    assert segments.reads < 50
    assert not any(sum_parts(segments, 7.0, 3.0).values())


def drawn(random: Random) -> list[list[Event]]:
    """Up to 6 attempts, some without steps or logs; steps may repeat, jump and go back; some losses are told."""
    logs, now_s, numbers = [], 0.0, range(random.randint(1, 6))
    for number in numbers:
        now_s += random.randint(1, 20)
        if random.random() < 0.15:
            continue
        first, size = random.randint(0, 12), random.choice([0, 1, 4, 8])
        steps = [first + random.choice([k, k, k, k // 2, 2 * k, 0]) for k in range(size)]
        logs.append(life(number, now_s, steps, random.choice([1.0, 2.0])))
        now_s += random.randint(0, 10)
    logs = logs or [life(0, now_s, [0])]
    told = [number for number in numbers if random.random() < 0.4]
    losses = [
        at(Kind.DISRUPTED, random.uniform(0, now_s), process=-1, attempt=n, lost=0, cause="SIGKILL", detect_s=0.5)
        for n in told
    ]
    return [*logs, losses]


def reference(number: int, attempts: Sequence[Attempt], launcher: Sequence[Event]) -> tuple[object, ...]:
    """Lost steps, seconds to the first step and to the first new one: each from all steps, as simply as possible."""
    told = {event.fields["attempt"]: event for event in launcher}
    done = {step for a in attempts if a.number <= number for step, _ in a.steps}
    later = [pair for a in attempts if a.number > number for pair in a.steps]
    at_s = told[number].at_s - 0.5 if number in told else next(a.last_s for a in attempts if a.number == number)
    resumed_s = min((span.at_s for _, span in later), default=None)
    caught_up_s = min((span.at_s for step, span in later if step > max(done, default=-1)), default=None)
    since = [None if then_s is None else max(0.0, then_s - at_s) for then_s in (resumed_s, caught_up_s)]
    return number, reference_lost(number, attempts), *since


def reference_lost(number: int, attempts: Sequence[Attempt]) -> int:
    done: set[int] = set()
    for this, after in pairwise([a for a in attempts if a.steps]):
        done |= {step for step, _ in this.steps}
        again = {step for step in done if step >= min(other for other, _ in after.steps)}
        if this.number == number:
            return len(again)
        done -= again
    return 0


def shown(loss: Disruption) -> tuple[object, ...]:
    return loss.attempt, loss.lost_steps, loss.resume_s, loss.caught_up_s


@pytest.mark.parametrize("seed", range(300))
def test_losses_of_drawn_logs_match_the_simple_account(seed: int) -> None:
    """Breaks when the single pass over the steps counts other losses than a look at all steps for each loss."""
    logs = drawn(Random(seed))
    attempts, launcher = attempts_of(logs)
    expected = [reference(number, attempts, launcher) for number in lost_attempts(attempts, launcher)]
    assert [shown(loss) for loss in goodput_report(logs).disruptions] == expected, f"seed {seed}"
