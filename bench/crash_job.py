"""The run whose crash points are enumerated: saves, flushes, prunes, a rollback, a deletion, a repair.

    python -m bench.crash_job HOME direct|mapping

`direct` and `mapping` are ways to write a slot on a disk. With `mapping`, a mark commits each durable step, as on a
mount that does not rename a directory in one step. All files are below HOME. The promises of the run are in notes, and
the oracle uses nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from bench.crashpoints import MARKED
from ckptkit.durable.cells import unchanged
from ckptkit.durable.commit import make_attempt
from ckptkit.model.manifest import SaveId
from ckptkit.save import disk_copy
from ckptkit.slots import arena
from ckptkit.slots.reader import read_manifests
from ckptkit.store import local, open_store
from ckptkit.testing.crash import Notes
from ckptkit.util import disk_file

HOST = "host"
TIERS = ("ram", "ssd", "durable")
KEPT = 2  # durable steps
FLUSH_EVERY = 2
ROLLED_BACK_TO = 6


def main() -> None:
    """Runs every scene once."""
    home, method = Path(sys.argv[1]).resolve(), sys.argv[2]
    notes = Notes(home)
    _say_what_is_mapped(notes, method)
    with small_leaves_shared(), committed_by_marks(method == MARKED):
        job = Job(home, notes.say)
        job.observe(lambda event: _say_what_was_staged(event, home, notes))
        job.save()
        job.repair()


@contextmanager
def small_leaves_shared() -> Iterator[None]:
    """A frozen leaf of 3 kB is in data files of its own. Durable steps take these over from each other, and a slot on a
    disk keeps the leaf as it is."""
    usual = unchanged.LEAF_BYTES_MIN, unchanged.GROUP_BYTES_MIN, disk_copy.KEPT_BYTES_MIN
    unchanged.LEAF_BYTES_MIN = unchanged.GROUP_BYTES_MIN = disk_copy.KEPT_BYTES_MIN = 1
    try:
        yield
    finally:
        unchanged.LEAF_BYTES_MIN, unchanged.GROUP_BYTES_MIN, disk_copy.KEPT_BYTES_MIN = usual


@contextmanager
def committed_by_marks(marked: bool) -> Iterator[None]:
    """Directories are taken for those of a mounted bucket, if `marked`."""
    usual = local.DIRECTORY
    local.DIRECTORY = replace(usual, atomic_rename=not marked)
    try:
        yield
    finally:
        local.DIRECTORY = usual


def make_state(step: int, branch: int) -> dict[str, Any]:
    """Random bits, different for every save, except those of one leaf."""
    chance = np.random.default_rng([step, branch])
    return {
        "w": jnp.asarray(chance.standard_normal((16, 16)), jnp.float32),
        "x": jnp.asarray(chance.standard_normal(700), jnp.bfloat16),
        "b": jnp.asarray(chance.integers(-100, 100, 7), jnp.int8),
        "frozen": jnp.asarray(np.random.default_rng(1).standard_normal(700), jnp.float32),
    }


def save_args(step: int, branch: int) -> Any:
    """A state and the words that identify it."""
    return ocp.args.Composite(
        state=ocp.args.StandardSave(make_state(step, branch)),  # pyright: ignore[reportCallIssue]
        data=ocp.args.JsonSave({"step": step, "branch": branch}),  # pyright: ignore[reportCallIssue]
    )


def restore_args() -> Any:
    """What restores it."""
    target = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), make_state(0, 0))
    return ocp.args.Composite(state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]


def make_manager(home: Path, log: ckptkit.EventLog, durable: str | None = None) -> ckptkit.CheckpointManager:
    """A manager over the three tiers below `home`, or with its durable one elsewhere."""
    return ckptkit.CheckpointManager(
        durable or home / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=FLUSH_EVERY, max_to_keep=KEPT),
        tiers=[
            ckptkit.Tier.ram(str(home / "ram"), slots=2),
            ckptkit.Tier.ssd(str(home / "ssd"), save=ckptkit.EverySteps(FLUSH_EVERY), slots=2),
        ],
        host_id=HOST,
        events=log,
        processes=ckptkit.ProcessOptions(timeout_s=60),
    )


class Job:
    """The scenes, in order."""

    def __init__(self, home: Path, say: Callable[[str], None], durable: str | None = None):
        self._home, self._durable, self._say_text, self._branch = home, durable, say, 0
        self._log = ckptkit.EventLog()
        self._log.observe(self._heard)

    def observe(self, observer: Callable[[ckptkit.Event], None]) -> None:
        """Shows every event to somebody else too."""
        self._log.observe(observer)

    def save(self) -> None:
        """Saves, a restart, a rollback, a deletion, and saves again."""
        self._say(scene="start")
        with make_manager(self._home, self._log, self._durable) as manager:
            self._say(scene="save")
            self._save(manager, range(1, 9))
        self._say(scene="start")
        self._leave_behind()
        with make_manager(self._home, self._log, self._durable) as manager:
            self._say(scene="rollback")
            manager.restore(ROLLED_BACK_TO, args=restore_args())
            self._say(rolled_back=ROLLED_BACK_TO)
            self._branch = 1
            self._save(manager, (7, 8))
            self._say(scene="delete", deleting=8)
            manager.delete(8)
            self._say(deleted=8)
            self._say(scene="save")
            self._save(manager, range(9, 12))

    def _leave_behind(self) -> None:
        """The leftovers of an interrupted save: the next run removes them when it first saves."""
        attempt = make_attempt(self._root, "3", SaveId(1, 3, 0), 0o777)
        attempt.begin()
        for name in ("state/d/half", "state/_METADATA"):
            open_store(attempt.place).put(name, b"half")

    @property
    def _root(self) -> str:
        return self._durable or str(self._home / "durable")

    def repair(self) -> None:
        """Damage in every tier, and the scrub that mends it."""
        self._say(scene="damage", damaged=True, lost=11)
        self._damage()
        self._say(scene="repair")
        tiers = [str(self._home / "ram"), str(self._home / "ssd")]
        done = ckptkit.scrub(self._root, tiers, repair=True, host_id=HOST)
        assert not done.problems, done
        assert all(each.done for each in done.treatments), done
        assert len(done.treatments) == 4, done
        self._say(scene="end", damaged=False)

    def _save(self, manager: ckptkit.CheckpointManager, steps: Any) -> None:
        for step in steps:
            assert manager.save(step, args=save_args(step, self._branch))
            manager.wait_until_finished()

    def _damage(self) -> None:
        """Other cells of the newest flushed save in each tier, and a save that only the ramdisk holds."""
        for tier, step, leaf in (("ram", 10, "w"), ("ram", 11, "x"), ("ssd", 10, "x")):
            ((directory, manifest),) = [
                found
                for found in read_manifests(list((self._home / tier).glob(f"*/{HOST}/0")))[0]
                if found[1].save_id.step == step
            ]
            (record,) = next(each for each in manifest.arrays["state"] if each.name == leaf).boxes
            with (directory / manifest.slot).open("r+b") as file:
                file.seek(record.offset)
                file.write(b"damaged")
        store = open_store(self._root)
        name = next(each for each in store.list_all("10/state/d") if len(store.get(each)) > 1000)
        store.put(name, store.get(name)[:-700])

    def _heard(self, event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.COMMITTED:
            self._say(committed=[event.tier, self._branch, event.step])

    def _say(self, **record: Any) -> None:
        self._say_text(json.dumps(record))


def _say_what_was_staged(event: ckptkit.Event, home: Path, notes: Notes) -> None:
    if event.kind == ckptkit.Kind.PHASE and (event.tier, event.fields["phase"]) == ("ram", "staged"):
        for path in sorted((home / "ram").glob(f"*/{HOST}/*/slot-*.bin")):
            notes.stored(path, 0, path.read_bytes())


def _say_what_is_mapped(notes: Notes, chosen: Any) -> None:
    """Stores through mappings are not system calls: notes announce slots that are handed out and written."""
    acquire, write = arena.Arena.acquire, disk_file.DiskFile.write

    def acquired(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = acquire(self, *args, **kwargs)
        if slot is not None and self.directory is not None and not self.synced:
            for path in sorted(self.directory.glob("slot-*.bin")):
                notes.unchanged(path)  # the old manifest goes first, then bytes change
        return slot

    def written(self: Any, source: Any, start: int, method: Any) -> None:
        del method
        write(self, source, start, chosen)
        if chosen == "mapping":
            notes.stored(Path(os.readlink(f"/proc/self/fd/{self._fd}")), start, source.tobytes())

    arena.Arena.acquire = acquired
    disk_file.DiskFile.write = written


if __name__ == "__main__":
    main()
