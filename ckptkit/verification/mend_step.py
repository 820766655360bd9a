"""Repairs a durable step in a directory: writes a new copy next to it, verifies it, and swaps both by one rename."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckptkit.inspection.places import Place
from ckptkit.model import paths
from ckptkit.store.local import sync_directory, sync_tree
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock, exchange, move_aside
from ckptkit.verification.durable import identity_of, prove_step
from ckptkit.verification.pool import Limits
from ckptkit.verification.rebuild import CannotMendError, mend_large_files, sidecars_for, small_files, write_arrays
from ckptkit.verification.records import StepProof
from ckptkit.verification.sources import Sources

_PREFIX = "repair-"
_SWAPPING = "swapping"  # in a repair's directory from before the names change places
_TREE = ("d", paths.OCDBT_MANIFEST)  # what an OCDBT tree consists of, and the processes' own trees


def mend_step(
    place: Place, before: object, step: int, sources: Sources, limits: Limits, *, root: Path, timeout_s: float
) -> str | None:
    """Puts a proven step in the place of a damaged one, which goes to quarantine; None, or why nothing was done.

    The step is never absent: two names change places in one rename, which is the commit. A step that was pruned or
    replaced since it had the identity `before` is left as it is. Cost: the whole step is written once more. Raises
    `CannotMendError` where this host does not hold what it takes.
    """
    with _workplace(root) as work:
        return _mend(place, before, step, sources, limits, root, work, timeout_s)


def _mend(
    place: Place, before: object, step: int, sources: Sources, limits: Limits, root: Path, work: Path, timeout_s: float
) -> str | None:
    try:
        copy = work / place.name
        _write_step(Path(place.url), copy, place, sources)
        proof = _proof(copy, step, limits, timeout_s)
        if proof is None or proof.findings:
            raise CannotMendError(f"it cannot be made whole: {proof.findings[0] if proof else 'it is gone'}")
        if identity_of(place.again()) != before:
            return "it was pruned or replaced meanwhile"
        (work / _SWAPPING).touch()
        sync_directory(work)
        try:
            exchange(copy, Path(place.url))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return "its file system cannot swap two names in one step"
        if identity_of(Place.open(str(copy), timeout_s=timeout_s)) != before:
            exchange(copy, Path(place.url))
            return "it was replaced meanwhile"
        move_aside(copy, root / paths.SIDECAR_DIR / QUARANTINE_DIR, place.name)
        return None
    except FileNotFoundError:
        if os.path.isdir(place.url):
            raise
        return "it was pruned meanwhile"


def clean_repairs(root: Path) -> None:
    """Removes the unfinished copies of crashed repairs below a root. A copy that was, or may have been, swapped with a
    step goes to quarantine.

    A repair that lives holds a lock, and is left alone. Raises OSError.
    """
    for work in sorted((root / paths.SIDECAR_DIR).glob(f"{_PREFIX}*")):
        if work.is_symlink():
            continue
        with suppress(FileNotFoundError), arena_lock(work) as is_dead:  # another one may clean, too
            if not is_dead:
                continue
            for copy in sorted(work.iterdir()) if (work / _SWAPPING).exists() else ():
                if copy.is_dir():
                    move_aside(copy, root / paths.SIDECAR_DIR / QUARANTINE_DIR, copy.name)
            shutil.rmtree(work)


@contextmanager
def _workplace(root: Path) -> Iterator[Path]:
    """A directory for a repair, locked while it lives: whoever finds it unlocked removes it."""
    with ExitStack() as held:
        work = None
        while work is None:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_made(root / paths.SIDECAR_DIR)))
            with suppress(FileNotFoundError):  # removed before it was locked
                work = made if held.enter_context(arena_lock(made)) and made.exists() else None
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


def _write_step(source: Path, copy: Path, place: Place, sources: Sources) -> None:
    """The step as it was saved: arrays from verified cells, sidecars, small items; the rest unchanged."""
    sidecars = sidecars_for(place, sources)

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


def _proof(copy: Path, step: int, limits: Limits, timeout_s: float) -> StepProof | None:
    proofs = prove_step(Place.open(str(copy), timeout_s=timeout_s), step, limits, [], timeout_s=timeout_s)
    return proofs[0] if proofs else None


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
