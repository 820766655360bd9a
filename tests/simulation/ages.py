"""The oracle of age limits: a tier that lost one save has another try before a job ends for it."""

from __future__ import annotations

from typing import Any

from ckptkit.model.manifest import SaveId
from tests.simulation.process import SimProcess
from tests.simulation.scheduler import Violation


def watch_ages(process: SimProcess) -> None:
    """From now on raises `Violation` where a process decides that a tier was without a commit for too long, although
    it lost fewer than two saves of that tier since the last commit."""
    health = process.pipeline.outcomes.health
    note, committed, overdue = health._note, health.committed, health._overdue
    lost: dict[str, set[SaveId]] = {}  # since the last commit, by tier

    def noted(save_id: SaveId, tier: str, *, gone: bool) -> None:
        for name in (tier, "any tier") if gone else (tier,):
            lost.setdefault(name, set()).add(save_id)
        note(save_id, tier, gone=gone)

    def ended(tier: str) -> None:
        for name in (tier, "any tier"):
            lost.pop(name, None)
        committed(tier)

    def judged(*limits: Any, **words: Any) -> str | None:
        why = overdue(*limits, **words)
        if why is not None and "max_age_s" in why and len(lost.get(why.partition(" has committed")[0], ())) < 2:
            raise Violation(f"process {process.index}: {why}; since the last commit it lost {lost}")
        return why

    health._note, health.committed, health._overdue = noted, ended, judged
