"""The parts of a planned save that a process can share with its replicas, and process 0's use of all offers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ckptkit.model.boxes import Box, boxes_by_process
from ckptkit.model.policies import BroadcastMode
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.broadcast.collective import links_of
from ckptkit.restore.broadcast.schedule import Common, groups_of
from ckptkit.restore.plan import Key
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.tree import Form, Target

# Of one process. The smallest state of `python -m bench broadcast` that replicas share in no more time than each reads
# it: two share 64 MB in 0.59 s, and read it in 0.60 s, at 400 MB/s. For 32 MB it is 0.44 s and 0.40 s (bench/LOG.md,
# 2026-11-28).
SHARED_BYTES_MIN = 64_000_000


class NothingToShareError(Exception):
    """Why a process has nothing to share; a reason, never shown as an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One process's value in the first exchange."""

    leaves: tuple[Common, ...]
    wanted_bytes: int  # of those leaves, by this process
    needs: tuple[bool, ...]  # for each leaf, whether this process would read the durable tier for it
    layout: str  # names leaves, boxes and who holds them: the same on every process, or nothing is shared

    def to_json(self) -> list[Any]:
        """As it is sent: a bit for each leaf only if they differ."""
        bits = int("1" + "".join("01"[need] for need in self.needs), 2)
        needs = all(self.needs) if all(self.needs) or not any(self.needs) else f"{bits:x}"
        return [self.layout, self.wanted_bytes, needs]


def offer_of(prepared: Prepared | None, count: int) -> Offer:
    """The parts of a planned save that can be shared. Raises `NothingToShareError`."""
    if prepared is None:
        raise NothingToShareError("stock Orbax restores this step")
    if min(map(len, links_of(count))) == 0:
        raise NothingToShareError("a process has no device")
    cells = {(item, leaf.path): leaf.cell for item, answer in prepared.answers.items() for leaf in answer.leaves}
    targets = [target for target in prepared.targets if target.key[0] in prepared.asked.trees]
    leaves = []
    for target in targets:
        form = target.form
        groups = groups_of(_holders(form, count), count)
        if groups is not None:
            leaves.append(
                Common(
                    key=target.key,
                    shape=form.shape,
                    boxes=form.boxes,
                    cell=cells[target.key],
                    itemsize=np.dtype(form.dtype).itemsize,
                    groups=groups,
                )
            )
    if not leaves:
        raise NothingToShareError("no two processes want the same boxes")
    tiers = prepared.plan.tiers
    needed = {read.key for read in prepared.plan.reads if tiers[read.sources[0][0]] == DURABLE}
    return Offer(
        leaves=tuple(leaves),
        wanted_bytes=sum(box.size * leaf.itemsize for leaf in leaves if leaf.key in needed for box in leaf.boxes),
        needs=tuple(leaf.key in needed for leaf in leaves),
        layout=_layout(leaves, {target.key: target for target in targets}, count),
    )


def _holders(form: Form, count: int) -> Mapping[Box, tuple[int, ...]]:
    if form.sharding is None:
        return {Box.whole(form.shape): tuple(range(count))}
    return boxes_by_process(form.sharding, form.shape)


def _layout(leaves: Sequence[Common], targets: Mapping[Key, Target], count: int) -> str:
    known: dict[Any, str] = {}
    said = []
    for leaf in leaves:
        form = targets[leaf.key].form
        about = (form.sharding, form.shape)
        if about not in known:
            holders = [[box.start, box.stop, who] for box, who in _holders(form, count).items()]
            known[about] = xxhash.xxh3_64_hexdigest(json.dumps(holders).encode())
        said.append([leaf.key, form.dtype, leaf.cell, known[about]])
    return xxhash.xxh3_128_hexdigest(json.dumps(said).encode())


def judge(values: Sequence[str | list[Any]], mode: BroadcastMode) -> dict[str, Any]:
    """Process 0's decision: whether replicas share, why, and which process needs which leaf."""
    problem = first_problem([value if isinstance(value, str) else None for value in values])
    if problem is not None:
        return {"go": False, "why": problem}
    offers = [value for value in values if not isinstance(value, str)]
    if len({layout for layout, _, _ in offers}) > 1:
        return {"go": False, "why": "the processes do not want the same tree in the same layout"}
    most = max(wanted_bytes for _, wanted_bytes, _ in offers)
    if not most:
        return {"go": False, "why": "fast tiers hold the boxes that the replicas share"}
    why = f"mode {mode!r}: {most / 1e6:.1f} MB in common"
    if mode == "auto" and most < SHARED_BYTES_MIN:
        return {"go": False, "why": f"{why}, less than {SHARED_BYTES_MIN / 1e6:.1f} MB"}
    return {"go": True, "why": why, "needs": [needs for _, _, needs in offers]}


def first_problem(problems: Sequence[str | None]) -> str | None:
    """The report of the first process with a problem."""
    return next((f"process {process}: {said}" for process, said in enumerate(problems) if said is not None), None)


def needs_of(said: bool | str, count: int) -> Sequence[bool]:
    """The `needs` from the result of `Offer.to_json`."""
    if isinstance(said, str):
        return [bit == "1" for bit in f"{int(said, 16):b}"[1:]]
    return [said] * count
