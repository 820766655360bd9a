"""Roots with what runs and commands leave: abandoned branches, pins, leases, and what a crash left half done."""

from __future__ import annotations

import json
from typing import Final

from tests.durable.test_leases import ended_process
from tests.roots.tree import ROOT, StrangeRoot, Tree, registered

LEAVINGS: Final[dict[str, StrangeRoot]] = {}
OURS, STOCK = "ckptkit composite", "orbax composite"
_LEASES = f"{ROOT}/_ckptkit/leases"
_ATTEMPT = "0123456789abcdef" * 2


@registered(LEAVINGS)
def abandoned_branch(tree: Tree) -> None:
    """A run restored its second step and saved a fourth: the third is of an abandoned branch."""
    tree.history("rolled back")
    tree.fact(f"{ROOT}/3", abandoned=True)


@registered(LEAVINGS)
def pinned_abandoned_step(tree: Tree) -> None:
    """The abandoned step is pinned."""
    abandoned_branch(tree)
    tree.pin(3, f"{ROOT}/3")


@registered(LEAVINGS)
def damaged_after_a_rollback(tree: Tree) -> None:
    """After a rollback the newest step is damaged: the abandoned one is not to take its place."""
    abandoned_branch(tree)
    tree.damage(f"{ROOT}/4", "state/d/*", "bit flip")


@registered(LEAVINGS)
def pinned_step(tree: Tree) -> None:
    """The oldest step of a run is pinned."""
    tree.run(OURS)
    tree.pin(1, f"{ROOT}/1")


@registered(LEAVINGS)
def pinned_stock_step(tree: Tree) -> None:
    """The oldest step of a run of stock Orbax is pinned."""
    tree.run(STOCK)
    tree.pin(1, f"{ROOT}/1")


@registered(LEAVINGS)
def pin_of_a_step_that_is_not_there(tree: Tree) -> None:
    """A pin of a step that is not there, and one whose record is damaged."""
    tree.run(OURS)
    tree.put(f"{_LEASES}/pin-{77:018d}.json", "{}")
    tree.pin(2, f"{ROOT}/2")
    tree.put(f"{_LEASES}/pin-{2:018d}.json", "{")


@registered(LEAVINGS)
def leased_step(tree: Tree) -> None:
    """A reader holds a lease of the oldest step."""
    tree.run(OURS)
    tree.lease(1, f"{ROOT}/1")


@registered(LEAVINGS)
def leased_stock_step(tree: Tree) -> None:
    """A reader holds a lease of the oldest step of stock Orbax."""
    tree.run(STOCK)
    tree.lease(1, f"{ROOT}/1")


@registered(LEAVINGS)
def damaged_lease(tree: Tree) -> None:
    """A lease that cannot be read: it may be of any step."""
    tree.run(OURS)
    tree.put(f"{_LEASES}/{_ATTEMPT}.json", '{"step": 1, "lea')
    _every_step_is_held(tree)


@registered(LEAVINGS)
def lease_of_an_infinite_step(tree: Tree) -> None:
    """A lease whose step is infinite."""
    tree.run(OURS)
    tree.put(f"{_LEASES}/{_ATTEMPT}.json", '{"step": 1e999, "beat": 1, "lease_s": 60, "holder": "h"}')
    _every_step_is_held(tree)


@registered(LEAVINGS)
def damaged_announcements(tree: Tree) -> None:
    """The announcements of deletions cannot be read: the writer's, and a command's."""
    tree.run(OURS)
    tree.put(f"{ROOT}/_ckptkit/doomed.json", '{"steps": [1, ')
    tree.put(f"{_LEASES}/doomed-{_ATTEMPT}.json", "null")


@registered(LEAVINGS)
def stale_announcement(tree: Tree) -> None:
    """A command that announced the deletion of every step has died."""
    tree.run(OURS)
    record = {"steps": [1, 2, 3], "beat": 3, "lease_s": 60.0, "holder": "host:1", "process": ended_process()}
    tree.put(f"{_LEASES}/doomed-{_ATTEMPT}.json", json.dumps(record))
    tree.put(f"{ROOT}/_ckptkit/doomed.json", json.dumps(record))


@registered(LEAVINGS)
def unfinished_stock_step(tree: Tree) -> None:
    """Stock Orbax died in mid-write: a temporary directory on a disk, a step without its mark in a bucket."""
    tree.run(STOCK)
    tree.step(STOCK, 1, f"{ROOT}/4.orbax-checkpoint-tmp", of_run=True)
    tree.remove(f"{ROOT}/4.orbax-checkpoint-tmp", "commit_success.txt", "_CHECKPOINT_METADATA", state="unfinished")
    tree.subject = f"{ROOT}/3"


