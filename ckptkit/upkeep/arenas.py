"""The arenas of fast tiers on a host: their jobs, whether a process holds them, and the removal of dead jobs' ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.durable.lifecycle.places import local_kind, nothing_at
from ckptkit.errors import StoreError
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.roots import root_record_of
from ckptkit.model import paths
from ckptkit.slots.directory import remove_slots
from ckptkit.slots.reader import slot_directories
from ckptkit.store import open_store
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock, try_lock
from ckptkit.store.roots import root_url
from ckptkit.util import clock
from ckptkit.util.plain import plain_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaEntry:
    """One slot directory. `live`: a process holds its lock. `saves`: step, epoch and number of each manifest, newest
    save last. `used_at_s`: when its newest manifest, or else a slot, was written (wall clock; None: never).
    `other_root`: the saves are of a root that was at the place of the given one before."""

    tier: str
    job: str
    host_id: str
    path: str
    live: bool
    saves: tuple[tuple[int, int, int], ...]
    slots: int
    stored_bytes: int
    quarantine_bytes: int
    used_at_s: float | None
    other_root: bool = False

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = asdict(self)
        found["bytes"] = found.pop("stored_bytes")
        found["saves"] = [{"step": step, "epoch": epoch, "number": number} for step, epoch, number in self.saves]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaning:
    """The outcome for arenas: `removed` (or to be removed), `kept` with the reason. Bytes are those that removal frees.
    `notes` list what exists if nothing was chosen."""

    removed: tuple[ArenaEntry, ...]
    kept: tuple[tuple[ArenaEntry, str], ...]
    done: bool
    notes: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Bytes of all slots and quarantines that are emptied."""
        return sum(each.stored_bytes + each.quarantine_bytes for each in self.removed)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        kept = [{**each.to_json(), "reason": why} for each, why in self.kept]
        found = plain_fields(self, without=("kept",))
        return {"format": FORMAT, "freed_bytes": self.freed_bytes, **found, "kept": kept}


def list_arenas(
    tiers: Sequence[str], *, root: str | None = None, job: str | None = None, host_id: str | None = None
) -> list[ArenaEntry]:
    """The slot directories below the paths of fast tiers, by path. Those that were emptied are left out.

    `root` leaves those of the jobs that save there, also to a root that was there before (`other_root`), `job` those of
    one directory name, `host_id` those of one host.
    To learn whether an arena is live, it takes the arena's lock in shared mode for a moment. A job that starts in that
    moment takes the next directory, and still finds the saves in this one. Writes nothing. Raises `StoreError` for
    files that it may not read.
    """
    url = None if root is None else root_url(root)
    own = () if url is None else root_record_of(open_store(url)).job_names(url)
    found = []
    for tier in tiers:
        for directory, name, host in _directories(tier):
            of_root = url is None or paths.job_of_url(name, url)
            if of_root and job in (None, name) and host_id in (None, host):
                entry = _entry(tier, name, host, directory)
                other = url is not None and not name.endswith(tuple(each.removeprefix("job") for each in own))
                found += [replace(entry, other_root=other)] if entry is not None else []
    return sorted(found, key=lambda each: each.path)


def require_tiers(tiers: Sequence[str]) -> None:
    """Raises `StepNotFoundError` for a path that is not a directory: a missing directory is not an empty one."""
    for tier in tiers:
        if local_kind(tier) != stat.S_IFDIR:
            raise nothing_at(tier, "there is no such directory; check the path")


def clean_arenas(
    tiers: Sequence[str],
    *,
    host_id: str,
    job: str | None = None,
    root: str | None = None,
    idle_s: float | None = None,
    dry_run: bool = False,
) -> Cleaning:
    """Frees the slots of ended jobs, and empties their quarantines; the empty directories stay.

    `job` (a directory's name), `root` and `idle_s` (seconds without a save) choose the jobs. Give at least one; all
    that are given must match. Only arenas of `host_id` are touched, but not those of a job with a live process on this
    host. The locks of all directories of a job are held while they are emptied, manifests first. If such a job is
    started again later, it restores from a slower tier.

    Raises ValueError if none is given, `StepNotFoundError` if a tier does not exist, `StoreError`.
    """
    if job is None and root is None and idle_s is None:
        raise ValueError("choose the arenas: give a job, a root, or an idle time")
    require_tiers(tiers)
    found = list_arenas(tiers, host_id=host_id)
    chosen = {each.path for each in list_arenas(tiers, root=root, job=job, host_id=host_id)}
    now_s = clock.wall_s()
    removed: list[ArenaEntry] = []
    kept: list[tuple[ArenaEntry, str]] = []
    for of_job in _by_job(each for each in found if each.path in chosen):
        newest_s = max((each.used_at_s for each in of_job if each.used_at_s is not None), default=0.0)
        if any(each.live for each in of_job):
            kept += [(each, "a process of the job is running") for each in of_job]
        elif idle_s is not None and now_s - newest_s < idle_s:
            kept += [(each, "it was used since") for each in of_job]
        elif dry_run or _emptied(of_job):
            removed += of_job
        else:
            kept += [(replace(each, live=True), "a process of the job is running") for each in of_job]
    notes = [] if chosen else [_nothing_chosen(list_arenas(tiers), host_id)]
    return Cleaning(removed=tuple(removed), kept=tuple(kept), done=not dry_run, notes=tuple(notes))


