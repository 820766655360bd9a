"""`ckptkit doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import HOST_ID, JSON, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.prices import PRICE, STORAGE_PRICE, job_price, price_of_hosts, processes_of
from ckptkit.cli.text import count_text, print_json, print_line, print_notes
from ckptkit.diagnosis import Diagnosis, diagnose
from ckptkit.diagnosis.records import Advice
from ckptkit.goodput.prices import JobPrice, Price, bill_of
from ckptkit.util.clock import time_text

_GB = 1e9
_TITLES = {"at risk": "At risk", "slow": "Slow", "wasteful": "Wasteful"}


@click.command()
@click.argument("root")
@click.option("--events", metavar="RUN_DIR", help="The event logs of its run, as `goodput` takes them.")
@PRICE
@price_of_hosts("one for each process of the logs")
@STORAGE_PRICE
@TIERS
@click.option("--measure", is_flag=True, help="Write 32 MiB into each --tier on a wrong mount, for its rate.")
@HOST_ID
@JSON
@TIMEOUT
def doctor(
    root: str,
    events: str | None,
    price: Price | None,
    hosts: int | None,
    storage_price: Price | None,
    tiers: tuple[str, ...],
    measure: bool,
    host_id: str | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Report what is slow, at risk or wasteful about ROOT and its run, and which setting changes it.

    Looks at metadata, mounts and logs alone, and changes nothing. Without --events it looks only at the checkpoints
    and mounts.
    """
    host = fast_tiers(tiers, host_id)
    if price is not None and events is None:
        raise click.UsageError("--price is for the time of a run: give its logs with --events")
    job_price(price, hosts, processes=1)  # a wrong pair of flags is refused before any work
    found = diagnose(root, events=events, tiers=tiers, host_id=host, timeout_s=timeout_s, measure=measure)
    costs = _Costs(found, job_price(price, hosts, processes=processes_of(found.facts.events)), storage_price)
    if as_json:
        print_json({**found.to_json(), **costs.to_json()})
    else:
        _show(found, costs)
    return exit_with(found.problems)


class _Costs:
    """The prices that were given, and what a finding costs at them."""

    def __init__(self, found: Diagnosis, job: JobPrice | None, storage: Price | None):
        self._found, self._job, self._storage = found, job, storage

    def of(self, each: Advice) -> str | None:
        """The cost of a finding with its arithmetic; None where it has none, or its price was not given."""
        report = self._found.facts.report
        if self._job is not None and report is not None and each.of_run:
            run = time_text(report.wall_s)
            cost = self._job.text(each.of_run * report.wall_s)
            return f"{each.of_run:.2%} of {run} at {self._job.rate_text} = {cost}"
        if self._storage is not None and each.stored_bytes:
            return self._stored(each.stored_bytes)
        return None

    def lines(self) -> Iterator[str]:
        """The cost of the run and of its root."""
        report = self._found.facts.report
        if self._job is not None and report is not None:
            bill = bill_of(report, self._job)
            text = self._job.host_h.text
            yield f"run: {time_text(report.wall_s)} at {self._job.rate_text} = {text(bill.total)}, of which " + (
                f"{text(bill.badput)} was not productive"
            )
        if self._storage is not None:
            yield f"storage: {self._stored(self._found.facts.usage.stored_bytes)}"

    def to_json(self) -> dict[str, Any]:
        """The costs as plain values; empty without prices."""
        told: dict[str, Any] = {}
        if self._job is not None and self._found.facts.report is not None:
            told["cost"] = bill_of(self._found.facts.report, self._job).to_json()
        if self._storage is not None:
            told["storage_cost_month"] = self._storage.amount * self._found.facts.usage.stored_bytes / _GB
        return told

    def _stored(self, size_bytes: int) -> str:
        assert self._storage is not None
        cost = self._storage.text(self._storage.amount * size_bytes / _GB)
        return f"{size_bytes / _GB:,.3f} GB x {self._storage} = {cost} a month"


def _show(found: Diagnosis, costs: _Costs) -> None:
    logs = "no event logs were given (--events)" if found.events is None else f"event logs of {found.events}"
    count = count_text(len(found.advice), "finding") if found.advice else "nothing to say"
    print_line(f"{found.root}: {count}; {found.rules} rules, {logs}")
    print_notes(found.notes)
    for kind, title in _TITLES.items():
        of_kind = [each for each in found.advice if each.kind == kind]
        if of_kind:
            print_line()
            print_line(title)
        for each in of_kind:
            print_line(f"  {each.what}.")
            print_line(f"    -> {each.advice}")
            if cost := costs.of(each):
                print_line(f"    {cost}")
    if told := list(costs.lines()):
        print_line()
        print_line("Cost")
        print_notes(told)
