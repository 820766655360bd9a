"""Pausing the collector leaves it as it was."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.util import gc_pause
from ckptkit.util.gc_pause import collection_paused, old_afterwards


@pytest.fixture(scope="module", autouse=True)
def unfrozen() -> Iterator[None]:
    """`tests/conftest.py` freezes what collection has made, and a caller's frozen objects stay so."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_the_collector_runs_again_when_the_last_pause_ends() -> None:
    """If it failed, a restore would leave a job that never frees a cycle, until it has no memory left."""
    assert gc.isenabled()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with collection_paused():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled(), "the other pause goes on"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    """If it failed, one step that does not verify would switch the collector off for good."""
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    """If it failed, a job that collects by hand, between its steps, would be interrupted in them after a restore."""
    gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_collected_right_after_a_pause() -> None:
    """A restore of thousands of leaves would end in a look at all that it made, none of which is garbage."""
    gc.collect()
    with old_afterwards():
        made = [[number] for number in range(5000)]
    assert gc.get_count()[0] < 700
    assert any(each is made for each in gc.get_objects(generation=2))


def test_garbage_from_before_a_pause_is_freed() -> None:
    """The state that a rollback replaces would stay on its device, if it is a part of a cycle, as modules are."""
    gc.collect()
    state = Cycle()
    gone = weakref.ref(state)
    del state
    with old_afterwards():
        assert gone() is None


def test_full_collections_stay_due() -> None:
    """A job that pauses in each of its steps would never free a cycle: what counts as old is not counted as new."""
    gc.collect()
    made: list[list[int]] = []
    for _ in range(20):
        with old_afterwards():
            made = [[number] for number in range(10)]
    assert not any(each is made for each in gc.get_objects(generation=2))


def test_frozen_objects_stay_frozen() -> None:
    """A worker that was forked with frozen objects would copy their pages, at its next collection."""
    made = [[0]]
    gc.collect()
    gc.freeze()
    try:
        with old_afterwards():
            pass
        assert not any(each is made for each in gc.get_objects()), "it has all objects but those that are frozen"
    finally:
        gc.unfreeze()
    assert any(each is made for each in gc.get_objects())


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each restore of a worker that a template forked would count the template's objects twice: 23 ms each time."""
    gc.collect()
    counts: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 1)
    for _ in range(3):
        with old_afterwards():
            pass
    assert len(counts) == 1
    gc.collect()


def test_pause_that_begins_where_another_one_ends_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that saves at the end of a save would leave the process without a collector."""
    enable, nested = gc.enable, [True]

    def interrupted() -> None:
        if nested:
            nested.clear()
            with collection_paused():
                pass
        enable()

    monkeypatch.setattr(gc, "enable", interrupted)
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("line", range(1, 8))
def test_pause_whose_end_a_signal_has_cut_off_ends_with_the_next_one(line: int) -> None:
    """Ctrl-C at the end of a save would leave the process without a collector for good."""
    left = [line]

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "end" or frame.f_globals["__name__"] != "ckptkit.util.gc_pause":
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    try:
        with collection_paused():
            sys.settrace(interrupt)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not gc_pause._pauses
