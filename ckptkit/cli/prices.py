"""The flags that turn seconds and bytes into money."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from ckptkit.cli.options import Parsed
from ckptkit.events import Event
from ckptkit.goodput.prices import JobPrice, Price


def _price(unit: str) -> Parsed:
    """`2.5/h` on the command line."""
    return Parsed(f"2.5{unit}", lambda text: Price.parse(text, unit))


# The forms as they are read: without `metavar`, click would show the type in capitals.
PRICE = click.option(
    "--price", type=_price("/h"), metavar="2.5/h", help="Price of one host for an hour: also show costs."
)
STORAGE_PRICE = click.option(
    "--storage-price",
    type=_price("/GB-month"),
    metavar="2.5/GB-month",
    help="Price of 10^9 stored bytes for a month: also show costs.",
)


def price_of_hosts(default: str) -> Any:
    """`--hosts`, for a `--price`."""
    return click.option("--hosts", type=click.IntRange(1, 1_000_000), help=f"Hosts at that price [default: {default}].")


def processes_of(events: Iterable[Event]) -> int:
    """The number of processes that wrote the logs of a run; 1 where the launcher alone wrote."""
    return len({event.process for event in events if event.process >= 0}) or 1


def job_price(price: Price | None, hosts: int | None, *, processes: int) -> JobPrice | None:
    """The price of a job; None without a price. Without `hosts`, each process has a host of its own."""
    if price is None:
        if hosts is not None:
            raise click.UsageError("--hosts is for --price: give both, or neither")
        return None
    return JobPrice(host_h=price, hosts=hosts or processes)
