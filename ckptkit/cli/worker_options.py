"""The flags that `ckptkit run` and `ckptkit chaos` share: which workers run, and how they start."""

from __future__ import annotations

import click

from ckptkit.cli.parsed import Parsed
from ckptkit.launch.policy import HangPolicy


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
