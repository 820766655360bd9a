"""Strange roots: directories of checkpoints as people have them, and whether a command did what it may over each.

`ROOTS` are generated trees: runs of every kind by stock Orbax and by ckptkit, files of other tools and people, damage
of every kind, and what crashes leave. Each is a small function and one line about it. Building one records which steps
stock Orbax restores, which are damaged and which files are foreign (`Tree.facts`). `ACTIONS` are the commands that take
a path and the uses of a manager. `Campaign` runs one over the other on a disk or in the shipped bucket. It judges each
cell from plain listings and by stock Orbax. No byte that ckptkit did not write may change. No step may be lost that
nobody asked to delete. Nothing good may be called damaged, and nothing damaged good.
"""

from tests.roots.campaign import Campaign, Tally, all_cells, chosen_cells
from tests.roots.commands import ACTIONS, Action
from tests.roots.damaged import DAMAGED
from tests.roots.foreign import FOREIGN
from tests.roots.leavings import LEAVINGS
from tests.roots.named import NAMED
from tests.roots.oracle import Failure
from tests.roots.running import Cell
from tests.roots.sound import SOUND
from tests.roots.tree import StepFact, StrangeRoot, Tree

ROOTS: dict[str, StrangeRoot] = {**SOUND, **FOREIGN, **DAMAGED, **LEAVINGS, **NAMED}
FEWER = {
    name: root for name, root in ROOTS.items() if name not in NAMED or name in list(NAMED)[::4]
}  # a few names of each record

__all__ = [
    "ACTIONS",
    "FEWER",
    "ROOTS",
    "Action",
    "Campaign",
    "Cell",
    "Failure",
    "StepFact",
    "StrangeRoot",
    "Tally",
    "Tree",
    "all_cells",
    "chosen_cells",
]
