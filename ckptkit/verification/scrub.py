"""`scrub`: verify every copy of every save on this host, mend what another copy still has, put aside what none has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from ckptkit.durable.lifecycle.classify import StepClass
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import PruneGuard, announced_deletions, pinned_steps
from ckptkit.durable.lifecycle.listing import DurableStep, read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.lifecycle.step_records import sidecar_processes
from ckptkit.errors import CorruptCheckpointError, StoreError, store_error, with_damage
from ckptkit.inspection.roots import read_ancestry, require_root
from ckptkit.inspection.shares import read_shares
from ckptkit.inspection.steps import recorded_tiers, slots_of_root
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.store import open_store
from ckptkit.store.roots import root_url
from ckptkit.util.plain import plain_fields
from ckptkit.verification.deletions import DeletionNotice, finish_deletions
from ckptkit.verification.durable import identity_of, items_of, judged_step
from ckptkit.verification.leaving import reason_to_leave
from ckptkit.verification.mending import ManifestFile, RootStep, SlotShare, clean_repairs
from ckptkit.verification.pool import MEMORY_BYTES_MAX, THREADS, Limits
from ckptkit.verification.records import FORMAT, Finding, ProofKind, StepProof, Verification, VerifyProgress
from ckptkit.verification.slots import ShareProof, damaged_manifests, prove_share
from ckptkit.verification.sources import CannotMendError, RepairSource, Sources, durable_sources, slot_source

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
    that are not steps and why, and tiers that have no slots of the root. `failed`: steps at which an error of ckptkit's
    own ended the look."""

    root: str
    repair: bool
    checked: int
    treatments: tuple[Treatment, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def damaged(self) -> bool:
        """Whether damage was found that could not be repaired; what was put aside counts."""
        return bool(self.problems) or any(not each.done or each.act == "quarantine" for each in self.treatments)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": FORMAT, **plain_fields(self)}


def scrub(
    root: str,
    tiers: Sequence[str] | None = None,
    *,
    repair: bool = False,
    host_id: str,
    step_prefix: str | None = None,
    threads: int = THREADS,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    timeout_s: float = 20.0,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> Scrub:
    """Verifies every copy of every save of `root` on this host: durable steps, and slots of `host_id` below `tiers`
    (None: those that the newest durable step was saved with, as far as they are here; where no record names them,
    nothing is put aside). With `repair`, repairs damaged copies from the other copies of the same save.

    A repair is bit-exact: every cell is compared with the digest of the save. A slot is changed only if its manifest is
    still the one that was read, and no running process holds its directory. A durable step is written as a new copy and
    verified; the damaged one is put aside, and its files are replaced one by one, objects of a bucket only if they are
    still those that were read. Every state in between verifies as damaged or complete. A save of ckptkit that cannot be
    repaired or restored goes to `_quarantine` (in the slot directory, or below `_ckptkit` in the root) and is never
    deleted. Steps of stock Orbax and other directories stay. Pinned steps, and steps that a process reads, are repaired
    and never moved. `step_prefix`: see `ckptkit steps`. The leftovers of a repair that died are removed a day
    after it began. Without `repair` nothing is written.

    Cost: a read of every byte, and for each damaged durable step a write of the whole. Raises `StepNotFoundError`
    where there is nothing, `StoreError` where something cannot be reached or written, `ValueError` for limits below 1.
    """
    limits = Limits(threads=threads, memory_bytes_max=memory_bytes_max, progress=progress)
    return _Scrubber(root_url(root), tiers, host_id, limits, timeout_s, repair=repair).run(step_prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DamagedCopy:
    """`found` and `proof` are those of a durable step."""

    step: int
    save_id: SaveId | None
    path: str
    findings: tuple[Finding, ...]
    copy: ManifestFile | SlotShare | RootStep
    found: DurableStep | None = None
    proof: StepProof | None = None


@final
class _Scrubber:
    def __init__(
        self, url: str, tiers: Sequence[str] | None, host_id: str, limits: Limits, timeout_s: float, *, repair: bool
    ):
        self._place = Place.open(url, timeout_s=timeout_s)
        self._tiers, self._host_id = tiers, host_id
        self._limits, self._timeout_s, self._repair = limits, timeout_s, repair
        self._shares: list[ShareProof] = []
        self._steps: list[tuple[DurableStep, StepProof]] = []
        self._notes: list[str] = []

    def run(self, step_prefix: str | None) -> Scrub:
        """Looks at every copy, then treats what is damaged."""
        ancestry, problems = self._ancestry()
        url = self._place.url
        in_root = read_root(self._place, ancestry, step_prefix=step_prefix)
        recorded = recorded_tiers(in_root)
        self._knows_tiers = self._tiers is not None or recorded is not None
        tiers = (recorded or {}) if self._tiers is None else self._tiers
        directories = [
            path for tier in tiers for path in slots_of_root(tier, url, self._host_id, self._notes, are_given=True)
        ]
        manifests = [each for directory in directories for each in self._look_into(directory)]
        if not directories:
            require_root(self._place, in_root)
        unread: list[Exception] = []
        self._notes += in_root.notes
        steps: list[_DamagedCopy] = []
        for each in in_root.steps:
            try:
                steps += self._look_at(each)
            except (StoreError, OSError) as error:  # unreachable is not corrupt, and the others are still read
                unread.append(error)
        shares = [self._damaged_share(proof) for proof in self._shares if proof.findings]
        damaged = [*manifests, *shares, *steps]
        findings = [finding for each in (*shares, *steps, *manifests) for finding in each.findings]
        with with_damage([*problems, *(f"{each.path}: {each.problem}" for each in findings)]):
            for error in unread:
                raise error
            treatments = self._treated(damaged)
        verified = Verification(path=url, steps=tuple(proof for _, proof in self._steps))
        return Scrub(
            root=url,
            repair=self._repair,
            checked=len(self._shares) + len(self._steps) + len(manifests),
            treatments=tuple(treatments),
            findings=tuple(findings),
            notes=tuple(self._notes),
            problems=tuple(problems),
            failed=verified.failed,
            unread=verified.unread,
        )

    def _ancestry(self) -> tuple[Ancestry, list[str]]:
        """The epoch record, mended from its copy first where that is asked for and can be."""
        ancestry, problems = read_ancestry(self._place)
        if problems and self._repair:
            with suppress(CorruptCheckpointError):
                EpochRecords(open_store(self._place.url)).mend()
                return read_ancestry(self._place.again())
        return ancestry, problems

    def _look_into(self, directory: Path) -> list[_DamagedCopy]:
        """Verifies the shares in a slot directory. Returns the damaged manifests."""
        shares, errors = read_shares(directory)
        proofs = [prove_share(share, self._limits) for share in shares]
        self._shares += [proof for proof in proofs if not proof.superseded]
        return [
            _DamagedCopy(
                step=proof.step,
                save_id=proof.save_id,
                path=finding.path,
                findings=proof.findings,
                copy=ManifestFile(Path(finding.path)),
            )
            for proof in damaged_manifests(errors)
            for finding in proof.findings
        ]

    def _damaged_share(self, proof: ShareProof) -> _DamagedCopy:
        return _DamagedCopy(
            step=proof.share.manifest.save_id.step,
            save_id=proof.share.manifest.save_id,
            path=str(proof.share.directory),
            findings=proof.findings,
            copy=SlotShare(proof, self._limits),
        )

    def _look_at(self, found: DurableStep) -> list[_DamagedCopy]:
        """Verifies a durable step, or nothing if it was pruned meanwhile. Returns it if it is damaged."""
        before = identity_of(found.place.again())
        proofs = judged_step(found.place, found.step, self._limits, [], timeout_s=self._timeout_s)
        self._steps += [(found, proof) for proof in proofs]
        return [
            _DamagedCopy(
                step=proof.step,
                save_id=proof.save_id or (self._save_of(proof.step) if _kind_of(found).ours else None),
                path=found.place.url,
                findings=proof.findings,
                copy=RootStep(
                    root=self._place.url,
                    place=found.place,
                    step=proof.step,
                    before=before,
                    limits=self._limits,
                    timeout_s=self._timeout_s,
                ),
                found=found,
                proof=proof,
            )
            for proof in proofs
            if proof.state == "corrupt"
        ]

    def _save_of(self, step: int) -> SaveId | None:
        """The save of a step whose sidecars are damaged, where only one of that step is in the slots."""
        saves = {proof.share.manifest.save_id for proof in self._shares}
        same = [save_id for save_id in saves if save_id.step == step]
        return same[0] if len(same) == 1 else None

    def _treated(self, damaged: Sequence[_DamagedCopy]) -> list[Treatment]:
        """An error that ends the work has a note for each treatment that was done before it."""
        treatments: list[Treatment] = []
        try:
            if self._repair:
                clean_repairs(self._place.url)
                finish_deletions(open_store(self._place.url, deadline_s=self._timeout_s))  # of a killed repair, too
            for each in damaged:
                treatments.append(self._treat(each))
        except (OSError, StoreError) as error:
            stopped = error
            if not isinstance(error, StoreError):
                stopped = store_error(error, error.filename or self._place.url)
            for each in treatments:
                if each.done:
                    stopped.add_note(f"done before that: {each.act} of step {each.step}, {each.path}")
            raise stopped from error
        return treatments

    def _treat(self, each: _DamagedCopy) -> Treatment:
        """Repairs a copy, or puts it aside if that is impossible and allowed; without `repair`, only plans it."""
        sources = self._sources(each.save_id)
        act, reason = "repair", self._why_not_mended(each)
        if reason is None:
            try:
                reason = each.copy.mend(sources, writes=self._repair)
            except (CannotMendError, CorruptCheckpointError) as error:
                act, reason = "quarantine", str(error)
                left = self._why_not_put_aside(each, sources)
                if left is None and self._repair:
                    left = self._put_aside(each)
                if left is not None:
                    act, reason = "leave", f"{left}; {error}"
        if act == "repair" and reason is not None:
            act = "leave"
        return Treatment(
            step=each.step,
            save_id=each.save_id,
            kind="slot" if each.found is None else "durable",
            path=each.path,
            act=act,
            done=self._repair and act != "leave",
            reason=reason,
            sources=dict(sources.used) if act == "repair" else {},
        )

    def _sources(self, save_id: SaveId | None) -> Sources:
        """Every copy of a save. Slots first: their manifests name the places of all boxes of a process."""
        shares = [proof.share for proof in self._shares if proof.share.manifest.save_id == save_id]
        found: list[RepairSource] = [source for share in shares if (source := slot_source(share)) is not None]
        for each, proof in self._steps:
            if save_id is not None and proof.step == save_id.step:
                durable = durable_sources(each.place, proof.step, found)
                found += [source for source in durable if source.manifest.save_id == save_id]
        return Sources(found, self._limits.memory_bytes_max)

    def _why_not_mended(self, each: _DamagedCopy) -> str | None:
        """Why a durable step must not be repaired."""
        if each.found is None:
            return None
        if self._is_announced(each.step):  # half deleted, it looks damaged
            return "its job has announced that it deletes this step"
        return reason_to_leave("mend", _kind_of(each.found), each.found.state)

    def _why_not_put_aside(self, each: _DamagedCopy, sources: Sources) -> str | None:
        """Why a durable step that cannot be repaired stays: it is of use, or protected."""
        if each.found is None or each.proof is None:
            return None
        if _restorable(each.proof, each.found.place):
            return "ckptkit can restore it, stock Orbax may not"
        if others_may_hold(sources.manifests, self._host_id) or (
            not sources.manifests and _is_of_several(each.found.place)  # nothing here tells which hosts they ran on
        ):
            return (
                "other hosts of its job may hold it: run scrub there. If none does, "
                f"CheckpointManager.delete({each.step}) deletes it"
            )
        unknown = None if self._knows_tiers else "no record names the fast tiers that may have its bytes: give --tier"
        return self._protection(each.found) or unknown

    def _protection(self, found: DurableStep) -> str | None:
        """Why a step must not be put aside now."""
        pinned = found.step in pinned_steps(self._place.store)
        in_use = not pinned and found.step in PruneGuard(self._place.store).leased([found.step])
        return reason_to_leave("quarantine", _kind_of(found), found.state, pinned=pinned, in_use=in_use)

    def _put_aside(self, each: _DamagedCopy) -> str | None:
        """Announces a durable step as a deletion is announced, so that no reader begins with it meanwhile."""
        if each.found is None:
            return each.copy.put_aside()
        with DeletionNotice(open_store(self._place.url, deadline_s=self._timeout_s), [each.step]):
            return self._protection(each.found) or each.copy.put_aside()

    def _is_announced(self, step: int) -> bool:
        """Whether a process is deleting a step now: it announces that before it begins, and withdraws the notice
        afterwards."""
        return bool(announced_deletions(self._place.store, [step]))


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


def _restorable(proof: StepProof, place: Place) -> bool:
    """Whether every cell is verified, and only Orbax's own files are damaged."""
    whole = proof.checked[0] > 0 and not any(finding.leaf is not None for finding in proof.findings)
    return whole and bool(durable_sources(place, proof.step, ()))
