"""Every step of every tier: looked at afresh, deleted, forgotten."""

from __future__ import annotations

from ckptkit.errors import StepNotFoundError
from ckptkit.job.coordination import Coordinator
from ckptkit.manager.build import Components
from ckptkit.manager.metadata import durable_infos
from ckptkit.manager.opening import take_stock


class Catalog:
    """Keeps what is known of steps in agreement with what the tiers hold. No save may be on its way."""

    def __init__(self, components: Components, coordinator: Coordinator, timeout_s: float):
        self._components = components
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    def reload(self) -> None:
        """Looks at every tier afresh. Called by all processes together."""
        components, ledger = self._components, self._components.ledger
        components.durable.reload()
        held, _ = take_stock(components.inventory, ledger.ancestry, self._coordinator, self._timeout_s)
        ledger.refill(held)
        components.metadata_index.refill(ledger.steps())
        components.decider.refill(durable_infos(ledger, components.durable))

    def delete(self, step: int) -> None:
        """Deletes `step` from every tier; raises `StepNotFoundError` for one that is in none."""
        components = self._components
        if step not in components.ledger.steps():
            components.decider.forget(
                step
            )  # of a step that its own save has pruned: whoever looked for it knows it gone
            raise StepNotFoundError(
                f"step {step} is in no tier of {components.durable.url}; it cannot be deleted", step=step
            )
        components.durable.delete(step)
        for arena in components.arenas.values():
            arena.forget_step(step)
        components.ledger.forget(step)
        components.decider.forget(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone."""
        for name, arena in self._components.arenas.items():
            arena.forget_step(step)
            self._components.ledger.keep_only(name, arena.held())

    def times_ns(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._components.ledger.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {step: int(at.timestamp() * 1e9) for step, at, _ in self._components.durable.stock.infos() if at}
