"""Results of a verification. `to_json` of each record is the documented shape of `--json` (docs/CLI.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.inspection.sharing import steps_words
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import SaveId
from ckptkit.util.plain import plain_fields

FORMAT = 1  # of the JSON shapes: grows when a field goes or changes its meaning, not when one is added

ProofState = Literal["proven", "corrupt", "unproven", "incomplete", "failed"]
ProofKind = Literal["slot", "durable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One damage. `leaf` and `box` are None where it is not of a cell, `expected` and `found` are digests.

    `found` is None where the bytes could not be read at all. `shared_with`: other steps that have the damaged file too,
    a hard link, and so the same damage.
    """

    path: str
    problem: str
    item: str | None = None
    leaf: str | None = None
    box: Box | None = None
    expected: str | None = None
    found: str | None = None
    shared_with: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.leaf is None:
            return self.problem
        where = "" if self.box is None else f", cell {self.box.start} to {self.box.stop}"
        digests = "" if self.found is None else f" (digest {self.found}, expected {self.expected})"
        shared = f"; the file is also damaged in {steps_words(self.shared_with)}" if self.shared_with else ""
        return f"{self.path}: leaf {self.item}:{self.leaf}{where}: {self.problem}{digests}{shared}"

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        box = None if self.box is None else [list(self.box.start), list(self.box.stop)]
        return {**plain_fields(self), "box": box}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProof:
    """One save at one place. `save_id` is None for a step of stock Orbax; `reason` tells why it is not proven, and
    `unread` names its parts that were not read.

    `proven`: every cell that the save consists of is there and matches its digest. `corrupt`: something does not.
    `unproven`: nothing of it is damaged, and of some nobody kept digests, or it takes more memory to read than is
    allowed. `incomplete`: what is here is proven, and is not all of it (a step that was never committed, or a fast tier
    that holds some processes' shares). `failed`: an error of ckptkit's own ended the look, and `reason` has it.
    """

    step: int
    state: ProofState
    kind: ProofKind
    path: str
    save_id: SaveId | None = None
    checked: tuple[int, int] = (0, 0)  # cells, bytes
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        cells, checked_bytes = self.checked
        return {**plain_fields(self, without=("checked",)), "cells": cells, "bytes": checked_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Every save at `path`, ascending. `notes` list what was left out, `problems` damage outside of steps. `item` is
    the name of an item outside of a step: its step is unknown, and its proof has step 0."""

    path: str
    steps: tuple[StepProof, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    item: str | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """The steps at which an error of ckptkit's own ended the look, and the error."""
        return tuple(f"{proof.path}: {proof.reason}" for proof in self.steps if proof.state == "failed")

    @property
    def unread(self) -> tuple[str, ...]:
        """The parts of the steps that were not read, each with its path."""
        return tuple(f"{proof.path}: {each}" for proof in self.steps for each in proof.unread)

    @property
    def corrupt(self) -> bool:
        """Whether anything is damaged."""
        return bool(self.problems) or any(step.state == "corrupt" for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": FORMAT, **plain_fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """How far the step that is read now has come, in bytes of array data."""

    path: str
    step: int
    checked_bytes: int
    total_bytes: int
