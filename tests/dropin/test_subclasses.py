"""Subclasses that answer what Orbax's managers ask of themselves: the drop-in asks them in the same calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit

args: Any = ocp.args
Options = ocp.CheckpointManagerOptions
LIBRARIES = pytest.mark.parametrize("library", [ocp, ckptkit], ids=["orbax", "ckptkit"])


def state(step: int) -> Any:
    return args.StandardSave({"w": jnp.full(4, float(step))})


def value(found: Any) -> float:
    return float(found["w"][0])


def made(library: Any, root: Path, methods: dict[str, Any], **words: Any) -> Any:
    """A manager of a subclass of `library`'s with these methods; each gets ours as its first argument."""

    def method(name: str, own: Any) -> Any:
        def asked(self: Any, *given: Any) -> Any:
            return own(lambda *more: getattr(super(kind, self), name)(*more), *given)

        return asked

    kind = type("Own", (library.CheckpointManager,), {name: method(name, own) for name, own in methods.items()})
    return kind(root, **words)


def asked_by_calls(library: Any, root: Path) -> list[tuple[str, list[str]]]:
    """Which methods of a subclass each call of a manager asks, without those that repeat."""
    asked: list[str] = []

    def noted(name: str) -> Any:
        def own(ours: Any, *given: Any) -> Any:
            asked.append(name)
            return ours(*given)

        return own

    names = ("should_save", "latest_step", "reached_preemption", "wait_until_finished", "all_steps")
    manager = made(library, root, {name: noted(name) for name in names})
    calls = {
        "save": lambda: manager.save(0, args=state(0)),
        "forced save": lambda: manager.save(1, args=state(1), force=True),
        "should_save": lambda: manager.should_save(2),
        "restore": lambda: manager.restore(None, args=args.StandardRestore()),
        "restore of a step": lambda: manager.restore(0, args=args.StandardRestore()),
        "best_step": manager.best_step,
        "delete": lambda: manager.delete(0),
        "close": manager.close,
    }
    found = []
    for call, act in calls.items():
        asked.clear()
        act()
        ocp.CheckpointManager.wait_until_finished(manager) if library is ocp else manager._pipeline.wait()
        found.append((call, sorted(set(asked))))
    return found


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_calls_ask_the_methods_that_orbax_asks(tmp_path: Path) -> None:
    """A trainer's own method would be left out by one of the calls."""
    expected, found = asked_by_calls(ocp, tmp_path / "orbax"), asked_by_calls(ckptkit, tmp_path / "ckptkit")
    assert dict(found) == dict(expected)
    assert dict(found)["save"] == sorted(
        ["should_save", "latest_step", "reached_preemption", "wait_until_finished", "all_steps"]
    )


@LIBRARIES
def test_should_save_decides_in_place_of_the_policies(tmp_path: Path, library: Any) -> None:
    """A trainer would save steps that it did not choose, or lose steps that it chose."""
    options, asked = Options(save_interval_steps=10, max_to_keep=None), []

    def should_save(_: Any, step: int) -> bool:
        asked.append(step)
        return step % 3 == 1

    with made(library, tmp_path, {"should_save": should_save}, options=options) as manager:
        taken = [step for step in range(12) if manager.save(step, args=state(step))]
        assert taken == [1, 4, 7, 10]
        assert asked == list(range(12)), "once for each save"
        assert manager.save(11, args=state(11), force=True)
        assert asked == list(range(12)), "a forced save asks nobody"
    assert ocp.CheckpointManager(tmp_path).all_steps() == [1, 4, 7, 10, 11]


@LIBRARIES
def test_should_save_that_adds_a_condition_asks_the_policy_once(tmp_path: Path, library: Any) -> None:
    """A policy that counts its calls would be asked twice for a step."""
    asked = []

    def policy(step: int, last: int | None) -> bool:
        asked.append((step, last))
        return True

    methods = {"should_save": lambda ours, step: ours(step) and step != 1}
    with made(library, tmp_path, methods, options=Options(should_save_fn=policy)) as manager:
        assert [manager.save(step, args=state(step)) for step in range(3)] == [True, False, True]
    assert asked == [(0, None), (1, 0), (2, 0)]


def test_should_save_that_agrees_saves_to_the_tiers_that_are_due(tmp_path: Path) -> None:
    """Each step of a ramdisk would go to the durable tier too; or a step that only the trainer chose would not."""
    methods = {"should_save": lambda ours, step: ours(step) or step == 3}
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(2))]
    options = Options(save_interval_steps=100)
    with made(ckptkit, tmp_path / "run", methods, options=options, tiers=tiers) as manager:
        for step in range(5):
            assert manager.save(step, args=state(step)) == (step != 1)
            manager.wait_until_finished()
        held = {record.step: record.tiers for record in manager.steps()}
        assert [step for step, in_tiers in held.items() if "durable" in in_tiers] == [0, 3]
        assert held[4] == ("ram",)


