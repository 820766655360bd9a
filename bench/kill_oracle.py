"""The saves in the files that survived a kill: read by `docs/FORMAT.md`, without the library."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # registers bfloat16 with np.dtype
import numpy as np
import xxhash

assert ml_dtypes.bfloat16 is not None


class Save(NamedTuple):
    """Which save, in the order of saving."""

    epoch: int
    number: int
    step: int
    run: str

    def __str__(self) -> str:
        return f"{self.step}@{self.epoch}.{self.number}"


Leaf = tuple[str, tuple[str, ...], tuple[int, ...]]  # item, path, shape


def newest_covered(ram: Iterable[Path], ssd: Iterable[Path], durable: Path) -> Save | None:
    """The newest save, of no abandoned branch, of which the files still hold every element, proven by its digests.

    `ram` and `ssd` are tier roots of the hosts; a durable step counts as whole once its directory has its name.
    """
    covered = _durable_saves(durable) | _fast_saves([*ram, *ssd])
    ancestry = _ancestry(durable)
    abandoned = {save for save in covered for epoch, _, *base in ancestry if save.epoch < epoch and [*save[:2]] > base}
    return max(covered - abandoned, default=None)


def _fast_saves(roots: Iterable[Path]) -> set[Save]:
    held: dict[Save, dict[Leaf, np.ndarray]] = defaultdict(dict)
    for path in (path for root in roots for path in root.glob("*/*/*/step-*.json")):
        manifest = _manifest(path)
        if manifest is None:
            continue
        slot = (path.parent / manifest["slot"]).read_bytes()
        leaves = held[_save(manifest["save_id"])]
        for key, leaf in _leaves(manifest):
            mask = leaves.setdefault(key, np.zeros(leaf["shape"], bool))
            for start, stop, offset, digests in leaf["boxes"]:
                if _proven(slot, leaf, start, stop, offset, digests):
                    mask[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
    return {save for save, leaves in held.items() if leaves and all(mask.all() for mask in leaves.values())}


def _durable_saves(root: Path) -> set[Save]:
    saves = set()
    for path in root.glob("*/*/_ckptkit/process-*.json"):
        manifest = _manifest(path) if path.parent.parent.parent.name.isdecimal() else None
        if manifest is not None:
            saves.add(_save(manifest["save_id"]))
    return saves


def _ancestry(root: Path) -> list[list[int]]:
    records = sorted(root.glob("_ckptkit/epochs/*.json"))
    return json.loads(records[-1].read_text())["ancestry"] if records else []


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, or None where it does not match its own digest."""
    text = path.read_bytes()
    start, stop = text.index(b'"manifest":') + len(b'"manifest":'), len(text) - 1
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record["manifest"] if xxhash.xxh3_128_hexdigest(text[start:stop]) == record["digest"] else None


def _save(save_id: dict[str, Any]) -> Save:
    return Save(*(save_id[name] for name in Save._fields))


def _leaves(manifest: dict[str, Any]) -> Iterator[tuple[Leaf, dict[str, Any]]]:
    for item, leaves in manifest["arrays"].items():
        for leaf in leaves:
            yield (item, tuple(leaf["path"]), tuple(leaf["shape"])), leaf


def _proven(slot: bytes, leaf: dict[str, Any], start: Any, stop: Any, offset: int, digests: list[str]) -> bool:
    """Whether a box's bytes are those that its digests were taken of: one per cell, whole leading rows."""
    shape = [b - a for a, b in zip(start, stop, strict=True)]
    box_bytes = math.prod(shape) * np.dtype(leaf["dtype"]).itemsize
    row_bytes = box_bytes // shape[0] if shape else box_bytes
    step = max(1, row_bytes * (leaf["cell"][0] if leaf["cell"] else 1))
    parts = [slot[offset + at : offset + min(at + step, box_bytes)] for at in range(0, max(1, box_bytes), step)]
    return len(parts) == len(digests) and all(
        xxhash.xxh3_128_hexdigest(part) == digest for part, digest in zip(parts, digests, strict=True)
    )
