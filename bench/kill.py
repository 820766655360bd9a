"""`python -m bench kill`: processes of a saving job are killed again and again, and what comes back is judged.

Each resume must give the newest save that the surviving files cover (an oracle reads them by the format alone), bit for
bit as in a run that nothing happened to.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console

from bench.environment import WORKER_ENV, environment, store_result
from bench.kill_hosts import Hosts, running_hosts
from bench.kill_oracle import Save, newest_covered
from bench.kill_report import judge, show
from ckptkit.events import EventLog
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.launch.chaos import Chaos, Injected
from ckptkit.launch.faults import Fault

Moment = Literal["time", "mid-save", "mid-flush", "mid-restore"]
MOMENTS: tuple[Moment, ...] = ("time", "mid-save", "mid-flush", "mid-restore")
SHORT = 5
FINAL_STEPS = 8  # of the life after the last kill
LATEST_STEPS = 40  # a life in which the planned moment has not come by then is ended anyway
TIME_MAX_S = 1.5
LIFE_LIMIT_S = 240.0  # a hang, not a slow machine
PHASES = {
    "mid-save": ("phase save begun", "phase ram staged", "phase ram committed_here"),
    "mid-flush": ("phase ssd begun", "phase ssd copied", "phase durable begun", "phase durable written"),
    "mid-restore": ("phase restore planned",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The fault in one life of the job."""

    moment: Moment
    line: str | None  # of a victim's output, at which it is killed; None: after `after_s`
    after_s: float  # since the life's first step
    min_steps: int  # of the life, before a line counts
    victims: tuple[int, ...]
    wipes: bool

    def __str__(self) -> str:
        who = "process" if len(self.victims) == 1 else "replica"
        wiped = ", ramdisk wiped" if self.wipes else ""
        return f"{self.moment} ({self.line or f'{self.after_s:.2f} s'}): {who} {self.victims}{wiped}"


def plan(kills: int, processes: int, seed: int) -> list[Kill]:
    """The kills of a seed: every moment, one process or one whole replica, half with the ramdisk wiped."""
    chance = random.Random(f"kill {seed}")
    half = processes // 2
    planned = []
    for number in range(kills):
        moment = MOMENTS[number % len(MOMENTS)]
        is_replica = chance.random() < 0.5
        first = chance.randrange(2) * half if is_replica else chance.randrange(processes)
        planned.append(
            Kill(
                moment=moment,
                line=chance.choice(PHASES[moment]) if moment in PHASES else None,
                after_s=chance.uniform(0.0, TIME_MAX_S),
                min_steps=0 if moment == "mid-restore" else chance.randrange(2, 16),
                victims=tuple(range(first, first + half)) if is_replica else (first,),
                wipes=number // len(MOMENTS) % 2 == 0,
            )
        )
    return planned


@dataclass(slots=True)
class Campaign:
    """One job, killed as planned; the oracle's verdict after each kill is in `expected`.

    The machinery of `ckptkit chaos` kills and wipes. The moments are chosen here: most are lines of a victim's output.
    """

    hosts: Hosts
    kills: Sequence[Kill]
    say: Any
    cold: bool = False
    expected: list[Save | None] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    _steps: int = 0
    _fired: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _chaos: Chaos = field(init=False)
    _hang: threading.Timer | None = None
    _timer: threading.Timer | None = None

    def run(self) -> ExitCode:
        """Kills the job as often as planned and lets it come to an end."""
        self._chaos = Chaos(on_lost=self._after_loss, say=lambda line: None)
        self._watch()
        try:
            ended = self._chaos.run(self._launcher, on_output=self._hear)
        finally:
            for timer in (self._hang, self._timer):
                if timer is not None:
                    timer.cancel()
        assert ended.code is not None, "a job that was started here"
        return ended.code

    def _launcher(self, hooks: Hooks, first_attempt: int) -> Launcher:
        # A life that fails by itself is started again too: it is reported, and does not cost a planned kill its turn.
        last = ["--last-attempt", str(len(self.kills)), "--steps", str(FINAL_STEPS)]
        return Launcher(
            Workers(
                worker_command(["--attempt", "{attempt}", *last]),
                prefixes=self.hosts.prefixes,
                warm=WarmStart(is_cold=self.cold),
                processes=len(self.hosts.hosts),
                devices_per_process=1,
                env=WORKER_ENV,
            ),
            first_attempt=first_attempt,
            coordinator_host=self.hosts.coordinator_host,
            policy=RestartPolicy(restarts=len(self.kills), backoff_s=0.0, grace_s=0.2),
            events=EventLog(self.hosts.home / "launcher.jsonl", process=-1),
            hooks=hooks,
        )

    def _watch(self) -> None:
        if self._hang is not None:
            self._hang.cancel()
        self._hang = threading.Timer(LIFE_LIMIT_S, self._chaos.stop)
        self._hang.daemon = True
        self._hang.start()

    def _hear(self, process: int, line: str) -> None:
        with self._lock:
            self.last_lines = [*self.last_lines[-39:], f"{process}: {line}"]
            life = len(self.expected)
            if life >= len(self.kills) or self._fired:
                return
            kill = self.kills[life]
            if process == 0 and line.startswith("step "):
                self._steps += 1
                if self._steps == 1 and kill.line is None:
                    self._timer = threading.Timer(kill.after_s, self._fire, [life])
                    self._timer.daemon = True
                    self._timer.start()
            is_line = line == kill.line and process == kill.victims[0] and self._steps >= kill.min_steps
            if is_line or self._steps >= LATEST_STEPS:
                self._fire(life)

    def _fire(self, life: int) -> None:
        with self._lock:
            if self._fired or life != len(self.expected):
                return
            self._fired = True
            self._chaos.inject(self._fault(life, self.kills[life]))

    def _fault(self, life: int, kill: Kill) -> Fault:
        rams = tuple(str(self.hosts.hosts[victim].ram) for victim in kill.victims)
        wipes = rams if kill.wipes else ()
        return Fault(number=life, after_s=kill.after_s, kind="kill", victims=kill.victims, wipes=wipes)

    def _after_loss(self, attempt: int, process: int, struck: Sequence[Injected]) -> None:
        """All processes are dead, and the files are deleted that are lost with them: the oracle looks at the rest."""
        with self._lock:
            life = len(self.expected)
            if not struck:
                self.unplanned.append(f"life {attempt}: process {process} was lost by itself")
                self.unplanned += self.last_lines[-20:]
            self.expected.append(covered(self.hosts))
            self.say(f"kill {life + 1}/{len(self.kills)} {self.kills[life]}; the files cover {self.expected[-1]}")
            self._fired, self._steps = False, 0
            self._watch()


