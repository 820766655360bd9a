"""Every step of every tier: looked at afresh, deleted, forgotten; and what `v1` and `surgery` ask of a manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.lifecycle.places import Place, item_handlers, step_items
from ckptkit.errors import StepNotFoundError
from ckptkit.job.coordination import ScopedCoordinator
from ckptkit.manager.build import Components
from ckptkit.manager.metadata import durable_infos
from ckptkit.manager.restore import Resumer
from ckptkit.manager.stock import take_stock
from ckptkit.restore.flow import Restore
from ckptkit.restore.records import Restored
from ckptkit.restore.request import Choice, RestoreRequest

_TIMEOUT_S = 60.0  # for the small reads of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedItems:
    """The items of the durable step `step`: their directories, and the handlers that the step names for them."""

    step: int
    items: Sequence[str]
    handlers: Mapping[str, str]


class Catalog:
    """Keeps what is known of steps in agreement with what the tiers hold. No save may be in flight."""

    def __init__(self, components: Components, resumer: Resumer):
        self._storage, self._history = components.storage, components.history
        self._flow, self._pipeline, self._resumer = components.restore_flow, components.pipeline, resumer
        self._coordinator = ScopedCoordinator(components.job.coordinator)

    def reload(self, about: str) -> None:
        """Looks at every tier afresh. Called by all processes together, in the call `about`."""
        self._coordinator.begin(about)
        durable, ledger = self._storage.durable, self._history.ledger
        durable.reload()
        told = self._coordinator.ask_process_0("records", lambda: self._history.inventory.epochs.read().to_json())
        read = Ancestry.from_json(told)
        if read.epoch > ledger.ancestry.epoch:  # another run has begun: this process only looks, or is fenced off
            ledger.ancestry = read
        self._look()
        self._history.decider.refill(durable_infos(ledger, durable))

    def _look(self, without: int | None = None) -> None:
        """Lists what the tiers hold now; `without` is a step that may still be in the root while it is deleted."""
        ledger = self._history.ledger
        held = take_stock(self._history.inventory, ledger.ancestry, self._coordinator).held
        ledger.refill({save: tiers for save, tiers in held.items() if save.step != without})
        self._history.metadata_index.refill(ledger.steps())

    def delete(self, step: int, about: str) -> None:
        """Deletes `step` from every tier, in the call `about`; raises `StepNotFoundError` for one that is in none.

        After the newest step was deleted, the tiers are looked at again, as at a start: a save that has lost a host is
        listed only while no whole save is newer, so one may be listed now.
        """
        storage, history = self._storage, self._history
        if step not in {*history.ledger.steps(), *(record.step for record in history.ledger.rejected())}:
            history.decider.forget(step)  # of a step that its own save has pruned: it is known to be deleted
            raise StepNotFoundError(
                f"step {step} is in no tier of {storage.durable.url}; it cannot be deleted", step=step
            )
        saves = {record.save_id for record in history.ledger.every() if record.step == step and record.save_id.ours}
        was_newest = step == history.ledger.latest_step()
        self._coordinator.begin(about)
        if storage.arenas and saves:
            self._coordinator.ask_process_0("deleted", lambda: history.inventory.epochs.delete(saves))
            ancestry = history.ledger.ancestry
            history.ledger.ancestry = replace(ancestry, deleted=ancestry.deleted | saves)
        storage.durable.delete(step, about=about)
        for arena in storage.arenas.values():
            arena.forget_step(step)
        history.ledger.forget(step)
        history.decider.forget(step)
        if storage.arenas and was_newest:
            self._look(without=step)

    def forget_in_fast_tiers(self, step: int) -> None:
        """Leaves a step to the durable tier alone: what fast tiers hold of it is not what it is any more."""
        for name, arena in self._storage.arenas.items():
            arena.forget_step(step)
            self._history.ledger.keep_only(name, arena.held())

    def name_items(self) -> None:
        """From now on every item has a name, also one called `default`: the newer API has no other items."""
        self._storage.durable.stock.lock_default_item(False)

    def recorded_items(self, step: int | None) -> RecordedItems | None:
        """The items of a step (None: of the newest one) as the step records them. None where there is no such step.

        Called by all processes together: process 0 reads, and all get the same answer, or its error. Waits for saves
        in flight. Cost: a listing and a small read of the durable step; a step of fast tiers alone records nothing.
        """
        self._coordinator.begin(self._resumer.enter("load", kind="recorded-items"))

        def read() -> dict[str, Any] | None:
            steps = self._history.ledger.steps()
            number = step if step is not None or not steps else steps[-1]
            if number is None or number not in steps:
                return None
            place = Place.open(self._storage.durable.reader(number).url, timeout_s=_TIMEOUT_S)
            return asdict(RecordedItems(step=number, items=step_items(place), handlers=item_handlers(place)))

        found = self._coordinator.ask_process_0("recorded-items", read)
        return None if found is None else RecordedItems(**found)

    def step_times(self) -> dict[int, int]:
        """When each step was committed, in nanoseconds of the wall clock, where that is known without reading."""
        made = {record.step: record.verified_s for record in self._history.ledger.records()}
        times = {step: int(made_s * 1e9) for step, made_s in made.items() if made_s is not None}
        return times | {
            info.step: int(info.time.timestamp() * 1e9) for info in self._storage.durable.stock.infos() if info.time
        }

    def known_metrics(self, step: int) -> Any:
        """The metrics of a step as far as they are known without reading; None for none."""
        return self._history.metadata_index.cached_metrics(step)

    def restore_chosen(self, step: int | None, choice: Choice) -> Restored:
        """The part of a step (None: of the newest that verifies completely) that `choice` picks, verified as in
        `restore`.

        Only what is picked is read. `choice` picks the same on every process. The run does not continue from the step:
        this is a look, not a rollback. Raises what `restore` and `choice` raise.
        """
        about = self._resumer.enter("restore_chosen", kind="restore")
        wanted = RestoreRequest(args=None, default_item=None, choice=choice)
        return self._flow.restore(Restore(step=step, wanted=wanted, about=about))
