"""Damage to files, as by disks, networks and people: seeded, so that a failure is repeated by its seed."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

DamageKind = Literal["bit flip", "zeroed block", "truncation", "swapped files", "stale file", "missing file", "garbage"]
DAMAGE_KINDS: tuple[DamageKind, ...] = get_args(DamageKind)
BLOCK_BYTES = 4096  # what a disk loses at once

_GARBAGE = (b"", b"null", b"[]", b"{}", b"\xff\xfe\x00", b'{"digest":"","manifest":{}}', b"[" * 5000)


def inflict(kind: DamageKind, files: Sequence[Path], older: Sequence[Path], seed: int) -> str:
    """Damages one of `files` and returns a description. The same seed does the same to files of the same names.

    `older` are such files of an older step. `swapped files` exchanges two of `files`, or one with one of `older`.
    Raises `ValueError` where there is nothing to damage, or nothing older to be stale.
    """
    chance = random.Random(seed)
    candidates = [path for path in files if path.stat().st_size] or list(files)
    if not candidates or (kind in ("stale file", "swapped files") and not older and len(files) < 2):
        raise ValueError(f"{kind} needs files, found {len(files)} and {len(older)} of an older step")
    path = chance.choice(sorted(candidates))
    size_bytes = path.stat().st_size
    if kind == "missing file":
        path.unlink()
        return f"{path} removed"
    if kind == "truncation":
        left_bytes = chance.randrange(max(1, size_bytes))
        os.truncate(path, left_bytes)
        return f"{path} cut from {size_bytes} to {left_bytes} bytes"
    if kind == "stale file":
        same = [each for each in older if each.name == path.name] or list(older) or list(files)
        source = chance.choice(sorted(same))
        path.write_bytes(source.read_bytes())
        return f"{path} has the bytes of {source}"
    if kind == "swapped files":
        other = chance.choice(sorted(each for each in (*files, *older) if each != path))
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
        return f"{path} and {other} swapped"
    data = bytearray(path.read_bytes())
    if kind == "garbage":
        path.write_bytes(chance.choice(_GARBAGE))
        return f"{path} overwritten with garbage"
    at = chance.randrange(max(1, size_bytes))
    if kind == "bit flip":
        if data:
            data[at] ^= 1 << chance.randrange(8)
    else:
        at -= at % BLOCK_BYTES
        data[at : at + BLOCK_BYTES] = bytes(len(data[at : at + BLOCK_BYTES]))
    path.write_bytes(data)
    return f"{path}: {kind} at byte {at}"
