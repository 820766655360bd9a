"""A guard over a small loop and a real manager: alarms, the way back, the batches that are skipped."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.cli import main
from ckptkit.errors import GuardStopError
from ckptkit.goodput import goodput_report
from ckptkit.guard import Alarm, Guard, GuardPolicy, GuardRecord, NonFinite, Skips, SlowDown, Spike
from ckptkit.job.coordination import LocalCoordinator
from ckptkit.model.manifest import SaveId
from tests.cases import long_except

POISON = frozenset(range(60, 63))  # batches


class Killed(Exception):
    """Stands for SIGKILL."""


def loss_of(weight: jax.Array, batch: int) -> float:
    """Falls with the weight; the noise depends on the batch, and poison is far off."""
    return float(weight) + random.Random(batch).gauss(0, 0.02) + (50.0 if batch in POISON else 0.0)


def run(
    root: Path,
    steps: int = 120,
    *,
    guarded: bool = True,
    skips: Skips = Skips(),  # noqa: B008  frozen
    before_step: Callable[[int], None] = lambda step: None,
    policy: GuardPolicy = GuardPolicy(margin_steps=3, lag_steps=0),  # noqa: B008  frozen
    events: ckptkit.EventLog | None = None,
    as_arrays: bool = False,
) -> tuple[bytes, Guard, list[int]]:
    """A loop as a user writes it. Returns the weight's bits, the guard, and the batches in the order of training."""
    guard = Guard([NonFinite(), Spike("loss", minimum=8, window=32)], policy=policy, events=events)
    tier = ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(2), keep=guard.keep(2))
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)
    taken: list[int] = []
    with ckptkit.CheckpointManager(
        root / "durable", options=options, tiers=[tier], host_id="h", events=events
    ) as manager:
        step, weight = 0, jnp.float32(4.0)
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore({"w": jax.ShapeDtypeStruct((), jnp.float32)}), data=ocp.args.JsonRestore()
        )
        if manager.latest_step() is not None:
            found = manager.restore(None, args=wanted)
            step, weight = found["data"]["step"], found["state"]["w"]
            guard.resume(found["data"]["guard"])
        while step < steps:
            before_step(step)
            batch = guard.skips.batch_of(step) if guarded else skips.batch_of(step)
            taken.append(batch)
            loss = loss_of(weight, batch)
            weight = weight * jnp.float32(0.98 if batch not in POISON else -3.0) * jnp.float32(guard.rate_factor(step))
            if guarded and (alarm := guard.watch(step, loss=jnp.float32(loss) if as_arrays else loss)):
                found = guard.roll_back(manager, alarm, args=wanted)
                step, weight = found["data"]["step"], found["state"]["w"]
                guard.resume(found["data"]["guard"])
                continue
            step += 1
            args = ocp.args.Composite(
                state=ocp.args.StandardSave({"w": weight}),
                data=ocp.args.JsonSave({"step": step, "guard": guard.to_json()}),
            )
            manager.save(step, args=args)
            manager.wait_until_finished()
    return np.asarray(weight).tobytes(), guard, taken


def test_run_goes_back_and_skips_the_batches_of_the_window(tmp_path: Path) -> None:
    """The run would keep the weights that the poison made."""
    heard: list[ckptkit.Event] = []
    events = ckptkit.EventLog()
    events.observe(heard.append)
    _, guard, taken = run(tmp_path, events=events)
    assert guard.skips == Skips(((57, 63),))  # onset 60, margin 3, alarm at 62
    assert list(dict.fromkeys(taken[-20:])) == taken[-20:]
    assert taken[-1] == 119 + sum(stop - first for first, stop in guard.skips.ranges)
    (back,) = [event for event in heard if event.kind == Kind.ROLLED_BACK]
    assert back.step == 56
    assert back.fields["batches"] == [57, 63]
    assert [event.step for event in heard if event.kind == Kind.ALARM] == [62]
    assert next(event.step for event in heard if event.kind == Kind.SUSPECTED) == 60


def test_end_depends_on_the_alarms_alone(tmp_path: Path) -> None:
    """The result of a run would depend on which save happened to exist."""
    bits, guard, _ = run(tmp_path / "a")
    assert run(tmp_path / "b")[0] == bits
    assert run(tmp_path / "c", guarded=False, skips=guard.skips)[0] == bits
    assert run(tmp_path / "d", as_arrays=True, policy=GuardPolicy(margin_steps=3, lag_steps=2))[0] == bits
    assert run(tmp_path / "e", guarded=False)[0] != bits


