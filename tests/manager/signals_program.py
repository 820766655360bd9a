"""A program whose signal handler emits, asks or saves in the middle of a call, once at each line of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp

from ckptkit import CheckpointManager, Event, EventLog, EverySteps, GoodputOptimal, Kind, Tier
from ckptkit.util.gc_pause import collection_paused

HANGS_S = 60.0
LIBRARY = str(Path(os.__file__).parent)  # Python's own, apart from what is installed into it
OURS = str(Path(__file__).parents[2] / "ckptkit")


class Job:
    """A step loop and its handler. `tiers`: durable, ram, or policy (a learned interval for the ramdisk)."""

    def __init__(self, home: Path, tiers: str):
        self.events = EventLog(home / "attempt-0-process-0.jsonl")
        self.over: dict[int, set[str]] = {}  # by step, the tiers that have it, or why it was skipped
        self.events.observe(self._hear)
        learned = GoodputOptimal(self.events, tiers=["ram", "durable"]) if tiers == "policy" else None
        ram = Tier.ram(str(home / "ram"), save=EverySteps(1) if learned is None else learned.every("ram"))
        durable_interval = 1 if tiers == "durable" else 100_000
        self.manager = CheckpointManager(
            str(home / "root"),
            options=ocp.CheckpointManagerOptions(save_interval_steps=durable_interval, max_to_keep=2),
            tiers=[] if tiers == "durable" else [ram],
            events=self.events,
        )
        self.step, self.handled = 0, 0
        self.taken: set[int] = set()

    def save(self) -> None:
        """The loop's: also of a step that the handler has saved already."""
        self.step += 1
        if self.manager.save(self.step, args=self._args()):
            self.taken.add(self.step)

    def save_last(self) -> None:
        """The handler's, of the loop's next step: it has the state of that."""
        self.manager.save(self.step + 1, args=self._args(), force=True)
        self.manager.wait_until_finished()
        assert "durable" in self.over[self.step + 1], f"step {self.step + 1}: {self.over.get(self.step + 1)}"

    def emit(self) -> None:
        self.events.emit(Kind.SPAN, span="mine", duration_s=0.0)

    def should_save(self) -> None:
        self.manager.should_save(self.step + 1)

    def ask(self) -> None:
        self.emit()
        self.should_save()
        self.manager.latest_step()
        with collection_paused():
            pass

    def _args(self) -> Any:
        return ocp.args.StandardSave({"w": jnp.arange(8.0)})  # pyright: ignore[reportCallIssue]

    def _hear(self, event: Event) -> None:
        if event.step is not None and event.kind in (Kind.COMMITTED, Kind.SKIPPED):
            what = event.tier if event.kind == Kind.COMMITTED else event.fields["reason"]
            self.over.setdefault(event.step, set()).add(str(what))


def handler(job: Job, does: str) -> Callable[[int, FrameType | None], None]:
    """ask: emits and asks; save: saves and waits; exit: the same, and ends the program."""

    def handle(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        traced = sys.gettrace()
        sys.settrace(None)
        try:
            job.ask() if does == "ask" else job.save_last()
            job.handled += 1
        finally:
            sys.settrace(traced)
        if does == "exit":
            sys.exit(0)

    return handle


def signal_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises the signal at the `line`-th line of ckptkit, or of Python's library, that runs."""
    left = line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        del arg
        name = frame.f_code.co_filename
        if not name.startswith((OURS, LIBRARY)) or "site-packages" in name:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    return trace


def main(act: str, does: str, tiers: str, every: int, home: Path) -> None:
    """Repeats one act, and raises the signal at the first, (1 + `every`)-th, ... line, until the act has no more."""
    job = Job(home, tiers)
    signal.signal(signal.SIGUSR1, handler(job, does))
    acts: dict[str, Callable[[], Any]] = {
        "save": job.save,
        "emit": job.emit,
        "should_save": job.should_save,
        "wait_until_finished": job.manager.wait_until_finished,
        "latest_step": job.manager.latest_step,
    }
    acts[act]()  # what is made at the first call is there
    signals = 0
    while job.handled == signals:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        sys.settrace(signal_at(1 + signals * every))
        try:
            acts[act]()
        except SystemExit:
            assert does == "exit"
        finally:
            sys.settrace(None)
        signals += 1
        job.save()  # the loop goes on, to the step that the handler saved
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    job.manager.wait_until_finished()
    job.manager.close()
    lost = job.taken - job.over.keys()
    assert not lost, f"neither committed nor skipped: {sorted(lost)}"
    print("signals", job.handled)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], words[1], words[2], int(words[3]), Path(words[4]))
