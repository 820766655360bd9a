"""Every command over strange roots, a choice of cells; and whether the facts of the roots are true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.cli import main
from tests.mount import why_not
from tests.roots import ACTIONS, FEWER, Campaign, StepFact, Tally, Tree, chosen_cells
from tests.roots.__main__ import repeat
from tests.roots.campaign import failure_lines
from tests.roots.catalog import SavedRuns
from tests.roots.media import Disk
from tests.roots.oracle import Answer, Outcome, judge, restores

SEED = int(os.environ.get("CKPTKIT_ZOO_SEED", "21"))
PARTS = 12
BUCKET_ROOTS = 12
MOUNT_ROOTS = 6
ENDS_THE_PROCESS = ("shape-grown",)  # stock Orbax takes all memory there: ours alone is asked
# Stock Orbax leaves coroutines of a failed restore behind, which raise when their event loop is closed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("orbax_may_fail"),
]
CELLS = [
    *chosen_cells(FEWER, "disk", SEED),
    *chosen_cells(FEWER, "bucket", SEED, BUCKET_ROOTS),
    *(chosen_cells(FEWER, "mount", SEED, MOUNT_ROOTS) if why_not() is None else ()),
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """One for all cells: what it has built serves the next cell."""
    with Campaign(tmp_path_factory.mktemp("zoo"), main, FEWER) as made:
        yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRuns:
    return SavedRuns(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_no_command_destroys_or_misjudges_a_root(campaign: Campaign, part: int) -> None:
    """A command could destroy a user's files, call a good step damaged, or a damaged one good."""
    tally = Tally()
    for cell in CELLS[part::PARTS]:
        tally.add(cell, campaign.run(cell))
    lines = [failure_lines(*each, repeat) for each in tally.failures]
    assert not lines, "\n".join([f"seed {SEED}", *lines, tally.line()])


def test_choice_covers_every_root_and_every_action() -> None:
    """A root or a command that the choice leaves out would be tested by nobody."""
    for seed in range(5):
        cells = chosen_cells(FEWER, "disk", seed)
        assert {cell.root for cell in cells} == set(FEWER)
        assert {cell.action for cell in cells} == set(ACTIONS)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_stock_orbax_restores_what_the_roots_call_good(tmp_path: Path, saved: SavedRuns, part: int) -> None:
    """The oracle would hold the commands to something that is not so."""
    for name in list(FEWER)[part::PARTS]:
        tree = Tree(tmp_path / name, saved)
        FEWER[name].build(tree)
        if name.startswith(ENDS_THE_PROCESS):
            continue
        for fact in tree.facts:
            if fact.path == tree.subject and fact.state not in ("unfinished", "forged"):
                assert restores(fact, str(tree.home / fact.path)) == fact.whole, (name, fact)


def outcome(tree: Tree, disk: Disk) -> Outcome:
    listing = disk.listing(str(tree.home))
    return Outcome(answer=Answer(code=0), before=listing, after=listing, written={}, place=str(tree.home))


@pytest.fixture
def tree(tmp_path: Path, saved: SavedRuns) -> Tree:
    """A run with a user's file in its root."""
    made = Tree(tmp_path / "tree", saved)
    made.run("orbax composite")
    made.put("run/notes.txt")
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "places")


def kinds(tree: Tree, action: str, found: Outcome) -> list[str]:
    return [failure.kind for failure in judge(tree, ACTIONS[action], found)]


PRUNE, REPAIR, VERIFY = "prune root --keep newest=1", "scrub root --repair", "verify step --json"


def test_lost_file_of_a_user_is_found(tree: Tree, disk: Disk) -> None:
    """The oracle could overlook the one thing that it is for."""
    whole = outcome(tree, disk)
    assert kinds(tree, PRUNE, whole) == []
    gone = {path: found for path, found in whole.before.items() if path != "run/notes.txt"}
    assert kinds(tree, PRUNE, replace(whole, after=gone)) == ["bytes lost"]
    assert kinds(tree, PRUNE, replace(whole, after={**whole.after, "run/notes.txt": "other"})) == ["bytes lost"]


