"""`ckptkit doctor`."""

from __future__ import annotations

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import HOST_ID, JSON, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.text import count_text, print_json, print_line
from ckptkit.diagnosis import Diagnosis, diagnose

_TITLES = {"at risk": "At risk", "slow": "Slow", "wasteful": "Wasteful"}


@click.command()
@click.argument("root")
@click.option("--events", metavar="RUN_DIR", help="The event logs of its run, as `goodput` takes them.")
@TIERS
@HOST_ID
@JSON
@TIMEOUT
def doctor(
    root: str, events: str | None, tiers: tuple[str, ...], host_id: str | None, as_json: bool, timeout_s: float
) -> int:
    """Report what is slow, at risk or wasteful about ROOT and its run, and which setting changes it.

    Looks at metadata and logs alone, and changes nothing. Without --events it looks only at the checkpoints.
    """
    host = fast_tiers(tiers, host_id)
    found = diagnose(root, events=events, tiers=tiers, host_id=host, timeout_s=timeout_s)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    return exit_with(found.problems)


def _show(found: Diagnosis) -> None:
    logs = "no event logs were given (--events)" if found.events is None else f"event logs of {found.events}"
    count = count_text(len(found.advice), "finding") if found.advice else "nothing to say"
    print_line(f"{found.root}: {count}; {found.rules} rules, {logs}")
    for note in found.notes:
        print_line(f"  {note}")
    for kind, title in _TITLES.items():
        of_kind = [each for each in found.advice if each.kind == kind]
        if of_kind:
            print_line()
            print_line(title)
        for each in of_kind:
            print_line(f"  {each.what}.")
            print_line(f"    -> {each.advice}")
