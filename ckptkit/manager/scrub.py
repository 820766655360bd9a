"""A scrub of the job's own slots: each process proves its own, and mends them from this host, other processes, or the
durable tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CorruptCheckpointError, StepNotFoundError
from ckptkit.events import Kind
from ckptkit.inspection.shares import read_share
from ckptkit.job.coordination import ScopedCoordinator
from ckptkit.job.vote import act_together
from ckptkit.manager.build import Components
from ckptkit.model.manifest import SaveId
from ckptkit.restore.inventory import Held, box_set_hash, givers_of
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import manifest_name_of
from ckptkit.verification.mend_slot import can_mend, mend_own
from ckptkit.verification.pool import Limits
from ckptkit.verification.records import Finding
from ckptkit.verification.scrub import Scrub, Treatment
from ckptkit.verification.slots import ShareProof, prove_share
from ckptkit.verification.sources import RepairSource, Sources, peer_sources, slot_source


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaProofs:
    """The result of verifying the slots of a process's arenas: the number of shares, the damaged ones with their
    arenas, and unreadable manifests."""

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
    """The action (done or planned) for each share in `found`. Cells are rewritten in place, under a lease on their
    slot, and compared with the digests that were taken when they were saved.

    A share without another copy stays as it is: no restore takes it, and the process reuses the slot.
    """
    treatments, findings = [], [finding for _, finding in found.manifests]
    for save_id, finding in found.manifests:
        reason = "its manifest is damaged or missing: its slot is used again after a newer save"
        treatments.append(_treatment(save_id, finding.path, "leave", done=False, reason=reason))
    for arena, proof in found.damaged:
        findings += proof.findings
        save_id, path = proof.share.manifest.save_id, str(proof.share.directory)
        sources = sources_of(proof)
        if repair:
            reason = mend_own(proof, sources, limits, arena)
        else:
            reason = None if can_mend(proof, sources) else "no other copy of it is intact"
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


Givers = dict[int, list[tuple[int, int]]]  # by the place among this process's damaged shares


class Scrubber:
    """Belongs to the caller's thread; called by all processes together, with no save in flight."""

    def __init__(self, components: Components):
        self._storage, self._inventory = components.storage, components.history.inventory
        self._coordinator = ScopedCoordinator(components.job.coordinator)
        self._events = components.job.events

    def scrub(self, about: str, *, repair: bool) -> Scrub:
        """See `CheckpointManager.scrub`. `about` names the call."""
        self._coordinator.begin(about)
        limits, arenas = Limits(), list(self._storage.arenas.values())
        _, found = act_together(self._coordinator, "scrub-prove", lambda: prove_arenas(arenas, limits))
        assert found is not None, "damage is a finding, and everything else raises"
        givers = self._who_gives(found)
        places = {id(proof): place for place, (_, proof) in enumerate(found.damaged)}

        def sources_of(proof: ShareProof) -> Sources:
            save_id = proof.share.manifest.save_id
            more = self._elsewhere(save_id, givers.get(places[id(proof)], []))
            return Sources(self._here(save_id), limits.memory_bytes_max, more=more)

        root = self._storage.durable.url
        # Nobody goes on, and perhaps ends, while others still read from it.
        _, scrubbed = act_together(
            self._coordinator,
            "scrub-mend",
            lambda: mend_arenas(root, found, sources_of, limits, repair=repair),
        )
        assert scrubbed is not None
        for each in scrubbed.treatments:
            reason, sources = each.reason or "mended", each.sources
            self._events.emit(
                Kind.SCRUBBED, step=each.step, path=each.path, done=each.done, reason=reason, sources=sources
            )
        return scrubbed

    def _who_gives(self, found: ArenaProofs) -> Givers:
        """The other processes that hold a save damaged here; one exchange, of a few KiB from each process."""
        manifests = [proof.share.manifest for _, proof in found.damaged]
        wanted = [
            [manifest.save_id.to_list(), manifest.writer.process, box_set_hash(manifest)] for manifest in manifests
        ]

        def chosen(said: list[list[Any]]) -> list[list[list[tuple[int, int]]]]:
            reports = [[Held.from_json(values) for values in held] for held, _ in said]
            return [
                [
                    givers_of(reports, SaveId.from_list(save), writer=writer, boxes=boxes)
                    for save, writer, boxes in asked
                ]
                for _, asked in said
            ]

        mine = [self._inventory.reports(), wanted]
        told = self._coordinator.agree("scrub-givers", mine, chosen)
        own = self._coordinator.process
        return {
            place: [(process, share) for process, share in givers if process != own]
            for place, givers in enumerate(told[own])
        }

    def _here(self, save_id: SaveId) -> list[RepairSource]:
        """The shares of the save in this host's slots."""
        found: list[RepairSource] = []
        local = self._inventory.local.saves().get(save_id)
        for pairs in local.held.values() if local is not None else ():
            for directory, _ in pairs:
                with suppress(CorruptCheckpointError, FileNotFoundError):
                    source = slot_source(read_share(directory / manifest_name_of(save_id)))
                    found += [source] if source is not None else []
        return found

    def _elsewhere(self, save_id: SaveId, givers: list[tuple[int, int]]) -> Iterator[RepairSource]:
        """Other processes, then the durable step."""
        client, durable = self._inventory.client, self._storage.durable
        if client is not None:
            client.try_again()
            yield from peer_sources(client, save_id, givers)
        with suppress(CorruptCheckpointError, FileNotFoundError, StepNotFoundError):
            if durable.holds(save_id):
                reader = durable.reader(save_id.step)
                for manifest in reader.manifests():
                    yield RepairSource(name=durable.url, manifest=manifest, read=reader.read)
