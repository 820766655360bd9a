"""Records the storage operations of commands on a medium, and remakes the state after any of them.

On a disk, strace records one process that runs all commands one after another. In the shipped bucket, every change is
recorded with the records of all objects, so that generations come back too.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, final
from unittest.mock import patch

from ckptkit.durable.lifecycle import leases
from ckptkit.store.remote import forget_listings
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.records import ObjectRecord
from ckptkit.testing.crash import CrashState, Trace, is_operation, notes, record
from tests.killed.commands import Command
from tests.killed.running import Main, run
from tests.roots.catalog import SavedRuns
from tests.roots.media import Bucket, LinkedCopies, Listing, bucket
from tests.roots.media import Disk as DiskPlaces

_AT_S: Final = 1_700_000_000  # when every file was changed: sources are known by it
_BUCKET: Final = "roots"
_CHANGES: Final = ("commit", "patch", "delete", "copy", "move")


class Medium(Protocol):
    """Where commands are killed. `points` are the states that a command goes through, the first before it began."""

    name: str

    def place(self, command: Command) -> str:
        """Where the tree of a command is."""
        ...

    def local(self, command: Command) -> Path:
        """A directory of this machine with the fast tier of a command."""
        ...

    def points(self, command: Command) -> Sequence[str]:
        """A name for each state: the operation that was the last one."""
        ...

    def remake(self, command: Command, point: int) -> None:
        """Makes the state anew."""
        ...

    def listing(self, command: Command) -> Listing:
        """Everything in the place of a command."""
        ...


def slug(name: str) -> str:
    """A command's name as that of a directory."""
    return name.replace(":", "").replace(" ", "-")


@final
class DiskMedium:
    """Directories below `home`, each recorded and made again under the name that it had."""

    name = "disk"

    def __init__(self, home: Path, commands: Sequence[Command], saved: SavedRuns, key: str):
        self._root = home / "traced"
        self._listed = DiskPlaces(home)
        for command in commands:
            command.build(self.local(command), saved, partial(_copied, self.local(command)))
        _set_times(self._root)
        names = [command.name for command in commands]
        self._trace = record([sys.executable, "-m", "tests.killed.worker", str(self._root), key, *names], self._root)
        ends = [(number, text) for number, text in notes(self._trace)]
        self._spans = {name: (start, stop) for (start, name), (stop, _) in zip(ends[::2], ends[1::2], strict=True)}

    def place(self, command: Command) -> str:
        """A directory."""
        return str(self.local(command))

    def local(self, command: Command) -> Path:
        """The same directory."""
        return self._root / slug(command.name)

    def points(self, command: Command) -> list[str]:
        """The state before, and after each operation in the command's directory."""
        return [_told(self._trace, number) for number in self._numbers(command)]

    def remake(self, command: Command, point: int) -> None:
        """Writes the tree."""
        number, below = self._numbers(command)[point], (slug(command.name),)
        disk = CrashState(count=number + 1).disk(self._trace)
        shutil.rmtree(self.local(command), ignore_errors=True)
        disk.materialise(self._root, below)
        _set_times(self.local(command))

    def listing(self, command: Command) -> Listing:
        """Every file by its digest."""
        return self._listed.listing(self.place(command))

    def _numbers(self, command: Command) -> list[int]:
        start, stop = self._spans[command.name]
        below, operations = slug(command.name) + "/", self._trace.operations
        inside = (n for n in range(start, stop) if is_operation(operations[n]) and operations[n].path.startswith(below))
        return [start, *inside]


def _copied(place: Path, tree: Path) -> str:
    LinkedCopies().tree(tree, place)
    return str(place)


def _told(trace: Trace, number: int) -> str:
    return f"{trace.operations[number].call} {trace.operations[number].path}"


