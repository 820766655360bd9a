"""`ckptkit verify` and `ckptkit scrub`."""

from __future__ import annotations

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import HOST_ID, JSON, STEP_PREFIX, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.show_verification import progress_line, show_scrub, show_verification
from ckptkit.cli.text import print_json
from ckptkit.durable.signatures import TrustedKey
from ckptkit.upkeep import with_signatures
from ckptkit.verification import scrub as scrub_root
from ckptkit.verification import verify as verify_path


@click.command()
@click.argument("path")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
@click.option("--key", metavar="FILE", help="A public key: a step that its owner did not sign as it is now is corrupt.")
@STEP_PREFIX
@JSON
@TIMEOUT
def verify(
    path: str, step: int | None, key: str | None, step_prefix: str | None, as_json: bool, timeout_s: float
) -> int:
    """Read every byte of the saves at PATH and compare it with the digests of the save.

    PATH is a root, a step directory or an item in one (local, gs:// or s3://), or a fast tier, or a directory in it.
    """
    trusted = None if key is None else TrustedKey(key)  # a key that cannot be used ends it before anything is read
    with progress_line() as progress:
        found = verify_path(path, step, step_prefix=step_prefix, timeout_s=timeout_s, progress=progress)
    if trusted is not None:
        found = with_signatures(found, trusted, timeout_s=timeout_s)
    if as_json:
        print_json(found.to_json())
    else:
        show_verification(found)
    findings = [str(finding) for proof in found.steps for finding in proof.findings]
    return exit_with([*found.problems, *findings])


@click.command()
@click.argument("root")
@TIERS
@HOST_ID
@click.option("--repair", is_flag=True, help="Repair saves from another copy; put aside saves without one.")
@click.option("--dry-run", is_flag=True, help="Show what --repair would do, and change nothing (the default).")
@STEP_PREFIX
@JSON
@TIMEOUT
def scrub(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    repair: bool,
    dry_run: bool,
    step_prefix: str | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Verify every copy of every save of ROOT on this host, and repair damaged ones from another copy of the same save.

    Only saves of ckptkit are repaired or put aside. A step that is pinned or in use is repaired, and never put aside.
    Exit code 11 if damage is left, or was put aside.
    """
    host = fast_tiers(tiers, host_id)
    with progress_line() as progress:
        found = scrub_root(
            root,
            tiers,
            repair=repair and not dry_run,
            host_id=host,
            step_prefix=step_prefix,
            timeout_s=timeout_s,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        show_scrub(found)
    left = [str(finding) for finding in found.findings] if found.damaged else []
    return exit_with([*found.problems, *left])
