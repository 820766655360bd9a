"""A restore: one object for the call and one for the candidate that is tried, which gain fields as they advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from ckptkit.errors import Reason
from ckptkit.model.manifest import SaveId
from ckptkit.restore.broadcast.coordinator import BroadcastChoice
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.execute import Shared, Verified
from ckptkit.restore.host_values import Told
from ckptkit.restore.inventory import Held
from ckptkit.restore.local_tiers import LocalSave
from ckptkit.restore.plan import Candidate
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.request import RestoreRequest
from ckptkit.restore.sources import SourceSearch
from ckptkit.util import clock

Outcome = Literal["restored", "damaged", "unsuited", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A save that was not restored, the tiers that were tried, and why: the same on every process."""

    save_id: SaveId
    where: str
    reason: Reason
    is_incomplete: bool = False  # some processes had not committed it when the job ended: nothing is damaged

    @property
    def outcome(self) -> Outcome:
        """The outcome of the candidate: the table in `restore/flow.py`."""
        if "no item" in self.reason.causes and not self.is_damage:
            return "unreachable"
        return "unsuited" if self.is_unsuited else "damaged"

    @property
    def is_damage(self) -> bool:
        """Whether the save itself is at fault: bytes are damaged, or files are missing."""
        return self.reason.is_damage

    @property
    def is_unsuited(self) -> bool:
        """Whether the save is intact, as far as it was committed: a repair changes nothing."""
        return self.is_incomplete or self.reason.is_intact

    def __str__(self) -> str:
        return f"step {self.save_id.step} in {self.where}: {self.reason.text}"


@final
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Restore:
    """One call of `restore`: of the newest save, or of `step` alone.

    `about` names its exchanges: it is unique, and the same on every process. `caller` launches collectives if the
    current thread must not.
    """

    # Of the call.
    step: int | None
    wanted: RestoreRequest
    about: str
    caller: CallerThread | None = None
    start_s: float = field(default_factory=clock.monotonic_s)

    # Looked at, and ranked.
    local: Mapping[SaveId, LocalSave] = field(default_factory=dict)  # this host's
    prepared: dict[SaveId, Prepared] = field(default_factory=dict)  # for the report: those that this host has whole
    reports: list[list[Held]] = field(default_factory=list)  # on process 0: of all processes
    candidates: Sequence[Candidate] = ()
    manifests_damaged: bool = False  # on any process: what those recorded is not known
    rejected: Sequence[Rejection] = ()  # in the order in which they were tried


@final
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Attempt:
    """A restore of one candidate."""

    candidate: Candidate
    prepared: Prepared | None  # compared and planned. None: not yet; after the plan: stock Orbax restores it
    search: SourceSearch = field(init=False)
    is_planned: bool = False  # on all processes: what is rejected now was read
    told: Told = field(default_factory=Told)  # values in host memory, for all
    shared: Shared | None = None  # what replicas have read for each other
    choice: BroadcastChoice = field(init=False)  # and why
    verified: Verified = field(init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore: items by name, their save, and whether it was saved without names."""

    items: Mapping[str, Any]
    save_id: SaveId
    default_item: bool
    slot_bytes: int  # that a save of the same would take
    read_bytes: Mapping[str, int] = field(default_factory=dict)  # by tier
    duration_s: float = 0.0  # from the call to the placed items
    damaged: frozenset[str] = frozenset()  # tiers whose copy had a damaged cell, which this process read elsewhere
    proven: bool = True  # every cell, by its digest; False for a step of stock Orbax, which has none
    rejected: Sequence[Rejection] = ()  # newer ones, in the order in which they were tried; those of unknown age last
