"""Warnings about the mounts of a job's tiers when a manager is made: once for each mount in a process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.events import EventLog, Kind
from ckptkit.model.tiers import DURABLE, Tier
from ckptkit.store.backends import backend_of
from ckptkit.store.mounts import FileSystem, existing, file_system_of, measured_rate_bytes_s, root_problem, tier_problem
from ckptkit.util.words import size_text

_log = logging.getLogger("ckptkit")

_reported: set[tuple[str, str, int]] = set()  # medium of a tier, type, device


def report_durable_mount(url: str, events: EventLog) -> None:
    """Logs that a durable root looks local and is not: its file system, and how steps are committed there."""
    if not backend_of(url).properties.file_system:
        return
    found = file_system_of(url)
    if found.medium == "disk" and found.atomic_rename:
        return
    commit = "a rename of the step's directory" if found.atomic_rename else "a mark, written last, as in a bucket"
    problem = root_problem(found)
    if _is_new(DURABLE, found, url):
        log, told = (_log.warning, f". {problem}") if problem else (_log.info, "")
        log("durable tier %s is on %s (%s): a step is committed by %s%s", url, found.name, found.medium, commit, told)
    events.emit(
        Kind.MOUNTED,
        tier=DURABLE,
        path=url,
        file_system=found.name,
        medium=found.medium,
        commit="rename" if found.atomic_rename else "mark",
        problem=problem or "",
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


def _is_new(medium: str, found: FileSystem, path: str) -> bool:
    key = medium, found.name, os.stat(existing(path)).st_dev
    if key in _reported:
        return False
    _reported.add(key)
    return True
