"""`CheckpointManager.scrub`: a process verifies its own slots while the job runs.

A damaged slot stays. Until the next save that takes it has written every byte anew, a restore reads its damaged cells
from another copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.events import EventLog, Kind
from ckptkit.model.manifest import SaveId
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import damaged_cells, manifest_name_of, read_manifest
from ckptkit.util.sharing import copy_threads


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
        if directory is None:
            continue
        for save_id in arena.held():
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
        found = damaged_cells(directory / manifest.slot, manifest, copy_threads(manifest.held_bytes))
    except FileNotFoundError:
        return (f"the manifest of save {save_id} is missing",)
    except CorruptCheckpointError as error:
        return (str(error),)
    except OSError as error:
        raise StoreError(f"{directory}: {error.strerror}; look at its permissions", path=str(directory)) from error
    return tuple(
        f"leaf {cell.item}:{cell.leaf.name}, cell {cell.cell.start} to {cell.cell.stop}: {problem}"
        for cell, problem, _ in found
    )