@pytest.mark.parametrize(
    "moment", long_except(["after the restore"], ["before the restore", "after the restore", "one step later"])
)
def test_run_that_is_killed_in_a_rollback_comes_to_the_same_bits(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second failure at the worst moment would end in a state of neither branch."""
    bits, guard, _ = run(tmp_path / "straight")
    back = Guard.roll_back
    state = {"armed": True, "rolled": False}

    def roll_back(self: Guard, *args: Any, **keywords: Any) -> Any:
        if state["armed"] and moment == "before the restore":
            raise Killed
        found = back(self, *args, **keywords)
        state["rolled"] = True
        if state["armed"] and moment == "after the restore":
            raise Killed
        return found

    def before_step(step: int) -> None:
        if state["armed"] and state["rolled"] and moment == "one step later" and step == 58:
            raise Killed

    monkeypatch.setattr(Guard, "roll_back", roll_back)
    with pytest.raises(Killed):
        run(tmp_path / "killed", before_step=before_step)
    state["armed"] = False
    again, resumed, _ = run(tmp_path / "killed", before_step=before_step)
    assert again == bits
    assert resumed.skips == guard.skips


def test_alarms_without_end_stop_the_run_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that no skip helps would repeat without an end."""
    monkeypatch.setattr(f"{__name__}.POISON", frozenset(range(60, 1000)))
    policy = GuardPolicy(margin_steps=3, lag_steps=0, retries_max=2)
    with pytest.raises(GuardStopError, match=r"spike at step \d+.*2 rollbacks in a row did not help") as stopped:
        run(tmp_path, policy=policy)
    assert "batches 57 to 62 are skipped" in str(stopped.value)
    with pytest.raises(GuardStopError):  # a restart gets the same alarm
        run(tmp_path, policy=policy)


def test_processes_with_different_alarms_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would return to a save of its own."""

    class Two:
        """Process 1 has the same alarm one step later."""

        def agree(self, channel: str, value: Any, decide: Any, **options: Any) -> Any:
            other = {**value, "alarm": {**value["alarm"], "step": value["alarm"]["step"] + 1}}
            return LocalCoordinator().agree(channel, value, lambda values: decide([*values, other]), **options)

    monkeypatch.setattr("ckptkit.guard.guarding.make_coordinator", Two)
    with pytest.raises(GuardStopError, match=r"process 1 has spike at step 63.*process 0 has spike at step 62"):
        run(tmp_path)


def test_alarm_without_an_old_save_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would go back to a state that is as wrong."""
    monkeypatch.setattr(f"{__name__}.POISON", frozenset(range(60, 1000)))
    policy = GuardPolicy(margin_steps=70, lag_steps=0)
    with pytest.raises(GuardStopError, match="no save is 70 steps older than step 60"):
        run(tmp_path, policy=policy)


def test_rate_is_lower_after_a_rollback_and_only_then(tmp_path: Path) -> None:
    """`SlowDown` would do nothing, or never end."""
    policy = GuardPolicy(margin_steps=3, lag_steps=0, slow_down=SlowDown(factor=0.5, steps=10))
    _, guard, _ = run(tmp_path, policy=policy)
    assert [guard.rate_factor(step) for step in (56, 57, 66, 67)] == [1.0, 0.5, 0.5, 1.0]


def test_batches_after_the_alarm_are_skipped_where_asked(tmp_path: Path) -> None:
    """Bad data that goes on after the alarm would take one rollback for every few batches."""
    _, guard, _ = run(tmp_path, policy=GuardPolicy(margin_steps=3, lag_steps=0, skip_ahead_steps=10))
    assert guard.skips == Skips(((57, 73),))


def test_saves_to_keep_reach_back_before_any_onset() -> None:
    """A tier would release the save that a rollback needs."""
    guard = Guard([Spike(patience=4)], policy=GuardPolicy(margin_steps=6, lag_steps=2))
    assert guard.reach_steps == 9
    for every in range(1, 15):
        for alarm in range(200, 230):
            last_save = (alarm + 2) // every * every  # the alarm arrives two steps late
            kept = [last_save - every * age for age in range(guard.saves_to_keep(every))]
            assert any(step <= alarm - 9 for step in kept), (every, alarm)


def test_save_within_a_suspicious_stretch_is_never_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would return to a state that was saved while the loss was odd, and begin from the trouble again."""
    usual = loss_of
    monkeypatch.setattr(f"{__name__}.loss_of", lambda weight, batch: usual(weight, batch) + 9.0 * (batch == 55))
    heard: list[ckptkit.Event] = []
    events = ckptkit.EventLog()
    events.observe(heard.append)
    _, guard, _ = run(tmp_path, events=events)
    (back,) = [event for event in heard if event.kind == Kind.ROLLED_BACK]
    assert back.step == 54, "save 56 is old enough, and holds the odd step 55"
    assert guard.skips == Skips(((57, 63),)), "which save was restored decides nothing else"
    assert GuardRecord.from_json(json.loads(json.dumps(guard.to_json()))).was_suspicious(55)
    assert [step for step in range(50, 60) if not guard.is_good(step)] == [56]


def test_second_rollback_restores_no_save_that_the_first_one_undid(tmp_path: Path) -> None:
    """The run would contain batches that the first rollback skipped, and the record would deny it."""
    guard = Guard([NonFinite()])
    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore({"took": jax.ShapeDtypeStruct((40,), jnp.int32)}), data=ocp.args.JsonRestore()
    )
    restored: list[int] = []
    with ckptkit.CheckpointManager(tmp_path) as manager:
        step, took, saves = 0, jnp.zeros(40, jnp.int32), range(11)  # no save is due between the two alarms
        while step < 25:
            batch = guard.skips.batch_of(step)
            took = took.at[batch].add(1)
            if alarm := guard.watch(step, loss=math.nan if batch in (10, 20) else 1.0):
                found = guard.roll_back(manager, alarm, args=wanted)
                step, took, saves = found["data"]["step"], found["state"]["took"], range(0)
                guard.resume(found["data"]["guard"])
                restored.append(step)
                continue
            step += 1
            if step in saves:
                data = {"step": step, "guard": guard.to_json()}
                state = ocp.args.StandardSave({"took": took})
                manager.save(step, args=ocp.args.Composite(state=state, data=ocp.args.JsonSave(data)))
    assert restored == [5, 5], "saves 6 to 9 hold batches that the first rollback skips"
    assert guard.skips == Skips(((5, 11), (15, 21)))
    taken = [batch for batch in range(25 + 12) if not (5 <= batch < 11 or 15 <= batch < 21)]
    assert np.flatnonzero(took).tolist() == taken
    assert int(took.max()) == 1


def test_last_good_save_is_kept_until_a_newer_one_is_old_enough() -> None:
    """A long odd stretch without an alarm would push the only save that serves a rollback out of the tier."""
    guard = Guard([Spike("loss", minimum=8, patience=3)], policy=GuardPolicy(margin_steps=2, lag_steps=0))
    assert guard.saves_to_keep(1) == 5, "2 of patience, 2 of margin, and the newest"
    keep, durable = guard.keep(1), guard.preservation_policy(1)
    held: list[SaveId] = []
    lasts: list[int] = []
    for step in range(90):
        odd = 40 <= step < 70 and step % 3  # never three in a row
        assert guard.watch(step, loss=9.0 if odd else 1.0 + random.Random(step).gauss(0, 0.01)) is None
        guard.to_json()
        held = keep.kept([SaveId(1, step + 1, 0), *held], (), 5)
        assert durable.should_preserve(held[::-1], context=None) == [True] * len(held)
        assert len(held) <= 5
        lasts.append(held[-1].step)
    assert all(guard.is_good(step) for step in lasts)
    assert lasts[59:64] == [55, 55, 58, 58, 58], "one in three of the saves 41 to 70 is good"
    newest = [SaveId(1, step, 0) for step in range(60, 50, -1)]
    kept = durable.should_preserve(newest, context=None)
    assert [save.step for save, keeps in zip(newest, kept, strict=True) if keeps] == [60, 59, 58, 57, 55]


def test_record_of_an_earlier_version_has_no_suspicious_stretches() -> None:
    """A run that is resumed by a newer version would stop."""
    record = Guard().to_json()
    del record["suspicious"]
    guard = Guard()
    guard.resume(record)
    assert guard.is_good(3)


def test_record_survives_json_with_values_that_json_has_not() -> None:
    """A save in the middle of trouble would fail, or not be readable."""
    guard = Guard()
    for step in range(5):
        assert guard.watch(step, loss=1.0, grad_norm=2.0) is None
    alarm = guard.watch(5, loss=float("nan"), grad_norm=float("inf"))
    assert alarm is not None
    assert str(alarm) == "non-finite at step 5: grad_norm inf"
    text = json.dumps(guard.to_json(), allow_nan=False)
    later = Guard()
    later.resume(json.loads(text))
    assert later.watch(6, loss=1.0, grad_norm=1.0) == alarm  # not answered yet
    assert GuardRecord.from_json(json.loads(text)).suspect_since == 5
    with pytest.raises(ValueError, match="not the record of a guard"):
        later.resume({"format": "other"})


def test_array_is_read_late_and_alarm_is_that_of_its_step() -> None:
    """`watch` would wait for the step that was just dispatched."""
    guard = Guard([NonFinite()], policy=GuardPolicy(lag_steps=2))
    heard = [guard.watch(step, loss=jnp.float32(math.nan if step == 3 else 1.0)) for step in range(6)]
    assert heard[:5] == [None] * 5
    assert isinstance(heard[5], Alarm)
    assert heard[5].step == 3


@pytest.mark.parametrize("step", [3, 4, 5])
def test_finish_returns_the_alarm_of_the_last_steps(step: int) -> None:
    """A run would end with NaN in its last save and no alarm."""
    guard = Guard([NonFinite()], policy=GuardPolicy(lag_steps=2))
    losses = [jnp.float32(math.nan if each == step else 1.0) for each in range(6)]
    heard = [guard.watch(each, loss=loss) for each, loss in enumerate(losses)]
    assert heard[:5] == [None] * 5
    alarm = guard.finish()
    assert alarm is not None
    assert alarm.step == step
    assert guard.finish() == alarm, "it is not answered yet"


def test_finish_of_a_sound_run_is_none() -> None:
    """A sound run would go back at its end."""
    guard = Guard()
    assert guard.finish() is None
    assert guard.watch(0, loss=jnp.float32(1.0)) is None
    assert guard.finish() is None
    assert len(GuardRecord.from_json(guard.to_json()).readings["loss"]) == 1


def test_pickled_guard_has_the_skips_alone(tmp_path: Path) -> None:
    """Worker processes that read data could not be given `guard.skips.batch_of`."""
    _, guard, _ = run(tmp_path, steps=100)
    copy = pickle.loads(pickle.dumps(guard))
    assert copy.skips == guard.skips == Skips(((57, 63),))
    assert not hasattr(copy, "watch"), "a copy that judges would not know the readings"


def test_calls_that_forget_something_are_refused() -> None:
    """A guard would judge nothing, and nobody would know."""
    with pytest.raises(ValueError, match="rules judge grad_norm, which the call does not give"):
        Guard([Spike("grad_norm")]).watch(0, loss=1.0)
    with pytest.raises(ValueError, match="margin_steps is at least 1"):
        GuardPolicy(margin_steps=0)


def test_goodput_counts_undone_steps_as_wasted_by_the_spike() -> None:
    """Steps that a rollback undid would count as progress."""

    def at(at_s: float, kind: Kind, **fields: Any) -> ckptkit.Event:
        step = fields.pop("step", None)
        return ckptkit.Event(kind=kind, at_s=at_s, process=0, step=step, fields=fields)

    log = [at(0.0, Kind.STARTED, attempt=0)]
    log += [at(1.0 + k, Kind.SPAN, step=k, span="step", duration_s=1.0) for k in range(6)]
    log += [at(7.0, Kind.SPAN, span="checkpoint_restore", duration_s=1.0), at(7.0, Kind.ROLLED_BACK, step=3)]
    log += [at(8.0 + k, Kind.SPAN, step=3 + k, span="step", duration_s=1.0) for k in range(4)]
    log += [at(11.0, Kind.FINISHED)]
    report = goodput_report([log])
    assert {str(part): s for part, s in report.parts_s.items() if s} == {
        "productive": 7.0,
        "wasted_progress_from_spike": 3.0,
        "checkpoint_restore": 1.0,
    }
    assert report.goodput.distinct_steps == 7
    assert report.goodput.ml_goodput == pytest.approx(7 / 11)
    assert report.goodput.effective_training_time == pytest.approx(7 / 11)


def test_inspect_names_the_skipped_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data that a model has never seen would be unknown."""
    run(tmp_path, steps=100)
    assert main(["inspect", str(tmp_path / "durable" / "100")]) == 0
    assert re.search(r"^  guard: spike at step 62: loss .*batches 57 to 62 are skipped$", capsys.readouterr().out, re.M)


def test_inspect_survives_a_damaged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One odd value in a record would hide the rest of the step."""
    args = ocp.args.Composite(data=ocp.args.JsonSave({"guard": {"format": "ckptkit.guard/1", "readings": 5}}))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args)
    assert main(["inspect", str(tmp_path / "1")]) == 0
    assert "guard: its record cannot be read" in capsys.readouterr().out
