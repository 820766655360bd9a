"""`CheckpointManager.scrub`: a process verifies its own slots while the job runs.

A damaged slot stays. Until the next save that takes it has written every byte anew, a restore reads its damaged cells
from another copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.events import EventLog, Kind
from ckptkit.model.cells import DigestedCell, digested_cells
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import digest_of_range, manifest_name_of, opened_slot, read_manifest
from ckptkit.util.sharing import copy_threads, share_work


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDamage:
    """A save in one of the slots that is damaged. `path`: the slot directory. `problems`: one for each damaged cell, or
    why its manifest or the slot cannot be read."""

    save_id: SaveId
    path: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotScrub:
    """The result of a scrub of this process's slots: how many saves were verified, and which are damaged."""

    checked: int
    damaged: tuple[SlotDamage, ...]


def scrub_slots(arenas: Iterable[Arena], events: EventLog) -> SlotScrub:
    """Verifies every committed slot of `arenas`, and reports damage in events.

    Takes no lease, so no save waits for it: a save that is superseded while it is read is left out. Raises `StoreError`
    where a slot may not be read.
    """
    checked, damaged = 0, list[SlotDamage]()
    for arena in arenas:
        directory = arena.directory
        for save_id in arena.held() if directory is not None else ():
            assert directory is not None
            problems = _problems(directory, save_id)
            if save_id not in arena.held():
                continue
            checked += 1
            if problems:
                arena.forget_contents(save_id)
                damaged.append(SlotDamage(save_id=save_id, path=str(directory), problems=problems))
                events.emit(Kind.SCRUBBED, step=save_id.step, path=str(directory), reason="; ".join(problems[:3]))
    return SlotScrub(checked=checked, damaged=tuple(damaged))


def _problems(directory: Path, save_id: SaveId) -> tuple[str, ...]:
    try:
        manifest = read_manifest(directory / manifest_name_of(save_id))
        return _damaged_cells(directory / manifest.slot, manifest)
    except FileNotFoundError:
        return (f"the manifest of save {save_id} is missing",)
    except CorruptCheckpointError as error:
        return (str(error),)
    except OSError as error:
        raise StoreError(f"{directory}: {error.strerror}; look at its permissions", path=str(directory)) from error


def _damaged_cells(path: Path, manifest: Manifest) -> tuple[str, ...]:
    """The damaged cells of a slot, read by several threads: a MiB of memory each."""
    cells, lock, found = digested_cells(manifest), threading.Lock(), list[str]()

    def next_cell() -> DigestedCell | None:
        with lock:
            return next(cells, None)

    with opened_slot(path) as fd:

        def work() -> None:
            while (each := next_cell()) is not None:
                start = each.record.offset
                try:
                    digest = digest_of_range(fd, start + each.start, start + each.stop, path)
                except CorruptCheckpointError as error:
                    found.append(str(error))
                    continue
                if digest != each.digest:
                    where = f"leaf {each.item}:{each.leaf.name}, cell {each.cell.start} to {each.cell.stop}"
                    found.append(f"{path}: {where} has digest {digest}, expected {each.digest}")

        share_work(work, copy_threads(manifest.held_bytes))
    return tuple(sorted(found))
