"""Runs protocols of a save on the calling thread."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.events import EventLog
from ckptkit.job.coordination import Coordinator, Job
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import FailurePolicy
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.protocol import Do, SaveProtocol, drive
from ckptkit.save.agreement.voting import Voting
from ckptkit.save.book.health import SaveHealth
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.circuit_breaker import DurableRetry


class Retry:
    """The durable tries of one process, which begins with no saves."""

    def __init__(self, coordinator: Coordinator, policy: FailurePolicy, events: EventLog | None = None):
        self.ledger = Ledger(Ancestry(epoch=1))
        log = CommitLog(self.ledger, lambda *_: None)
        health = SaveHealth(policy)
        outcomes: Any = SimpleNamespace(
            health=health, losing=lambda save, tier, _, gone: health.losing(save, tier, gone=gone)
        )
        voting = Voting(log, outcomes, coordinator.process, lambda _: None)
        self._coordinator = coordinator
        self.breaker = DurableRetry(policy, Job(coordinator=coordinator, events=events or EventLog()), voting, log)

    @property
    def failing(self) -> bool:
        return self.breaker.failing

    def attempt(self, step: int, write: Callable[[], Any], landed: Callable[[], bool] = bool, **words: Any) -> None:
        """A durable save of `step`; raises what it raises."""

        def written(_: int) -> SaveProtocol:
            yield Do("write", write)

        durable: Any = SimpleNamespace(holds=lambda _: landed(), kept=list)
        protocol = self.breaker.attempt(SaveId(1, step, step), f"0.{step}.0", written, durable, **words)
        drive(protocol, self._coordinator)