def test_step_may_go_only_by_a_policy_and_if_older(tree: Tree, disk: Disk) -> None:
    """A command that deletes the newest step, or a step that nobody asked to delete, could pass."""
    whole = outcome(tree, disk)

    def without(step: int) -> Outcome:
        return replace(whole, after={path: each for path, each in whole.after.items() if f"run/{step}" not in path})

    assert kinds(tree, PRUNE, without(1)) == []
    assert kinds(tree, PRUNE, without(3)) == ["bytes lost"]
    assert kinds(tree, REPAIR, without(1)) == ["bytes lost"]
    tree.pin(1, "run/1")
    assert kinds(tree, PRUNE, without(1)) == ["bytes lost"]


def test_change_by_a_dry_run_is_found(tree: Tree, disk: Disk) -> None:
    """A plan that already changes something could pass."""
    whole = outcome(tree, disk)
    made = replace(whole, after={**whole.after, "run/new": "file"})
    assert kinds(tree, f"{PRUNE} --dry-run", made) == ["bytes lost"]
    assert kinds(tree, PRUNE, made) == []


def test_wrong_judgements_and_internal_errors_are_found(tree: Tree, disk: Disk) -> None:
    """A command could call good what is damaged, or the reverse, or end with a traceback."""
    whole = outcome(tree, disk)
    assert kinds(tree, VERIFY, replace(whole, answer=Answer(code=11, err="damaged"))) == ["false corrupt"]
    assert kinds(tree, VERIFY, replace(whole, answer=Answer(code=1, err="internal error"))) == ["internal error"]
    tree.damage("run/3", "state/manifest.ocdbt", "truncation")
    assert kinds(tree, VERIFY, whole) == ["false good"]
    assert kinds(tree, VERIFY, replace(whole, answer=Answer(code=11, err="damaged"))) == []


def test_wrong_advice_is_found(tree: Tree, disk: Disk) -> None:
    """An error could send people to repair good checkpoints, or keep them from repairing a damaged one."""
    whole = outcome(tree, disk)
    repair = replace(whole, answer=Answer(code=1, err="Run on each host: `ckptkit scrub run --repair`."))
    calm = replace(whole, answer=Answer(code=1, err="Nothing is damaged, and nothing was deleted."))
    assert (kinds(tree, REPAIR, repair), kinds(tree, REPAIR, calm)) == (["false corrupt"], [])
    tree.damage("run/3", "state/manifest.ocdbt", "truncation")
    look = "inspect root"
    assert (kinds(tree, look, repair), kinds(tree, look, calm)) == ([], ["false good"])
    for command, wrong in (("scrub '{}/run' --repair", 0), ("scrub {}/run --repair", 1), ("scrub '{}/run' --mend", 1)):
        said = f"`ckptkit {command.format('/a b')}`"
        advised = replace(whole, place="/a b", answer=Answer(code=1, err=said))
        assert kinds(tree, look, advised) == ["internal error"] * wrong, said


def test_damage_that_is_not_told_is_found(tree: Tree, disk: Disk, tmp_path: Path, saved: SavedRuns) -> None:
    """A command could end with other words, and keep to itself that the newest step cannot be proven."""
    del tree
    own = Tree(tmp_path / "own", saved)
    own.run("ckptkit composite")
    own.damage("run/3", "state/_ckptkit/process-0.json", "truncation", "unproven")
    whole = outcome(own, disk)
    look = "plan-restore root"
    assert kinds(own, look, replace(whole, answer=Answer(code=0, out="step 2"))) == ["false good"]
    assert kinds(own, look, replace(whole, answer=Answer(code=11, err="damaged: /x/run/3: truncated"))) == []


def test_damage_of_a_shared_file_is_a_fact_of_each_step_that_has_it(tmp_path: Path, saved: SavedRuns) -> None:
    """Copies would have bytes of their own: what a command does to a shared file would be tested on none."""
    tree = Tree(tmp_path / "tree", saved)
    tree.run("ckptkit unchanged leaf")
    tree.damage("run/3", "default/d/unchanged.*", "bit flip")
    assert {fact.path: fact.state for fact in tree.facts} == {"run/1": "good", "run/2": "damaged", "run/3": "damaged"}
    place = Path(Disk(tmp_path / "places").place(tree.home))
    one, other = (next((place / step).glob("default/d/unchanged.*")) for step in ("run/2", "run/3"))
    assert os.path.samefile(one, other)


def test_facts_say_who_wrote_a_step() -> None:
    """A step of stock Orbax could be taken for one that ckptkit may put aside."""
    assert not StepFact(path="run/1", kind="orbax composite", step=1).ours
    assert StepFact(path="run/1", kind="ckptkit composite", step=1).ours
