"""The saves that a ramdisk and the lanes keep for copies, in addition to a tier's own policy."""

from __future__ import annotations

from pathlib import Path

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import PEER, KeepNewest, KeepUnflushed, Tier
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.book.retention import Retention
from ckptkit.slots.arena import Arena
from tests.peers.conftest import commit


def of(step: int) -> SaveId:
    return SaveId(1, step, step)


class Kept:
    """A process with a ramdisk of a policy, and a lane."""

    def __init__(self, host_dir: Path, ram: Tier):
        self.ram = Arena.open(host_dir, 0, slots=ram.slots_for(1, 1, beside=1), synced=False, keeps_found=True)
        self.peer_arena = Arena.open(host_dir, "buddy-0-0", slots=2, synced=False)
        self.book = Ledger(Ancestry())
        self.retention = Retention((ram, Tier.peer()), {"ram": self.ram, "buddy-0": self.peer_arena}, self.book, 1)
        self.retention.opened()

    def save(self, step: int, *, copied: bool) -> None:
        commit(self.ram, of(step))
        self.book.commit(of(step), "ram")
        self.retention.committed(of(step), "ram")
        if copied:
            commit(self.peer_arena, of(step), process=1)
            self.book.commit(of(step), PEER)
            self.retention.copied(of(step))

    def close(self) -> None:
        self.ram.close()
        self.peer_arena.close()


def test_newest_copied_save_is_kept_until_a_newer_one_is_copied(host_dir: Path) -> None:
    """Hosts would hold copies of a save that nobody has whole any more, or of one too many."""
    kept = Kept(host_dir, Tier.ram("/r", keep=KeepNewest(1)))
    kept.save(1, copied=True)
    for step in (2, 3, 4):
        kept.save(step, copied=False)
        assert sorted(kept.ram.held()) == [of(1), of(step)]
    assert kept.book.committed_in("ram") == {of(1), of(4)}
    kept.save(5, copied=True)
    assert kept.ram.held() == [of(5)]
    assert kept.peer_arena.protected == {of(5)}
    assert kept.book.committed_in("ram") == {of(5)}
    kept.close()


def test_peer_copies_do_not_count_as_flushed(host_dir: Path) -> None:
    """A save that waits for the durable tier would be released once other hosts' memory has it."""
    kept = Kept(host_dir, Tier.ram("/r", keep=KeepUnflushed(2)))
    for step in (1, 2, 3):
        kept.save(step, copied=True)
    assert sorted(kept.ram.held()) == [of(1), of(2), of(3)]
    kept.close()


def test_restored_save_is_kept_in_ramdisk_and_peer_slots(host_dir: Path) -> None:
    """The save that all go on from could be overwritten before the next one has its copies."""
    kept = Kept(host_dir, Tier.ram("/r", keep=KeepNewest(1)))
    kept.save(1, copied=True)
    kept.retention.restored(of(1))
    kept.save(2, copied=False)
    assert sorted(kept.ram.held()) == [of(1), of(2)]
    assert kept.peer_arena.protected == {of(1)}
    kept.close()
