"""Waits that name what they wait for, and log lines that reach a stream."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import ckptkit
from ckptkit.util import clock, waits
from ckptkit.util.waits import Meter, told

LINES = [
    "import orbax.checkpoint, logging, ckptkit",
    "logging.basicConfig(level='INFO')",  # does nothing: absl owns the root logger
    "ckptkit.log_to('INFO')",
    "ckptkit.log_to('INFO')",  # once more: in a notebook, the cell runs again
    "logging.getLogger('ckptkit').info('one line')",
    "logging.getLogger('ckptkit').debug('no line')",
    "ckptkit.log_to('DEBUG')",
    "logging.getLogger('ckptkit').debug('another')",
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are long after a moment."""
    for name, seconds in (("_LOGGED_EVERY_S", 0.05), ("_SHOWN_AFTER_S", 0.05), ("_SHOWN_EVERY_S", 0.02)):
        monkeypatch.setattr(waits, name, seconds)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("ckptkit")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield logger
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1], before[2]


def test_log_to_works_after_orbax_is_imported() -> None:
    """Breaks when absl's root handler swallows our lines, or the second call writes each line twice."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(LINES)], capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.split(" ", 2)[2] for line in done.stderr.splitlines() if "ckptkit" in line] == [
        "INFO ckptkit: one line",
        "DEBUG ckptkit: another",
    ]


def test_log_to_takes_a_stream(logger: logging.Logger) -> None:
    """Breaks when a user cannot send the lines to a file, or a misspelt level is ignored."""
    stream = io.StringIO()
    ckptkit.log_to("WARNING", stream=stream)
    logger.info("no line")
    logger.warning("a line")
    assert stream.getvalue().endswith("WARNING ckptkit: a line\n")
    assert stream.getvalue().count("\n") == 1
    with pytest.raises(ValueError, match="LOUD"):
        ckptkit.log_to("LOUD")


def test_long_wait_says_what_it_waits_for(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks when a job that hangs in a restore logs nothing."""
    caplog.set_level(logging.INFO, logger="ckptkit")
    heard = threading.Event()
    with told(lambda: heard.set() or "restore waits for process 3", show=False):
        assert heard.wait(20)
        assert heard.is_set()
    assert any("restore waits for process 3 (for " in record.getMessage() for record in caplog.records)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptkit-waits"]


def test_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks when every restore of a second has a line more."""
    caplog.set_level(logging.INFO, logger="ckptkit")
    with told(lambda: "never", show=True):
        pass
    assert caplog.records == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("show", [True, False])
def test_terminal_shows_progress_unless_it_is_off(
    quick: None, show: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks when a person looks at a terminal without progress, or `progress=False` shows it all the same."""
    caplog.set_level(logging.INFO, logger="ckptkit")
    terminal, asked = Terminal(), threading.Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    with told(lambda: asked.set() or "restore: 1 of 2", show=show):
        assert asked.wait(20)
    assert ("\rrestore: 1 of 2" in terminal.getvalue()) is show
    assert not show or terminal.getvalue().endswith("\r")  # the line is wiped: the next output begins at its left
    assert bool(caplog.records) is not show


def test_meter_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when progress is shown without what a person wants of it: how long it will still take."""
    now = {"s": 100.0}
    monkeypatch.setattr(clock, "monotonic_s", lambda: now["s"])
    meter = Meter()
    assert meter.text() == ""
    meter.begin(4 << 30)
    now["s"] += 2.0
    meter.add(1 << 30)
    assert meter.text() == "1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6 s left"
    meter.begin(0)
    now["s"] += 2.0
    meter.at(1 << 30)
    assert meter.text() == "1.0 GiB, 512.0 MiB/s"


def test_meter_adds_up_over_threads() -> None:
    """Breaks when bytes that two threads read at once are lost."""
    meter = Meter()
    meter.begin(1 << 20)
    threads = [threading.Thread(target=lambda: [meter.add(1 << 10) for _ in range(256)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.text().startswith("1.0 MiB of 1.0 MiB")


def test_output_into_a_pipe_has_no_progress() -> None:
    """Breaks when a log file of a job is filled with carriage returns."""
    code = "from ckptkit.util.waits import is_watched; print(is_watched())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
