"""Mends one process's share in a slot, in place: a cell is either still damaged, or has the bytes of its digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckptkit.durable.lifecycle.places import local_kind
from ckptkit.inspection.shares import Share, read_shares
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.cells import digested_cells
from ckptkit.model.manifest import LeafRecord, SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.latest_pointer import forget_newest
from ckptkit.slots.reader import manifest_name_of
from ckptkit.store.local import sync_directory
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock, move_aside
from ckptkit.util.disk_file import write_all
from ckptkit.util.pages import PAGE_BYTES
from ckptkit.verification.pool import Limits
from ckptkit.verification.slots import ShareProof, prove_share
from ckptkit.verification.sources import Sources

HELD = "a running process holds its directory, which will replace it"
SUPERSEDED = "it was superseded meanwhile"

Cell = tuple[str, LeafRecord, Box, int, str]  # item, leaf, cell, where it begins in the slot, digest


def can_mend(proof: ShareProof, sources: Sources) -> bool:
    """Whether every damaged cell can be had from elsewhere. Reads them all, writes nothing."""
    return all(
        offset >= 0 and sources.rebuild(item, leaf, cell, digest) is not None
        for item, leaf, cell, offset, digest in damaged_cells(proof)
    )


def mend_share(proof: ShareProof, sources: Sources, limits: Limits) -> str | None:
    """Rewrites the damaged cells of a share; None once it is proven, else why it was left as it was, or is damaged.

    Holds the arena's lock, and writes only while the manifest is the one that was read. The manifest is not touched:
    whatever stops this, no cell is trusted that does not match it. Synced before the share is read again.
    """
    share = proof.share
    with arena_lock(share.directory) as held:
        return _mend(proof, sources, limits) if held else HELD


def mend_own(proof: ShareProof, sources: Sources, limits: Limits, arena: Arena) -> str | None:
    """`mend_share` in an arena of this very process, which holds its lock: under a lease on the slot instead.

    A reader of the slot meanwhile finds each cell damaged or intact, and its digest tells which.
    """
    slot = arena.hold(proof.share.manifest.save_id)
    if slot is None:
        return SUPERSEDED
    try:
        if local_kind(str(proof.share.directory / slot.name)) != stat.S_IFREG:
            return "its slot's file was deleted, and this process still writes to the deleted one"
        return _mend(proof, sources, limits)
    finally:
        arena.release(slot)


def put_share_aside(share: Share) -> str | None:
    """Moves manifest, then slot, into the directory's quarantine; why not, where it may not be touched."""
    with arena_lock(share.directory) as held:
        if not held:
            return HELD
        if not still_there(share):
            return SUPERSEDED
        name = manifest_name_of(share.manifest.save_id)
        slot = share.directory / share.manifest.slot
        taken = claimed_by(share) is not None
        forget_newest(share.directory, share.manifest.save_id)
        move_aside(share.directory / name, share.directory / QUARANTINE_DIR, name)
        if not taken and os.path.lexists(slot):
            move_aside(slot, share.directory / QUARANTINE_DIR, f"{name.removesuffix('.json')}.{slot.name}")
    return None


def put_manifest_aside(path: Path) -> str | None:
    """Moves a damaged manifest into the quarantine; a missing one is no longer expected.

    The place of its bytes is unknown, so the slot is free.
    """
    with arena_lock(path.parent) as held:
        if not held:
            return HELD
        save = paths.save_of_manifest(path.name)
        missed = save is not None and forget_newest(path.parent, SaveId(save[1], save[0], save[2]))
        if os.path.lexists(path):
            move_aside(path, path.parent / QUARANTINE_DIR, path.name)
        elif not missed:
            return SUPERSEDED
    return None


def damaged_cells(proof: ShareProof) -> Iterator[Cell]:
    """The cells that are named in the findings; all of them where the slot itself is."""
    named = {(finding.item, finding.leaf, finding.box) for finding in proof.findings}
    everything = any(finding.leaf is None for finding in proof.findings)
    for item, leaf, record, cell, start, _, digest in digested_cells(proof.share.manifest):
        if everything or (item, leaf.name, cell) in named:
            yield item, leaf, cell, record.offset + start if record.offset >= 0 else -1, digest


def still_there(share: Share) -> bool:
    """Whether the manifest is still the one that was read."""
    return any(each.manifest == share.manifest for each in read_shares(share.directory)[0])


def claimed_by(share: Share) -> object | None:
    """Another save whose manifest names the same slot, if it is newer: then the bytes are that one's."""
    saves = [
        each.manifest.save_id
        for each in read_shares(share.directory)[0]
        if each.manifest.slot == share.manifest.slot and each.manifest.save_id > share.manifest.save_id
    ]
    return max(saves, default=None)


def _mend(proof: ShareProof, sources: Sources, limits: Limits) -> str | None:
    share = proof.share
    if not still_there(share):
        return SUPERSEDED
    newer = claimed_by(share)
    if newer is not None:
        return f"its slot holds save {newer} now"
    return _write(proof, sources) or _proven_now(share, limits)


def _write(proof: ShareProof, sources: Sources) -> str | None:
    share = proof.share
    path = share.directory / share.manifest.slot
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        move_aside(path, share.directory / QUARANTINE_DIR, path.name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    lost = 0
    try:
        for item, leaf, cell, offset, digest in damaged_cells(proof):
            block = sources.rebuild(item, leaf, cell, digest) if offset >= 0 else None
            if block is None:
                lost += 1
            else:
                write_all(fd, block.reshape(-1).view(np.uint8), offset)
        if not lost:  # only then the size comes from more than a manifest
            os.posix_fallocate(fd, 0, _slot_bytes(share))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(share.directory)
    return f"{lost} cells of it are nowhere else" if lost else None


def _proven_now(share: Share, limits: Limits) -> str | None:
    proof = prove_share(share, limits)
    return None if not proof.findings else f"it is still damaged: {proof.findings[0]}"


def _slot_bytes(share: Share) -> int:
    ends = [
        record.offset + record.box.size * leaf.itemsize
        for leaves in share.manifest.arrays.values()
        for leaf in leaves
        for record in leaf.boxes
    ]
    return -(-max(ends, default=1) // PAGE_BYTES) * PAGE_BYTES