def _nothing_chosen(arenas: Sequence[ArenaEntry], host_id: str) -> str:
    """The reason, as far as the arenas show it: a wrong name would look like a clean tier."""
    if not arenas:
        return "the tiers hold no arena of any job"
    if not any(each.host_id == host_id for each in arenas):
        hosts = ", ".join(sorted({each.host_id for each in arenas})[:8])
        return f"the tiers hold arenas of other hosts: {hosts} (name one with --host-id)"
    jobs = ", ".join(sorted({each.job for each in arenas if each.host_id == host_id})[:8])
    return f"no job is meant; the tiers hold arenas of {jobs}"


def _by_job(entries: Iterable[ArenaEntry]) -> list[list[ArenaEntry]]:
    jobs: dict[tuple[str, str], list[ArenaEntry]] = {}
    for each in entries:
        jobs.setdefault((each.tier, each.job), []).append(each)
    return list(jobs.values())


def _emptied(arenas: Sequence[ArenaEntry]) -> bool:
    """Empties all of them; False, and nothing was touched, where a process holds one by now."""
    with ExitStack() as locks:
        if not all(locks.enter_context(arena_lock(Path(each.path))) for each in arenas):
            return False
        for each in arenas:
            with _store_errors(each.path):
                remove_slots(Path(each.path))
                shutil.rmtree(Path(each.path) / QUARANTINE_DIR, ignore_errors=True)
    return True


def _directories(tier: str) -> Iterator[tuple[Path, str, str]]:
    """Every slot directory of a tier, with its job and host."""
    with _store_errors(tier):
        for job in _subdirectories(Path(tier)):
            for host in _subdirectories(job):
                for directory in slot_directories(host):
                    if os.path.lexists(directory / paths.LOCK_NAME):
                        yield directory, job.name, host.name


def _subdirectories(path: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(Path(each.path) for each in os.scandir(path) if each.is_dir(follow_symlinks=False))
    return []


def _entry(tier: str, job: str, host: str, directory: Path) -> ArenaEntry | None:
    """None for a directory that is empty and free, as `clean_arenas` and a job that ended well leave it."""
    with _store_errors(str(directory)):
        names = os.listdir(directory)
        saves = [save for name in names if (save := paths.save_of_manifest(name)) is not None]
        slots = [name for name in names if paths.slot_index(name) is not None]
        sizes, times = _stats(directory, slots)
        _, saved = _stats(directory, [name for name in names if paths.save_of_manifest(name) is not None])
        aside = [path for path in (directory / QUARANTINE_DIR).rglob("*") if path.is_file()]
        quarantine, _ = _stats(directory, [str(path.relative_to(directory)) for path in aside])
        live = _is_live(directory)
    if not live and not saves and not slots and not aside:
        return None
    return ArenaEntry(
        tier=tier,
        job=job,
        host_id=host,
        path=str(directory),
        live=live,
        saves=tuple(sorted(saves, key=lambda save: (save[1], save[2]))),
        slots=len(slots),
        stored_bytes=sum(sizes),
        quarantine_bytes=sum(quarantine),
        used_at_s=max(saved or times, default=None),
    )


def _stats(directory: Path, names: Sequence[str]) -> tuple[list[int], list[float]]:
    """The bytes that files take, and when they were written; files that were deleted meanwhile are left out."""
    sizes, times = [], []
    for name in names:
        with suppress(FileNotFoundError):
            status = os.lstat(directory / name)
            sizes.append(status.st_blocks * 512)
            times.append(status.st_mtime)
    return sizes, times


def _is_live(directory: Path) -> bool:
    """Whether a process holds it, or may hold it: a file system without locks cannot exclude that."""
    fd = os.open(directory / paths.LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextmanager
def _store_errors(where: str) -> Iterator[None]:
    """Raises a `StoreError` that names the path for an operation that the file system refuses."""
    try:
        yield
    except OSError as error:
        path = error.filename or where
        raise StoreError(f"{path}: {error.strerror}; look at its permissions", path=str(path)) from error
