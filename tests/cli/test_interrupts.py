"""Ctrl-C ends a command with 130, at any time, and leaves nothing next to the target except what `--resume`
continues."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ckptkit.cli.interrupts import Interrupts
from ckptkit.conversion import converting
from tests.cli.conftest import Run
from tests.formats.writers import by_safetensors

SEED = int(os.environ.get("CKPTKIT_FUZZ_SEED", "11"))

# Children of one process that has imported all, so that most of their time is work. The work takes 0.8 s at least, and
# the garbage collector, which has a callback as JAX gives it one, 0.3 ms whenever it runs. Prints the exit codes.
_RUNS = """
import gc, os, random, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs us in the background has it ignored
from ckptkit.cli import main
from ckptkit.conversion import converting
import ckptkit.cli.convert, ckptkit.formats.orbax

def slowly(*arguments, plain=converting.write_tensor):
    time.sleep(0.05)
    gc.collect()
    return plain(*arguments)

converting.write_tensor = slowly
gc.callbacks.append(lambda phase, info: time.sleep(0.0003))
source, above, seed, *runs = sys.argv[1:]
children = []
for run in runs:
    children.append(os.fork())
    if not children[-1]:
        sys.stderr = open(f"{above}/err{run}", "w")
        delay_s = random.Random(f"{seed} {run}").uniform(0.01, 0.6)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        code = main(["convert", source, f"{above}/t{run}", "--to", "npz", "--memory", "64KiB"])
        sys.stderr.flush()
        os._exit(code)
for child in children:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("where", ["collector", "dropped"])
def test_lost_interrupt_is_raised_again(where: str, ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a callback of the garbage collector is only printed, some C code drops it: the command ran on."""
    source = by_safetensors(tmp_path / "a.safetensors", {"w": np.arange(9.0)})
    plain = converting.write_tensor

    def slow(*arguments: object) -> object:
        if where == "collector":
            gc.callbacks.append(lost)
            gc.collect()
            gc.callbacks.remove(lost)
        else:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        return plain(*arguments)  # pyright: ignore[reportArgumentType]

    def lost(phase: str, info: object) -> None:
        if phase == "start":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

    monkeypatch.setattr(converting, "write_tensor", slow)
    hook, handler = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        said = ckpt("convert", source, tmp_path / "t", "--to", "npz")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.unraisablehook is hook
    assert (said.code, said.err.splitlines()[-2]) == (130, "ckptkit: interrupted")
    assert "--resume continues it" in said.err
    assert sorted(os.listdir(tmp_path)) == [".t.ckptkit-part", "a.safetensors"]


def test_interrupt_during_an_import_is_an_interrupt(ckpt: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that an interrupt has kept from being imported would be reported as an internal error."""

    def fails(*arguments: object, **options: object) -> object:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("ckptkit.cli.convert.open_checkpoint", fails)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        said = ckpt("convert", tmp_path / "a", tmp_path / "b", "--to", "npz")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (said.code, said.err) == (130, "ckptkit: interrupted\n")


def test_ignored_interrupts_stay_ignored() -> None:
    """A command in the background of a shell would end when somebody stops another one."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert not interrupts.seen
    finally:
        signal.signal(signal.SIGINT, handler)


def test_commands_in_other_threads_leave_signals_alone() -> None:
    """Python refuses to set a handler there, and the command would end in an internal error."""
    before, failed = signal.getsignal(signal.SIGINT), []

    def enters() -> None:
        try:
            with Interrupts():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=enters)
    thread.start()
    thread.join()
    assert (failed, signal.getsignal(signal.SIGINT)) == ([], before)


@pytest.mark.long
def test_twenty_interrupts_at_random_times(tmp_path: Path) -> None:
    """Ctrl-C would be lost now and then, or leave something that no message names."""
    tree = {f"w{at}": np.full(1 << 14, at, np.float32) for at in range(16)}
    source, runs = by_safetensors(tmp_path / "a.safetensors", tree), range(20)
    print(f"CKPTKIT_FUZZ_SEED={SEED}")
    (tmp_path / "made").mkdir()
    command = [sys.executable, "-c", _RUNS, str(source), str(tmp_path / "made"), str(SEED), *map(str, runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["130"] * len(runs), (done.stdout, done.stderr[-2000:])
    left = sorted(each.name for each in (tmp_path / "made").iterdir() if not each.name.startswith("err"))
    for run in runs:
        said = (tmp_path / "made" / f"err{run}").read_text()
        assert "ckptkit: interrupted" in said
        assert "Exception ignored" not in said
        assert (f".t{run}.ckptkit-part" in left) <= ("--resume continues it" in said), (run, said)
    assert set(left) <= {f".t{run}.ckptkit-part" for run in runs}
