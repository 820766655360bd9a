"""The memory of accelerators that copies of saves may take, by a model of the allocator, in any order of steps."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptkit
from tests.snapshot.allocator import PIECE, Run, pieces

pytestmark = pytest.mark.usefixtures("accelerators")


@settings(deadline=None, max_examples=60)
@given(
    free=st.integers(0, 12),
    kept_free=st.integers(0, 12),
    leaves=st.integers(1, 6),
    actions=st.lists(st.one_of(st.sampled_from(["save", "finish"]), st.floats(0, 1)), min_size=3, max_size=25),
)
@example(free=10, kept_free=1, leaves=6, actions=[0.1, "save", 1.0])
def test_no_step_runs_out_of_memory_because_of_saves(
    free: int, kept_free: int, leaves: int, actions: list[str | float]
) -> None:
    """A save would end the run: the copy of the state, or of an earlier one, is where a step needs its memory. Each
    step is of another size, such as an evaluation, and needs up to all that is not kept free for copies."""
    run = Run((leaves + free) * PIECE, leaves, kept_free=kept_free * PIECE)
    for action in actions:
        if isinstance(action, float):
            run.step(int(max(0, free - kept_free) * action * PIECE))  # raises where our copies take its room
        elif action == "save" and len(run.under_way) < 2:
            run.save()
            assert sum(taken for _, taken, *_ in run.under_way) <= kept_free * PIECE
        elif action == "finish" and run.under_way:
            run.finish()
    while run.under_way:
        run.finish()


@settings(deadline=None, max_examples=60)
@given(
    free=st.integers(0, 12),
    leaves=st.integers(1, 6),
    share=st.floats(0, 1),
    saves=st.integers(0, 2),
    actions=st.lists(st.one_of(st.sampled_from(["save", "finish"]), st.floats(0, 1)), min_size=3, max_size=25),
)
def test_without_a_setting_the_largest_step_so_far_always_fits(
    free: int, leaves: int, share: float, saves: int, actions: list[str | float]
) -> None:
    """A save would end the run, although its owner has changed nothing: no setting is needed where no step is larger
    than all before. Saves before the first step are among them."""
    run = Run((leaves + free) * PIECE, leaves)
    for _ in range(saves):
        run.save()
    run.step(int(free * share * PIECE))
    for action in actions:
        if isinstance(action, float):
            run.step(int(free * share * action * PIECE))
        elif action == "save" and len(run.under_way) < 2:
            run.save()
        elif action == "finish" and run.under_way:
            run.finish()
    while run.under_way:
        run.finish()


@settings(deadline=None, max_examples=25)
@given(free=st.integers(2, 24), leaves=st.integers(1, 6), share=st.floats(0, 1), late=st.booleans())
def test_the_share_that_is_copied_does_not_shrink(free: int, leaves: int, share: float, late: bool) -> None:
    """From the second save on a part of the state would be waited for: the peak contains our own earlier copies."""
    run = Run((leaves + free) * PIECE, leaves)
    copied = []
    for _ in range(6):
        run.step(int(free * share * PIECE))
        copied.append(run.save())
        if late:  # the copies are there while the next step runs
            run.step(int(free * share * PIECE))
        run.finish()
    assert copied[0] == 0, "no step is known to have run before the first save"
    assert copied[1:] == sorted(copied[1:])
    if free * (1 - share) >= 2 * leaves + 2:
        assert copied[1] == leaves * PIECE


def test_save_before_the_first_step_copies_nothing_on_the_device() -> None:
    """The first step of the run would find its memory taken by the copy of the state that it starts from."""
    run = Run(10 * PIECE, 4)
    assert run.save() == run.save() == 0
    run.step(6 * PIECE)
    begun = run.under_way[0][0]
    assert begun.strategy == "block"
    assert "no step has run" in begun.reason
    assert run.allocator.puts == []


def test_nothing_is_copied_on_a_device_where_the_caller_has_no_room() -> None:
    """The first evaluation of a run would find the memory that it needs taken by a copy."""
    run = Run(100 * PIECE, 40, kept_free=0)
    run.step(10 * PIECE)
    assert run.save() == 0
    run.step(60 * PIECE)
    assert run.under_way[0][0].reason == "device_copy_bytes_max is 0"
    assert run.allocator.puts == []
    run.finish()


def test_setting_of_the_caller_reaches_the_stager(tmp_path: Path) -> None:
    """A copy would take the memory of the caller's largest program, although the caller has set a limit."""
    log, events = ckptkit.EventLog(), []
    log.observe(events.append)
    for number, kept_free in enumerate((0, 1 << 30)):
        saving = ckptkit.SaveOptions(device_copy_bytes_max=kept_free)
        with ckptkit.CheckpointManager(tmp_path / str(number), saving=saving, events=log) as manager:
            manager.save(1, args=ocp.args.StandardSave(pieces(2)))  # pyright: ignore[reportCallIssue]
    reasons = [event.fields["reason"] for event in events if event.kind == ckptkit.Kind.STAGED]
    assert reasons == ["device_copy_bytes_max is 0", "the devices do not report their memory"]
    with pytest.raises(ValueError, match="device_copy_bytes_max=-1: give a number of bytes, 0 for none, or None"):
        ckptkit.SaveOptions(device_copy_bytes_max=-1)


def test_strategies_follow_what_the_devices_have() -> None:
    """A device without room would be asked for a copy, or one with room would stall the loop for a transfer."""
    run = Run(12 * PIECE, 4)
    run.save()
    run.step(4 * PIECE)  # 4 of 12 were never in use: 2 of them may be taken
    assert run.save() == 2 * PIECE
    begun = run.under_way[-1][0]
    assert begun.reason == "0.0 GB of each device are free for copies; device_copy 0.000131 GB, block 0.000131 GB"
    silent = Run(12 * PIECE, 4)
    silent.allocator.reports = False
    assert silent.save() == 0
    begun = silent.under_way[-1][0]
    assert (begun.strategy, begun.reason) == ("block", "the devices do not report their memory")
