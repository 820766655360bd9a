"""Repairs a durable step in a directory: writes a new copy next to it, verifies it, and swaps both by one rename.

Where the file system cannot swap two names, the files of the copy replace those of the step, in the order of a repair
in a bucket (`mend_object`).
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path

from ckptkit.durable.lifecycle.places import Place
from ckptkit.model import paths
from ckptkit.store.local import sync_directory, sync_tree
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock, exchange, move_aside
from ckptkit.util.clock import wall_s
from ckptkit.verification.durable import identity_of
from ckptkit.verification.mend_object import DEAD_AFTER_S, is_tree, order_of, require_whole
from ckptkit.verification.pool import Limits
from ckptkit.verification.rebuild import Sidecars, mend_large_files, sidecars_for, small_files, write_arrays
from ckptkit.verification.sources import Sources

_PREFIX = "repair-"
_SWAPPING = "swapping"  # in a repair's directory from before the names change places
_TREE = ("d", paths.OCDBT_MANIFEST)  # what an OCDBT tree consists of, and the processes' own trees


def mend_step(
    place: Place, before: object, step: int, sources: Sources, limits: Limits, *, root: Path, timeout_s: float
) -> str | None:
    """Puts a proven step in the place of a damaged one, which goes to quarantine; None, or why nothing was done.

    The step is never absent: two names change places in one rename, which is the commit, or one file after another is
    replaced. A step that was pruned or replaced since it had the identity `before` is left as it is. Cost: the whole
    step is written once more. Raises `CannotMendError` where this host does not hold what it takes.
    """
    with _workplace(root) as work:
        return _mend(place, before, step, sources, limits, root, work, timeout_s)


def _mend(
    place: Place, before: object, step: int, sources: Sources, limits: Limits, root: Path, work: Path, timeout_s: float
) -> str | None:
    try:
        copy = work / place.name
        sidecars = sidecars_for(place, sources)
        _write_step(Path(place.url), copy, place, sources, sidecars)
        require_whole(Place.open(str(copy), timeout_s=timeout_s), step, limits, timeout_s)
        if identity_of(place.again()) != before:
            return "it was pruned or replaced meanwhile"
        (work / _SWAPPING).touch()
        sync_directory(work)
        try:
            exchange(copy, Path(place.url))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return _replace_files(copy, Path(place.url), sidecars, work, root)
        if identity_of(Place.open(str(copy), timeout_s=timeout_s)) != before:
            exchange(copy, Path(place.url))
            return "it was replaced meanwhile"
        move_aside(copy, root / paths.SIDECAR_DIR / QUARANTINE_DIR, place.name)
        return None
    except FileNotFoundError:
        if os.path.isdir(place.url):
            raise
        return "it was pruned meanwhile"


def _replace_files(copy: Path, step: Path, sidecars: Sidecars, work: Path, root: Path) -> str | None:
    """Moves the files of a proven copy over those of the step that differ: data, then the trees that name it, then the
    records. Removes data that no tree names any more. None, or why nothing was done.

    After a crash the step is as it was, less damaged, or mended, and the next repair completes it. Files go through a
    descriptor of the step's directory: where a job has renamed or removed it, they make no new one.
    """
    (work / _SWAPPING).unlink()
    damaged = work / "damaged" / step.name
    shutil.copytree(step, damaged, symlinks=True, copy_function=_linked)
    sync_tree(damaged)
    move_aside(damaged, root / paths.SIDECAR_DIR / QUARANTINE_DIR, step.name)
    names = sorted(_files(copy), key=lambda name: order_of(name, sidecars))
    fd = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _, phase in groupby(names, key=lambda name: order_of(name, sidecars)[0]):
            for name in phase:
                _replace(copy, step, name, fd)
            sync_tree(step)
        for name in sorted(_files(step) - set(names)):
            if is_tree(name, sidecars):
                os.unlink(name, dir_fd=fd)
        if not os.path.samestat(os.fstat(fd), step.stat()):
            return "it was replaced meanwhile"
    except (IsADirectoryError, NotADirectoryError):
        return "a directory has the name of a file of it, and its file system cannot swap two names in one step"
    finally:
        os.close(fd)
    sync_tree(step)
    return None


def _linked(source: str, target: str) -> None:
    """A second name of the file, which nobody writes to; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _replace(copy: Path, step: Path, name: str, step_fd: int) -> None:
    if not (step / name).is_symlink() and (step / name).is_file() and filecmp.cmp(copy / name, step / name, False):
        return
    for above in reversed(Path(name).parents[:-1]):
        with suppress(FileExistsError):
            os.mkdir(above, dir_fd=step_fd)
    os.replace(copy / name, name, dst_dir_fd=step_fd)


