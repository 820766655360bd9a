"""`scrub`: verify every copy of every save on this host, mend what another copy still has, put aside what none has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import DeletionNotice, PruneGuard, announced_deletions
from ckptkit.durable.lifecycle.listing import DurableStep, read_ancestry, read_root
from ckptkit.durable.lifecycle.permissions import Standing, reason_to_leave
from ckptkit.durable.lifecycle.pins import pinned_steps
from ckptkit.durable.lifecycle.places import Place, nothing_at
from ckptkit.durable.lifecycle.step_records import sidecar_processes
from ckptkit.errors import CorruptCheckpointError, StoreError, with_damage
from ckptkit.inspection.shares import read_shares
from ckptkit.inspection.steps import slots_of_root
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.slots.latest_pointer import LostManifestError
from ckptkit.store import open_store
from ckptkit.store.roots import root_url
from ckptkit.util.plain import plain_fields
from ckptkit.verification.durable import identity_of, items_of, prove_step
from ckptkit.verification.mend_object import clean_object_repairs, mend_object_step, put_object_step_aside
from ckptkit.verification.mend_slot import can_mend, mend_share, put_manifest_aside, put_share_aside
from ckptkit.verification.mend_step import clean_repairs, mend_step, put_step_aside
from ckptkit.verification.pool import MEMORY_BYTES_MAX, THREADS, Limits
from ckptkit.verification.rebuild import CannotMendError, intact_sidecars, require_mendable
from ckptkit.verification.records import FORMAT, Finding, ProofKind, StepProof, VerifyProgress
from ckptkit.verification.slots import ShareProof, prove_share
from ckptkit.verification.sources import RepairSource, Sources, durable_sources, intact_sources, slot_source

RepairAction = Literal["repair", "quarantine", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """The action (done or planned) for one damaged copy. `sources`: bytes by place that it was made from."""

    step: int
    save_id: SaveId | None
    kind: ProofKind
    path: str
    act: RepairAction
    done: bool
    reason: str | None = None
    sources: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrub:
    """Every copy that was looked at: how many were whole, and what became of each that was not. `notes`: directories
    that are not steps and why, and tiers that have no slots of the root."""

    root: str
    repair: bool
    checked: int
    treatments: tuple[Treatment, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def damaged(self) -> bool:
        """Whether damage was found that could not be repaired; what was put aside counts."""
        return bool(self.problems) or any(not each.done or each.act == "quarantine" for each in self.treatments)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": FORMAT, **plain_fields(self)}


def scrub(
    root: str,
    tiers: Sequence[str],
    *,
    repair: bool = False,
    host_id: str,
    step_prefix: str | None = None,
    threads: int = THREADS,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    timeout_s: float = 20.0,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> Scrub:
    """Verifies every copy of every save of `root` on this host: durable steps, and slots of `host_id` below `tiers`.
    With `repair`, repairs damaged copies from another copy of the same save.

    A repair is bit-exact: every cell is compared with the digest of the save. A slot is changed only if its manifest is
    still the one that was read, and no running process holds its directory. A durable step on a disk is written as a
    new copy and swapped by one rename, or file by file where the file system lacks RENAME_EXCHANGE. In a bucket it is
    replaced object by object, each only if it is still the one that was read. Every state in between verifies as
    damaged or complete. A save of ckptkit that cannot be repaired or
    restored goes to `_quarantine` (in the slot directory, or below `_ckptkit` in the root) and is never deleted. Steps
    of stock Orbax and other directories stay. Pinned steps, and steps that a process reads, are repaired and never
    moved. `step_prefix`: see `ckptkit steps`. Leftovers of a crashed repair are removed from a root on a disk. Without
    `repair` nothing is written.

    Cost: a read of every byte, and for each damaged durable step a write of the whole. Raises `StepNotFoundError`
    where there is nothing, `StoreError` where something cannot be reached or written, `ValueError` for limits below 1.
    """
    limits = Limits(threads=threads, memory_bytes_max=memory_bytes_max, progress=progress)
    return _Scrubber(root_url(root), tiers, host_id, limits, timeout_s, repair=repair).run(step_prefix)


@final
class _Scrubber:
    def __init__(self, url: str, tiers: Sequence[str], host_id: str, limits: Limits, timeout_s: float, *, repair: bool):
        self._place = Place.open(url, timeout_s=timeout_s)
        self._tiers, self._host_id = tiers, host_id
        self._limits, self._timeout_s, self._repair = limits, timeout_s, repair
        self._shares: list[ShareProof] = []
        self._steps: list[tuple[DurableStep, StepProof, object]] = []  # the last tells it from one that takes its place
        self._manifests: list[tuple[Path, Finding]] = []
        self._notes: list[str] = []

    def run(self, step_prefix: str | None) -> Scrub:
        """Looks at every copy, then treats what is damaged."""
        ancestry, problems = self._ancestry()
        url, tiers = self._place.url, self._tiers
        directories = [path for tier in tiers for path in slots_of_root(tier, url, self._host_id, self._notes)]
        if not directories and not self._place.names() and not os.path.isdir(self._place.url):
            raise nothing_at(self._place.url, "there is no such root, and no tier that was given has slots of it")
        for directory in directories:
            self._look_into(directory)
        in_root = read_root(self._place, ancestry, step_prefix=step_prefix)
        unread: list[Exception] = []
        self._notes += in_root.notes
        for each in in_root.steps:
            before = identity_of(each.place.again())
            try:
                proofs = prove_step(each.place, each.step, self._limits, [], timeout_s=self._timeout_s)
            except (StoreError, OSError) as error:  # unreachable is not corrupt, and the others are still read
                unread.append(error)
                continue
            self._steps += [(each, proof, before) for proof in proofs]
        bad_shares = [proof for proof in self._shares if proof.findings]
        bad_steps = [each for each in self._steps if each[1].state == "corrupt"]
        findings = [finding for proof in bad_shares for finding in proof.findings]
        findings += [finding for _, proof, _ in bad_steps for finding in proof.findings]
        findings += [finding for _, finding in self._manifests]
        with with_damage([*problems, *(f"{each.path}: {each.problem}" for each in findings)]):
            for error in unread:
                raise error
            treatments = self._treated(bad_shares, bad_steps)
        return Scrub(
            root=self._place.url,
            repair=self._repair,
            checked=len(self._shares) + len(self._steps) + len(self._manifests),
            treatments=tuple(treatments),
            findings=tuple(findings),
            notes=tuple(self._notes),
            problems=tuple(problems),
        )

    def _treated(
        self, bad_shares: Sequence[ShareProof], bad_steps: Sequence[tuple[DurableStep, StepProof, object]]
    ) -> list[Treatment]:
        """An error that ends the work has a note for each treatment that was done before it."""
        treatments: list[Treatment] = []
        try:
            if self._repair and self._place.store.properties.atomic_rename:
                clean_repairs(Path(self._place.url))
            elif self._repair:
                clean_object_repairs(self._place.url)
            for path, _ in self._manifests:
                treatments.append(self._treat_manifest(path))
            for proof in bad_shares:
                treatments.append(self._treat_share(proof))
            for each in bad_steps:
                treatments.append(self._treat_step(*each))
        except (OSError, StoreError) as error:
            stopped = error
            if not isinstance(error, StoreError):
                stopped = StoreError(f"{error.filename or self._place.url}: {error.strerror or error}")
            for each in treatments:
                if each.done:
                    stopped.add_note(f"done before that: {each.act} of step {each.step}, {each.path}")
            raise stopped from error
        return treatments

    def _ancestry(self) -> tuple[Ancestry, list[str]]:
        """The epoch record, mended from its copy first where that is asked for and can be."""
        ancestry, problems = read_ancestry(self._place)
        if problems and self._repair:
            with suppress(CorruptCheckpointError):
                EpochRecords(open_store(self._place.url)).mend()
                return read_ancestry(self._place.again())
        return ancestry, problems

    def _look_into(self, directory: Path) -> None:
        shares, errors = read_shares(directory)
        for error in errors:
            if isinstance(error, LostManifestError) or (error.path is not None and os.path.lexists(error.path)):
                self._manifests.append((Path(str(error.path)), Finding(path=str(error.path), problem=str(error))))
        for share in shares:
            proof = prove_share(share, self._limits)
            if not proof.superseded:
                self._shares.append(proof)

    def _sources(self, save_id: SaveId | None) -> Sources:
        """Every copy of a save. Slots first: their manifests name the places of all boxes of a process."""
        shares = [proof.share for proof in self._shares if proof.share.manifest.save_id == save_id]
        found: list[RepairSource] = [source for share in shares if (source := slot_source(share)) is not None]
        for each, proof, _ in self._steps:
            if save_id is not None and proof.step == save_id.step:
                durable = durable_sources(each.place.url, proof.step) or self._intact(each.place, proof.step, found)
                found += [source for source in durable if source.manifest.save_id == save_id]
        return Sources(found, self._limits.memory_bytes_max)

    @staticmethod
    def _intact(place: Place, step: int, slots: Sequence[RepairSource]) -> list[RepairSource]:
        """The identity that a step with damaged sidecars still has; trusted if a slot holds the same save."""
        if not slots:
            return []
        items = [(item, intact_sidecars(item, item.name, slots[0].manifest)) for item in items_of(place)]
        return intact_sources(place, step, [each for _, found in items for each in found.values()])

    def _treat_manifest(self, path: Path) -> Treatment:
        epoch_step = paths.save_of_manifest(path.name) or (0, 0, 0)
        gone = not os.path.lexists(path)
        reason = put_manifest_aside(path) if self._repair else None
        return Treatment(
            step=epoch_step[0],
            save_id=SaveId(epoch_step[1], epoch_step[0], epoch_step[2]),
            kind="slot",
            path=str(path),
            act="leave" if reason else "quarantine",
            done=self._repair and reason is None,
            reason=reason or ("its manifest is missing: its slot is free" if gone else "its manifest is damaged"),
            sources={},
        )

    def _treat_share(self, proof: ShareProof) -> Treatment:
        save_id = proof.share.manifest.save_id
        sources = self._sources(save_id)
        act, done = "repair", False
        if not self._repair:
            reason = None if can_mend(proof, sources) else "no other copy of it is intact on this host"
            act = "quarantine" if reason else "repair"
        else:
            reason = mend_share(proof, sources, self._limits)
            done = reason is None
            if reason is not None:
                left = put_share_aside(proof.share)
                act, done = ("leave", False) if left else ("quarantine", True)
                reason = left or reason
        return Treatment(
            step=save_id.step,
            save_id=save_id,
            kind="slot",
            path=str(proof.share.directory),
            act=act,
            done=done,
            reason=reason,
            sources=dict(sources.used) if act == "repair" else {},
        )

    def _treat_step(self, each: DurableStep, proof: StepProof, before: object) -> Treatment:
        place, kind = each.place, _kind_of(each)
        save_id = proof.save_id or (self._save_of(proof.step) if kind.ours else None)
        sources = self._sources(save_id)
        act, done, reason = "repair", False, None
        try:
            if proof.step in self._announced():  # half deleted, it looks damaged
                act, reason = "leave", "its job has announced that it deletes this step"
            elif (why := reason_to_leave("mend", kind, Standing(state=each.state))) is not None:
                act, reason = "leave", why
            elif self._repair:
                reason = self._mend(place, before, proof.step, sources)
                act, done = ("leave", False) if reason else ("repair", True)
            else:
                require_mendable(place, sources)
        except CannotMendError as error:
            act, reason = "quarantine", str(error)
            if _restorable(proof, place.url):
                act, reason = "leave", f"ckptkit can restore it, stock Orbax may not; {error}"
            elif others_may_hold(sources.manifests, self._host_id) or (
                not sources.manifests and _is_of_several(place)  # nothing here tells which hosts they ran on
            ):
                act = "leave"
                reason = (
                    f"{error}; other hosts of its job may hold it: run scrub there. If none does, "
                    f"CheckpointManager.delete({proof.step}) deletes it"
                )
            elif (why := self._quarantine_refused(each, kind)) is not None:
                act, reason = "leave", f"{why}; {error}"
            elif self._repair:
                left = self._put_aside(each, kind, before)
                act, done, reason = ("leave", False, left) if left else ("quarantine", True, reason)
        return Treatment(
            step=proof.step,
            save_id=save_id,
            kind="durable",
            path=place.url,
            act=act,
            done=done,
            reason=reason,
            sources=dict(sources.used) if act == "repair" else {},
        )

    def _mend(self, place: Place, before: object, step: int, sources: Sources) -> str | None:
        root, limits, timeout_s = self._place.url, self._limits, self._timeout_s
        if place.store.properties.atomic_rename:
            return mend_step(place, before, step, sources, limits, root=Path(root), timeout_s=timeout_s)
        return mend_object_step(place, before, step, sources, limits, root=root, timeout_s=timeout_s)

    def _quarantine_refused(self, each: DurableStep, kind: StepClass) -> str | None:
        """Why a step must not be put aside now."""
        pinned = each.step in pinned_steps(self._place.store)
        in_use = not pinned and each.step in PruneGuard(self._place.store).leased([each.step])
        return reason_to_leave("quarantine", kind, Standing(state=each.state, pinned=pinned, in_use=in_use))

    def _put_aside(self, each: DurableStep, kind: StepClass, before: object) -> str | None:
        """Announces it as a deletion is announced, so that no reader begins with the step meanwhile."""
        with DeletionNotice(open_store(self._place.url, deadline_s=self._timeout_s), [each.step]):
            return self._quarantine_refused(each, kind) or self._moved_aside(each.place, before)

    def _moved_aside(self, place: Place, before: object) -> str | None:
        if place.store.properties.atomic_rename:
            return put_step_aside(place, before, Path(self._place.url))
        return put_object_step_aside(place, before, self._place.url)

    def _announced(self) -> set[int]:
        """The steps that a job is deleting now: it announces them before it begins, and withdraws the notice
        afterwards."""
        with suppress(ValueError, KeyError, TypeError):
            return announced_deletions(self._place.store)
        return set()

    def _save_of(self, step: int) -> SaveId | None:
        """The save of a step whose sidecars are damaged, where only one of that step is in the slots."""
        saves = {proof.share.manifest.save_id for proof in self._shares}
        same = [save_id for save_id in saves if save_id.step == step]
        return same[0] if len(same) == 1 else None


def others_may_hold(manifests: Sequence[Manifest], host_id: str) -> bool:
    """Whether slots of a save may be on other hosts than `host_id`.

    That is so for a save of several processes if `manifests`, which are those of every place on this host, lack the
    slots of some.
    """
    slots = {each.writer.process for each in manifests if each.slot}
    hosts = {each.writer.process: each.writer.host for each in manifests}
    count = max((each.writer.count for each in manifests), default=1)
    one_host = len(hosts) == count and set(hosts.values()) == {host_id}
    return count > 1 and len(slots) < count and not one_host


def _is_of_several(step: Place) -> bool:
    """Whether several processes wrote a step, by the names of its sidecars: the only sign where these are damaged."""
    joined = paths.JOINED_SIDECARS.rpartition("/")[2]
    return any(
        len(sidecar_processes(item)) > 1 or joined in item.below(paths.SIDECAR_DIR).names() for item in items_of(step)
    )


def _kind_of(damaged: DurableStep) -> StepClass:
    """The class of a step with findings. Without digests of ours nothing proves damage: a save of ours that Orbax's
    handlers wrote counts as a stock step."""
    if damaged.kind is StepClass.DAMAGED or damaged.shares is not None:
        return StepClass.DAMAGED
    return StepClass.PARTLY if damaged.kind.ours else damaged.kind


def _restorable(proof: StepProof, url: str) -> bool:
    """Whether every cell is verified, and only Orbax's own files are damaged."""
    whole = proof.checked[0] > 0 and not any(finding.leaf is not None for finding in proof.findings)
    return whole and bool(durable_sources(url, proof.step))
