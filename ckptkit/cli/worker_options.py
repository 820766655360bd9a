"""The flags that `ckptkit run` and `ckptkit chaos` share: which workers run, and how they start."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.launch.policy import HangPolicy


class HangLimit(click.ParamType):
    """`auto`, `off`, or seconds."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> HangPolicy | None:
        """The policy; None where hangs are not looked for."""
        if isinstance(value, HangPolicy):
            return value
        if value == "auto":
            return HangPolicy()
        try:
            return None if value == "off" else HangPolicy(limit_s=float(value))
        except ValueError:
            self.fail(f"{value!r} is not a time; write auto, off, or seconds", param, ctx)


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
    type=HangLimit(),
    default="auto",
    show_default="auto: 10 times the longest pause between steps, at least 1800",
    metavar="SECONDS|auto|off",
    help="Restart a job that has made no step for so long.",
)
EVENTS = click.option(
    "--events", metavar="RUN_DIR", help="The job's event logs: write launcher.jsonl here too, for `goodput`."
)
