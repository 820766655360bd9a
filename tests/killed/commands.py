"""The commands that write, each with the tree that it is given and what it is asked to change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import ckptkit
from ckptkit.store import open_store
from ckptkit.upkeep import pin
from tests.roots.catalog import KINDS, STEPS, SavedRuns
from tests.roots.kinds import quiet
from tests.roots.media import LinkedCopies
from tests.roots.tree import ROOT, Tree

KIND: Final = "ckptkit composite"
HOST: Final = "h0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command line. Its places: `{root}`, a run with the steps 1 to 3; `{other}`, one with the steps 46 to 50;
    `{new}`, which nothing is at; `{tier}`, a fast tier of `{root}`; `{key}`.

    `deletes`: the steps of `{root}` that it is asked to delete, or may change. `makes`: a checkpoint in another
    format. `fills`: `{new}` is a root. `resumes`: it has `--resume`. `damaged`: the step of `{root}` that is damaged.
    `tiered`: `{tier}` has the saves of `{root}`. `pinned`: a step of it.
    `renumbered`: the steps that it writes, and the numbers that they had.
    """

    name: str
    line: str
    code: int = 0
    deletes: frozenset[int] = frozenset()
    makes: bool = False
    fills: bool = False
    resumes: bool = False
    damaged: int | None = None
    tiered: bool = False
    pinned: int | None = None
    renumbered: Mapping[int, int] = field(default_factory=dict)
    media: Sequence[str] = ("disk", "bucket")

    def arguments(self, place: str, key: str, local: str, *, resume: bool = False) -> list[str]:
        """The words of the command in a place; fast tiers and keys are on this machine, in `local`."""
        places = {
            "root": f"{place}/{ROOT}",
            "other": f"{place}/other",
            "new": f"{place}/new",
            "tier": f"{local}/tier",
            "key": key,
        }
        words = [word.format(**places) for word in self.line.split()]
        return [*words, *["--resume"] * (resume and self.resumes)]

    def build(self, local: Path, saved: SavedRuns, put: Callable[[Path], str]) -> str:
        """Makes the tree that the command is given, and returns its place: `put` copies a directory there."""
        home = local.with_name(f"{local.name} built")
        home.mkdir(parents=True)
        if not self.tiered:
            Tree(home / "tree", saved).run(KIND)
        LinkedCopies().tree(saved.root("restarted"), home / "tree/other")
        place = put(home / "tree")
        root = f"{place}/{ROOT}"
        if self.tiered:
            _save_with_tier(root, local / "tier")
        if self.damaged is not None:
            store = open_store(f"{root}/{self.damaged}/state/d")
            (name,) = store.list("")
            store.put(name, bytes(len(store.get(name))))
        if self.pinned is not None:
            pin(root, self.pinned)
        shutil.rmtree(home)
        return place


def _save_with_tier(root: str, tier: Path) -> None:
    """A job with a fast tier, which saves what `KIND` does. A ramdisk and a disk are alike here."""
    tier.mkdir()
    with quiet(), ckptkit.CheckpointManager(root, tiers=[ckptkit.Tier.ram(str(tier))], host_id=HOST) as manager:
        for step in STEPS:
            manager.save(step, args=KINDS[KIND].arguments(step))
            manager.wait_until_finished()


def _made(name: str, line: str) -> Command:
    """With `--resume`, and without."""
    return Command(name=name, line=line, makes=True, resumes=True)


_MAKING: Final = [
    *(_made(f"convert to {to}", f"convert {{root}}/3 {{new}} --to {to}") for to in ("orbax", "npz", "safetensors")),
    _made("convert to hf", "convert {root}/3 {new} --to hf --shard-size 100"),  # two files
    _made("convert to torch", "convert {root}/3 {new} --to torch"),
    _made("extract", "extract {root}/3 {new} --only ** --to npz"),
    _made("merge", "merge {root}/3 {root}/3 {new} --average --to hf"),
    _made("reshard", "reshard {root}/3 {new} --mesh x=2"),
]
_UPKEEP: Final = [
    Command(name="prune", line="prune {root} --keep newest=2", deletes=frozenset({1})),
    Command(name="prune unread", line="prune {root} --keep newest=1 --unread", deletes=frozenset({1, 2})),
    Command(
        name="scrub: mend",
        line=f"scrub {{root}} --tier {{tier}} --host-id {HOST} --repair",
        damaged=3,
        deletes=frozenset({3}),
        tiered=True,
    ),
    Command(name="scrub: put aside", line="scrub {root} --repair", code=11, damaged=3, deletes=frozenset({3})),
    Command(name="rollback", line="rollback {root} --to 2"),
    Command(name="pin", line="pin {root} 2 --reason test"),
    Command(name="unpin", line="unpin {root} 2", pinned=2),
    Command(name="copy root", line="copy {root} {new}", fills=True, resumes=True),
    Command(name="copy step", line="copy {root}/2 {new}", fills=True, resumes=True),
    Command(name="copy as newest", line="copy {other}/50 {root} --as newest", resumes=True),
    Command(
        name="copy as history", line="copy {other}/50 {root} --as history --as-step 0", resumes=True, renumbered={0: 50}
    ),
    Command(name="sign", line="sign {root}/3 --key {key}", deletes=frozenset({3})),
    Command(name="tiers clean", line=f"tiers clean {{tier}} --idle 0s --host-id {HOST}", tiered=True, media=("disk",)),
]
COMMANDS: Final[dict[str, Command]] = {each.name: each for each in (*_UPKEEP, *_MAKING)}
