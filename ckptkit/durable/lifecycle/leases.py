"""Leases: what a reader in another process is using, so that the writer does not prune it meanwhile.

Small objects in the durable root. A reader keeps one per step that it uses, `{"step": S, "beat": N, "lease_s": T,
"holder": ...}`, and counts the beat up while it lives. The writer names the steps that it is about to delete in
`doomed.json` *before* it looks for leases, and a reader looks there *after* its lease is written. So at least one of
the two sees the other: the step is kept, or the reader leaves it.

A command that deletes steps, with or without a running job, announces it in an object of its own among the leases,
which it renews as a reader does (`ckptkit.verification.deletions`). A pin (`ckptkit.upkeep.pinning`) is there too: a
lease without an end. So the one listing that a writer makes shows all of them.

All of them have a beat, `doomed.json` too. One rule (`_state_of`) decides for readers and for writers whether the
holder of a notice or a claim lives.

No two clocks are compared. For the writer a lease is dead when its beat has not changed for `lease_s` of the writer's
own time. For the reader it is lost `lease_s` after the start of its last successful renewal, which is earlier.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, final

from ckptkit.errors import CheckpointError, StoreError
from ckptkit.model import paths
from ckptkit.store import Store, put_new
from ckptkit.util import clock

LEASE_S_MAX = 3600.0  # how long a reader that died may hold up a deletion
_LEASE_S = 60.0  # of notices and claims, and of a lease that cannot be read
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_WATCH_S = 1.0  # between two looks at the claim of another process
_RENEWALS = 3  # in the life of a lease: two may fail


class Beating:
    """A small object whose beat a thread counts up until `release`; context manager. `lease_s` is its lifetime, 60 s by
    default."""

    def __init__(
        self,
        store: Store,
        key: str,
        record: Mapping[str, Any],
        now_s: Callable[[], float],
        *,
        lease_s: float | None = None,
    ):
        lease_s = _LEASE_S if lease_s is None else lease_s
        if not 0 < lease_s <= LEASE_S_MAX:
            raise ValueError(f"lease_s is {lease_s}; it must be above 0 and at most {LEASE_S_MAX:g}")
        self._store = store
        self._key = key
        self._record = {**record, "lease_s": lease_s, **_holder()}
        self._lease_s = lease_s
        self._now_s = now_s
        self._beat = 0
        self._released = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._keep, name="ckptkit-lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether others may take it for dead by now: it could not be renewed in time."""
        return self._now_s() > self._until_s

    def release(self) -> None:
        """Ends it. A store that cannot be reached lets it lapse by itself."""
        self.stop()
        with suppress(StoreError):
            self._store.delete(self._key)

    def stop(self) -> None:
        """Ends the renewals; the object stays."""
        self._released.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        begun_s = self._now_s()
        self._store.put(self._key, json.dumps({**self._record, "beat": self._beat}).encode())
        self._beat += 1
        self._until_s = begun_s + self._lease_s

    def _keep(self) -> None:
        while not self._released.wait(self._lease_s / _RENEWALS):
            if self.lost:  # the writer may have removed it: it is never renewed again
                return
            with suppress(StoreError):  # tried again until it is lost
                self._renew()


@final
class Lease(Beating):
    """Steps that this process reads, one or more. Renewed by a thread until `release`; context manager. Once it is
    `lost`, the steps may be pruned.

    Raises `StoreError` where it cannot be written, ValueError for a `lease_s` outside (0, 3600].
    """

    def __init__(self, store: Store, *steps: int, lease_s: float, monotonic_s: Callable[[], float] = clock.monotonic_s):
        self.steps = frozenset(steps)
        # A name of its own for each: one that lapsed can never be taken for the one that follows it.
        key = f"{paths.LEASES_DIR}/{uuid.uuid4().hex}.json"
        record = {"step": steps[0]} if len(steps) == 1 else {"steps": sorted(steps)}
        super().__init__(store, key, record, monotonic_s, lease_s=lease_s)

    def granted(self) -> bool:
        """Whether the writer will keep every step of it: asked once, after the lease was written."""
        return self.kept() == self.steps

    def kept(self) -> frozenset[int]:
        """The steps that the writer will keep: asked once, after the lease was written."""
        doomed = announced_deletions(self._store, self.steps)
        return frozenset() if self.lost else self.steps - doomed


@final
class WriterClaim(Beating):
    """The one process that copies a step into a bucket, until `release`; context manager. Once it is `lost`, another
    process may have taken it over: nothing more may be written.

    Raises `CheckpointError` if another process holds the claim; the claim of a dead holder is replaced (`_state_of`).
    Raises `StoreError`.
    """

    def __init__(self, store: Store, name: str, *, monotonic_s: Callable[[], float] = clock.monotonic_s):
        key = f"{paths.LEASES_DIR}/{paths.claim_name(name)}"
        record = {"steps": [], "copying": name, "claim": uuid.uuid4().hex}  # it keeps no step from being pruned
        while not _created(store, key, record):
            _replace_dead(store, key, f"{store.url}/{name}", monotonic_s)
        super().__init__(store, key, record, monotonic_s)


