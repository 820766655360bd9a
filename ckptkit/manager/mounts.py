"""Warnings about the mounts of a job's tiers when a manager is made: once for each mount in a process."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.events import EventLog, Kind
from ckptkit.inspection.words import size_text
from ckptkit.model.tiers import DURABLE, RAM, SSD, Tier
from ckptkit.store.backends import backend_of
from ckptkit.store.mounts import FileSystem, file_system_of
from ckptkit.util import clock

_log = logging.getLogger("ckptkit")
_PROBE_BYTES = 32 << 20  # at most, and for at most a second
_PIECE_BYTES = 4 << 20
_PROBE_S = 1.0

_reported: set[tuple[str, str, int]] = set()  # medium of a tier, type, device


def report_durable_mount(url: str, events: EventLog) -> None:
    """Logs that a durable root looks local and is not: its file system, and how steps are committed there."""
    if not backend_of(url).properties.file_system:
        return
    found = file_system_of(url)
    if found.medium == "disk" and found.atomic_rename:
        return
    commit = "a rename of the step's directory" if found.atomic_rename else "a mark, written last, as in a bucket"
    problem = durable_problem(found)
    if _is_new(DURABLE, found, url):
        log = _log.warning if problem else _log.info
        log(
            "durable tier %s is on %s (%s): a step is committed by %s%s", url, found.name, found.medium, commit, problem
        )
    events.emit(
        Kind.MOUNTED,
        tier=DURABLE,
        path=url,
        file_system=found.name,
        medium=found.medium,
        commit="rename" if found.atomic_rename else "mark",
        problem=problem.removeprefix(". "),
    )


def report_tier_mounts(tiers: Sequence[Tier], host_dirs: Mapping[str, Path], events: EventLog) -> None:
    """Warns of a ramdisk tier that is not in memory, and of an SSD tier that is not on a disk of this host.

    Cost: nothing for a tier that is where it should be; else up to a second of writing into its directory, once in a
    process, for the rate in the warning.
    """
    for tier in tiers:
        if tier.name not in host_dirs:
            continue
        found = file_system_of(host_dirs[tier.name])
        problem = tier_problem(tier.medium, found)
        if problem is None:
            continue
        rate_bytes_s = None
        if _is_new(tier.medium, found, str(host_dirs[tier.name])):
            rate_bytes_s = measured_rate_bytes_s(host_dirs[tier.name])
            rate = "" if rate_bytes_s is None else f" It takes {size_text(int(rate_bytes_s))} a second."
            _log.warning("tier %s: %s %s.%s", tier.name, tier.path, problem, rate)
        events.emit(
            Kind.MOUNTED,
            tier=tier.name,
            path=tier.path,
            file_system=found.name,
            medium=found.medium,
            problem=problem,
            **({} if rate_bytes_s is None else {"rate_bytes_s": round(rate_bytes_s)}),
        )


def tier_problem(medium: str, found: FileSystem) -> str | None:
    """The problem of a tier of this medium on that file system; None if no problem is known."""
    if medium == RAM and found.medium in ("disk", "network", "bucket"):
        return f"is a ramdisk tier on {found.name}, which is not memory: mount a tmpfs there, or take Tier.ssd"
    if medium == SSD and found.medium in ("network", "bucket"):
        return f"is an SSD tier on {found.name}, which is not a disk of this host: take a local disk"
    if medium == SSD and found.medium == "memory":
        return f"is an SSD tier on {found.name}, which is memory: it is lost with the host; take a disk, or Tier.ram"
    return None


def durable_problem(found: FileSystem) -> str:
    """The remedy for a durable root on that file system, to be added to a sentence; empty if it has no problem."""
    if found.medium == "bucket":
        return ". Give the bucket's own URL instead: it needs fewer requests, and its commit is one (docs/STORAGE.md)"
    if found.medium == "memory":
        return ". It is lost with the host: give a disk, a shared file system or a bucket"
    return ""


def measured_rate_bytes_s(directory: Path) -> float | None:
    """How fast a directory takes bytes, synced at the end; None where it takes none. Leaves nothing there."""
    path = directory / f".rate-{uuid.uuid4().hex}"
    piece, written = os.urandom(_PIECE_BYTES), 0
    try:
        began_s = clock.monotonic_s()
        with open(path, "wb", buffering=0) as file:
            while written < _PROBE_BYTES and clock.monotonic_s() - began_s < _PROBE_S:
                written += file.write(piece)
            os.fsync(file.fileno())
        return written / max(clock.monotonic_s() - began_s, 1e-9)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            path.unlink()


def _is_new(medium: str, found: FileSystem, path: str) -> bool:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    key = medium, found.name, os.stat(path).st_dev
    if key in _reported:
        return False
    _reported.add(key)
    return True
