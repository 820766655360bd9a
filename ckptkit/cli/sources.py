"""The checkpoints that a command reads, kept from being deleted by a running job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from ckptkit.cli.text import printable
from ckptkit.conversion import leased


@contextmanager
def leased_sources(sources: Iterable[str], timeout_s: float) -> Iterator[None]:
    """Leases the steps among the sources. A root that cannot be written is read without, and stderr has a note."""
    with leased(sources, timeout_s=timeout_s) as notes:
        for note in notes:
            click.echo(f"ckptkit: {printable(note)}", err=True)
        yield
