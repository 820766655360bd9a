"""The first tier of a save: from a staged snapshot to a slot that all processes have committed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import FILES, SaveId, Writer, custom_digest
from ckptkit.save.fence import EpochFence
from ckptkit.save.flusher import Flusher
from ckptkit.save.ledger import Branch
from ckptkit.save.outcomes import Outcomes, describe
from ckptkit.save.protocol import Ask, Do, Effect, SaveProtocol
from ckptkit.save.records import Refusal, Save, SaveTargets, SealedSave
from ckptkit.save.replica_check import ReplicaComparison
from ckptkit.save.voting import TierWork, Verdict, joined
from ckptkit.slots.files import Slot
from ckptkit.snapshot.describe import Digests


@final
class Sealer:
    """Commits staged snapshots to this process's slots. Belongs to the writer thread."""

    def __init__(self, tiers: SaveTargets, claim: EpochFence, writer: Writer, outcomes: Outcomes):
        self.tiers, self.outcomes = tiers, outcomes
        self.claim, self._writer, self.processes = claim, writer, writer.count

    def commit(self, save: Save, slot: Slot, digests: Mapping[int, Digests]) -> SealedSave:
        """Writes the manifest of `slot`; without a directory, only makes what slower tiers will write."""
        sealed = SealedSave(
            save_id=save.save_id,
            writer=self._writer,
            description=save.description,
            digests=digests,
            inline=save.items.inline,
            custom=custom_digest(save.items.custom_metadata),
        )
        if self.tiers.staging.directory is not None:
            self.tiers.staging.commit(slot, save.save_id, sealed.text_for(slot))
        return sealed


