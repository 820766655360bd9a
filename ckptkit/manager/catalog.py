"""Every step of every tier: looked at afresh, deleted, forgotten."""

from __future__ import annotations

from ckptkit.errors import StepNotFoundError
from ckptkit.job.coordination import Coordinator
from ckptkit.manager.build import Parts
from ckptkit.manager.metadata import durable_infos
from ckptkit.manager.opening import take_stock


class Catalog:
    """Keeps what is known of steps in agreement with what the tiers hold. No save may be on its way."""

    def __init__(self, parts: Parts, coordinator: Coordinator, timeout_s: float):
        self._parts = parts
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    def reload(self) -> None:
        """Looks at every tier afresh. Called by all processes together."""
        parts, book = self._parts, self._parts.book
        parts.durable.reload()
        held, _ = take_stock(parts.restorer, parts.durable, book.ancestry, self._coordinator, self._timeout_s)
        book.refill(held)
        parts.known.refill(book.steps())
        parts.decider.refill(durable_infos(book, parts.durable))

    def delete(self, step: int) -> None:
        """Deletes `step` from every tier; raises `StepNotFoundError` for one that is in none."""
        parts = self._parts
        if step not in parts.book.steps():
            parts.decider.forget(step)  # of a step that its own save has pruned: whoever looked for it knows it gone
            raise StepNotFoundError(
                f"step {step} is in no tier of {parts.durable.url}; it cannot be deleted", step=step
            )
        parts.durable.delete(step)
        for arena in parts.arenas.values():
            arena.forget_step(step)
        parts.book.forget(step)
        parts.decider.forget(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone."""
        for name, arena in self._parts.arenas.items():
            arena.forget_step(step)
            self._parts.book.keep_only(name, arena.held())

    def times_ns(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._parts.book.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {step: int(at.timestamp() * 1e9) for step, at, _ in self._parts.durable.stock.infos() if at}
