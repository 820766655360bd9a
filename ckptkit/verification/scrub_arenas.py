"""`scrub` within a running job: a process proves the slots of its own arenas, and mends them from whatever has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.shares import read_share
from ckptkit.model.manifest import SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import manifest_name_of
from ckptkit.verification.mend_slot import can_mend, mend_own
from ckptkit.verification.pool import Limits
from ckptkit.verification.records import Finding
from ckptkit.verification.scrub import Scrub, Treatment
from ckptkit.verification.slots import ShareProof, prove_share
from ckptkit.verification.sources import Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaProofs:
    """What proving the slots of a process's arenas found: how many shares, those that are damaged with their arenas,
    and manifests that cannot be read."""

    checked: int
    damaged: tuple[tuple[Arena, ShareProof], ...]
    manifests: tuple[tuple[SaveId, Finding], ...]


def prove_arenas(arenas: Sequence[Arena], limits: Limits) -> ArenaProofs:
    """Reads every cell of every committed slot of `arenas`. Holds no lease: what is superseded meanwhile is left out.

    Raises `StoreError` where a slot may not be read.
    """
    checked, damaged, manifests = 0, list[tuple[Arena, ShareProof]](), list[tuple[SaveId, Finding]]()
    on_disk = [(arena, arena.directory) for arena in arenas if arena.directory is not None]
    for arena, directory in on_disk:
        for save_id in arena.held():
            path = directory / manifest_name_of(save_id)
            try:
                proof = prove_share(read_share(path), limits)
            except (CorruptCheckpointError, FileNotFoundError) as error:
                if save_id in arena.held():  # else it was replaced meanwhile
                    manifests.append((save_id, Finding(path=str(path), problem=str(error))))
                continue
            checked += not proof.superseded
            damaged += [(arena, proof)] if proof.findings else []
    return ArenaProofs(checked=checked, damaged=tuple(damaged), manifests=tuple(manifests))


def mend_arenas(
    root: str, found: ArenaProofs, sources_of: Callable[[ShareProof], Sources], limits: Limits, *, repair: bool
) -> Scrub:
    """What was, or would be, done about `found`. Cells are rewritten in place, under a lease on their slot, and
    compared with the digests that were taken when they were saved.

    What nobody has a copy of stays as it is: no restore takes it, and the process reuses the slot.
    """
    treatments, findings = [], [finding for _, finding in found.manifests]
    for save_id, finding in found.manifests:
        reason = "its manifest is damaged or gone: its slot is used again after a newer save"
        treatments.append(_treatment(save_id, finding.path, "leave", done=False, reason=reason))
    for arena, proof in found.damaged:
        findings += proof.findings
        save_id, path = proof.share.manifest.save_id, str(proof.share.directory)
        sources = sources_of(proof)
        if repair:
            reason = mend_own(proof, sources, limits, arena)
        else:
            reason = None if can_mend(proof, sources) else "no other copy of it is whole"
        used = dict(sources.used) if reason is None else {}
        act = "leave" if reason else "repair"
        treatments.append(_treatment(save_id, path, act, done=repair and reason is None, reason=reason, sources=used))
    return Scrub(
        root=root,
        repair=repair,
        checked=found.checked + len(found.manifests),
        treatments=tuple(treatments),
        findings=tuple(findings),
    )


def _treatment(
    save_id: SaveId, path: str, act: str, *, done: bool, reason: str | None, sources: dict[str, int] | None = None
) -> Treatment:
    return Treatment(
        step=save_id.step,
        save_id=save_id,
        kind="slot",
        path=path,
        act="repair" if act == "repair" else "leave",
        done=done,
        reason=reason,
        sources=sources or {},
    )
