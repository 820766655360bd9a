"""`ckptkit sign`."""

from __future__ import annotations

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import DRY_RUN, JSON, TIMEOUT
from ckptkit.cli.show_verification import progress_line
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import count_text, print_json, print_line, size_text
from ckptkit.upkeep import Signing
from ckptkit.upkeep import sign as sign_step


@click.command()
@click.argument("path", metavar="STEP")
@click.option("--key", required=True, metavar="FILE", help="The private key: elliptic, in PEM, not encrypted.")
@DRY_RUN
@JSON
@TIMEOUT
def sign(path: str, key: str, dry_run: bool, as_json: bool, timeout_s: float) -> int:
    """Sign the committed step directory STEP, or a tree of `ckptkit.save`: `verify --key` and `restore(trusted=...)`
    accept it as it is now, and nothing else.

    Every cell is compared with the digest of the save first, and damage is not signed. Every byte is read twice. A job
    may be running. Needs ckptkit-jax[sign].
    """
    with leased_sources([path], timeout_s), progress_line() as progress:
        found = sign_step(path, key, dry_run=dry_run, timeout_s=timeout_s, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    return Exit.OK


def _show(found: Signing) -> None:
    verb = "signed" if found.done else "would be signed"
    cells, files = count_text(found.cells[0], "cell"), count_text(found.files[0], "file")
    print_line(
        f"{found.path}: save {found.save_id} {verb} by {found.key}: {cells} ({size_text(found.cells[1])}), {files} "
        f"({size_text(found.files[1])})"
    )
    for name in found.unread:
        print_line(f"  item {name} is signed as files; a restore with `trusted` does not give it back")
