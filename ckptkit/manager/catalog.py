"""Every step of every tier: looked at afresh, deleted, forgotten."""

from __future__ import annotations

from ckptkit.errors import StepNotFoundError
from ckptkit.manager.build import Components
from ckptkit.manager.metadata import durable_infos
from ckptkit.manager.opening import take_stock


class Catalog:
    """Keeps what is known of steps in agreement with what the tiers hold. No save may be on its way."""

    def __init__(self, components: Components):
        self._storage, self._history = components.storage, components.history
        self._coordinator = components.job.coordinator

    def reload(self) -> None:
        """Looks at every tier afresh. Called by all processes together."""
        durable, ledger = self._storage.durable, self._history.ledger
        durable.reload()
        held, _ = take_stock(self._history.inventory, ledger.ancestry, self._coordinator)
        ledger.refill(held)
        self._history.metadata_index.refill(ledger.steps())
        self._history.decider.refill(durable_infos(ledger, durable))

    def delete(self, step: int) -> None:
        """Deletes `step` from every tier; raises `StepNotFoundError` for one that is in none."""
        storage, history = self._storage, self._history
        if step not in history.ledger.steps():
            history.decider.forget(step)  # of a step that its own save has pruned: whoever looked for it knows it gone
            raise StepNotFoundError(
                f"step {step} is in no tier of {storage.durable.url}; it cannot be deleted", step=step
            )
        storage.durable.delete(step)
        for arena in storage.arenas.values():
            arena.forget_step(step)
        history.ledger.forget(step)
        history.decider.forget(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone."""
        for name, arena in self._storage.arenas.items():
            arena.forget_step(step)
            self._history.ledger.keep_only(name, arena.held())

    def times_ns(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._history.ledger.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {step: int(at.timestamp() * 1e9) for step, at, _ in self._storage.durable.stock.infos() if at}
