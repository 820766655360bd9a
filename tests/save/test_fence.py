"""The fence before a durable commit: the run has recorded its epoch, and no later run has begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.errors import CheckpointError, TransientStoreError
from ckptkit.job.coordination import LocalCoordinator
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.save.agreement.fence import EpochFence
from ckptkit.save.agreement.protocol import drive
from ckptkit.store import MemoryStore

SAVE = SaveId(2, 40, 7)


class Away:
    """Epoch records of a root that cannot be written while `away`."""

    def __init__(self, store: MemoryStore):
        self.records = EpochRecords(store)
        self.away = True

    def write(self, ancestry: Ancestry) -> None:
        if self.away:
            raise TransientStoreError("503")
        self.records.write(ancestry)

    def newest_epoch(self) -> int:
        return self.records.newest_epoch()


def claim_of(epochs: Any, degraded: list[Any]) -> EpochFence:
    tiers: Any = SimpleNamespace(epochs=epochs, durable=SimpleNamespace(url="gs://b/run"))
    outcomes: Any = SimpleNamespace(degraded=lambda step, tier, error: degraded.append((step, tier, str(error))))
    book: Any = SimpleNamespace(ancestry=Ancestry(epoch=SAVE.epoch))
    return EpochFence(tiers, LocalCoordinator(), book, outcomes)


def fence(claim: EpochFence) -> None:
    drive(claim.fence(SAVE, "0.40.0.0"), LocalCoordinator())


def test_no_durable_commit_before_the_epoch_is_recorded() -> None:
    """A run whose record did not land would commit, and the next one take the same epoch: two branches, one name."""
    epochs, degraded = Away(MemoryStore()), list[Any]()
    claim = claim_of(epochs, degraded)
    assert claim.claim(SAVE).after == "2-", "its first commit to a fast tier: training goes on"
    assert degraded == [(40, "durable", "503")]
    with pytest.raises(TransientStoreError, match=r"step 40 .* gs://b/run: epoch 2 of this run could not be recorded"):
        fence(claim)
    assert epochs.newest_epoch() == 0
    epochs.away = False
    fence(claim)
    assert epochs.newest_epoch() == SAVE.epoch
    assert claim.claim(SAVE).after == ""


def test_fence_is_checked_again_for_a_later_run() -> None:
    """Earlier records would be taken for good, and the older run overtake the newer one's branch."""
    epochs = Away(MemoryStore())
    epochs.away = False
    claim = claim_of(epochs, [])
    fence(claim)
    epochs.records.write(Ancestry(epoch=3))
    with pytest.raises(CheckpointError, match=r"this run has epoch 2, and a later run has begun epoch 3"):
        fence(claim)


def test_epoch_recorded_by_another_run_blocks_commits() -> None:
    """Two runs that began at once would both commit under one epoch."""
    store = MemoryStore()
    EpochRecords(store).write(Ancestry().begin(SAVE.epoch, None, new_id()))
    epochs = Away(store)
    epochs.away = False
    with pytest.raises(
        CheckpointError, match="another run has begun epoch 2 in gs://b/run; stop one of the two"
    ) as one:
        fence(claim_of(epochs, []))
    assert "processes of one job, call jax.distributed.initialize() first" in str(one.value), "srun without it is alike"


def test_removed_root_takes_no_commit_of_the_run_that_was_removed() -> None:
    """A run that outlived its root would save into the root that was made in its place."""
    store = MemoryStore()
    epochs = Away(store)
    epochs.away = False
    claim = claim_of(epochs, [])
    fence(claim)
    store.delete_many(store.list_all(""))
    with pytest.raises(CheckpointError, match=r"the record of this run \(epoch 2\) is not there any more"):
        fence(claim)
    EpochRecords(store).write(Ancestry().begin(1, None, new_id()))
    with pytest.raises(CheckpointError, match="the root was removed or replaced; start the run again"):
        fence(claim)
