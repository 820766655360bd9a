"""Which saves the durable tier holds, newest first, and a look into the newest; for process 0, before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CorruptCheckpointError
from ckptkit.events import EventLog, Kind
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.model.verify_mode import VerifySelection
from ckptkit.store import all_of
from ckptkit.store.schemes import properties_of

_AT_ONCE = 8  # steps that are asked for their names

_Named = SaveId | CorruptCheckpointError | None  # the save that a step says it is, or why it does not


class DurableLook(NamedTuple):
    """The steps that are there, newest first, and what the first of them say that they are."""

    steps: Sequence[int]
    named: Mapping[int, _Named]


@final
class DurableCandidates:
    """The saves of one durable root. Events name the steps that are damaged."""

    def __init__(self, durable: DurableSteps, events: EventLog):
        self._durable = durable
        self._events = events
        self._ahead: tuple[int, DurableReader] | None = None

    def look(self, step: int | None, ahead: VerifySelection | None) -> DurableLook:
        """The steps (`step`: that one alone). With `ahead`, the newest one of a bucket is looked into on the way, for
        `take_reader`, whose reader proves so. Cost: a listing, then a look into steps that are not known, then their
        names together. Raises `StoreError`."""
        looked = self._durable.looked()
        steps = sorted((each for each in looked if step is None or each == step), reverse=True)
        self._ahead = None
        others: list[Callable[[], Any]] = []
        if steps and ahead is not None and properties_of(self._durable.url).round_trips:
            self._ahead = steps[0], self._durable.reader(steps[0], ahead)
            others = [partial(self._ahead[1].look_ahead, looked[steps[0]])]
        return DurableLook(steps, self._names(steps[:_AT_ONCE], others))

    def take_reader(self, step: int) -> DurableReader | None:
        """The reader of a step that was looked into, once; None for any other."""
        looked_into, reader = self._ahead or (-1, None)
        self._ahead = None
        return reader if step == looked_into else None

    def newest(self, ancestry: Ancestry, looked: DurableLook, looked_into: int | None) -> list[SaveId]:
        """The newest saves that no rollback has abandoned, up to `looked_into`."""
        saves: list[SaveId] = []
        for some in (looked.steps[at : at + _AT_ONCE] for at in range(0, len(looked.steps), _AT_ONCE)):
            named = looked.named if some[0] in looked.named else self._names(some)
            found = [self._identified(step, named[step], ancestry) for step in some]
            # Abandoned steps do not count: a rollback may leave any number of them above the newest good one.
            saves += [save for save in found if not ancestry.superseded(save)]
            if looked_into is not None and len(saves) >= looked_into:
                return saves[:looked_into]
        return saves

    def identity(self, step: int, ancestry: Ancestry) -> SaveId:
        """Which save a step is. A damaged step is of unknown age: the oldest there is."""
        return self._identified(step, self._names([step])[step], ancestry)

    def _names(self, steps: Sequence[int], others: Sequence[Callable[[], Any]] = ()) -> dict[int, _Named]:
        """What steps say that they are, asked together with what `others` ask."""

        def name_of(step: int) -> _Named:
            try:
                return self._durable.save_id(step)
            except CorruptCheckpointError as error:
                return error

        found = all_of(self._durable.url, [*(partial(name_of, step) for step in steps), *others])
        return dict(zip(steps, found, strict=False))

    def _identified(self, step: int, name: _Named, ancestry: Ancestry) -> SaveId:
        if isinstance(name, CorruptCheckpointError):
            # A candidate of unknown age: tried last, and rejected with this reason.
            self._events.emit(Kind.REJECTED, step=step, tier=DURABLE, reason=str(name))
            return SaveId(0, step, 0)
        return name or ancestry.of_stock(step)
