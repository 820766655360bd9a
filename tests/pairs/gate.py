"""A gate: the threads of one command pause from its n-th storage operation on, until the gate opens.

On a disk the operations are Python's audit events for paths below the root; in a bucket the requests of a store.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

_EVENTS: Final = frozenset(
    ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.link", "os.symlink")
)
_READS: Final = ("cat_file", "exists", "info", "ls", "find")
_owned = threading.local()  # owner: the command for which a thread works; threads inherit it from who starts them
_gates: list[Gate] = []  # an audit hook can never be taken out: it looks here


@final
class Gate:
    """Counts the operations of one owner below a root; all its threads pause from operation `at` until `open`."""

    def __init__(self, owner: str, below: str, at: int | None):
        self.owner, self.below, self.at = owner, below, at
        self.count = 0
        self.paused = threading.Event()
        self.paused_at = ""
        self.trace: list[tuple[str, bool]] = []  # where, and whether it writes
        self._open = threading.Event()
        self._lock = threading.Lock()

    def open(self) -> None:
        """The owner continues, to its end."""
        self._open.set()

    def operation(self, event: str, where: str, *, writes: bool) -> None:
        """One operation of the owner: waits here from operation `at` on."""
        with self._lock:
            self.count += 1
            self.trace.append((where, writes))
            if self.count == self.at:
                self.paused_at = f"{event} {where}"
                self.paused.set()
        if self.paused.is_set():
            self._open.wait()


def moments(trace: Sequence[tuple[str, bool]], other: Sequence[tuple[str, bool]]) -> list[int]:
    """The operations before which the first command is to pause, given its own trace and that of the second one.

    Left out are those after a read of what the second one does not write: it may as well run before that read.
    """
    written = {_part(where) for where, writes in other if writes}
    kept = [1]
    for number, (where, writes) in enumerate(trace, 2):
        part = _part(where)
        listing = part == "" and written  # of the root
        below = part.isdecimal() and "?" in written  # by a descriptor: of a step, perhaps
        if number <= len(trace) and (writes or part == "?" or part in written or listing or below):
            kept.append(number)
    return kept


def _part(where: str) -> str:
    """The step, or the kind of records, that a path is of; `?` for one by a descriptor."""
    if where and not where.startswith("/"):
        return "?"
    parts = where.split("/")[1:]
    return "/".join(parts[:2]) if parts[:1] == ["_ckptkit"] else "".join(parts[:1])


def owner() -> str:
    """The command for which this thread works; empty for none."""
    return getattr(_owned, "owner", "")


@contextmanager
def gated(gate: Gate) -> Iterator[None]:
    """The gate counts, on disks and in buckets, in this context."""
    _install()
    _gates.append(gate)
    try:
        yield
    finally:
        _gates.remove(gate)
        gate.open()


def started(name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread that works for a command."""
    _install()

    def owned() -> None:
        _owned.owner = name
        work()

    thread = threading.Thread(target=owned, name=f"pairs-{name}", daemon=True)
    thread.start()
    return thread


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _gates or event not in _EVENTS:
        return
    for gate in tuple(_gates):
        if owner() == gate.owner and (where := _below(gate.below, event, arguments)) is not None:
            gate.operation(event, where, writes=_writes(event, arguments))


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return event not in ("os.listdir", "os.scandir")
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(each in mode for each in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _below(root: str, event: str, arguments: tuple[Any, ...]) -> str | None:
    for path in arguments[:2]:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if text.startswith(root):
                return text[len(root) :]
            if event != "open" and not text.startswith("/"):  # by a descriptor of a directory
                return text
    return None


def _asked(ask: Callable[..., Any], batch: str = "") -> Callable[..., Any]:
    """A method of a store of a bucket behind the gate: the one of all requests, or a `batch` of many objects."""

    def gated_ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        for gate in tuple(_gates):
            if owner() == gate.owner and gate.below in self.url + "/":
                method, path = ("", None) if batch else (*args, None)[:2]
                where = path.partition(gate.below.rstrip("/"))[2] if isinstance(path, str) else "?"
                gate.operation(str(batch or method), where, writes=method not in _READS)
        return ask(self, *args, **kwargs)

    return gated_ask


def _install() -> None:
    if getattr(threading.Thread, "is_owned", False):
        return
    from ckptkit.store.remote import RemoteStore

    start = threading.Thread.start

    def start_owned(thread: threading.Thread) -> None:
        name, run = owner(), thread.run
        if name:

            def run_owned() -> None:
                _owned.owner = name
                run()

            thread.run = run_owned
        start(thread)

    threading.Thread.start = start_owned  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread.is_owned = True  # pyright: ignore[reportAttributeAccessIssue]
    RemoteStore._ask = _asked(RemoteStore._ask)  # pyright: ignore[reportPrivateUsage]
    RemoteStore.delete_unchanged = _asked(RemoteStore.delete_unchanged, "delete_unchanged")
    RemoteStore.delete_many = _asked(RemoteStore.delete_many, "delete_many")
    sys.addaudithook(_hook)
