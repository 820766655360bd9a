"""The warnings of a start, about its root, its tiers and the class of the manager: each logged once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.durable.abandoned import left_behind
from ckptkit.durable.lifecycle.root_record import RootRecord
from ckptkit.durable.steps import DurableSteps
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import Job
from ckptkit.manager.fast_tiers import JobHosts
from ckptkit.manager.root import root_store
from ckptkit.manager.settings import Settings
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, Tier
from ckptkit.store.backends import backend_of
from ckptkit.store.mounts import FileSystem, existing, file_system_of, measured_rate_bytes_s, root_problem, tier_problem
from ckptkit.util.words import command_line, on_each_host, own_host_id, size_text

_log = logging.getLogger("ckptkit")
_NAMES_MAX = 20  # in one line or event
_reported: set[tuple[str, str, int]] = set()  # medium of a tier, type, device
# Methods that `save`, `restore(None)`, `delete` and `close` of Orbax's manager call on themselves.
_ASKED_BY_ORBAX = (
    "all_steps",
    "is_saving_in_progress",
    "latest_step",
    "reached_preemption",
    "should_save",
    "wait_until_finished",
)


def warn_of_overrides(kind: type, base: type) -> None:
    """One WARNING for a subclass `kind` of `base` whose methods decide nothing here."""
    overridden = [name for name in _ASKED_BY_ORBAX if getattr(kind, name) is not getattr(base, name)]
    if overridden:
        _log.warning(
            "%s overrides %s: save, restore, delete and close do not ask these methods, unlike stock Orbax's. Decide "
            "with CheckpointManagerOptions(save_decision_policy=...), or override save and restore themselves",
            *(kind.__qualname__, ", ".join(overridden)),
        )


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


def warn_of_other_roots(host_dirs: Mapping[str, Path], url: str, root: RootRecord, settings: Settings) -> None:
    """One warning for each directory of a root that was at this place before: its slots hold no save of this root, and
    take room until somebody frees them."""
    own = tuple(name.removeprefix("job") for name in root.job_names(url))  # of all jobs that save to this root
    for tier, host_dir in host_dirs.items():
        path = host_dir.parents[1]
        with suppress(OSError):
            for other in sorted(path.iterdir()):
                if not paths.job_of_url(other.name, url) or other.name.endswith(own):
                    continue
                files = [each for each in (other / settings.host_id).glob("*/*") if each.is_file()]
                saves = {save for each in files if (save := paths.save_of_manifest(each.name)) is not None}
                stored_bytes = sum(each.stat().st_blocks * 512 for each in files)
                if not saves and not stored_bytes:
                    continue
                clean = ("tiers", "clean", path, "--job", other.name, *own_host_id(settings.host_id))
                newest = f", the newest step {max(step for step, _, _ in saves)}" if saves else ""
                _log.warning(
                    "tier %s: %s has %d saves (%d bytes%s) of another root that was at %s before: this run neither "
                    "uses nor overwrites them. To free the space: %s",
                    *(tier, other, len(saves), stored_bytes, newest, url, on_each_host(command_line(*clean))),
                )


def warn_of_other_hosts(host_dirs: Mapping[str, Path], job_hosts: JobHosts) -> None:
    """One warning about directories of hosts that are not in this job: a host whose name has changed leaves its slots.

    The first process of a host looks, at names alone: what is in another host's directory is not this host's to open.
    """
    if job_hosts.rank[0] != 0:
        return
    for tier, host_dir in host_dirs.items():
        with suppress(OSError):
            names = sorted(each.name for each in host_dir.parent.iterdir() if each.name not in job_hosts.hosts)
            if names:
                clean = ("tiers", "clean", host_dir.parents[1], "--job", host_dir.parent.name, "--host-id")
                _log.warning(
                    "tier %s: %s has directories of hosts that are not in this job: %s. If those names are not used "
                    "any more, remove the slots of each: `%s`",
                    *(tier, host_dir.parent, ", ".join(names[:_NAMES_MAX]), command_line(*clean, names[0])),
                )


def warn_of_slots_alone(
    held: Mapping[SaveId, Sequence[str]], url: str, host_dirs: Mapping[str, Path], settings: Settings
) -> None:
    """One warning where fast tiers hold saves of an earlier run and the durable root has none: it may have been removed
    to start anew."""
    if not held or any(DURABLE in tiers for tiers in held.values()):
        return
    commands = [
        command_line(
            *("tiers", "clean", host_dir.parents[1], "--job", host_dir.parent.name),
            *own_host_id(settings.host_id),
        )
        for host_dir in host_dirs.values()
    ]
    _log.warning(
        "%s holds no step, and the fast tiers hold steps of an earlier run, which this run continues: %s. To start "
        "anew, end this run before it restores or saves, with close(remove_arenas=True), or run then %s",
        *(url, ", ".join(str(save.step) for save in sorted(held)[-_NAMES_MAX:])),
        "; ".join(map(on_each_host, commands)),
    )


def warn_of_unrecorded(unrecorded: Sequence[SaveId], url: str) -> None:
    """One warning about saves of a run whose record the root has lost."""
    if unrecorded:
        steps = sorted({save.step for save in unrecorded})
        _log.warning(
            "the fast tiers hold steps of a run that %s does not know: %s. An older copy of the root was put back, so "
            "this run continues from the root as it is, and overwrites those steps. To continue from them, end this "
            "run before its first save, and put back the files in %s/%s that the root had then",
            *(url, ", ".join(map(str, steps[-_NAMES_MAX:])), url, paths.EPOCHS_DIR),
        )


def warn_of_steps_from_elsewhere(saves: Iterable[SaveId], url: str) -> None:
    """One warning about steps of another root that somebody put into this one."""
    steps = sorted(save.step for save in saves if save.of_another_root)
    if steps:
        _log.warning(
            "%s holds steps of another root: %s. They count as older than what ckptkit saves here, for restarts and "
            "policies. To continue from one, copy it from the root that saved it: %s",
            *(url, ", ".join(map(str, steps[-_NAMES_MAX:]))),
            command_line("copy", f"OTHER_ROOT/{steps[-1]}", url, "--as", "newest"),
        )


def say_what_was_left(durable: DurableSteps, job: Job) -> None:
    """Process 0 names what a run that died did not commit. It is removed once this run saves, which fences its writer
    off (`ckptkit.durable.abandoned`)."""
    if job.coordinator.process != 0:
        return
    names = left_behind(root_store(durable.url), durable.steps())
    if names:
        say_left(Kind.LEFT_BEHIND, durable.url, names, job.events)


def say_left(kind: Kind, url: str, names: Sequence[str], events: EventLog) -> None:
    """An event about leftovers in a durable root, with the first of their names."""
    events.emit(kind, tier=DURABLE, path=url, names=list(names[:_NAMES_MAX]), count=len(names))


def _is_new(medium: str, found: FileSystem, path: str) -> bool:
    key = medium, found.name, os.stat(existing(path)).st_dev
    if key in _reported:
        return False
    _reported.add(key)
    return True
