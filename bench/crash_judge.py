"""Restarts after each crash, each distinct tree once, compared with what the run had been promised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import final

from bench.crash_job import KEPT, TIERS
from bench.crash_oracle import Found, Promises, Save, newest_in, promised, repair, restart
from ckptkit.testing.crash import CrashState, Disk, Trace, notes

_RECORDS = "durable/_ckptkit"  # epoch records: they outlive any tier's loss


@final
class Judge:
    """Asks restarts, each distinct tree once."""

    def __init__(self, root: Path, trace: Trace):
        self._root, self._trace = root, trace
        self._notes = notes(trace)
        self._metadata_index: dict[object, list[str]] = {}
        self._least: dict[str, Save | None] = {}  # what each tier alone gave when it was damaged, when the repair began
        self.restarts = 0

    def check(self, state: CrashState, views: Sequence[str]) -> list[str]:
        """The errors of a restart after this crash, by view: all tiers, or one alone."""
        promises = promised(text for number, text in self._notes if number < state.count)
        disk = state.disk(self._trace)
        wrong: list[str] = []
        for view in views:
            below = TIERS if view == "all" else (view,) if view == "durable" else (view, _RECORDS)
            key = (view, disk.digest(below), str(promises))
            if key not in self._metadata_index:
                self._metadata_index[key] = self._ask(disk, view, below, promises)
            wrong += [f"{view}: {each}" for each in self._metadata_index[key]]
        return wrong

    def _ask(self, disk: Disk, view: str, below: Sequence[str], promises: Promises) -> list[str]:
        kept = promises.kept.get(view, [])
        floor = promises.floor if view == "all" else max(kept, default=None)
        damaged_alone = promises.damaged and view != "all"
        if damaged_alone:
            floor = self._after_damage(view, below)
        found = self._restart(disk, below, go_on=view == "all")
        wrong = compare(found, floor, promises, strict=not promises.damaged)
        for save in still_kept(kept, found.save) if view == "durable" and not promises.damaged else ():
            self.restarts += 1
            older = restart(self._root, save[1])
            if older.save != save or not older.right:
                wrong.append(f"step {save[1]} is kept, and {older} was restored")
        if promises.damaged and view == "all":
            disk.materialise(self._root, below)
            left = repair(self._root)
            wrong += [f"the next repair: {left}"] if left else []
            for tier in TIERS:
                self.restarts += 1
                wrong += self._after_repair(tier, promises)
        return wrong

    def _after_damage(self, view: str, below: Sequence[str]) -> Save | None:
        """The result of a tier alone after its damage: a repair may only improve it."""
        if view not in self._least:
            begins = next(number for number, text in self._notes if json.loads(text).get("scene") == "repair")
            self._least[view] = self._restart(self._trace.disk(begins), below).save
        return self._least[view]

    def _after_repair(self, tier: str, promises: Promises) -> list[str]:
        found, expected = newest_in(self._root, tier), promises.floor
        return [] if found == expected else [f"after the next repair {tier} has {found}, expected {expected}"]

    def _restart(self, disk: Disk, below: Sequence[str], *, go_on: bool = False) -> Found:
        disk.materialise(self._root, below)
        self.restarts += 1
        return restart(self._root, go_on=go_on)


def still_kept(kept: Sequence[Save], newest: Save | None) -> list[Save]:
    """Without the saves that a newer, not yet announced commit has replaced."""
    return [save for save in kept if newest is None or save in sorted({*kept, newest})[-KEPT:]]


def compare(found: Found, floor: Save | None, promises: Promises, *, strict: bool) -> list[str]:
    """The errors of a restart's result; `strict` if nothing was damaged and nothing may be rejected."""
    if not found.right:
        return [f"{found.save} was restored with other bits, or not at all: {found.error}"]
    wrong = []
    if floor is not None and (found.save is None or found.save < floor):
        wrong.append(f"{found.save} was restored ({found.error}), and {floor} was committed; {found.rejected}")
    if found.save is not None and (why := promises.forbids(found.save)):
        wrong.append(why)
    if strict and found.rejected:
        wrong.append(f"a commit names what is not there: {found.rejected}")
    if strict and found.save is not None and found.latest != found.save[1]:
        wrong.append(f"latest_step says {found.latest}, {found.save} was restored")
    return wrong
