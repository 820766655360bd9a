"""The promises to a run at each point of its trace, from its own notes; and whether a restart keeps them.

It uses nothing of ckptkit's bookkeeping: a save is `(branch, step)`, and was reported as `committed` or not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ckptkit
from bench.crash_job import HOST, KEPT, TIERS, make_manager, make_state, restore_args, save_args

Save = tuple[int, int]  # branch, step


@dataclass(slots=True)
class Promises:
    """The promises at the time of a crash. `kept`: by tier, the saves that it must still have, ascending."""

    scene: str = "start"
    kept: dict[str, list[Save]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    branch: int = 0  # the newest with a committed save
    base: int | None = None  # what a rollback went back to
    deleted: int | None = None
    damaged: bool = False

    def hear(self, note: dict[str, Any]) -> None:
        """One note of the run."""
        self.scene = note.get("scene", self.scene)
        if "committed" in note:
            tier, branch, step = note["committed"]
            self.branch = max(self.branch, branch)
            self.kept[tier] = sorted([*self.kept[tier], (branch, step)])[-(KEPT if tier == "durable" else 1) :]
            self.deleted = None if self.deleted == step else self.deleted
        if "rolled_back" in note:
            self.base = note["rolled_back"]
            self._drop(lambda step: step > note["rolled_back"])
        if "deleting" in note:
            self._drop(lambda step: step == note["deleting"])
        self.deleted = note.get("deleted", self.deleted)
        if "lost" in note:
            self._drop(lambda step: step == note["lost"])
        self.damaged = note.get("damaged", self.damaged)

    @property
    def floor(self) -> Save | None:
        """The newest save that some tier must have."""
        return max((save for saves in self.kept.values() for save in saves), default=None)

    def forbids(self, save: Save) -> str | None:
        """Why a restart may not go on from this save."""
        branch, step = save
        if branch < self.branch and self.base is not None and step > self.base:
            return f"step {step} of branch {branch} was abandoned"
        return f"step {step} was deleted" if step == self.deleted else None

    def _drop(self, doomed: Callable[[int], bool]) -> None:
        self.kept = {tier: [save for save in saves if not doomed(save[1])] for tier, saves in self.kept.items()}


def promised(said: Iterable[str]) -> Promises:
    """The promises after these notes."""
    promises = Promises()
    for text in said:
        promises.hear(json.loads(text))
    return promises


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a restart: a save and whether its bits are right, or an error; `rejected`: the skipped saves."""

    save: Save | None
    right: bool
    latest: int | None
    rejected: tuple[str, ...]
    error: str = ""


def restart(home: Path, step: int | None = None, *, go_on: bool = False, durable: str | None = None) -> Found:
    """Makes a manager over the files in `home` and restores `step`, or the newest; with `go_on`, saves once more."""
    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)

    def rejected() -> tuple[str, ...]:
        return tuple(str(e.fields["reason"]) for e in events if e.kind == ckptkit.Kind.REJECTED)

    try:
        with make_manager(home, log, durable) as manager:
            latest = manager.latest_step()
            try:
                found = manager.restore(step, args=restore_args())
            except (ckptkit.NoRestorableStepError, ckptkit.CorruptCheckpointError) as error:
                return Found(None, True, latest, rejected(), type(error).__name__)
            except ckptkit.StepNotFoundError as error:
                return Found(None, True, latest, rejected(), type(error).__name__)
            branch, restored = int(found["data"]["branch"]), int(found["data"]["step"])
            right = _same(found["state"], make_state(restored, branch))
            if go_on:
                _go_on(manager, restored)
            return Found((branch, restored), right, latest, rejected())
    except Exception as error:  # noqa: BLE001  whatever a restart dies of is a violation, and is printed
        return Found(None, False, None, rejected(), f"{type(error).__name__}: {error}")


def newest_in(home: Path, tier: str) -> Save | None:
    """The newest save that one tier alone gives; the others are moved away for a moment."""
    with tempfile.TemporaryDirectory(dir=home.parent) as away:
        others = [home / each for each in TIERS[:2] if each != tier]
        others += [] if tier == "durable" else [p for p in (home / "durable").iterdir() if p.name != "_ckptkit"]
        for path in others:
            path.rename(Path(away) / path.name)
        found = restart(home).save
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
            (Path(away) / path.name).rename(path)
        return found


def repair(home: Path, durable: str | None = None) -> str:
    """Scrubs the files in `home`, as the next run of a repair does; the remaining damage, or nothing."""
    try:
        done = ckptkit.scrub(
            durable or str(home / "durable"), [str(home / t) for t in TIERS[:2]], repair=True, host_id=HOST
        )
    except Exception as error:  # noqa: BLE001  printed as a violation
        return f"{type(error).__name__}: {error}"
    return "; ".join(str(each) for each in done.treatments if not each.done)


def _go_on(manager: ckptkit.CheckpointManager, restored: int) -> None:
    """The next save in every tier, as the run would do it, and the restore of it."""
    step = restored + 1 + (restored + 1) % 2
    manager.save(step, args=save_args(step, 9))
    manager.wait_until_finished()
    found = manager.restore(None, args=restore_args())
    if found["data"] != {"step": step, "branch": 9} or not _same(found["state"], make_state(step, 9)):
        raise AssertionError(f"after the crash, step {step} was saved and {found['data']} was restored")


def _same(found: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
