"""A restore in the background: the same items and the same errors as `restore`, and nothing in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.manager import RestoreHandle, restore, save
from ckptkit.slots import files
from tests.states import abstract, assert_same, make_state, restore_args, save_args


class Held:
    """A manager with steps 0 to 3, whose restores stop after planning until they are released."""

    def __init__(self, root: Path):
        self.go = threading.Event()
        self.threads: list[str] = []
        log = ckptkit.EventLog()
        log.observe(self._hold)
        self.manager = ckptkit.CheckpointManager(
            root / "durable",
            tiers=[ckptkit.Tier.ram(str(root / "ram"))],
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=30),
        )
        for step in range(4):
            self.manager.save(step, args=save_args(make_state(step), step))
            self.manager.wait_until_finished()

    def _hold(self, event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.PLANNED:
            self.threads.append(threading.current_thread().name)
            assert self.go.wait(30)

    def restore_async(self, step: int | None = None) -> RestoreHandle:
        return self.manager.restore_async(step, args=restore_args(abstract(make_state())))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path)
    yield held
    held.go.set()
    held.manager.close()


@pytest.mark.parametrize("ends", ["a call of the loop", "its limit"])
def test_slots_are_made_after_the_step_that_follows_a_restore(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of slots would be faulted in during the restore and the first step, which then take a third longer."""
    monkeypatch.setattr(save, "_RESTORE_FOLLOWS_S", 60.0)
    monkeypatch.setattr(restore, "_FIRST_STEP_S", 60.0 if ends == "a call of the loop" else 0.0)
    made: list[int] = []
    monkeypatch.setattr(files, "populate", lambda memory, between: made.append(memory.nbytes))
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(10), slots=3)]
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers) as first:
        first.save(0, args=save_args(make_state(0), 0))
    made.clear()
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers) as manager:
        manager.prepare(save_args(abstract(make_state()), 0))
        restored = manager.restore_async(None, args=restore_args(abstract(make_state()))).result()
        if ends == "a call of the loop":
            assert not made
            manager.should_save(1)
        assert_same(restored["state"], make_state(0))
        assert manager._pipeline.slots._worker.wait_idle(60)
        assert len(made) == 3


def test_restore_async_does_not_block_the_caller(held: Held) -> None:
    """A restart would compile only after it has read."""
    handle = held.restore_async()
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"not finished after 0.05 s; it continues"):
        handle.result(timeout=0.05)
    held.go.set()
    restored = handle.result(timeout=30)
    assert handle.done()
    assert_same(restored["state"], make_state(3))
    assert restored["data"] == {"step": 3}
    assert handle.result() is restored
    assert held.threads == ["ckptkit-restore"]


def test_other_calls_are_refused_until_result_is_called(held: Held) -> None:
    """One process would save a step of the old branch that another, which was faster, refuses."""
    handle = held.restore_async(2)
    said = "a restore_async is unfinished; call result"
    others = [
        lambda: held.manager.save(9, args=save_args(make_state(9), 9)),
        lambda: held.manager.restore(None),
        lambda: held.manager.restore_async(None),
        lambda: held.manager.inner.restore_chosen(None, choice=None),  # pyright: ignore[reportArgumentType]
        lambda: held.manager.all_steps(read=True),
        lambda: held.manager.delete(1),
    ]
    for other in others:
        with pytest.raises(ckptkit.CheckpointError, match=said):
            other()
    held.go.set()
    handle._thread.join()
    for other in others:  # that it is done is a local matter of timing
        with pytest.raises(ckptkit.CheckpointError, match=said):
            other()
    handle.result()
    assert held.manager.save(3, args=save_args(make_state(33), 3)), "the run goes on from step 2, as after restore"
    held.manager.wait_until_finished()
    assert_same(held.manager.restore(None, args=restore_args(abstract(make_state())))["state"], make_state(33))


def test_errors_equal_those_of_restore_and_end_it(held: Held) -> None:
    """A failure in the background would be lost, or leave the manager unusable."""
    held.go.set()
    state: dict[str, Any] = abstract(make_state())
    del state["w"]
    first = held.manager.restore_async(None, args=restore_args(state))
    for _ in range(2):
        with pytest.raises(ckptkit.TreeMismatchError, match="but not in abstract_state"):
            first.result()
    second = held.manager.restore_async(77)
    with pytest.raises(ckptkit.TreeMismatchError):
        first.result()
    with pytest.raises(ckptkit.CheckpointError, match="is unfinished"):
        held.manager.save(9, args=save_args(make_state(9), 9))
    with pytest.raises(ckptkit.StepNotFoundError, match="step 77 was not found"):
        second.result()
    with pytest.raises(ValueError, match="Must provide `args` of type `Composite`"):
        held.manager.restore_async(None, args=ocp.args.ArrayRestore())  # pyright: ignore[reportCallIssue]
    assert held.manager.save(9, args=save_args(make_state(9), 9))


def test_close_waits_for_a_pending_restore(held: Held) -> None:
    """The thread would read unmapped slots and closed devices."""
    handle = held.restore_async()
    threading.Timer(0.2, held.go.set).start()
    held.manager.close()
    assert handle.done()
    assert not handle._thread.is_alive()
