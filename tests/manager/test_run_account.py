"""The display of long saves on a terminal: bytes, rate, and the time that is left."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from ckptkit.events import EventLog
from ckptkit.manager.run_account import RunAccount
from ckptkit.save.book.under_way import SavesUnderWay
from ckptkit.util import clock, waits

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Saves:
    """Two saves under way, of which a test writes bytes."""

    def __init__(self) -> None:
        self.written_bytes = 10 * GIB  # of saves before
        self.under_way = SavesUnderWay(lambda: self.written_bytes)
        self.under_way.begin(1, frozenset({"ram", "durable"}), share_bytes=4 * GIB)


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where a person looks; waits are long after a moment."""
    for name, seconds in (("_SHOWN_AFTER_S", 0.02), ("_SHOWN_EVERY_S", 0.02)):
        monkeypatch.setattr(waits, name, seconds)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)  # in the test itself: pytest sets its own before
    return terminal


def test_bytes_left_are_those_of_the_durable_saves_under_way() -> None:
    """Breaks when the time left counts what was written before, or what the ramdisk alone gets."""
    saves = Saves()
    under_way = saves.under_way
    assert under_way.left_bytes() == 4 * GIB
    saves.written_bytes += GIB
    under_way.begin(2, frozenset({"ram"}), share_bytes=4 * GIB)
    under_way.begin(3, frozenset({"durable"}), share_bytes=4 * GIB)
    assert under_way.left_bytes() == 7 * GIB
    under_way.end(1, "ram")
    assert under_way.left_bytes() == 7 * GIB
    saves.written_bytes += GIB
    under_way.end(1, "durable")  # compressed: the rest of it does not come
    assert under_way.left_bytes() == 4 * GIB
    under_way.end(3)
    assert under_way.left_bytes() == 0


def wait_for(terminal: Terminal, text: str) -> None:
    deadline_s = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < deadline_s, terminal.getvalue()
        time.sleep(0.01)


def test_wait_for_saves_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a person sees how much was written, and not how long it will still take."""
    terminal = watched(monkeypatch)
    now = {"s": 100.0}
    monkeypatch.setattr(clock, "monotonic_s", lambda: now["s"])
    saves = Saves()
    with RunAccount(EventLog(), progress=True).waiting(saves.under_way):
        now["s"] += 2.0
        saves.written_bytes += GIB
        wait_for(terminal, "waits for step 1 in durable and ram: 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6 s left")
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptkit-waits"]


def test_save_that_waits_for_the_one_before_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a notebook waits in `save`, and nothing shows why."""
    terminal = watched(monkeypatch)
    saves = Saves()
    with RunAccount(EventLog(), progress=True).saving(2, saves.under_way):
        saves.written_bytes += GIB
        wait_for(terminal, "\rsave waits for step 1 in durable and ram: 1.0 GiB of 4.0 GiB")


def test_progress_is_off_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when `progress=False` costs each save a thread."""
    terminal = watched(monkeypatch)
    with RunAccount(EventLog(), progress=False).saving(2, Saves().under_way):
        assert not [thread for thread in threading.enumerate() if thread.name == "ckptkit-waits"]
    assert terminal.getvalue() == ""