def _created(store: Store, key: str, record: Mapping[str, Any]) -> bool:
    try:
        put_new(store, key, record_text(record))
    except FileExistsError:
        return False
    return True


def _replace_dead(store: Store, key: str, target: str, monotonic_s: Callable[[], float]) -> None:
    """Deletes the claim of a process that has died; raises `CheckpointError` for one that lives."""
    first = store.stat_all(paths.LEASES_DIR).get(key)
    state, record = _state_of(store, key, monotonic_s)
    if state == "lives":
        raise CheckpointError(
            f"another process ({record.get('holder')}) is making {target}; wait until it has ended", path=target
        )
    if state == "died" and first is not None:
        store.delete_unchanged({key: first})


def _state_of(
    store: Store, key: str, monotonic_s: Callable[[], float], asked: Callable[[Any], bool] = lambda record: True
) -> tuple[Literal["lives", "died", "gone"], dict[str, Any]]:
    """Whether the holder of a notice or a claim lives, and what it wrote last: the one rule for readers and writers.

    The system knows at once if a process of this machine has ended. Any other record is watched: its holder lives once
    the record changes, and has died once it did not change for its lifetime, at most a minute. So long this waits. A
    record that `asked` does not accept is not of interest: it is `gone`.
    """
    first, begun_s = None, monotonic_s()
    while True:
        try:
            data = store.get(key)
        except FileNotFoundError:
            return "gone", {}
        record = _parsed(data)
        first = data if first is None else first
        ended = _has_ended(str(record.get("process")))
        if not asked(record):
            return "gone", {}
        if ended is not None or data != first:
            return "died" if ended else "lives", record
        if monotonic_s() - begun_s > _LEASE_S:
            return "died", record
        time.sleep(_WATCH_S)


def _parsed(data: bytes) -> dict[str, Any]:
    """A record; an empty one for a damaged one."""
    with suppress(*_UNREADABLE):
        record = json.loads(data)
        return record if isinstance(record, dict) else {}
    return {}


def record_text(record: Mapping[str, Any]) -> bytes:
    """A record without a beat, with the name of this process."""
    return json.dumps({**record, **_holder()}).encode()


def _holder() -> dict[str, str]:
    """Names this process in a record: for people, and for `_has_ended`."""
    return {"holder": f"{socket.gethostname()}:{os.getpid()}", "process": _process_name(os.getpid())}


