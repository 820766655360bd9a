"""`python -m bench hosts`: a job of several hosts and a spare loses workers and whole hosts, one after the other.

Each host has an agent of `ckptkit run` and one worker, in a network with mounts of its own. A lost host is one whose
agent is killed, and with it all its processes; its ramdisk is wiped. (A host that loses its power is noticed by its
silence: 5 s.) The spare takes its place, and the lost host comes back as the next spare.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from bench.environment import WORKER_ENV, environment, store_result
from bench.kill_hosts import Hosts, running_hosts
from bench.resume_phases import Phase, resumes
from ckptkit.events import Kind, read_events
from ckptkit.launch import ExitCode, free_port
from ckptkit.launch.harm import emptied
from ckptkit.launch.run_command import SECRET_NAME

Victim = Literal["worker", "host"]
NEXT_STEP_BAR_S = 4.0  # of a lost host
ENDED_BAR_S = 0.3  # from any loss until no worker of any host runs
_LIMIT_S = 240.0  # a hang, not a slow machine
_LOOK_S = 0.05
_STEPS_MIN = 6  # between two kills: there is a newer save
_QUIET_S = 1.0  # without processor time: a template has imported everything


@dataclass(slots=True)
class Job:
    """The agents of all hosts; the last host begins as the spare."""

    hosts: Hosts
    port: int
    has_copies: bool = False  # of each host's share, on another host; else there are data replicas
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """Where all of it is."""
        return self.hosts.home

    def start(self, number: int) -> None:
        """Starts the agent of a host."""
        words = ["--nnodes", str(len(self.hosts.hosts) - 1), "--node-rank", str(number), "--devices-per-process", "1"]
        words += ["--rendezvous", f"{self.hosts.coordinator_host}:{self.port}", "--max-restarts", "1000"]
        if number == 0:
            words += ["--status", str(self.home / "status.json"), "--events", str(self.home / "shared")]
        worker = ["bench.kill_worker", "--compile-cache", str(self.home / "shared" / "compile-cache")]
        worker += ["--peer-copies"] * self.has_copies
        for name in ("process", "processes", "attempt"):
            worker += [f"--{name}", f"{{{name}}}"]
        command = [sys.executable, "-m", "ckptkit.cli", "run", *words, "--", sys.executable, "-m", *worker]
        with (self.home / f"agent-{number}.log").open("ab") as log:
            self.agents[number] = subprocess.Popen(
                [*self.hosts.prefix(number), *command],
                env={**os.environ, **WORKER_ENV, SECRET_NAME: self.secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def status(self) -> dict[str, Any]:
        """The newest status of the job; empty before the first."""
        path = self.home / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def worker(self, number: int) -> int | None:
        """The process id of the worker on a host; None on a spare."""
        return next((pid for pid, name in _children(self.agents[number].pid) if name[0].isdigit()), None)

    def templates(self) -> list[int]:
        """The process ids of all templates."""
        found = (_children(agent.pid) for agent in self.agents.values())
        return [pid for children in found for pid, name in children if not name[0].isdigit()]

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Waits until something is there. Raises click's error with the agents' last lines if it never is."""
        end_s = time.monotonic() + _LIMIT_S
        while not is_there():
            if time.monotonic() > end_s or any(agent.poll() is not None for agent in self.agents.values()):
                logs = {path.name: path.read_text().splitlines()[-8:] for path in self.home.glob("agent-*.log")}
                raise click.ClickException(f"waiting for {what}: {json.dumps(logs, indent=1)}")
            time.sleep(_LOOK_S)

    def wait_warm(self, attempt: int) -> None:
        """Waits until the attempt has made some steps, and every host has a template with nothing left to import."""
        self.wait(lambda: self.status().get("newest_attempt_with_steps") == attempt, f"a step of attempt {attempt}")
        self.wait(lambda: _steps(self.home, attempt) >= _STEPS_MIN, f"{_STEPS_MIN} steps of attempt {attempt}")
        self.wait(lambda: len(self.templates()) == len(self.agents), "a template on each host")
        quiet = (0.0, time.monotonic())

        def is_quiet() -> bool:
            nonlocal quiet
            used_s = _cpu_s(self.templates())
            if used_s != quiet[0]:
                quiet = (used_s, time.monotonic())
            return time.monotonic() - quiet[1] > _QUIET_S

        self.wait(is_quiet, "templates that are ready")

    def close(self) -> None:
        """Ends everything."""
        if 0 in self.agents:
            self.agents[0].send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):  # it is killed right after
                self.agents[0].wait(timeout=20)
        for agent in self.agents.values():
            agent.kill()
            agent.wait()


