"""Which saves there are to restore: what this host's tiers hold, and what the durable tier does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CorruptCheckpointError, Reason
from ckptkit.events import EventLog, Kind
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.peers.client import PeerClient
from ckptkit.restore.inventory import Held
from ckptkit.restore.local_tiers import LocalSave, LocalTiers
from ckptkit.restore.plan import Candidate, rank_candidates
from ckptkit.store import all_of
from ckptkit.store.backends import properties_of

_AT_ONCE = 8  # steps that are asked for their names

_Named = SaveId | CorruptCheckpointError | None  # the save that a step records, or why it records none


@final
class Inventory:
    """The contents of this host's tiers, the way to read other processes' tiers, and the existing saves.

    `client` reads other processes' tiers, None where they are not read; `rank` is this process's place on its host, of
    how many. Each method looks on this process alone, and events name the durable steps that are damaged.
    """

    def __init__(
        self,
        host_dirs: Mapping[str, Path],
        durable: DurableSteps,
        epochs: EpochRecords,
        events: EventLog,
        *,
        client: PeerClient | None = None,
        rank: tuple[int, int] = (0, 1),
    ):
        self.local = LocalTiers(host_dirs, events)
        self.durable = durable
        self.client = client
        self._rank = rank
        self.epochs = epochs
        self._events = events
        self._ahead: tuple[int, DurableReader] | None = None

    def report(self, save: LocalSave, refusal: Reason | None = None) -> list[Any]:
        """This process's report of a save on its host; `refusal`: why it cannot be read from there."""
        return save.report(self._rank, refusal, linked=self.client is not None).to_json()

    @property
    def repair_command(self) -> str:
        """The command that repairs what this host's tiers and the durable one hold, from copies that are intact."""
        return self.local.repair_command(self.durable.url)

    def reports(self) -> list[list[Any]]:
        """This process's reports of the saves on its host."""
        return [self.report(save) for save in self.local.saves().values()]

    def candidates(
        self, reports: Sequence[Sequence[Held]], step: int | None, looked_into: int | None
    ) -> list[Candidate]:
        """The saves in the order in which they are to be tried, on process 0, from what all processes report.

        `step`: those of that step alone. Of the durable tier the newest `looked_into`, or all; steps that were not seen
        before are read to find out. Where nothing else holds
        anything, the newest step of a bucket is looked into on the way, by a reader that the restore uses then.

        Cost: a read of the epoch records, a listing, then a look into steps that are not known, then their names
        together. Raises `StoreError`.
        """
        fast = [{held.save_id: held.refusal for held in report} for report in reports]
        look = partial(self._look, step, ahead=not any(reports))
        ancestry, (steps, named) = all_of(self.durable.url, [self.epochs.read, look])
        durable = self._newest(ancestry, steps, named, looked_into)
        linked = self.client is not None
        return rank_candidates(fast, durable, ancestry.superseded, step, disowned=ancestry.disowned, linked=linked)

    def durable_opener(self, step: int) -> Callable[[], DurableReader]:
        """How a durable step is opened. A reader that `candidates` has made of it is used."""
        looked_into, reader = self._ahead or (-1, None)
        self._ahead = None
        ahead = reader if step == looked_into else None

        def open_durable() -> DurableReader:
            return ahead if ahead is not None else self.durable.reader(step)

        return open_durable

    def identity(self, step: int, ancestry: Ancestry) -> SaveId:
        """Which save a durable step is. A damaged step is of unknown age: the oldest there is."""
        return self._identified(step, self._names([step])[step], ancestry)

    def _look(self, step: int | None, *, ahead: bool) -> tuple[list[int], dict[int, _Named]]:
        """The durable steps, newest first, and the recorded identity of the first ones."""
        looked = self.durable.looked()
        steps = sorted(
            (each for each in looked if step is None or each == step), key=self.durable.place_of, reverse=True
        )
        self._ahead = None
        others: list[Callable[[], Any]] = []
        if steps and ahead and properties_of(self.durable.url).round_trips:
            self._ahead = steps[0], self.durable.reader(steps[0])
            others = [partial(self._ahead[1].look_ahead, looked[steps[0]])]
        unseen = sum(each not in self.durable.seen for each in steps)
        return steps, self._names(steps[: max(_AT_ONCE, unseen)], others)

    def _newest(
        self, ancestry: Ancestry, steps: Sequence[int], named: Mapping[int, _Named], looked_into: int | None
    ) -> list[SaveId]:
        """The newest saves that no rollback has abandoned, up to `looked_into`."""
        saves: list[SaveId] = []
        rest = sorted((step for step in steps if step not in named), key=self.durable.place_of, reverse=True)
        for some in filter(None, (list(named), *(rest[at : at + _AT_ONCE] for at in range(0, len(rest), _AT_ONCE)))):
            oldest = saves[looked_into - 1] if looked_into is not None and len(saves) >= looked_into else None
            if oldest is not None and all(self.durable.seen[step] < oldest for step in some):
                break
            named = named if some[0] in named else self._names(some)
            found = [self._identified(step, named[step], ancestry) for step in some if step not in self.durable.struck]
            # Abandoned steps do not count: a rollback may leave any number of them above the newest good one.
            saves = sorted([*saves, *(save for save in found if not ancestry.superseded(save))], reverse=True)
        return saves[:looked_into]

    def _names(self, steps: Sequence[int], others: Sequence[Callable[[], Any]] = ()) -> dict[int, _Named]:
        """The recorded identities of steps, read in parallel with `others`."""

        def name_of(step: int) -> _Named:
            try:
                return self.durable.save_id(step)
            except CorruptCheckpointError as error:
                return error

        found = all_of(self.durable.url, [*(partial(name_of, step) for step in steps), *others])
        return dict(zip(steps, found, strict=False))

    def _identified(self, step: int, name: _Named, ancestry: Ancestry) -> SaveId:
        if isinstance(name, CorruptCheckpointError):
            # A candidate of unknown age: tried last, and rejected with this reason.
            self._events.emit(Kind.REJECTED, step=step, tier=DURABLE, reason=str(name))
            return SaveId(0, step, 0)
        self.durable.seen[step] = ancestry.identity(step, name)
        return self.durable.seen[step]
