"""Every step of every tier: looked at afresh, deleted, forgotten."""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.arena import Arena
from ckptkit.coordination import Coordinator
from ckptkit.durable import DurableSteps
from ckptkit.errors import StepNotFoundError
from ckptkit.manager.book import Book
from ckptkit.manager.deciding import Decider, StepInfo
from ckptkit.manager.known import KnownSteps
from ckptkit.manager.opening import take_stock
from ckptkit.manager.restoring import Restorer
from ckptkit.manager.taken import DURABLE


class Catalog:
    """Keeps what is known of steps in agreement with what the tiers hold. No save may be on its way."""

    def __init__(
        self,
        book: Book,
        known: KnownSteps,
        durable: DurableSteps,
        arenas: Mapping[str, Arena],
        restorer: Restorer,
        coordinator: Coordinator,
        timeout_s: float,
    ):
        self._book = book
        self._known = known
        self._durable = durable
        self._arenas = arenas
        self._restorer = restorer
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    def take_stock(self) -> int:
        """Fills the book and what is known of steps; returns the highest epoch. Called by all processes together."""
        held, epoch = take_stock(self._restorer, self._durable, self._book.ancestry, self._coordinator, self._timeout_s)
        self._book.refill(held)
        self._known.refill(self._book.steps())
        return epoch

    def reload(self, decider: Decider) -> None:
        """Looks at every tier afresh. Called by all processes together."""
        self._durable.reload()
        self.take_stock()
        decider.refill(self.durable_infos())

    def delete(self, step: int, decider: Decider) -> None:
        """Deletes `step` from every tier; raises `StepNotFoundError` for one that is in none."""
        if step not in self._book.steps():
            raise StepNotFoundError(
                f"step {step} is in no tier of {self._durable.url}; it cannot be deleted", step=step
            )
        self._durable.delete(step)
        for arena in self._arenas.values():
            arena.forget_step(step)
        self._book.forget(step)
        decider.forget(step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone."""
        for name, arena in self._arenas.items():
            arena.forget_step(step)
            self._book.keep_only(name, arena.held())

    def durable_infos(self) -> list[StepInfo]:
        """What policies look at of the steps that the durable tier holds."""
        held = {record.step for record in self._book.records() if DURABLE in record.tiers}
        return [StepInfo(step, time, metrics) for step, time, metrics in self._durable.stock.infos() if step in held]

    def times_ns(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._book.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {step: int(at.timestamp() * 1e9) for step, at, _ in self._durable.stock.infos() if at}
