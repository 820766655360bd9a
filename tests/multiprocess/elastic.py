"""Runs of the trainer that go on, one launch after the other, on other processes and meshes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit import Event, EventLog, Kind
from ckptkit.goodput import load_run
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers, next_attempt
from tests.forked import WARM, launch_forked

STEP_LINE = re.compile(r"step +(\d+)/")
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The machines of a launch."""

    processes: int
    devices: int  # of each process
    mesh: str

    def __str__(self) -> str:
        return f"{self.processes} processes x {self.devices} devices, {self.mesh}"


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of the trainer below `directory`; each launch goes on where the last one stopped."""

    directory: Path
    batch: int
    steps: int
    corpus: Path
    keeps: bool = True  # checkpoints
    proofs: list[Path] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    def launch(self, shape: Shape, *flags: str, preempt_at: int | None = None) -> ExitCode:
        """Trains to the end, or until it is preempted once step `preempt_at` is done."""
        proof = self.directory / "proof" / str(len(self.proofs))
        self.proofs.append(proof)
        log = self.directory / "events" / "launcher.jsonl"
        events = EventLog(log, process=-1)
        launcher = Launcher(
            Workers(
                [*self._command(shape, proof), *flags],
                processes=shape.processes,
                devices_per_process=shape.devices,
                warm=WARM,
            ),
            policy=RestartPolicy(restarts=0, preempt_grace_s=120.0),
            first_attempt=next_attempt(log),
            events=events,
            hooks=Hooks(say=self.output.append, on_output=lambda process, line: hear(process, line)),
        )
        told = False

        def hear(process: int, line: str) -> None:
            nonlocal told
            self.output.append(f"{process}: {line}")
            step = STEP_LINE.match(line)
            if step and preempt_at is not None and int(step[1]) >= preempt_at and not told:
                told = True
                launcher.preempt()

        code = launch_forked(launcher)
        events.close()
        return code

    def copied(self, directory: Path) -> Run:
        """A run of its own that goes on from here: all files, and the proofs so far."""
        shutil.copytree(self.directory, directory)
        proofs = [directory / proof.relative_to(self.directory) for proof in self.proofs]
        return replace(self, directory=directory, proofs=proofs, output=[])

    def _command(self, shape: Shape, proof: Path) -> list[str]:
        words = [sys.executable, "-m", "trainer", "--preset", "tiny-mha", "--seed", "5", "--log-every", "1"]
        words += ["--steps", str(self.steps), "--mesh", shape.mesh, "--global-batch", str(self.batch)]
        words += ["--data", str(Path(asyncio.__file__).parent), "--run-dir", str(self.directory)]
        words += ["--corpus-dir", str(self.corpus)]
        words += ["--proof", str(proof), "--events", str(self.directory / "events"), "--attempt", "{attempt}"]
        if self.keeps:
            words += ["--checkpoint", str(self.directory / "durable"), "--save-every", "50", "--grace-s", "100"]
            words += ["--ram", str(self.directory / "ram"), "--ram-every", "2", "--host-id", "host-{process}"]
        return [*words, "--coordinator", "{coordinator}", "--processes", "{processes}", "--process", "{process}"]

    def taken(self) -> dict[int, tuple[frozenset[tuple[int, int]], frozenset[str]]]:
        """Step to what was read, (row, record), and the losses, over all launches and processes."""
        rows: dict[int, set[tuple[int, int]]] = defaultdict(set)
        losses: dict[int, set[str]] = defaultdict(set)
        for path in sorted(self.directory.glob("proof/*/*.jsonl")):
            for noted in map(json.loads, path.read_text().splitlines()):
                if path.name.startswith("records-"):
                    rows[noted["step"]] |= {(row, record) for row, record in noted["rows"]}
                else:
                    losses[noted["step"]].add(noted["loss"])
        return {step: (frozenset(rows[step]), frozenset(losses[step])) for step in sorted(rows)}

    def events(self, kind: Kind) -> list[Event]:
        """The events of one kind, of all launches, in order of time."""
        found = [event for log in load_run(self.directory / "events") for event in log if event.kind == kind]
        return sorted(found, key=lambda event: event.at_s)

    @property
    def said(self) -> str:
        """The end of the output, for a failure."""
        return "\n".join(self.output[-60:])
