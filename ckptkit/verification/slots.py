"""Proves what fast tiers hold: every cell of every manifest, read from the slot's file by another process.

Manifest, bytes, manifest again: where the manifest has gone meanwhile the slot was reused, and what was read is
superseded, not corrupt. Takes no lock and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.shares import Share, read_shares
from ckptkit.model import paths
from ckptkit.model.cells import DigestedCell
from ckptkit.model.manifest import SaveId
from ckptkit.restore.inventory import hole_in
from ckptkit.slots.latest_pointer import LostManifestError
from ckptkit.slots.reader import PIECE_BYTES, damaged_cells, manifest_name_of
from ckptkit.verification.pool import Limits
from ckptkit.verification.records import Finding, StepProof, VerifyProgress

_DEPTH_MAX = 3  # <tier>/<job>/<host>/<rank>


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareProof:
    """One process's share of a save: what was read of it, and what is wrong. `superseded`: it went meanwhile."""

    share: Share
    checked: tuple[int, int]
    findings: tuple[Finding, ...]
    superseded: bool


def slot_directories_below(path: Path) -> list[Path]:
    """The slot directories at or below a slot, host, job or tier directory; links are not followed."""
    found, level = [], [path]
    for _ in range(_DEPTH_MAX + 1):
        below: list[Path] = []
        for directory in level:
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            names = [entry.name for entry in entries]
            if any(paths.slot_index(name) is not None or paths.save_of_manifest(name) for name in names):
                found.append(directory)
            elif paths.LOCK_NAME not in names:
                below += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        level = below
    return found


def prove_slots(directories: Iterable[Path], step: int | None, limits: Limits, notes: list[str]) -> list[StepProof]:
    """Every save that these directories hold, or those of `step`; what was superseded meanwhile goes to `notes`."""
    proofs: dict[tuple[Path, SaveId], list[ShareProof]] = {}
    damaged: list[StepProof] = []
    for directory in directories:
        shares, errors = read_shares(directory)
        damaged += damaged_manifests(errors, step)
        for share in shares:
            if step is None or share.manifest.save_id.step == step:
                proof = prove_share(share, limits)
                proofs.setdefault((directory.parent.parent, share.manifest.save_id), []).append(proof)
    merged = []
    for (_, save_id), shares in proofs.items():
        gone = [proof for proof in shares if proof.superseded]
        notes += [f"{proof.share.directory}: save {save_id} was superseded while it was read" for proof in gone]
        kept = [proof for proof in shares if not proof.superseded]
        merged += [_merged(save_id, kept)] if kept else []
    return sorted([*merged, *damaged], key=lambda proof: (proof.step, proof.path))


def prove_share(share: Share, limits: Limits) -> ShareProof:
    """Reads every cell of one process's share. Raises `StoreError` where the slot may not be read."""
    manifest, path = share.manifest, share.directory / share.manifest.slot
    manifest_path = share.directory / manifest_name_of(manifest.save_id)
    before = _identity(manifest_path)
    checked, findings = [0, 0], list[Finding]()

    def read(cell: DigestedCell) -> None:
        checked[0] += 1
        checked[1] += cell.stop - cell.start
        if limits.progress is not None:
            step, total_bytes = manifest.save_id.step, manifest.held_bytes
            where = str(share.directory)
            limits.progress(VerifyProgress(path=where, step=step, checked_bytes=checked[1], total_bytes=total_bytes))

    piece_bytes = max(1, min(PIECE_BYTES, limits.memory_bytes_max // limits.threads))
    try:
        for cell, problem, found in damaged_cells(path, manifest, limits.threads, piece_bytes=piece_bytes, read=read):
            finding = Finding(
                path=str(path),
                problem=problem,
                item=cell.item,
                leaf=cell.leaf.name,
                box=cell.cell,
                expected=cell.digest,
                found=found,
            )
            findings.append(finding)
    except CorruptCheckpointError as error:
        findings = [Finding(path=str(path), problem=str(error))]
    superseded = before is None or _identity(manifest_path) != before
    return ShareProof(
        share=share,
        checked=(checked[0], checked[1]),
        findings=() if superseded else tuple(findings),
        superseded=superseded,
    )


def _identity(path: Path) -> tuple[int, ...] | None:
    """Which file this is; None where there is none. A manifest that is renamed into place never changes."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _merged(save_id: SaveId, proofs: Sequence[ShareProof]) -> StepProof:
    manifests = [proof.share.manifest for proof in proofs]
    findings = tuple(finding for proof in proofs for finding in proof.findings)
    missing = hole_in(manifests)
    present = sorted({manifest.writer.process for manifest in manifests})
    reason = None
    if missing:
        reason = f"here are the shares of processes {present} of {manifests[0].writer.count} alone: {missing}"
    directories = sorted({str(proof.share.directory) for proof in proofs})
    return StepProof(
        step=save_id.step,
        state="corrupt" if findings else "incomplete" if missing else "proven",
        kind="slot",
        path=directories[0] if len(directories) == 1 else str(Path(directories[0]).parent),
        save_id=save_id,
        checked=(sum(proof.checked[0] for proof in proofs), sum(proof.checked[1] for proof in proofs)),
        reason=f"{len(findings)} damaged" if findings else reason,
        findings=findings,
    )


def damaged_manifests(errors: Iterable[CorruptCheckpointError], step: int | None = None) -> Iterator[StepProof]:
    """The saves, or those of `step`, whose manifests are damaged or missing; one that was superseded is left out."""
    for error in errors:
        path = Path(error.path or "")
        save = paths.save_of_manifest(path.name)
        lost = isinstance(error, LostManifestError)
        if save is not None and (lost or os.path.lexists(path)) and step in (None, save[0]):
            yield StepProof(
                step=save[0],
                state="corrupt",
                kind="slot",
                path=str(path.parent),
                save_id=SaveId(save[1], save[0], save[2]),
                reason="its manifest is missing" if lost else "its manifest is damaged",
                findings=(Finding(path=str(path), problem=str(error)),),
            )