def _set_times(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            os.utime(f"{directory}/{name}", (_AT_S, _AT_S), follow_symlinks=False)


State = dict[str, ObjectRecord]


@final
class BucketMedium:
    """Prefixes of the shipped bucket, which runs in this process. Use `bucket_medium`."""

    name = "bucket"

    def __init__(self, home: Path, places: Bucket, commands: Sequence[Command], saved: SavedRuns, key: str, main: Main):
        self._home, self._places = home, places
        self._kept = home / "kept"  # the bytes of every object that there was, by the id of its content
        self._kept.mkdir(parents=True)
        self._urls: dict[str, str] = {}
        self._states: dict[str, list[tuple[str, State]]] = {}
        self._store: Any = None
        self._lock = threading.RLock()
        for command in commands:
            self._record(command, saved, key, main)

    def place(self, command: Command) -> str:
        """A prefix."""
        return self._urls[command.name]

    def local(self, command: Command) -> Path:
        """A directory."""
        return self._home / "local" / slug(command.name)

    def points(self, command: Command) -> list[str]:
        """The state before, and after each request that changed something."""
        return [what for what, _ in self._states[command.name]]

    def remake(self, command: Command, point: int) -> None:
        """Makes the command's prefix hold these objects, with their generations, and nothing else."""
        state = self._states[command.name][point][1]
        prefix = self._prefix(command)
        with self._store._lock:  # pyright: ignore[reportPrivateUsage]
            found = self._store._find(_BUCKET)
            for name, each in list(found.objects.items()):
                if name.startswith(prefix) and state.get(name) != each:
                    self._store._remove(found, each)
            for name, each in state.items():
                if name not in found.objects:
                    self._store._put(found, each, self._kept / each.content.id)
        forget_listings(f"gs://{_BUCKET}")

    def listing(self, command: Command) -> Listing:
        """Every object by its checksum."""
        forget_listings(f"gs://{_BUCKET}")
        return self._places.listing(self.place(command))

    def _prefix(self, command: Command) -> str:
        return self.place(command).removeprefix(f"gs://{_BUCKET}/") + "/"

    def _record(self, command: Command, saved: SavedRuns, key: str, main: Main) -> None:
        local, states = self.local(command), list[tuple[str, State]]()
        local.mkdir(parents=True)
        self._urls[command.name] = command.build(local, saved, self._places.place)
        forget_listings(f"gs://{_BUCKET}")
        with self._watched(states, command), _as_another_process():
            answer = run(main, command.arguments(self.place(command), key, str(local)))
        assert answer.code == command.code, (command.name, answer)
        self._states[command.name] = states

    @contextmanager
    def _watched(self, states: list[tuple[str, State]], command: Command) -> Iterator[None]:
        """Keeps the states of the command's prefix meanwhile."""
        originals = {name: getattr(ObjectStore, name) for name in (*_CHANGES, "list")}

        def changed(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
            def kept(store: ObjectStore, *args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    self._store = store
                    if not states:
                        states.append(("nothing", self._state(store, command)))
                    result = change(store, *args, **kwargs)
                    if name != "list":
                        target = args[1] if isinstance(args[1], str) else args[1][1]
                        states.append((f"{name} {target}", self._state(store, command)))
                    return result

            return kept

        with ExitStack() as patches:
            for name, original in originals.items():
                patches.enter_context(patch.object(ObjectStore, name, changed(name, original)))
            yield

    def _state(self, store: ObjectStore, command: Command) -> State:
        prefix = self._prefix(command)
        with store._lock:  # pyright: ignore[reportPrivateUsage]
            found = store._find(_BUCKET)  # pyright: ignore[reportPrivateUsage]
            state = {name: each for name, each in found.objects.items() if name.startswith(prefix)}
            for each in state.values():
                if not (kept := self._kept / each.content.id).exists():
                    kept.hardlink_to(found.directory.data_path(each))
        return state


@contextmanager
def bucket_medium(
    home: Path, commands: Sequence[Command], saved: SavedRuns, key: str, main: Main
) -> Iterator[BucketMedium]:
    """A bucket that the clients in this process find for as long as the context is open."""
    with bucket(home / "bucket") as places:
        yield BucketMedium(home, places, commands, saved, key, main)


@contextmanager
def _as_another_process() -> Iterator[None]:
    """Claims of this process look like those of a process of this machine that has ended."""
    name = leases._process_name(os.getpid()).rpartition(" ")[0]  # pyright: ignore[reportPrivateUsage]
    with patch.object(leases, "_holder", lambda: {"holder": "host:1", "process": f"{name} 1"}):
        yield
