"""Crash points of the durable tier in a bucket: what the bucket holds after each request that changed it.

The run of `crash_job` saves to the fake bucket, which keeps every state that it went through. A crash comes between
two of them: a bucket has no unsynced writes, and an upload that was cut is not there. Each state is put back and a
new manager with nothing else restores from it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import fsspec

from bench.crash_judge import compare, still_kept
from bench.crash_oracle import Promises, Save, promised, repair, restart
from ckptkit.store.remote import forget_listings
from ckptkit.testing.bucket import BucketServer
from ckptkit.testing.bucket.conditions import Preconditions
from ckptkit.testing.bucket.listing import ListQuery
from ckptkit.testing.bucket.objects import ObjectStore

BUCKET = "runs"
ROOT = f"gs://{BUCKET}/run"
_CHANGES = ("commit", "delete", "copy", "move")
_ANY = Preconditions()

State = dict[str, bytes]


@final
class History:
    """Every state of the bucket, each with the request that made it, and the run's notes, with the states so far."""

    def __init__(self) -> None:
        self.states: list[tuple[str, State]] = []
        self.notes: list[tuple[int, str]] = []
        self._metadata_index: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """The notes of the run."""
        with self._lock:
            self.notes.append((len(self.states), text))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keeps the states of every bucket of this process meanwhile."""
        originals = {name: getattr(ObjectStore, name) for name in _CHANGES}
        for name, original in originals.items():
            setattr(ObjectStore, name, self._kept(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(ObjectStore, name, original)

    def _kept(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(store: ObjectStore, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                result = change(store, *args, **kwargs)
                target = args[1] if isinstance(args[1], str) else args[1][1]
                self.states.append((f"{name} {target}", self._state(store)))
                return result

        return changed

    def _state(self, store: ObjectStore) -> State:
        records, _ = store.list(BUCKET, ListQuery())
        for record in records:
            if (record.name, record.generation) not in self._metadata_index:
                with store.open(BUCKET, record.name, _ANY)[1] as file:
                    self._metadata_index[record.name, record.generation] = file.read()
        return {record.name: self._metadata_index[record.name, record.generation] for record in records}


@contextmanager
def bucket(home: Path) -> Iterator[BucketServer]:
    """A fake bucket, and the environment in which this process finds it."""
    with BucketServer(dir=home / "bucket", buckets=[BUCKET]) as server:
        os.environ.update(server.env())
        yield server


def record_bucket(home: Path) -> History:
    """The scenes of `crash_job`, each state that the bucket went through; the fast tiers are in `home`."""
    from bench.crash_job import Job

    history = History()
    with history.watch():
        job = Job(home, history.say, durable=ROOT)
        job.save()
        job.repair()
    return history


@final
class Replayed:
    """The bucket, set to one state after the other."""

    def __init__(self) -> None:
        self._fs = fsspec.filesystem("gs")

    def set_to(self, state: State) -> None:
        """Makes the bucket hold these objects and nothing else."""
        forget_listings(f"gs://{BUCKET}")
        found = {path.partition("/")[2]: path for path in self._fs.find(BUCKET)}
        for name in sorted(set(found) - set(state)):
            self._fs.rm_file(found[name])
        there = {name: self._fs.cat_file(path) for name, path in found.items() if name in state}
        for name, data in state.items():
            if there.get(name) != data:
                self._fs.pipe_file(f"{BUCKET}/{name}", data)
        forget_listings(f"gs://{BUCKET}")


@final
class BucketJudge:
    """Puts a state of the bucket back, and asks restarts that have nothing else."""

    def __init__(self, home: Path, history: History):
        self._home, self._history = home, history
        self._replayed = Replayed()
        self._least: Save | None = None  # what the bucket alone gave when its damage was done

    def check(self, number: int, *, repairs: bool) -> tuple[list[str], int]:
        """The errors after the request `number`, and the number of tested restarts."""
        promises = promised(text for count, text in self._history.notes if count <= number + 1)
        state = self._history.states[number][1]
        wrong, asked = self._repair(number, state, promises) if repairs else self._run(number, state, promises)
        return [f"bucket: {each}" for each in wrong], asked

    def _run(self, number: int, state: State, promises: Promises) -> tuple[list[str], int]:
        empty, kept = self._home / f"after-{number}", promises.kept["durable"]
        self._replayed.set_to(state)
        found = restart(empty, durable=ROOT)
        wrong = compare(found, max(kept, default=None), promises, strict=True)
        asked = still_kept(kept, found.save)
        for save in asked:
            older = restart(empty, save[1], durable=ROOT)
            wrong += [] if older.save == save and older.right else [f"step {save[1]} is kept, and got {older}"]
        again = restart(empty, durable=ROOT, go_on=True)
        wrong += [] if again.right else [f"the run cannot go on: {again.error}"]
        return wrong, len(asked) + 2

    def _repair(self, number: int, state: State, promises: Promises) -> tuple[list[str], int]:
        """A repair may only make it better, and the next one has to mend everything; the fast tiers are whole."""
        if self._least is None:
            damaged = max(n for n in range(number) if scene_at(self._history.notes, n) == "damage")
            self._replayed.set_to(self._history.states[damaged][1])
            self._least = restart(self._home / "least", durable=ROOT).save
        self._replayed.set_to(state)
        wrong = compare(restart(self._home / f"after-{number}", durable=ROOT), self._least, promises, strict=False)
        left = repair(self._home / "run", ROOT)
        wrong += [f"the next repair: {left}"] if left else []
        found = restart(self._home / f"mended-{number}", durable=ROOT)
        newest = max(promises.kept["durable"])
        wrong += (
            [] if found.right and found.save == newest else [f"after the next repair there is {found}, not {newest}"]
        )
        return wrong, 2


def label(request: str, scene: str) -> str:
    """The row of a request: which operation it belongs to."""
    _, name = request.split(" ", 1)
    if "/_ckptkit/epochs" in name or "doomed" in name or "probe" in name:
        return "bucket records"
    if scene == "save" and "/_ckptkit/intents/" in name and "/e00000000-" not in name:  # that of a deletion
        return "bucket flush"
    if scene == "save":
        return "bucket prune" if request.startswith("delete ") or "/_ckptkit/intents/" in name else "bucket flush"
    return f"bucket {scene}"


def scene_at(notes: list[tuple[int, str]], number: int) -> str:
    """The scene that the run was in when the state came about."""
    scene = "start"
    for count, text in notes:
        if count <= number:
            scene = json.loads(text).get("scene", scene)
    return scene