def _files(directory: Path) -> set[str]:
    """Everything below it that is not a directory."""
    return {
        os.path.relpath(os.path.join(here, name), directory) for here, _, names in os.walk(directory) for name in names
    }


def clean_repairs(root: Path) -> None:
    """Removes the unfinished copies of crashed repairs below a root. A copy that was, or may have been, swapped with a
    step goes to quarantine.

    A repair that lives holds a lock, and is left alone. On a file system without locks one that began within a day is.
    Raises OSError.
    """
    for work in sorted((root / paths.SIDECAR_DIR).glob(f"{_PREFIX}*")):
        if work.is_symlink():
            continue
        with suppress(FileNotFoundError):  # another one may clean, too
            age_s = wall_s() - work.stat().st_mtime
            with arena_lock(work) as is_free:
                if is_free or (is_free is None and age_s > DEAD_AFTER_S):
                    _remove_copy(work, root)


def _remove_copy(work: Path, root: Path) -> None:
    for copy in sorted(work.iterdir()) if (work / _SWAPPING).exists() else ():
        if copy.is_dir():
            move_aside(copy, root / paths.SIDECAR_DIR / QUARANTINE_DIR, copy.name)
    shutil.rmtree(work)


@contextmanager
def _workplace(root: Path) -> Iterator[Path]:
    """A directory for a repair, locked while it lives: whoever finds it unlocked removes it (`clean_repairs`)."""
    with ExitStack() as held:
        work = None
        while work is None:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_made(root / paths.SIDECAR_DIR)))
            with suppress(FileNotFoundError):  # removed before it was locked
                is_free = held.enter_context(arena_lock(made))
                work = made if is_free is not False and made.exists() else None
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def put_step_aside(place: Place, before: object, root: Path) -> str | None:
    """Moves a step directory into the root's quarantine, in one rename; why not, where it is no longer the same."""
    if before == ([], None):  # a step that a running job is deleting looks like this at its end
        return "there is nothing in it to keep"
    if identity_of(place.again()) != before:
        return "it was pruned or replaced meanwhile"
    try:
        move_aside(Path(place.url), root / paths.SIDECAR_DIR / QUARANTINE_DIR, place.name)
    except FileNotFoundError:
        if os.path.isdir(place.url):
            raise
        return "it was pruned meanwhile"
    return None


def _write_step(source: Path, copy: Path, place: Place, sources: Sources, sidecars: Sidecars) -> None:
    """The step as it was saved: arrays from verified cells, sidecars, small items; the rest unchanged."""

    def left_out(directory: str, names: list[str]) -> list[str]:
        in_item = Path(directory).name in sidecars and Path(directory).parent == source
        return [name for name in names if in_item and (name in _TREE or name.startswith("ocdbt.process_"))]

    shutil.copytree(source, copy, symlinks=True, ignore=left_out)
    for name, manifests in sidecars.items():
        write_arrays(str(_made(copy / name)), name, manifests, sources)
        for manifest in manifests:
            path = _made(copy / name / paths.SIDECAR_DIR) / paths.sidecar_name(manifest.writer.process)
            path.write_bytes(manifest.to_bytes())
    for key, data in small_files(place, sidecars).items():
        (_made((copy / key).parent) / (copy / key).name).write_bytes(data)
    mend_large_files(copy, sidecars, sources)
    sync_tree(copy)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
