"""One process of the trainer with its event log open, which can be told to die at a phase of a save.

    python -m tests.multiprocess.worker --process 0 --coordinator HOST:PORT --die tier:phase:step:process DIR

Runs the reference trainer's own loop (preset `tiny`) with all three tiers below DIR. With `--plain` it reads and
writes no checkpoint. On the attempt 0, process `process` sends itself SIGKILL when the phase is reached.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import ckptkit

PROCESSES = 2
STEPS = 12
RAM_EVERY, SSD_EVERY, DURABLE_EVERY = 1, 2, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--die")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--trace-opens", action="store_true")
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    if args.trace_opens:
        trace_opens(args.dir / f"opened-{args.process}.txt")
    log = ckptkit.EventLog(
        args.dir / "events" / f"attempt-{args.attempt}-process-{args.process}.jsonl", process=args.process
    )
    log.emit(ckptkit.Kind.STARTED, attempt=args.attempt, pid=os.getpid())
    if args.die and args.attempt == 0:
        log.observe(Killer(args.die, args.process))
    train(args, log)


def trace_opens(path: Path) -> None:
    """Writes down every path that is opened or listed, as Python's own audit reports it."""
    out = path.open("w", buffering=1)
    names = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.link"}

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in names and isinstance(arguments[0], str | os.PathLike):
            out.write(f"{os.fspath(arguments[0])}\n")

    sys.addaudithook(hook)


class Killer:
    """Sends this process SIGKILL at one phase of one step."""

    def __init__(self, die: str, process: int):
        tier, phase, step, victim = die.split(":")
        self._at = (tier or None, phase, int(step)) if int(victim) == process else None

    def __call__(self, event: ckptkit.Event) -> None:
        phase = "committed" if event.kind == ckptkit.Kind.COMMITTED else event.fields.get("phase")
        if (event.tier, phase, event.step) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(args: argparse.Namespace, log: ckptkit.EventLog) -> None:
    from trainer import loop
    from trainer.__main__ import main as command
    from trainer.__main__ import read_flags
    from trainer.cluster import leave

    flags = ["--preset", "tiny", "--steps", str(STEPS), "--mesh", "data=2,fsdp=2", "--run-dir", str(args.dir)]
    flags += ["--corpus-dir", str(args.dir.parent / "corpus"), "--seed", "11"]
    flags += ["--schedule-steps", "30"]  # the program of test_demo.py
    flags += ["--data", str(Path(asyncio.__file__).parent), "--log-every", "1"]
    flags += ["--coordinator", args.coordinator, "--processes", str(PROCESSES), "--process", str(args.process)]
    flags += ["--host-id", f"host-{args.process}", "--proof", str(args.dir / "proof" / str(args.attempt))]
    if not args.plain:
        flags += ["--checkpoint", str(args.dir / "durable"), "--save-every", str(DURABLE_EVERY)]
        flags += ["--ram", str(args.dir / "ram"), "--ram-every", str(RAM_EVERY)]
        flags += ["--ssd", str(args.dir / "ssd"), "--ssd-every", str(SSD_EVERY)]
    config = read_flags(command.make_context("worker", flags).params)
    loop.train(config, log)
    leave(config.cluster, 0)


if __name__ == "__main__":
    main()
