"""The log of process 0's decisions: what a process missed comes with the next verdict, whatever that is about."""

from __future__ import annotations

from ckptkit.durable.lifecycle.epochs import Ancestry, Rollback
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.model.tiers import MEMORY
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.book.ledger import Ledger


class Process:
    """A log over a ledger; `booked` is what it was told, in order."""

    def __init__(self) -> None:
        self.ledger = Ledger(Ancestry(epoch=1))
        self.booked: list[tuple[int, str]] = []
        self.log = CommitLog(self.ledger, lambda save_id, tier: self.booked.append((save_id.step, tier)))

    def tiers(self) -> dict[int, tuple[str, ...]]:
        return {record.step: record.tiers for record in self.ledger.every()}


def save(step: int) -> SaveId:
    return SaveId(1, step, step)


def test_missed_commits_are_learnt_once_and_in_order() -> None:
    """Books would differ between processes, and retention release another slot on each."""
    first, late = Process(), Process()
    for step in range(3):
        first.log.append(save(step), "ram")
        first.log.append(save(step), "ssd")
    news = first.log.news([late.log.state(), first.log.state()])
    for _ in range(2):  # an answer may come twice
        assert late.log.learn(news)
    assert late.booked == first.booked == [(step, tier) for step in range(3) for tier in ("ram", "ssd")]
    assert late.tiers() == first.tiers() == dict.fromkeys(range(3), ("ram", "ssd"))
    assert late.log.has(save(1), "ssd")
    assert first.log.news([late.log.state()])["changes"] == []


def test_process_that_missed_many_commits_gets_the_whole_book() -> None:
    """A process that was away for long would never agree with the others again."""
    first, late = Process(), Process()
    late.log.append(save(0), "ram")
    for step in range(400):
        first.log.append(save(step), "ram")
        first.ledger.keep_only("ram", [save(step)])
    news = first.log.news([late.log.state()])
    assert (news["changes"], len(news["book"])) == ([], 1)
    assert late.log.learn(news)
    assert late.tiers() == first.tiers() == {399: ("ram",)}
    assert late.log.state() == first.log.state()


def test_gap_in_the_news_is_reported_and_not_booked() -> None:
    """A process that did not vote would book the newest commits without those before."""
    first, absent = Process(), Process()
    for step in range(20):
        first.log.append(save(step), "ram")
    unknown = first.log.news([first.log.state(), None])
    assert len(unknown["changes"]) == 8, "of one that did not report it is only likely what it has missed"
    assert not absent.log.learn(unknown)
    assert absent.tiers() == {}
    assert absent.log.learn(first.log.news([absent.log.state()]))
    assert absent.tiers() == first.tiers()


def test_durable_steps_that_are_gone_are_dropped_on_all() -> None:
    """Processes would list steps that process 0 has pruned."""
    first, late = Process(), Process()
    for step in (1, 2, 3):
        first.log.append(save(step), "durable")
    late.log.learn(first.log.news([late.log.state()]))
    first.log.drop_durable([3])
    late.log.learn(first.log.news([late.log.state()]))
    assert late.tiers() == first.tiers() == {3: ("durable",)}


def test_staging_memory_is_no_tier_of_the_book() -> None:
    """A step that only anonymous memory holds would be listed as one to restore."""
    first = Process()
    first.log.append(save(1), MEMORY)
    assert (first.tiers(), first.booked) == ({}, [])
    assert first.log.has(save(1), MEMORY)


def test_ancestry_goes_to_processes_of_another_epoch() -> None:
    """A rollback that a process missed would leave it on the branch that was abandoned."""
    first, late = Process(), Process()
    first.ledger.ancestry = first.ledger.ancestry.begin(2, SaveId(1, 5, 0), new_id())
    news = first.log.news([late.log.state()])
    late.log.learn(news)
    assert late.ledger.ancestry == first.ledger.ancestry
    assert first.log.news([late.log.state()])["ancestry"] is None


def test_ancestry_that_differs_in_one_epoch_is_replaced() -> None:
    """A process that counted a rollback of its own would list no step any more, and nothing would mend it."""
    first, other = Process(), Process()
    other.ledger.ancestry = Ancestry(epoch=first.ledger.ancestry.epoch, rollbacks=(Rollback(1, 0),))
    other.log.learn(first.log.news([other.log.state()]))
    assert other.ledger.ancestry == first.ledger.ancestry