def measure(job: Job, kills: int, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Workers and hosts are killed in turn; a row for each kill."""
    chance = random.Random(f"hosts {seed}")
    for number in range(len(job.hosts.hosts)):
        job.start(number)
    rows: list[dict[str, Any]] = []
    attempt = 0
    for kill in range(kills):
        job.wait_warm(attempt)
        what: Victim = "host" if kill % 2 == 0 else "worker"
        running = [number for number in job.agents if job.worker(number) is not None and (number or what == "worker")]
        rows.append(_killed(job, what, chance.choice(running), attempt))
        say(f"kill {kill + 1}/{kills}, {what}: {rows[-1]['next_step_s']:.2f} s to the next step")
        attempt = rows[-1]["attempt"]
    phases = {each.attempt + 1: each.phases_s for each in resumes(_logs(job.home))}
    return [{**row, "phases_s": {str(p): s for p, s in phases.get(row["attempt"], {}).items()}} for row in rows]


def _killed(job: Job, what: Victim, victim: int, attempt: int) -> dict[str, Any]:
    known = len(job.status()["losses"])
    pid = job.agents[victim].pid if what == "host" else job.worker(victim)
    assert pid is not None, "chosen among those that run"
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)
    if what == "host":
        job.agents.pop(victim).wait()
        emptied(job.hosts.hosts[victim].ram)
    job.wait(lambda: bool(job.status()["recoveries"][known:]), "the next step")
    status = job.status()
    loss, back = status["losses"][known], status["recoveries"][known]
    first = _first_steps(job.home, back["attempt"])
    if what == "host":
        job.start(victim)  # only now: a scheduler takes longer than a spare
    return {
        "what": what,
        "victim": victim,
        "attempt": back["attempt"],
        "attempts": back["attempt"] - attempt,
        "noticed_s": round(loss["at_s"] - killed_s, 3),
        "ended_s": round(loss["at_s"] - killed_s + loss["ended_s"], 3),
        "next_step_s": round(max(first) - killed_s, 3),
        "repeated_steps": back["repeated"],
    }


def _children(agent: int) -> Iterator[tuple[int, str]]:
    """With their names: a worker has that of its process and module, `2:kill_worker`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                yield int(path.name), (path / "comm").read_text()
        except (OSError, ValueError, IndexError):
            continue  # it has ended


def _cpu_s(pids: Iterable[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _logs(home: Path, attempt: str = "*") -> list[Any]:
    paths = [*home.glob(f"host-*/events/attempt-{attempt}-process-*.jsonl"), home / "shared" / "launcher.jsonl"]
    return [read_events(path) for path in paths]


def _spans(home: Path, attempt: int) -> list[list[float]]:
    """When each process has ended its steps."""
    logs = _logs(home, str(attempt))[:-1]
    return [[e.at_s for e in log if e.kind == Kind.SPAN and e.fields["span"] == "step"] for log in logs]


def _first_steps(home: Path, attempt: int) -> list[float]:
    return [steps[0] for steps in _spans(home, attempt) if steps]


def _steps(home: Path, attempt: int) -> int:
    return min(map(len, _spans(home, attempt)), default=0)


def wrong_bits(home: Path) -> int:
    """Steps that a process did again with other bits than before."""
    return sum(len(found) > 1 for found in digests_of(home).values())


def digests_of(home: Path) -> dict[tuple[str, int], set[str]]:
    """The digests of each process's part of the state after each step, over all lives."""
    digests: dict[tuple[str, int], set[str]] = {}
    for path in home.glob("host-*/events/attempt-*-process-*.jsonl"):
        _, attempt, _, process = path.stem.split("-")
        for line in (path.parent.parent / f"proof-{attempt}.jsonl").read_text().split("\n")[:-1]:
            step, digest = json.loads(line)
            digests.setdefault((process, step), set()).add(digest)
    return digests


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by what was lost, and the bars."""

    def of(what: str, figure: str) -> float | None:
        values = [row[figure] for row in rows if row["what"] == what]
        return round(median(values), 3) if values else None

    figures = ("noticed_s", "ended_s", "next_step_s", "repeated_steps")
    found: dict[str, Any] = {what: {each: of(what, each) for each in figures} for what in ("host", "worker")}
    for what in ("host", "worker"):
        phases = [row["phases_s"] for row in rows if row["what"] == what and row["phases_s"]]
        found[what]["phases_s"] = {str(p): round(median(each[str(p)] for each in phases), 3) for p in Phase if phases}
    ended_s = round(median(row["ended_s"] for row in rows), 3)
    next_s = found["host"]["next_step_s"]
    found["bars"] = {
        name: {"found": value, "bar": bar, "met": value is not None and value <= bar}
        for name, value, bar in (("next_step_s", next_s, NEXT_STEP_BAR_S), ("ended_s", ended_s, ENDED_BAR_S))
    }
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the account."""
    where = "in networks and mounts of their own" if result["apart"] else "on one shared machine"
    console.print(f"{result['hosts']} hosts and a spare {where}, {len(result['rows'])} kills", markup=False)
    table = Table("figure", "host lost", "worker lost", title="seconds from the kill, medians")
    found = result["summary"]
    for name, text in (("noticed_s", "noticed"), ("ended_s", "all workers ended"), ("next_step_s", "next step")):
        table.add_row(text, *(f"{found[what][name]}" for what in ("host", "worker")))
    for phase in Phase:
        cells = [found[what]["phases_s"].get(str(phase)) for what in ("host", "worker")]
        if any(cells):
            table.add_row(f"  of it: {phase}", *map(str, cells))
    table.add_row("steps again", *(f"{found[what]['repeated_steps']}" for what in ("host", "worker")))
    console.print(table)
    for name, bar in found["bars"].items():
        console.print(f"{name} {bar['found']:.3f}, at most {bar['bar']:g}: {'met' if bar['met'] else 'NOT MET'}")
    console.print(f"steps with other bits when done again: {result['wrong_bits']}", markup=False)


@click.command(context_settings={"max_content_width": 120})
@click.option("--hosts", "count", type=click.IntRange(2), default=4, show_default=True, help="An even number.")
@click.option("--kills", type=click.IntRange(2), default=20, show_default=True, help="Half of hosts, half of workers.")
@click.option("--seed", type=int, default=0, show_default=True, help="Repeats the victims.")
@click.option("--peer-copies", is_flag=True, help="One replica, and Tier.peer(), in place of two data replicas.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every kill, as JSON.")
@click.option("--keep", is_flag=True, help="Keep the logs, and print their place.")
def main(count: int, kills: int, seed: int, peer_copies: bool, json_path: Path | None, keep: bool) -> None:
    """Kills workers and hosts of a job with a spare host, and measures how soon it makes steps again."""
    if count % 2:
        raise click.UsageError("--hosts must be even: two replicas of one half each")
    console = Console(stderr=True)
    home = Path(tempfile.mkdtemp(prefix="ckptkit-hosts-"))
    where = environment("/dev/shm", str(home))
    try:
        (home / "shared").mkdir()
        with running_hosts(home, count + 1) as hosts:
            job = Job(hosts=hosts, port=free_port(""), has_copies=peer_copies)
            try:
                rows = measure(job, kills, seed, lambda text: console.print(text, markup=False))
            finally:
                job.close()
            result = {
                "benchmark": "hosts",
                "environment": where,
                "seed": seed,
                "hosts": count,
                "peer_copies": peer_copies,
                "apart": hosts.why_shared is None,
                "rows": rows,
                "wrong_bits": wrong_bits(home),
                "summary": summary(rows),
            }
    finally:
        if keep:
            console.print(f"logs, proofs and the durable root: {home}", markup=False)
        else:
            shutil.rmtree(home, ignore_errors=True)
    show(result, Console())
    store_result(result, json_path)
    raise SystemExit(ExitCode.OK if not result["wrong_bits"] else ExitCode.BUDGET_SPENT)
