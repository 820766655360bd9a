"""Which tiers a last save is for, when a preemption leaves so much time: pure values and decisions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckptkit.events import Event, Kind

POLL_S = 1.0  # JAX's notifier looks for SIGTERM once a second
MARGIN = 1.5  # how much longer than the slowest of the last saves one may take: the machine is being emptied
_REMEMBERED = 5  # saves of a tier


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """The outcome of the last save before a preemption. Equal on all processes, except `tiers`: those known to this
    process.

    `tiers` hold the complete step on all processes. `left_out` has the reason why a tier was not tried. `unfinished`
    names the tiers that were not done at the end of the grace period: the process must then end without waiting
    (`os._exit`). At most `spent_s` of `grace_s` had passed before the save began.
    """

    step: int
    tiers: tuple[str, ...]
    unfinished: tuple[str, ...]
    left_out: Mapping[str, str]
    spent_s: float
    grace_s: float

    @property
    def saved(self) -> bool:
        """Whether any tier holds the step."""
        return bool(self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSavePlan:
    """The tiers to try, and why each other one is left out."""

    tiers: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def plan_last_save(tiers: Sequence[str], needs_s: Mapping[str, float], left_s: float) -> LastSavePlan:
    """The tiers that a last save is for. `tiers` are those there are, fastest first.

    The fastest tier is always tried. Another one is tried if `MARGIN` times its needed seconds (`needs_s`, from the
    measured rates of the slowest process) fit into `left_s`. It is also tried if nothing was measured yet: an
    unfinished save does not harm a finished one.
    """
    left_out = {
        tier: f"needs {MARGIN * needs_s[tier]:.1f} s by the rates of earlier saves, {left_s:.1f} s are left"
        for tier in tiers[1:]
        if MARGIN * needs_s.get(tier, 0.0) > left_s
    }
    return LastSavePlan(tiers=tuple(tier for tier in tiers if tier not in left_out), left_out=left_out)


class TierRates:
    """How long saves take, by tier, from the events of earlier ones. An observer of an `EventLog`."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def __call__(self, event: Event) -> None:
        """Notes a committed save."""
        if event.kind == Kind.COMMITTED and event.tier is not None:
            self._seconds[event.tier].append((event.fields["duration_s"], event.fields["bytes"]))

    def needs_s(self, size_bytes: int) -> dict[str, float]:
        """The seconds from staged to committed by all, for a save of `size_bytes` of this process, in each tier with an
        earlier save: the slowest of the last saves, scaled by size."""
        return {
            tier: max(seconds * max(1.0, size_bytes / before) if before else seconds for seconds, before in noted)
            for tier, noted in list(self._seconds.items())
        }


class PreemptionPace:
    """How long ago a preemption may have been announced when the processes agree on it."""

    def __init__(self) -> None:
        self._asked_s: deque[float] = deque(maxlen=10)

    def asked(self, now_s: float) -> None:
        """The step loop asked whether a preemption was reached (monotonic seconds)."""
        self._asked_s.append(now_s)

    def spent_s(self, now_s: float) -> float:
        """The signal came at most this long ago: one poll of JAX's notifier, the running step, the next step (before
        which the processes agree), and the time since the loop asked."""
        asked = list(self._asked_s)
        longest_s = max((after - before for before, after in pairwise(asked)), default=0.0)
        return POLL_S + 2 * longest_s + (now_s - asked[-1] if asked else 0.0)
