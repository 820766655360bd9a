"""`ckptkit run`. The flags before it, of workers and how they start, are those of `ckptkit chaos` too."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckptkit.cli.options import DRY_RUN, JSON, OutputFile, Parsed, seconds
from ckptkit.cli.text import print_json, print_line
from ckptkit.events import EventLog
from ckptkit.launch import HangPolicy, Hooks, Launcher, OncePrinter, RestartPolicy, WarmStart, Workers, next_attempt
from ckptkit.launch.command import path_of, python_command
from ckptkit.launch.first_imports import FirstImports
from ckptkit.launch.follower import Follower
from ckptkit.launch.logs import LogFiles
from ckptkit.launch.policy import ExitCode
from ckptkit.launch.roster import HostLimits, Roster
from ckptkit.launch.status import FORMAT, write_status
from ckptkit.util.words import count_text


def _hang_policy(text: str) -> HangPolicy | None:
    """From `auto`, `off` or seconds; None where hangs are not looked for."""
    if text in ("auto", "off"):
        return HangPolicy() if text == "auto" else None
    try:
        return HangPolicy(limit_s=float(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write auto, off, or seconds") from None


COMMAND = click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND")
COMMAND_SETTINGS = {"ignore_unknown_options": False, "allow_interspersed_args": False}
PROCESSES = click.option(
    "--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this host."
)
DEVICES = click.option(
    "--devices-per-process", type=click.IntRange(min=1), metavar="N", help="Virtual CPU devices of each process."
)
COLD = click.option("--cold", is_flag=True, help="No template: every worker starts from nothing.")
HANG = click.option(
    "--hang-timeout",
    "hang",
    type=Parsed("seconds", _hang_policy),
    default="auto",
    show_default="auto: 10 times the longest pause between steps, at least 1800",
    metavar="SECONDS|auto|off",
    help="Restart a job that has made no step for so long, also before its first step.",
)
EVENTS = click.option(
    "--events", metavar="RUN_DIR", help="The job's event logs: write launcher.jsonl here too, for `goodput`."
)


@click.command(context_settings=COMMAND_SETTINGS)
@COMMAND
@PROCESSES
@DEVICES
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=10, show_default=True, help="Restarts of the whole job."
)
@seconds(
    "--backoff",
    "backoff_s",
    default=1.0,
    help="Wait after an attempt without a step, or one that failed where the last one did; doubles each time, at "
    "most 60 s.",
)
@seconds("--grace", "grace_s", default=0.1, help="From SIGTERM to SIGKILL for the others when a process is lost.")
@seconds(
    "--preempt-grace",
    "preempt_grace_s",
    default=30.0,
    help="The same when this command gets SIGTERM: time for a last save.",
)
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE,...",
    help="Import these before the program's first statement, though it may set what they read "
    "[default: the libraries that it imports first].",
)
@COLD
@HANG
@click.option("--nnodes", metavar="MIN[:MAX]", help="Hosts of the job; more agents than MAX wait as spares.")
@click.option("--node-rank", "rank", type=click.IntRange(min=0), metavar="N", help="Which host this is; 0 decides.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the agent of host 0 listens.")
@click.option("--secret-file", metavar="FILE", help="The secret that all agents share [default: $CKPTKIT_SECRET].")
@seconds("--join-timeout", "join_s", least=0.1, default=300.0, help="How long hosts wait for each other.")
@seconds(
    "--rejoin-timeout",
    "rejoin_s",
    default=30.0,
    help="How long a restart waits for a host in the place of a lost one, before it takes fewer.",
)
@EVENTS
@click.option("--log-dir", metavar="RUN_DIR", help="Write each worker's output to a file here too.")
@click.option(
    "--status",
    "status_path",
    type=OutputFile(),
    metavar="FILE",
    help="Keep a JSON file with what the job does; of several hosts, host 0 does.",
)
@DRY_RUN
@JSON
def run(
    command: tuple[str, ...],
    processes: int,
    devices_per_process: int | None,
    max_restarts: int,
    backoff_s: float,
    grace_s: float,
    preempt_grace_s: float,
    preload: tuple[str, ...],
    cold: bool,
    hang: HangPolicy | None,
    nnodes: str | None,
    rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
    join_s: float,
    rejoin_s: float,
    events: str | None,
    log_dir: str | None,
    status_path: Path | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run COMMAND as a job of several processes, and start all of them again when one is lost.

    Workers of a Python command are forked from a template that has imported what they need. In the words of COMMAND,
    {process}, {processes}, {coordinator} and {attempt} are replaced; the environment has CKPTKIT_PROCESS and so on, and
    `jax.distributed.initialize()` without arguments finds the job.
    """
    if not command:
        raise click.UsageError("no command to launch: give it after --")
    if not command[0]:
        raise click.BadParameter("the command is empty", param_hint="-- COMMAND")
    warm = WarmStart(preload=_words(preload), is_cold=cold)
    workers = Workers(command, processes=processes, devices_per_process=devices_per_process, warm=warm)
    hosts = hosts_of(os.environ, nnodes, rank, rendezvous, secret_file)
    log = Path(events) / "launcher.jsonl" if events is not None else None
    try:
        first_attempt = next_attempt(log)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--events") from error
    if dry_run:
        _show_plan(workers, hosts, first_attempt, as_json)
        return ExitCode.OK
    output = LogFiles(None if log_dir is None else Path(log_dir), OncePrinter(sys.stderr if as_json else None))
    if hosts is not None and hosts.rank > 0:
        return _follow(workers, hosts, join_s, output)
    last: dict[str, Any] = {}

    def note(status: dict[str, Any]) -> None:
        last.update(status)
        write_status(status_path, status)

    with closing(output):
        code = Launcher(
            workers,
            policy=RestartPolicy(
                restarts=max_restarts, backoff_s=backoff_s, grace_s=grace_s, preempt_grace_s=preempt_grace_s
            ),
            first_attempt=first_attempt,
            coordinator_host="127.0.0.1" if hosts is None else hosts.rendezvous[0],
            make_roster=None if hosts is None else lambda wake: _roster(hosts, processes, join_s, rejoin_s, wake),
            hang=hang,
            events=EventLog(log, process=-1) if log is not None else None,
            hooks=Hooks(on_output=output, on_attempt=output.begin, on_status=note),
        ).run()
    if as_json:
        print_json({"format": FORMAT, **last})
    return code


