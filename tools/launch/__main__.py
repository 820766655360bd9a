"""The launcher's command line: runs a job's processes on this machine, and all of them again when one is lost.

Of the command's words, {process}, {processes}, {coordinator} and {attempt} are replaced. Exit codes: 0 all
processes ended with 0; 1 the restart budget is spent; 2 the launcher's or the command's usage (a process that
exits with 2 has bad input and is never restarted); 75 preempted, state saved: the same command goes on from there
(processes that saved their last step exit with 75); 130 interrupted (Ctrl-C), or preempted without a saved step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptkit.events import EventLog, Kind, read_events
from tools.launch.launcher import Launcher
from tools.launch.policy import RestartPolicy


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser, args = _parse(sys.argv[1:] if argv is None else argv)
    log = args.events / "launcher.jsonl" if args.events else None
    try:
        launcher = Launcher(
            args.command,
            processes=args.processes,
            devices_per_process=args.devices_per_process,
            policy=RestartPolicy(
                restarts=args.restarts,
                backoff_s=args.backoff_s,
                grace_s=args.grace_s,
                preempt_grace_s=args.preempt_grace_s,
            ),
            first_attempt=next_attempt(log),
            events=EventLog(log, process=-1) if log else None,
        )
    except ValueError as error:
        parser.error(str(error))
    return launcher.run()


def next_attempt(log: Path | None) -> int:
    """One more than the last attempt that an earlier launch of the job noted: a run's attempts are numbered on."""
    if log is None or not log.exists():
        return 0
    begun = (event for event in read_events(log) if event.kind in (Kind.STARTED, Kind.RELAUNCHED))
    return max((event.fields["attempt"] + 1 for event in begun), default=0)


def _parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="processes to start")
    parser.add_argument("--devices-per-process", type=int, help="virtual CPU devices of each (default: JAX's own)")
    parser.add_argument("--restarts", type=int, default=3, help="restart budget (default: %(default)s)")
    parser.add_argument("--backoff-s", type=float, default=1.0, help="wait before the first restart; doubles")
    parser.add_argument("--grace-s", type=float, default=5.0, help="from SIGTERM to SIGKILL (default: %(default)s)")
    parser.add_argument(
        "--preempt-grace-s",
        type=float,
        default=30.0,
        help="the same when this launcher gets SIGTERM: time for a last save (default: %(default)s)",
    )
    parser.add_argument("--events", type=Path, help="directory for launcher.jsonl")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what each process runs")
    return parser, parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