def covered(hosts: Hosts) -> Save | None:
    """The oracle's verdict on the current files."""
    ram, ssd = [host.ram for host in hosts.hosts], [host.directory / "ssd" for host in hosts.hosts]
    return newest_covered(ram, ssd, hosts.home / "durable")


def worker_command(words: Sequence[str]) -> list[str]:
    """The command of each process."""
    return [sys.executable, "-m", "bench.kill_worker", "--process", "{process}", "--processes", "{processes}", *words]


def run_reference(hosts: Hosts, steps: int) -> None:
    """The run that nothing happens to, on the same hosts: it writes proofs of attempt -1."""
    lines: list[str] = []
    launcher = Launcher(
        Workers(
            worker_command(["--attempt", "-1", "--plain", "--steps", str(steps)]),
            prefixes=hosts.prefixes,
            warm=WarmStart(is_cold=True),
            env=WORKER_ENV,
            processes=len(hosts.hosts),
            devices_per_process=1,
        ),
        coordinator_host=hosts.coordinator_host,
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: lines.append(f"{process}: {line}"), say=lines.append),
    )
    if launcher.run() != ExitCode.OK:
        raise click.ClickException("the undisturbed run failed:\n" + "\n".join(lines[-20:]))


@click.command(context_settings={"max_content_width": 120})
@click.option("--processes", type=click.IntRange(2), default=4, show_default=True, help="An even number.")
@click.option("--kills", type=click.IntRange(1), default=SHORT, show_default=True, help="How often.")
@click.option("--seed", type=int, default=0, show_default=True, help="Repeats moments, victims and wipes.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every kill, as JSON.")
@click.option("--cold", is_flag=True, help="Every worker starts from nothing, as before `ckptkit run`.")
@click.option("--keep", is_flag=True, help="Keep the logs, and print their place.")
def main(processes: int, kills: int, seed: int, json_path: Path | None, cold: bool, keep: bool) -> None:
    """Kills processes of a saving job at random moments, and judges every resume."""
    if processes % 2:
        raise click.UsageError("--processes must be even: two replicas of one half each")
    console, where = Console(stderr=True), environment()
    home = Path(tempfile.mkdtemp(prefix="ckptkit-kill-"))
    try:
        with running_hosts(home, processes) as hosts:
            if hosts.why_shared is not None:
                console.print(f"hosts share the machine's network and mounts: {hosts.why_shared}", markup=False)
            planned = plan(kills, processes, seed)
            campaign = Campaign(hosts, planned, lambda text: console.print(text, markup=False), cold)
            code = campaign.run()
            if code != ExitCode.OK:
                campaign.unplanned += [f"the job ended with {code.name}", *campaign.last_lines[-20:]]
            lives = sorted(home.glob("host-*/proof-*.jsonl"))
            furthest = max((json.loads(x)[0] for path in lives for x in path.read_text().splitlines()), default=1)
            run_reference(hosts, furthest)
            result = {
                "benchmark": "kill",
                "environment": where,
                "seed": seed,
                "processes": processes,
                "start": "cold" if cold else "warm",
                "apart": hosts.why_shared is None,
                "unplanned": campaign.unplanned,
                "moments": dict(Counter(kill.moment for kill in campaign.kills)),
                **judge(home, campaign.kills, campaign.expected),
            }
    finally:
        if keep:
            console.print(f"logs, proofs and the durable root: {home}", markup=False)
        else:
            shutil.rmtree(home, ignore_errors=True)
    show(result, Console())
    store_result(result, json_path)
    raise SystemExit(0 if result["recovered"] == kills and not result["unplanned"] else 1)