@final
class FirstWork(TierWork):
    """A snapshot in a slot of the staging arena: the ramdisk's, or anonymous memory."""

    def __init__(self, save: Save, sealer: Sealer, replicas: ReplicaComparison, branch: Branch, flusher: Flusher):
        """The slot of the snapshot is leased until `release`."""
        super().__init__(sealer.tiers.staging_name, "commit", save)
        self._sealer, self._replicas, self._branch, self._flusher = sealer, replicas, branch, flusher
        self._outcomes, self._staging = sealer.outcomes, sealer.tiers.staging
        self._identified = False
        self._found: dict[str, Any] | None = None  # where replicas differ, as compared before the commit
        self._failure: Exception | None = None
        self.digests: Mapping[int, Digests] | None = None
        self.sealed: SealedSave | None = None

    def identify(self) -> SaveProtocol:
        """Takes the identity that process 0 gives the save, once it has recorded the run's epoch: no process commits
        anything under an epoch that another run could begin too."""
        if self._identified:
            return
        own = self.save.save_id

        def identity() -> list[Any]:
            return self._sealer.claim.claim(own).to_list()

        decided = yield Ask("identity", self.save.name, identity, self._branch.order)
        save_id = SaveId.from_list(decided)
        self._identified = True
        self._branch.adopt(save_id)
        self._branch.ledger.identify(own, save_id)
        self.save = self.save.identified(save_id)

    def finish_staging(self) -> SaveProtocol:
        """Moves what is left of the state into the slot; an error is raised by `act`."""
        snapshot = self.save.snapshot
        if snapshot is None:
            return
        try:
            self.digests = yield Do("finish staging", snapshot.staging.finish)
            self._outcomes.phase(self.save.save_id, "staged", self.tier)
        except Exception as error:  # noqa: BLE001  raised in `act`, and voted on
            self._failure = error

    def compare(self, refusal: Refusal | None) -> Generator[Effect, Any, Refusal | None]:
        """Compares replicas before the commit, where a difference refuses the save: a job that ends after the commit
        would be resumed from it. Called by all processes, also where this one has a `refusal`; that stays."""
        if not self._replicas.refuses:
            return refusal

        digests = None if refusal is not None else self.digests
        try:
            verdict = yield from self._replicas.compare_before_commit(self.save.name, self._compared(digests), digests)
        except CheckpointError as error:
            return refusal or Refusal(policy="veto", reason=describe(error))
        self._found = verdict["found"]
        why = verdict["refusal"]
        return refusal or (why and Refusal(policy=why[0], reason=why[1]))

    def _compared(self, digests: Mapping[int, Digests] | None) -> dict[str, Any] | None:
        snapshot = self.save.snapshot
        local_replicas = snapshot.local_replicas if snapshot is not None else ()
        return self._replicas.ballot(self.save.description, local_replicas, digests)

    def act(self) -> SaveProtocol:
        """See `TierWork.act`."""
        if self._failure is not None:
            raise self._failure
        yield from self.identify()
        snapshot, digests = self.save.snapshot, self.digests
        assert snapshot is not None, "a process without a snapshot refuses"
        assert digests is not None
        self.sealed = yield Do("commit here", lambda: self._sealer.commit(self.save, snapshot.slot, digests))
        self._outcomes.phase(self.save.save_id, "committed_here", self.tier)

    def ballot(self) -> dict[str, Any]:
        """See `TierWork.ballot`: hashes of replicas, and the slower tiers that this process can fill now."""
        snapshot = self.save.snapshot
        begun = snapshot is not None and snapshot.disk is not None
        slower = self._flusher.refusals(self.save, begun=begun)
        return {
            "host": host_values(self.save, self.digests or {}) if self._sealer.processes > 1 else {},
            "replicas": None if self._replicas.refuses else self._compared(self.digests),
            "slower": {tier: why and [why.policy, why.reason] for tier, why in slower.items()},
        }

    def decide(self, ballots: list[dict[str, Any] | None]) -> tuple[dict[str, Any], list[str] | None]:
        """See `TierWork.decide`."""
        self._outcomes.host_values_differ(self.save.save_id, differing_host_values(ballots))
        found, refusal = self._replicas.decide([ballot and ballot["replicas"] for ballot in ballots])
        tiers = dict.fromkeys(tier for ballot in ballots if ballot is not None for tier in ballot["slower"])
        later = {
            tier: joined([None if ballot is None else ballot["slower"].get(tier) for ballot in ballots])
            for tier in tiers
        }
        return {"replicas": found, "slower": {tier: why for tier, why in later.items() if why is not None}}, refusal

    def explain(self, verdict: Verdict) -> SaveProtocol:
        """See `TierWork.explain`: which boxes of replicas differ."""
        if not verdict.more:  # a process raised before it could vote
            return verdict
        save, found = self.save, self._found or verdict.more["replicas"]
        why = yield from self._replicas.follow_up(save.save_id, save.name, save.description, found, self.digests)
        if why is None or verdict.refusal is None:
            return verdict
        return replace(verdict, refusal=replace(verdict.refusal, reason=why))

    def refused_later(self, verdict: Verdict) -> dict[str, Refusal]:
        """The slower tiers that leave the save out, and why."""
        later = verdict.more["slower"]
        return {tier: Refusal(policy=policy, reason=reason) for tier, (policy, reason) in later.items()}

    def keep(self) -> None:
        """See `TierWork.keep`."""
        self._outcomes.committed(self.save, self.tier, self._staging)

    def drop(self) -> None:
        """See `TierWork.drop`."""
        if self.save.snapshot is not None:
            self._staging.discard(self.save.snapshot.slot)

    def release(self) -> None:
        """See `TierWork.release`."""
        if self.save.snapshot is not None:
            self._staging.release(self.save.snapshot.slot)


def host_values(save: Save, digests: Mapping[int, Digests]) -> dict[str, str]:
    """A hash of what each item has in host memory (NumPy leaves, numbers, JSON), by item: at most 50 bytes each. A
    data iterator, and files that a handler wrote, are each process's own."""
    parts: dict[str, list[Any]] = {}
    for name, value in save.items.inline.items():
        if value["kind"] not in ("grain", FILES):
            parts.setdefault(name, []).append(value)
    numbers = iter(range(len(save.description.extents)))
    for name, sources in save.description.items.items():
        for source in sources:
            of_boxes = [digests.get(next(numbers)) for _ in source.record.boxes]
            if source.record.kind != "jax" and name not in save.items.files and of_boxes:
                parts.setdefault(name, []).append([*source.record.path, *(list(each or ()) for each in of_boxes)])
    return {name: hashlib.sha256(json.dumps(each).encode()).hexdigest()[:12] for name, each in parts.items()}


def differing_host_values(ballots: Sequence[Mapping[str, Any] | None]) -> dict[str, int]:
    """The items whose values in host memory are not those of process 0, each with the first process that differs."""
    first, *others = [(ballot or {}).get("host") or {} for ballot in ballots]
    found: dict[str, int] = {}
    for process, values in enumerate(others, start=1):
        for name in first.keys() & values.keys():
            if first[name] != values[name]:
                found.setdefault(name, process)
    return dict(sorted(found.items()))
