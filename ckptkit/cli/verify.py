"""`ckptkit verify` and `ckptkit scrub`."""

from __future__ import annotations

from collections import Counter

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import FOUND_TIERS, HOST_ID, JSON, STEP_PREFIX, TIMEOUT, fast_tiers
from ckptkit.cli.progress import progress_line
from ckptkit.cli.text import count_text, print_found, print_line, print_notes, print_part_and_reasons, size_text
from ckptkit.upkeep import with_signatures
from ckptkit.upkeep.signatures import TrustedKey
from ckptkit.verification import Scrub, StepProof, Treatment, Verification
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
    public_key = None if key is None else TrustedKey(key)  # a key that cannot be used ends it before anything is read
    with progress_line() as progress:
        found = verify_path(path, step, step_prefix=step_prefix, timeout_s=timeout_s, progress=progress)
    if public_key is not None:
        found = with_signatures(found, public_key, timeout_s=timeout_s)
    print_found(found, show_verification, as_json)
    findings = [str(finding) for proof in found.steps for finding in proof.findings]
    return exit_with([*found.problems, *findings], found.failed, found.unread)


@click.command()
@click.argument("root")
@FOUND_TIERS
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
    Exit code 11 if damage is left, or was put aside; 13 if something was not read.
    """
    host = fast_tiers(tiers, host_id)
    with progress_line() as progress:
        found = scrub_root(
            root,
            tiers or None,
            repair=repair and not dry_run,
            host_id=host,
            step_prefix=step_prefix,
            timeout_s=timeout_s,
            progress=progress,
        )
    print_found(found, show_scrub, as_json)
    left = [str(finding) for finding in found.findings] if found.damaged else []
    return exit_with([*found.problems, *left], found.failed, found.unread)


_TITLES = ("step", "state", "save", "cells", "bytes", "where", "why")
_COLUMNS = [(title, title in ("step", "cells", "bytes")) for title in _TITLES]
_TREATED = [(title, title == "step") for title in ("step", "save", "copy", "where", "what", "from", "why")]


def show_verification(found: Verification) -> None:
    """Prints it on stdout."""
    counts = Counter(proof.state for proof in found.steps)
    others = "".join(f", {counts[state]} {state}" for state in ("unproven", "incomplete", "failed") if counts[state])
    saves = count_text(len(found.steps), "save")
    what = "" if found.item is None else f"item {found.item}, of no step: "
    print_line(f"{found.path}: {what}{saves}, {counts['proven']} proven, {counts['corrupt']} corrupt{others}")
    print_notes(found.notes)
    print_part_and_reasons(_COLUMNS, [_row(proof, found.item) for proof in found.steps])


def show_scrub(found: Scrub) -> None:
    """Prints it on stdout."""
    damaged, copies = len(found.treatments), count_text(found.checked, "copy", "copies")
    print_line(f"{found.root}: {copies}, {damaged} damaged{'' if found.repair else ', nothing was changed'}")
    print_notes(found.notes)
    print_part_and_reasons(_TREATED, [_treated(each) for each in found.treatments])


def _row(proof: StepProof, item: str | None) -> list[str]:
    save = "" if proof.save_id is None else str(proof.save_id)
    cells, checked_bytes = proof.checked
    return [
        str(proof.step) if item is None else "-",
        proof.state,
        save,
        str(cells),
        size_text(checked_bytes),
        proof.path,
        proof.reason or "",
    ]


def _treated(each: Treatment) -> list[str]:
    words = {
        "repair": "repaired" if each.done else "can be repaired",
        "quarantine": "put aside" if each.done else "would be put aside",
        "leave": "left",
    }
    sources = ", ".join(f"{name} ({size_text(size)})" for name, size in each.sources.items())
    save = "" if each.save_id is None else str(each.save_id)
    return [str(each.step), save, each.kind, each.path, words[each.act], sources, each.reason or ""]
