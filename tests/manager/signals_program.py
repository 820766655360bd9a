"""A program whose signal handler emits and asks at every line of the library; in the middle of an emit it saves."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp

from ckptkit import CheckpointManager, EventLog, EverySteps, Kind, Tier
from ckptkit.util.gc_pause import collection_paused


def main(act: str, home: Path) -> None:
    """Traces one act, and raises the signal once at each line of ckptkit."""
    events = EventLog(home / "attempt-0-process-0.jsonl")
    manager = CheckpointManager(
        str(home / "root"),
        options=ocp.CheckpointManagerOptions(save_interval_steps=100_000),
        tiers=[Tier.ram(str(home / "ram"), save=EverySteps(1))],
        events=events,
    )
    state = {"w": jnp.arange(8.0)}
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        manager.save(step, args=ocp.args.StandardSave(state))

    acts = {
        "save": save,
        "emit": lambda: events.emit(Kind.SPAN, span="mine", duration_s=0.0),
        "should_save": lambda: manager.should_save(step + 1),
    }

    def handle(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        for name, each in acts.items():
            if name != "save" or act == "emit":
                each()
        with collection_paused():
            pass

    signal.signal(signal.SIGUSR1, handle)
    seen: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        name = frame.f_code.co_filename
        if "/ckptkit/" not in name or "site-packages" in name:
            return None
        if event == "line" and (name, frame.f_lineno) not in seen:
            seen.add((name, frame.f_lineno))
            signal.raise_signal(signal.SIGUSR1)
        return trace

    acts[act]()  # what is made at the first call is there
    for _ in range(3):
        sys.settrace(trace)
        try:
            acts[act]()
        finally:
            sys.settrace(None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    manager.wait_until_finished()
    manager.close()
    print("lines", len(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
