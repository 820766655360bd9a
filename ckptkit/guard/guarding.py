"""`Guard`: watches what a training loop measures, and takes the run back to before the trouble."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax

from ckptkit.errors import GuardStopError
from ckptkit.events import EventLog, Kind
from ckptkit.guard.record import Alarm, GuardRecord, PickledGuard, Rollback, Skips
from ckptkit.guard.rules import Divergence, NonFinite, Reading, Rule, Spike
from ckptkit.job.coordination import Coordinator, gather, make_coordinator
from ckptkit.manager import CheckpointManager
from ckptkit.manager.restore import restore_first
from ckptkit.model.tiers import KeepGood
from ckptkit.util.words import count_text

StepNumber = Literal["done", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """A lower rate after a rollback: `rate_factor` is `factor` for `steps` steps from the first skipped batch on."""

    factor: float = 0.5
    steps: int = 100

    def __post_init__(self) -> None:
        if not (0 < self.factor <= 1 and self.steps >= 1):
            raise ValueError(f"{self}: give 0 < factor <= 1 and 1 step or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """The reaction to an alarm.

    `margin_steps`: the state returns to a save that is older than the onset by this many steps, and the batches from
    there to the alarm are skipped, and `skip_ahead_steps` more. `retries_max`: rollbacks in a row, each at most
    `clear_steps` after the one before; the next alarm is a `GuardStopError`. `slow_down`: also lower the rate, for
    loops that use `rate_factor`. `lag_steps`: a value that is a `jax.Array` is read this many steps later.
    `step_number`: the meaning of the number of a save: `done`, the number of finished steps (the saved state is that
    before step N), or `last`, the last finished step.
    """

    margin_steps: int = 5
    skip_ahead_steps: int = 0
    retries_max: int = 3
    clear_steps: int = 100
    slow_down: SlowDown | None = None
    lag_steps: int = 2
    step_number: StepNumber = "done"

    def __post_init__(self) -> None:
        others = (self.skip_ahead_steps, self.retries_max, self.clear_steps, self.lag_steps)
        if self.margin_steps < 1 or min(others) < 0:
            raise ValueError(
                f"{self}: margin_steps is at least 1 (the update before a bad loss may have done the harm), "
                "the others at least 0"
            )
        if self.step_number not in get_args(StepNumber):
            raise ValueError(f"step_number={self.step_number!r}: give one of {', '.join(get_args(StepNumber))}")


class GoodPreservation:
    """Orbax's preservation policy of `Guard.preservation_policy`: keeps what `keep` keeps."""

    def __init__(self, keep: KeepGood):
        self._keep = keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each of `checkpoints`."""
        del context
        newest_first = sorted(checkpoints, key=lambda each: each.step, reverse=True)
        kept = {each.step for each in self._keep.kept(newest_first, (), self._keep.count)}
        return [each.step in kept for each in checkpoints]


class Guard:
    """Finds a run that goes wrong, takes it back to a save from before the trouble, and skips the batches around it.

    The loop calls `watch` after each step, and `finish` after the last one. On an alarm it calls `roll_back`, then
    `resume`. It saves `to_json()` with the position of its data, takes batch `skips.batch_of(step)` at each step, and
    calls `resume` with the saved record after a restore. The training data of a run then follows from its measurements
    alone. A run that is killed, even within a rollback, reaches the same bits, whichever save was restored.

    All processes make the same calls, with values that are equal on all of them (outputs of the jitted step that every
    device holds). Cost of `watch`: about 0.1 ms for 3 rules, and no communication. A float is judged at once. A
    `jax.Array` is copied to the host in the background, and read `lag_steps` steps later: a loop waits for a device
    only if it is further behind.

    Args:
      rules: what is judged, and by which limits; `Spike("grad_norm")` needs `watch(step, grad_norm=...)`.
      policy: what follows an alarm.
      events: where to record alarms and rollbacks (default: nowhere).
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (NonFinite(), Spike("loss"), Divergence("loss")),
        *,
        policy: GuardPolicy = GuardPolicy(),
        events: EventLog | None = None,
    ):
        self._rules = tuple(rules)
        self._policy = policy
        self._events = events or EventLog()
        self._record: GuardRecord | None = GuardRecord()  # None: `resume` must supply the record of the restored step
        self._rollbacks: tuple[Rollback, ...] = ()
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._coordinator: Coordinator | None = None  # made by the first rollback, on all processes

    def __reduce__(self) -> tuple[type[PickledGuard], tuple[Skips]]:
        # For `batch_of=lambda step: guard.skips.batch_of(step)` in worker processes. They start anew after a rollback.
        return PickledGuard, (self.skips,)

    @property
    def skips(self) -> Skips:
        """The batches that no step takes."""
        return self._known.skips

    @property
    def reach_steps(self) -> int:
        """How many steps before an alarm a save has to be, at most, so that the run can go back to it."""
        return max((rule.delay_steps for rule in self._rules), default=0) + self._policy.margin_steps

    def saves_to_keep(self, every_steps: int) -> int:
        """How many of the newest saves, one every `every_steps`, a tier has to keep so that one is old enough."""
        late_steps = self._policy.lag_steps + self.reach_steps
        return math.ceil(late_steps / every_steps) + 1

    def is_good(self, step: int) -> bool:
        """Whether a save with this number was taken while nothing was suspicious: only such saves serve a rollback.

        True for a save that is older than the last 100 suspicious stretches. The loop calls `to_json` before `save`,
        so that the answer is the same on every process from the save on.
        """
        last_done = step - 1 if self._policy.step_number == "done" else step
        return not self._known.was_suspicious(last_done)

    def keep(self, every_steps: int) -> KeepGood:
        """The policy of a fast tier with a save every `every_steps`: `Tier.ram(..., keep=guard.keep(2))`.

        Keeps `saves_to_keep(every_steps)` steps. The oldest of them is the last good one: older than a coming alarm's
        reach, and taken while nothing was suspicious. It is kept until a newer step has both.
        """
        return KeepGood(self.saves_to_keep(every_steps), self._is_good_save)

    def preservation_policy(self, every_steps: int) -> GoodPreservation:
        """The same for the durable tier: `CheckpointManagerOptions(preservation_policy=...)`, without `max_to_keep`."""
        return GoodPreservation(self.keep(every_steps))

    def rate_factor(self, step: int) -> float:
        """The factor for the learning rate of `step`: 1.0, or that of `SlowDown` after a rollback."""
        slow = self._policy.slow_down
        if slow is None:
            return 1.0
        near = [each for each in self._known.rollbacks if each.first_step <= step < each.first_step + slow.steps]
        return slow.factor if near else 1.0

    def watch(self, step: int, **signals: Any) -> Alarm | None:
        """Judges the measurements of `step` (counted from 0): floats, or scalar arrays that are read later.

        Returns the alarm that the loop has to answer with `roll_back`, None where there is none. An alarm that was
        saved and not answered is returned by the next call.

        Raises ValueError for a signal that a rule needs and the call lacks.
        """
        if missing := {rule.signal for rule in self._rules} - {None, *signals}:
            raise ValueError(f"watch: rules judge {', '.join(sorted(map(str, missing)))}, which the call does not give")
        if self._known.alarm is None:
            with jax.transfer_guard_device_to_host("allow"):  # a guard is for transfers that no code asked for
                for value in signals.values():
                    if isinstance(value, jax.Array):
                        value.copy_to_host_async()
            self._pending.append((step, signals))
            lag = self._policy.lag_steps if any(isinstance(v, jax.Array) for v in signals.values()) else 0
            self._read(keep=lag)
        return self._known.alarm

    def finish(self) -> Alarm | None:
        """Judges the values that `watch` left for later: call it after the last `watch`, before the last save.

        Returns the alarm that the loop has to answer with `roll_back`, or None. It waits until the values are computed.
        Without it, bad values of the last `lag_steps` steps give no alarm.
        """
        self._read(keep=0)
        return self._known.alarm

    def to_json(self) -> dict[str, Any]:
        """The record to save with the position of the data; JSON, some 30 bytes for each of the last readings.

        It waits for the values that were not read yet: those of the state that is being saved.
        """
        self._read(keep=0)
        return self._known.to_json()

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Continues from a record that was saved with the restored step; None where the step has none.

        Raises ValueError for what is not the record of a guard.
        """
        record = GuardRecord.from_json(saved)
        theirs = record.rollbacks
        self._pending.clear()
        # After `roll_back` the restored record is that of an earlier time, and lacks the newest rollbacks.
        self._rollbacks = self._rollbacks if len(self._rollbacks) > len(theirs) else theirs
        self._record = replace(record, rollbacks=self._rollbacks)

    def roll_back(self, manager: CheckpointManager, alarm: Alarm, args: Any = None) -> Any:
        """Restores the newest save that is older than the alarm's onset by the margin, and skips the batches.

        Returns the result of `manager.restore`. The loop then calls `resume` with the record in it, and continues from
        the restored step, with batches by `skips`. Nothing is written: the next save begins a new epoch and abandons
        the later saves. A process that dies before that save gets the same alarm after its restart.

        All processes call it together: process 0 names the saves. Cost: one exchange, and the restore.

        Raises `GuardStopError` after `retries_max` rollbacks in a row, if no save is old enough, or if processes do not
        have the same alarm. Raises the errors of `manager.restore` for a tier that cannot be reached.
        """
        known = self._known
        first = max(0, alarm.onset - self._policy.margin_steps)
        offered = self._agreed(manager, alarm, first)
        self._refuse_retry(alarm)
        rollback = Rollback(
            alarm=alarm,
            first_step=first,
            first_batch=known.skips.batch_of(first),
            stop_batch=known.skips.batch_of(alarm.step + self._policy.skip_ahead_steps) + 1,
        )
        step, restored = self._restored(manager, alarm, offered, args)
        self._rollbacks = (*known.rollbacks, rollback)
        self._record = None
        self._pending.clear()
        self._events.emit(
            Kind.ROLLED_BACK,
            step=step,
            from_step=alarm.step,
            first_step=first,
            batches=[rollback.first_batch, rollback.stop_batch],
            rollbacks=len(self._rollbacks),
            alarm=str(alarm),
        )
        return restored

    @property
    def _known(self) -> GuardRecord:
        if self._record is None:
            raise RuntimeError("guard: call resume(record of the restored step) after roll_back, before anything else")
        return self._record

    def _read(self, *, keep: int) -> None:
        while len(self._pending) > keep and self._known.alarm is None:
            step, signals = self._pending.popleft()
            with jax.transfer_guard_device_to_host("allow"):
                readings = {signal: Reading(step, float(value)) for signal, value in sorted(signals.items())}
            for signal, reading in readings.items():
                self._judge(signal, reading)

    def _judge(self, signal: str, reading: Reading) -> None:
        """Books a reading, with what the rules find of it; the first alarm of a step counts."""
        record = self._known
        rules = [rule for rule in self._rules if rule.signal in (None, signal)]
        readings = (*record.readings.get(signal, ()), reading)[-max((r.readings_max for r in rules), default=1) :]
        findings = [finding for finding in (rule.judge(readings) for rule in rules) if finding is not None]
        if findings:
            readings = (*readings[:-1], reading._replace(suspect=True))
            record = replace(record, suspicious=record.suspicious_with(reading.step))
            self._tell(signal, reading, readings, findings[0].rule, findings[0].limit)
        alarm = record.alarm
        for found in findings:
            if alarm is None and found.onset is not None:
                alarm = Alarm(
                    rule=found.rule,
                    signal=signal,
                    step=reading.step,
                    onset=found.onset,
                    value=reading.value,
                    limit=found.limit,
                )
                self._events.emit(Kind.ALARM, **alarm.to_json())
        self._record = replace(record, readings={**record.readings, signal: readings}, alarm=alarm)

    def _tell(self, signal: str, reading: Reading, readings: Sequence[Reading], rule: str, limit: float) -> None:
        """An event where a suspicious stretch begins."""
        if len(readings) == 1 or not readings[-2].suspect:
            self._events.emit(
                Kind.SUSPECTED, step=reading.step, signal=signal, value=str(reading.value), rule=rule, limit=str(limit)
            )

    def _is_good_save(self, save: Any) -> bool:
        # Between `roll_back` and `resume` nothing is known yet: what is kept then is what was kept.
        return self._record is None or self.is_good(save.step)

    def _agreed(self, manager: CheckpointManager, alarm: Alarm, first: int) -> list[int]:
        """The saves that are old enough, newest first, as process 0 knows them."""
        manager.reload()  # saves that are under way are committed or lost first
        oldest_ok = first if self._policy.step_number == "done" else first - 1
        base = manager.restored_save_id
        if base is not None:  # after a rollback, until its first save: the later saves are of the steps that it undid
            oldest_ok = min(oldest_ok, base.step)
        old = sorted((step for step in manager.all_steps() if step <= oldest_ok), reverse=True)
        mine = [step for step in old if self.is_good(step)]
        self._coordinator = self._coordinator or make_coordinator()
        said = gather(self._coordinator, "guard", {"alarm": alarm.to_json(), "steps": mine})
        for process, other in enumerate(said):
            if other["alarm"] != said[0]["alarm"]:
                raise GuardStopError(
                    f"guard: process {process} has {Alarm.from_json(other['alarm'])}, process 0 has "
                    f"{Alarm.from_json(said[0]['alarm'])}; give watch values that are equal on all processes",
                    step=alarm.step,
                )
        return said[0]["steps"]

    def _refuse_retry(self, alarm: Alarm) -> None:
        row, later = [], alarm
        for each in reversed(self._known.rollbacks):
            if later.step - each.alarm.step > self._policy.clear_steps:
                break
            row.append(each)
            later = each.alarm
        if len(row) >= self._policy.retries_max:
            raise self._stopped(
                alarm, f"{count_text(len(row), 'rollback')} in a row did not help, and the limit is reached"
            )

    def _restored(self, manager: CheckpointManager, alarm: Alarm, offered: Sequence[int], args: Any) -> tuple[int, Any]:
        with self._events.span("checkpoint_restore"):
            step, restored, damaged = restore_first(offered, lambda each: manager.restore(each, args=args))
        if step is not None:
            return step, restored
        old = f"{count_text(self._policy.margin_steps, 'step')} older than step {alarm.onset}"
        margin = f"{old} and was taken while nothing was suspicious"
        why = f"no save is {margin}" if not offered else f"no save that is {margin} can be restored: {damaged[0]}"
        raise self._stopped(alarm, f"{why}; keep saves of {count_text(self.reach_steps, 'step')} (Guard.keep)")

    def _stopped(self, alarm: Alarm, why: str) -> GuardStopError:
        self._events.emit(Kind.GUARD_STOPPED, step=alarm.step, reason=why, alarm=str(alarm))
        before = "".join(f"\n  {each}" for each in self._known.rollbacks)
        return GuardStopError(
            f"guard: {alarm}; {why}. Rollbacks of this run:{before or ' none'}\n"
            "Nothing was deleted. Look at the data and the rate. Then go back to an older step (`ckptkit rollback`) "
            "and change the data, the rate or the rules.",
            step=alarm.step,
        )
