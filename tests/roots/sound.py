"""Roots in which nothing is damaged and nothing is foreign: runs of every kind, of stock Orbax's and of ckptkit's."""

from __future__ import annotations

from functools import partial
from typing import Final

from tests.roots.catalog import KINDS
from tests.roots.tree import ROOT, StrangeRoot, Tree, registered


def _of_kind(kind: str) -> StrangeRoot:
    line = f"Three steps of the kind {kind!r}."
    return StrangeRoot(name=kind.replace(" ", "-"), line=line, build=partial(Tree.run, kind=kind))


SOUND: Final[dict[str, StrangeRoot]] = {each.name: each for each in map(_of_kind, KINDS)}


@registered(SOUND)
def continued_run(tree: Tree) -> None:
    """Stock Orbax saved two steps, and ckptkit the third."""
    tree.history("continued")
    for step in (1, 2):
        tree.fact(f"{ROOT}/{step}", kind="orbax composite")


@registered(SOUND)
def restarted_run(tree: Tree) -> None:
    """A run that was restarted four times, with a step of each of its five epochs."""
    tree.history("restarted")


@registered(SOUND)
def run_without_records(tree: Tree) -> None:
    """A run without its records in the root: its epochs are known from the sidecars alone."""
    tree.run("ckptkit composite")
    tree.drop(f"{ROOT}/_ckptkit")


@registered(SOUND)
def empty_root(tree: Tree) -> None:
    """A directory without anything in it."""


@registered(SOUND)
def one_step(tree: Tree) -> None:
    """A run with one step."""
    tree.run("ckptkit composite", (2,))


@registered(SOUND)
def one_stock_step(tree: Tree) -> None:
    """A run of stock Orbax with one step."""
    tree.run("orbax composite", (2,))