@registered(LEAVINGS)
def unfinished_step(tree: Tree) -> None:
    """ckptkit died in mid-write: a temporary directory of its own name."""
    tree.run(OURS)
    name = f"{ROOT}/4.orbax-checkpoint-tmp-e{1:08d}-{_ATTEMPT}"
    tree.step(OURS, 1, name, of_run=True)
    tree.remove(name, "commit_success.txt", "state/_METADATA", state="unfinished")
    tree.subject = f"{ROOT}/3"


@registered(LEAVINGS)
def intents_without_steps(tree: Tree) -> None:
    """Intents of saves and of deletions in a bucket that never came to anything."""
    tree.run(OURS)
    tree.put(f"{ROOT}/_ckptkit/intents/e{1:08d}-{_ATTEMPT}-9", "")
    tree.put(f"{ROOT}/_ckptkit/intents/e{0:08d}-{'0' * 32}-8", "")


@registered(LEAVINGS)
def intent_over_a_user_directory(tree: Tree) -> None:
    """An intent names a directory in which a user keeps files."""
    tree.run(OURS)
    tree.put(f"{ROOT}/_ckptkit/intents/e{1:08d}-{_ATTEMPT}-2024", "")
    tree.put(f"{ROOT}/2024/notes.txt")


@registered(LEAVINGS)
def half_deleted_step(tree: Tree) -> None:
    """A deletion was cut off: on a disk the step is in the directory of what is leaving."""
    tree.run(OURS)
    tree.move(f"{ROOT}/1", f"{ROOT}/_ckptkit/leaving/1")
    tree.forget(f"{ROOT}/_ckptkit/leaving/1")
    tree.subject = f"{ROOT}/3"


@registered(LEAVINGS)
def quarantined_step(tree: Tree) -> None:
    """A step was put aside by a scrub, and is to stay there."""
    tree.run(OURS)
    tree.move(f"{ROOT}/3", f"{ROOT}/_ckptkit/_quarantine/3")
    tree.damage(f"{ROOT}/_ckptkit/_quarantine/3", "state/d/*", "bit flip")
    tree.fact(f"{ROOT}/_ckptkit/_quarantine/3", of_run=False)
    tree.subject = f"{ROOT}/2"


@registered(LEAVINGS)
def journal_of_a_conversion(tree: Tree) -> None:
    """A conversion into the root was killed, and left its journal and its part."""
    tree.run(OURS)
    tree.put(f"{ROOT}/.4000.ckptkit-part/journal/plan.json", '{"plan": "0"}')
    tree.put(f"{ROOT}/.4000.ckptkit-part/journal/done-0-0.json", "{}")
    tree.put(f"{ROOT}/.4000.ckptkit-part/4000/params.w", "half")


@registered(LEAVINGS)
def journal_beside_the_root(tree: Tree) -> None:
    """A conversion whose target was where the root is now was killed, and left its journal next to the root."""
    tree.run(OURS)
    tree.put(f".{ROOT}.ckptkit-part/journal/plan.json", '{"plan": "0"}')
    tree.put(f".{ROOT}.ckptkit-part/journal/done-0-0.json", "{}")


@registered(LEAVINGS)
def step_without_marks(tree: Tree) -> None:
    """The newest step of ckptkit without its marks: committed on a disk by its name, and not committed in a bucket."""
    tree.run(OURS)
    tree.remove(f"{ROOT}/3", "commit_success.txt", state="blemished")


@registered(LEAVINGS)
def stock_step_without_marks(tree: Tree) -> None:
    """The same of stock Orbax."""
    tree.run(STOCK)
    tree.remove(f"{ROOT}/3", "commit_success.txt", state="blemished")


@registered(LEAVINGS)
def empty_step_directories(tree: Tree) -> None:
    """Directories with names of steps that hold nothing, or an item that holds nothing."""
    tree.run(OURS)
    (tree.root / "4").mkdir()
    (tree.root / "5" / "state").mkdir(parents=True)


@registered(LEAVINGS)
def other_files_in_the_records(tree: Tree) -> None:
    """Files among the root's records that no version of ckptkit writes."""
    tree.run(OURS)
    for path in ("notes.txt", "epochs/notes.txt", "leases/notes.txt", "intents/notes.txt", "leaving/notes.txt"):
        tree.put(f"{ROOT}/_ckptkit/{path}")


def _every_step_is_held(tree: Tree) -> None:
    for each in tuple(tree.facts):
        tree.fact(each.path, held=True)