def _process_name(pid: int) -> str:
    """The machine since its last boot, the namespace of process ids, the id and the start of a process that runs. A
    host name and an id alone may be those of two processes, in two containers. Empty where the system has no names."""
    with suppress(OSError, ValueError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":
            return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {fields[18]}"
    return ""


def _has_ended(process: str) -> bool | None:
    """Whether a process of this machine has ended; None for one that this process cannot see."""
    *place, pid, _ = process.split(" ") if process.count(" ") == 3 else ("", "", "")
    if not pid.isdecimal() or place != _process_name(os.getpid()).split(" ")[:-2]:
        return None
    found = _process_name(int(pid))
    return None if not found and _is_hidden(int(pid)) else found != process


def _is_hidden(pid: int) -> bool:
    """Whether a process is there of which the system shows nothing: of another user, where `/proc` hides those."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return not os.path.exists(f"/proc/{pid}/stat")


class PruneGuard:
    """The side of the process that deletes (of a job, process 0): which of the doomed steps must stay for now."""

    def __init__(self, store: Store, *, monotonic_s: Callable[[], float] = clock.monotonic_s):
        self._store = store
        self._monotonic_s = monotonic_s
        self._seen: dict[str, tuple[bytes, float]] = {}  # lease -> its content, and when it was first seen so
        self._notice: Beating | None = None
        self._announced = True  # by a run before this one, perhaps

    def spare(self, doomed: Iterable[int]) -> set[int]:
        """Those of `doomed` that somebody reads; all of them where that cannot be known.

        Cost: a put and a listing, and a small read per lease; nothing where nothing is doomed.
        """
        steps = set(doomed)
        if not steps:
            return set()
        try:
            self.announce(steps)
            spared = self.leased(steps)
            if spared:
                self.announce(steps - spared)
        except StoreError:  # nothing is deleted that may be in use: the next save prunes it
            return steps
        return spared

    def settle(self) -> None:
        """Nothing is about to be deleted any more: the numbers of those that went may be saved again."""
        if self._notice is not None:
            self._notice.stop()
            self._notice = None
        if self._announced:
            with suppress(StoreError):  # a reader skips steps that are no longer doomed, until the next save
                self._store.delete(paths.DOOMED_KEY)
                self._announced = False

    def close(self) -> None:
        """Ends an announcement that is left."""
        if self._notice is not None:
            self.settle()

    def announce(self, steps: set[int]) -> None:
        """Announces that `steps` are about to be deleted, even if a process reads them, until `settle`. Cost: a put,
        and a thread that renews it. Raises `StoreError`."""
        self._announced = True
        if self._notice is not None:
            self._notice.stop()
        record = {"steps": sorted(steps)}
        self._notice = Beating(self._store, paths.DOOMED_KEY, record, self._monotonic_s)

    @property
    def lost(self) -> bool:
        """Whether readers may not see the announcement any more: nothing more may be deleted."""
        return self._notice is not None and self._notice.lost

    def leased(self, steps: Collection[int]) -> set[int]:
        """Those of `steps` that a reader uses, or that are pinned. Cost: a listing, a small read per lease.

        Raises `StoreError`. The lease of a process of this machine ends with it. Other leases whose holders have died
        count until this has watched them for their life.
        """
        names, leased = self._store.list(paths.LEASES_DIR), set[int]()
        for gone in set(self._seen) - set(names):
            del self._seen[gone]
        for name in names:
            pinned = paths.step_of_pin(name)
            if pinned is not None:  # its name holds everything: damage to its content does not matter
                leased |= {pinned} & set(steps)
                continue
            with suppress(FileNotFoundError):  # released meanwhile
                leased |= self._held(name, set(steps))
        return leased

    def _held(self, name: str, steps: set[int]) -> set[int]:
        data, now_s = self._store.get(f"{paths.LEASES_DIR}/{name}"), self._monotonic_s()
        if self._seen.get(name, (b"", 0.0))[0] != data:
            self._seen[name] = (data, now_s)
        leased, lease_s = _read_lease(data)
        if now_s - self._seen[name][1] > lease_s:
            self._store.delete(f"{paths.LEASES_DIR}/{name}")  # its holder has died, or knows that it is lost
            return set()
        if paths.is_announcement(name):  # of another that deletes: it has no reader
            return set()
        if _has_ended(str(_parsed(data).get("process"))):  # `drop_dead` deletes it: a claim may be another's by now
            return set()
        return steps if leased is None else steps & leased


def drop_dead(store: Store) -> None:
    """Deletes the leases and the notices of processes of this machine that have ended, which no process counts any
    more. Those of other machines stay until a job has watched them. Cost: a listing, and a small read for each. Raises
    `StoreError`.
    """
    for name in store.list(paths.LEASES_DIR):
        if paths.step_of_pin(name) is not None:
            continue
        with suppress(FileNotFoundError):  # released meanwhile
            record = _parsed(store.get(f"{paths.LEASES_DIR}/{name}"))
            # A claim has one name for all who ask for it: `WriterClaim` replaces that of a dead holder.
            if "copying" not in record and _has_ended(str(record.get("process"))):
                store.delete(f"{paths.LEASES_DIR}/{name}")


def announced_deletions(
    store: Store, steps: Collection[int] | None = None, *, monotonic_s: Callable[[], float] = clock.monotonic_s
) -> set[int]:
    """Those of `steps` (None: of all) that the writer, or a command, is about to delete. Notices of processes that have
    died do not count. Raises `StoreError`.

    Cost: a small read, a listing, one small read for each command that deletes. A notice of another machine that names
    one of `steps` is watched, for at most a minute (`_state_of`).
    """

    def named(record: dict[str, Any]) -> set[int]:
        with suppress(*_UNREADABLE):  # a damaged one names nothing: who deletes writes it anew
            found = {int(step) for step in record["steps"]}
            return found if steps is None else found & set(steps)
        return set()

    names = [name for name in store.list(paths.LEASES_DIR) if paths.is_announcement(name)]
    found = set[int]()
    for key in (paths.DOOMED_KEY, *(f"{paths.LEASES_DIR}/{name}" for name in names)):
        state, record = _state_of(store, key, monotonic_s, lambda record: bool(named(record)))
        found |= named(record) if state == "lives" else set()
    return found


def _read_lease(data: bytes) -> tuple[frozenset[int] | None, float]:
    """The steps and the lifetime of a lease; None for one that cannot be read, which counts for every step."""
    try:
        record: dict[str, Any] = json.loads(data)
        steps = record["steps"] if "steps" in record else [record["step"]]
        lease_s = float(record["lease_s"])
        if not lease_s > 0:  # not a number, too
            raise ValueError(f"a lease of {lease_s} s")
        return frozenset(map(int, steps)), min(lease_s, LEASE_S_MAX)
    except _UNREADABLE:
        return None, _LEASE_S


def pinned_steps(store: Store) -> set[int]:
    """The steps that are pinned in a durable root. Cost: a listing. Raises `StoreError`."""
    steps = (paths.step_of_pin(name) for name in store.list(paths.LEASES_DIR))
    return {step for step in steps if step is not None}
