"""The contenders of `python -m bench faults`, the places of their checkpoints, and how the newest is damaged."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.victims import durable_files
from ckptkit.launch.faults import Fault
from ckptkit.launch.harm import flip_bit
from ckptkit.slots.reader import read_manifests

CONTENDERS: Mapping[str, str] = {
    "ckptkit": "ramdisk, SSD and durable tier",
    "ckptkit-durable": "the durable tier alone",
    "orbax": "stock Orbax, asynchronous",
    "orbax-sync": "stock Orbax, synchronous",
}
DEFAULT = ("ckptkit", "orbax", "orbax-sync")
OURS = "ckptkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Steps between saves. Stock Orbax and the durable tier alone have only the last."""

    durable: int
    ram: int | None = None
    ssd: int | None = None

    def __str__(self) -> str:
        tiers = {"ram": self.ram, "ssd": self.ssd, "durable": self.durable}
        return ", ".join(f"{tier} {steps}" for tier, steps in tiers.items() if steps is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of one run: `disk` for what outlives a host's memory, `ram` on the ramdisk."""

    disk: Path
    ram: Path

    @property
    def durable(self) -> Path:
        """The durable tier, or Orbax's root."""
        return self.disk / "durable"

    @property
    def events(self) -> Path:
        """Event logs, for goodput."""
        return self.disk / "events"

    @property
    def proof(self) -> Path:
        """Losses of all steps, digests of the end."""
        return self.disk / "proof"

    def words(self, contender: str, every: Every) -> list[str]:
        """The trainer's flags that make it this contender."""
        words = ["--checkpoint", str(self.durable), "--save-every", str(every.durable)]
        if contender == OURS:
            words += ["--ram", str(self.ramdisk("{process}")), "--ram-every", str(every.ram)]
            words += ["--ssd", str(self.disk / "ssd"), "--ssd-every", str(every.ssd)]
        if contender in ("orbax", "orbax-sync"):
            return [*words, "--manager", contender]
        return [*words, "--host-id", host_id("{process}")]

    def ramdisk(self, process: object) -> Path:
        """The memory of the host that a process plays."""
        return self.ram / host_id(process)

    def at(self, fault: Fault) -> Fault:
        """A fault of a schedule, with the directories of this run."""
        wipes = [str(self.ramdisk(victim)) for victim in fault.victims] if fault.wipes else []
        return replace(fault, wipes=tuple(wipes), flips=(str(self.disk),) if fault.flips else ())

    def flip(self, chance: random.Random) -> str | None:
        """Flips a bit of array data in the newest committed step of the fastest tier that has it; returns the place.

        None where there is not another copy of some step besides: nobody could go on from there. The flips of
        `ckptkit chaos` know no tiers: they hit the only copy too, or bytes that no restore reads.
        """
        slots = [*(found for root in self.ram.glob("*") for found in _slots(root, 2)), *_slots(self.disk / "ssd", 1)]
        steps = _durable_steps(self.durable)
        if len(slots) + len(steps) < 2:
            return None
        found = [*slots, *_durable(self.durable, steps)]
        step, _, path, first, last = max(found)
        at, bit = chance.randrange(first, last), chance.randrange(8)
        flip_bit(path, at, bit)
        return f"step {step}: {path.name}, bit {bit} of byte {at}"

    def drop_page_cache(self) -> threading.Thread:
        """Begins to drop what the kernel keeps in memory of the checkpoints on the disk, in a thread of low priority.

        A host that loses its ramdisk, by a reboot or because another host takes its place, has no page cache either:
        every contender reads from the disk then. Pages that were not written back yet stay in memory.
        """
        thread = threading.Thread(target=_drop, args=([self.durable, self.disk / "ssd"],), name="drop-page-cache")
        thread.start()
        return thread

    def remove(self) -> None:
        """Deletes everything."""
        for directory in (self.disk, self.ram):
            shutil.rmtree(directory, ignore_errors=True)


def _drop(directories: Sequence[Path]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread: the job starts on the same cores
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def host_id(process: object) -> str:
    """Each process plays a host of its own."""
    return f"host-{process}"


_Found = tuple[int, int, Path, int, int]  # step, how fast the tier is, file, first and last byte of array data


def _slots(root: Path, speed: int) -> list[_Found]:
    """The largest box of every manifest in a fast tier."""
    found = []
    for directory in root.glob("*/host-*/*"):
        manifests, _ = read_manifests([directory])
        for _, manifest in manifests:
            leaves = [leaf for leaves in manifest.arrays.values() for leaf in leaves if leaf.boxes]
            leaf = max(leaves, key=lambda each: each.held_bytes)
            first = leaf.boxes[0].offset
            size = leaf.boxes[0].box.size * leaf.itemsize
            found.append((manifest.save_id.step, speed, directory / manifest.slot, first, first + size))
    return found


def _durable_steps(root: Path) -> list[int]:
    return [int(path.name) for path in root.glob("*") if path.name.isdecimal()]


def _durable(root: Path, steps: Sequence[int]) -> list[_Found]:
    """The middle of the largest data file of the newest step: there is array data, and nothing else."""
    files = durable_files(root, "data", max(steps)) if steps else []
    if not files:
        return []
    path = max(files, key=lambda each: each.stat().st_size)
    size = path.stat().st_size
    return [(max(steps), 0, path, size // 4, max(size // 4 + 1, size * 3 // 4))]
