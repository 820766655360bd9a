"""One answer to which steps a root holds: for the listing, the manager, followers and `latest_step`."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.lifecycle.listing import committed_steps, newest_committed, read_root
from ckptkit.durable.lifecycle.places import Place, item_kind
from ckptkit.events import EventLog
from ckptkit.inspection import list_steps
from ckptkit.store import open_store
from ckptkit.verification.follow import _Follower
from tests.roots import FEWER, Tree
from tests.roots.catalog import SavedRuns

PARTS = 6
NO_ROOTS = ("directory-of-runs", "directory-of-stock-runs", "files-alone")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRuns:
    return SavedRuns(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_every_caller_lists_the_same_steps_of_a_root(tmp_path: Path, saved: SavedRuns, part: int) -> None:
    """A restart would take a step that the listing calls abandoned, or an evaluator one that is not of the run."""
    for name in list(FEWER)[part::PARTS]:
        tree = Tree(tmp_path / name, saved)
        FEWER[name].build(tree)
        if tree.records_damaged or not tree.root.exists():
            continue
        root = str(tree.root)
        place = Place.open(root, timeout_s=5)
        found = read_root(place, EpochRecords(open_store(root)).read())
        if name in NO_ROOTS:
            with pytest.raises(ckptkit.StepNotFoundError, match="it has no step, and no record of a run"):
                list_steps(root, host_id="none")
            continue
        listed = list_steps(root, host_id="none").steps
        assert sorted((each.step, each.state) for each in listed) == sorted((s.step, s.state) for s in found.steps), (
            name
        )

        of_a_manager = [each for each in found.steps if item_kind(each.place) is None]
        newest = newest_committed(of_a_manager)
        assert ckptkit.latest_step(root) == (None if newest is None else newest.step), name

        names = ocp.path.step.standard_name_format(
            step_prefix=found.names.prefix, step_format_fixed_length=found.names.digits
        )
        known = {each.step for each in of_a_manager if each.state != "unfinished"}
        assert set(committed_steps(root, names)) == known, name

        follower = _Follower(root, None, False, False, 60.0, EventLog())
        followed = [[save.step for _, save in follower._new()] for _ in range(2)]  # the second look knows them
        committed = [each for each in found.steps if each.state == "committed"]
        assert followed == [[each.step for each in sorted(committed, key=lambda each: each.identity)]] * 2, name
