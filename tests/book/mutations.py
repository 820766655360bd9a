"""Faults of the library that break a rule of the book each, to see that histories find them.

Processes of the book are forked: what is replaced here before that is replaced in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from ckptkit.durable.lifecycle import root_record
from ckptkit.durable.lifecycle.epochs import Ancestry, Rollback
from ckptkit.manager import build, root
from ckptkit.model.manifest import ID_CHARS, SaveId
from ckptkit.model.tiers import KeepNewest
from ckptkit.restore import local_tiers
from ckptkit.save.book.ledger import Calls, Ledger
from tests.mutating import all_of
from tests.mutating import mutated as of_these

_SAME = "0" * ID_CHARS


def _roots_are_alike() -> Any:
    """Every root has the same id: a root that is made again is the one before."""
    return mock.patch.object(root_record, "new_id", return_value=_SAME)


def _runs_are_alike() -> Any:
    """Every run has the same id."""
    return mock.patch.object(root, "new_id", return_value=_SAME)


def _shares_are_joined() -> Any:
    """Saves are equal if their numbers are, whatever runs and roots made them."""

    def numbers(save: SaveId) -> tuple[int, int, int]:
        return save.epoch, save.step, save.number

    def is_equal(save: SaveId, other: Any) -> bool:
        return isinstance(other, SaveId) and numbers(save) == numbers(other)

    return all_of(
        mock.patch.object(SaveId, "__eq__", is_equal),
        mock.patch.object(SaveId, "__hash__", lambda self: hash(numbers(self))),
        _runs_are_alike(),
        _roots_are_alike(),
    )


def _order_is_by_step() -> Any:
    """The newest save of an epoch is that of the highest step."""
    return mock.patch.object(SaveId, "made", property(lambda self: (self.epoch, self.step, self.number)))


def _latest_is_highest() -> Any:
    """A manager names the highest step as the latest."""
    return mock.patch.object(Ledger, "latest_step", lambda self: max(self.steps(), default=None))


def _names_are_not_counted() -> Any:
    """A second save of a step has the names of the first one's exchanges."""
    return mock.patch.object(Calls, "enter", return_value=0)


def _ranks_alone() -> Any:
    """A smaller job does not look into the directories of processes that have ended."""

    def own(directory_name: str, rank: int, of: int) -> bool:
        del of
        return directory_name == str(rank)

    return mock.patch.object(local_tiers, "part_of", own)


def _nothing_is_abandoned() -> Any:
    """A rollback abandons nothing."""
    return mock.patch.object(Rollback, "abandons", return_value=False)


def _every_run_is_known() -> Any:
    """Saves of runs that the root does not know of are candidates."""
    return mock.patch.object(Ancestry, "disowned", return_value=False)


def _unrecorded_for_ever() -> Any:
    """Saves of a run that could not be recorded are candidates whatever runs have begun since."""

    def disowned(self: Ancestry, save: SaveId) -> bool:
        known = dict(self.runs).get(save.epoch)
        return bool(save.run) and (save.root != self.root or (not save.after and known != save.run))

    return mock.patch.object(Ancestry, "disowned", disowned)


def _nobody_is_told() -> Any:
    """A start names neither saves of another root nor those of runs that the root does not know."""
    return all_of(
        mock.patch.object(build, "warn_of_other_roots"),
        mock.patch.object(build, "warn_of_unrecorded"),
    )


def _oldest_are_kept() -> Any:
    """A tier that keeps several saves keeps the oldest of them with the newest."""

    def kept(self: KeepNewest, newest_first: Any, flushed: Any, most: int) -> list[Any]:
        del self, flushed
        return [*newest_first[:1], *list(newest_first[1:])[::-1][: most - 1]]

    return mock.patch.object(KeepNewest, "kept", kept)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "roots": _roots_are_alike,
    "runs": _runs_are_alike,
    "joined": _shares_are_joined,
    "order": _order_is_by_step,
    "latest": _latest_is_highest,
    "names": _names_are_not_counted,
    "ranks": _ranks_alone,
    "abandoned": _nothing_is_abandoned,
    "known": _every_run_is_known,
    "unrecorded": _unrecorded_for_ever,
    "told": _nobody_is_told,
    "kept": _oldest_are_kept,
}

mutated = partial(of_these, MUTATIONS)
