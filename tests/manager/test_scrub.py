"""`CheckpointManager.scrub`: a process finds damage in its own slots while the job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from ckptkit.events import Event, Kind
from ckptkit.manager.scrub import SlotScrub
from ckptkit.slots.reader import read_manifest

EVENTS = (Kind.SCRUBBED, Kind.REJECTED)


class Job:
    def __init__(self, home: Path, **options: Any):
        self.home, self.events = home, list[Event]()
        log = ckptkit.EventLog()
        log.observe(lambda event: self.events.append(event) if event.kind in EVENTS else None)
        self.manager = ckptkit.CheckpointManager(
            home / "root",
            options=ocp.CheckpointManagerOptions(save_interval_steps=1),
            tiers=[
                ckptkit.Tier.ram(str(home / "ram"), slots=2),
                ckptkit.Tier.ssd(str(home / "ssd"), save=ckptkit.EverySteps(1), slots=2),
            ],
            host_id="h0",
            events=log,
            **options,
        )

    def save(self, step: int) -> None:
        """`frozen` is the same in each step."""
        state = {"w": np.full(4096, step, np.float32), "frozen": np.arange(1 << 18, dtype=np.float32)}
        self.manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        self.manager.wait_until_finished()

    def manifest(self, tier: str, step: int) -> Path:
        (found,) = (self.home / tier).rglob(f"step-{step:012d}-*.json")
        return found

    def flip(self, tier: str, step: int, leaf: str) -> Path:
        """Flips a bit of a leaf in a slot; returns the slot."""
        path = self.manifest(tier, step)
        manifest = read_manifest(path)
        (record,) = next(each.boxes for each in manifest.arrays["default"] if each.name == leaf)
        slot = path.with_name(manifest.slot)
        with slot.open("r+b") as file:
            file.seek(record.offset)
            first = file.read(1)[0]
            file.seek(record.offset)
            file.write(bytes([first ^ 1]))
        return slot


def test_damaged_slots_are_found_and_reported(tmp_path: Path) -> None:
    """A job that runs for weeks would find at its restart the bits that flipped in the first of them."""
    job = Job(tmp_path)
    with job.manager as manager:
        job.save(1)
        job.save(2)
        assert manager.scrub() == SlotScrub(checked=4, damaged=())
        slot = job.flip("ram", 2, "w")
        job.manifest("ssd", 1).write_bytes(b"{}")
        found = manager.scrub()
        assert found.checked == 4
        cell, manifest = found.damaged
        assert (cell.save_id.step, cell.path) == (2, str(slot.parent))
        assert cell.problems == ("leaf default:w, cell (0,) to (4096,): the bytes are not those that were saved",)
        assert (manifest.save_id.step, "step-000000000001" in manifest.problems[0]) == (1, True)
        assert [(event.kind, event.step) for event in job.events] == [(Kind.SCRUBBED, 2), (Kind.SCRUBBED, 1)]
        slot.unlink()
        assert "is missing" in manager.scrub().damaged[0].problems[0]


def test_restore_reads_damaged_cells_from_another_copy(tmp_path: Path) -> None:
    """A slot with one bad cell would cost the whole save."""
    job = Job(tmp_path)
    with job.manager as manager:
        job.save(1)
        job.flip("ram", 1, "w")
        assert manager.scrub().damaged
    job = Job(tmp_path)
    with job.manager as manager:
        restored = manager.restore(None)
        assert (restored["w"] == 1).all()
        assert Kind.REJECTED in {event.kind for event in job.events}


def test_next_save_writes_every_byte_of_a_damaged_disk_slot(tmp_path: Path) -> None:
    """Each later save in the slot would be damaged: its disk writes only the cells that changed."""
    job = Job(tmp_path)
    with job.manager as manager:
        for step in range(1, 5):
            job.save(step)
        slot = job.flip("ssd", 3, "frozen")
        job.save(5)
        assert job.manifest("ssd", 5).with_name(read_manifest(job.manifest("ssd", 5)).slot) == slot
        assert [each.save_id.step for each in manager.scrub().damaged] == [5], "its frozen cells were not written"
        job.save(6)
        job.save(7)
        assert manager.scrub().damaged == ()
