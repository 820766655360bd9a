"""Pausing the collector leaves it as it was."""

from __future__ import annotations

import gc
import threading

import pytest

from ckptkit.util.gc_pause import collection_paused


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