@LIBRARIES
def test_latest_step_decides_what_is_restored_and_saved(tmp_path: Path, library: Any) -> None:
    """A trainer that goes on from an agreed step would restore another one, or not save from there."""
    with library.CheckpointManager(tmp_path) as manager:
        for step in (0, 1, 2):
            manager.save(step, args=state(step))
    latest: list[int | None] = [1]
    with made(library, tmp_path, {"latest_step": lambda ours: latest[0]}) as manager:
        assert value(manager.restore(None, args=args.StandardRestore({"w": jnp.zeros(4)}))) == 1.0
        assert manager.best_step() == 1
        latest[0] = 7
        assert not manager.should_save(7)
        assert not manager.save(6, args=state(6))
        assert manager.save(8, args=state(8))
        manager.wait_until_finished()
        latest[0] = None
        with pytest.raises(FileNotFoundError):
            manager.restore(None, args=args.StandardRestore())
    with made(library, tmp_path, {"latest_step": lambda ours: None}) as manager:
        assert manager.should_save(3), "at or below the latest step that is there"


def test_latest_step_that_agrees_keeps_the_fallback(tmp_path: Path) -> None:
    """A subclass that only logs would end on a damaged step, where `restore(None)` takes the next older one."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (0, 1):
            manager.save(step, args=state(step))
    for path in (tmp_path / "1" / "default" / "_ckptkit").iterdir():
        path.write_text("{}")
    with made(ckptkit, tmp_path, {"latest_step": lambda ours: ours()}) as manager:
        assert value(manager.restore(None)) == 0.0
    with made(ckptkit, tmp_path, {"latest_step": lambda ours: 1}) as manager:
        manager.restore(None)  # as the subclass calls the newest one latest, too
        assert manager.restore_async(0).result() is not None
        with pytest.raises(ckptkit.CorruptCheckpointError):
            manager.restore(None)


@LIBRARIES
def test_reached_preemption_saves_a_step_that_is_not_due(tmp_path: Path, library: Any) -> None:
    """The last save before a preemption would be left out by a trainer with a signal of its own."""
    methods = {"reached_preemption": lambda ours, step: ours(step) or step == 3}
    with made(library, tmp_path, methods, options=Options(save_interval_steps=100)) as manager:
        assert [manager.save(step, args=state(step)) for step in range(5)] == [True, False, False, True, False]


@LIBRARIES
def test_wait_until_finished_is_called_before_the_next_save_and_at_the_end(tmp_path: Path, library: Any) -> None:
    """The work of a trainer at the end of each save would be left out for the last one."""
    seen: list[list[int]] = []

    def wait_until_finished(ours: Any) -> None:
        ours()
        seen.append(list(manager.all_steps()))

    manager = made(library, tmp_path, {"wait_until_finished": wait_until_finished})
    manager.save(0, args=state(0))
    manager.save(1, args=state(1))
    manager.close()
    assert seen == [[], [0], [0, 1]]


@pytest.mark.parametrize("in_ram", [False, True])
def test_failure_is_raised_through_a_wait_of_the_trainers_own(tmp_path: Path, in_ram: bool) -> None:
    """A `save` would raise for a step that the ramdisk has, or `close` would not raise a failed save."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if in_ram else []
    root = tmp_path / "run"
    manager = made(ckptkit, root, {"wait_until_finished": lambda ours: ours()}, tiers=tiers)
    manager.save(0, args=state(0))
    manager._pipeline.wait()
    for path in sorted(root.iterdir(), reverse=True):
        path.rename(tmp_path / path.name)
    root.rmdir()
    root.write_text("no directory")
    manager.save(1, args=state(1))
    if in_ram:
        manager.save(2, args=state(2))
    else:
        with pytest.raises(ckptkit.SaveFailedError, match="step 1 was not committed"):
            manager.save(2, args=state(2))
        manager.save(2, args=state(2))
    with pytest.raises(ckptkit.SaveFailedError):
        manager.close()


@LIBRARIES
def test_steps_that_only_the_subclass_lists_exist(tmp_path: Path, library: Any) -> None:
    """A step would be saved that the trainer keeps elsewhere."""
    with made(library, tmp_path, {"all_steps": lambda ours, *read: [*ours(*read), 5]}) as manager:
        manager.save(4, args=state(4))
        with pytest.raises(ValueError, match=r"5.*exists"):
            manager.save(5, args=state(5))
        assert manager.save(6, args=state(6))
    other = made(library, tmp_path, {"all_steps": lambda ours, *read: [6]})
    with other as manager, pytest.raises(FileNotFoundError):
        manager.delete(4)
    assert ocp.CheckpointManager(tmp_path).all_steps() == [4, 6]


@LIBRARIES
def test_method_that_is_put_on_one_manager_is_asked(tmp_path: Path, library: Any) -> None:
    """A trainer, or a test with mocks, would not see its own method called."""
    with library.CheckpointManager(tmp_path) as manager:
        manager.should_save = lambda step: step == 1
        assert [manager.save(step, args=state(step)) for step in range(3)] == [False, True, False]