def _roster(hosts: Hosts, processes: int, join_s: float, rejoin_s: float, wake: Callable[[], None]) -> Roster:
    limits = HostLimits(min=hosts.min, max=hosts.max, join_s=join_s, rejoin_s=rejoin_s)
    try:
        return Roster(("", hosts.rendezvous[1]), hosts.secret, limits, processes, wake)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _follow(workers: Workers, hosts: Hosts, join_s: float, output: LogFiles) -> int:
    """This host obeys the agent of host 0."""
    with closing(output):
        try:
            return Follower(
                workers,
                rank=hosts.rank,
                first=hosts.rendezvous,
                secret=hosts.secret,
                join_s=join_s,
                hooks=Hooks(on_output=output, on_attempt=output.begin),
            ).run()
        except ValueError as error:
            raise click.UsageError(str(error)) from error


def _words(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for words in given for word in words.split(",") if word)


def _show_plan(workers: Workers, hosts: Hosts | None, first_attempt: int, as_json: bool) -> None:
    warm, found = workers.warm, python_command(workers.command)
    if found is None:
        start, why = "cold", "the command does not run a script or a module of this Python environment"
    elif warm is None or warm.is_cold:
        start, why = "cold", "--cold"
    else:
        start, why = "warm", f"{found.kind} {found.target}"
        if not warm.preload:
            first = FirstImports(found.kind, found.target, path_of(found))
            if not first.statements:
                start, why = "cold", first.reason
            elif first.reason:
                why += f"; the template ends where {first.reason}"
    if as_json:
        plan: dict[str, Any] = {
            "processes": workers.processes,
            "attempt": first_attempt,
            "start": start,
            "why": why,
            "command": list(workers.command),
        }
        if hosts is not None:
            plan |= {"nnodes": [hosts.min, hosts.max], "rank": hosts.rank, "rendezvous": list(hosts.rendezvous)}
        print_json({"format": FORMAT, **plan})
        return
    processes = count_text(workers.processes, "process", "processes")
    print_line(f"{processes} on this host, attempt {first_attempt}: {' '.join(workers.command)}")
    if hosts is not None:
        where = f"{hosts.rendezvous[0]}:{hosts.rendezvous[1]}"
        print_line(f"host {hosts.rank} of a job of {hosts.min} to {hosts.max}; host 0 listens at {where}")
    print_line(f"start: {start} ({why})")


SECRET_NAME = "CKPTKIT_SECRET"
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_PORTS = range(20000, 30000)  # below what Linux gives out by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """From `min` to `max` hosts; this agent has `rank`, and rank 0 listens at `rendezvous`."""

    min: int
    max: int
    rank: int
    rendezvous: tuple[str, int]
    secret: str


def hosts_of(
    environ: Mapping[str, str],
    nnodes: str | None,
    rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
) -> Hosts | None:
    """None where the job is of this host alone. Raises click's usage errors for what is missing or wrong."""
    in_slurm = "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ
    if nnodes is None and in_slurm and environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        nnodes = environ["SLURM_STEP_NUM_NODES"]
    if nnodes is None:
        if rendezvous is not None or rank is not None:
            raise click.UsageError("--rendezvous and --node-rank need --nnodes")
        return None
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise click.BadParameter(f"{nnodes!r}; write 4, or 3:4 for at least 3 and at most 4", param_hint="--nnodes")
    if rank is None:
        rank = next((int(environ[name]) for name in _RANKS if name in environ), None)
    if rank is None:
        raise click.UsageError("give --node-rank: no environment variable has the rank of this host")
    if rendezvous is None and in_slurm:
        job = int(environ.get("SLURM_JOB_ID", "0"))
        rendezvous = f"{first_node(environ['SLURM_STEP_NODELIST'])}:{_PORTS[job % len(_PORTS)]}"
    if rendezvous is None:
        raise click.UsageError("give --rendezvous HOST:PORT, where the host of --node-rank 0 listens")
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{rendezvous!r}; write HOST:PORT", param_hint="--rendezvous")
    return Hosts(
        min=int(match[1]),
        max=int(match[2] or match[1]),
        rank=rank,
        rendezvous=(host.strip("[]"), int(port)),
        secret=_secret(environ, secret_file),
    )


def first_node(nodes: str) -> str:
    """The first name in a list of Slurm's: `gpu[003-007,9]-ib,x` is `gpu003-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes if first is None else first[0])


def _secret(environ: Mapping[str, str], path: str | None) -> str:
    if path is not None:
        return Path(path).read_text().strip()
    if SECRET_NAME not in environ:
        raise click.UsageError(
            f"several hosts need a secret: the same {SECRET_NAME} in the environment of all agents, or --secret-file"
        )
    return environ[SECRET_NAME]
