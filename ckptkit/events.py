"""Events of a run: frozen records in one append-only JSONL file per process. ckptkit has no other telemetry.

Goodput, stall reports and plots are pure folds over these records (`ckptkit.goodput`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol, final

from ckptkit.util import clock, heartbeat

_log = logging.getLogger("ckptkit")
_LINE_BYTES_MAX = 1 << 20  # no event is longer
LOG_NAME = re.compile(r"attempt-(\d+)-process-(\d+)\.jsonl", re.ASCII)
# Where launchers and schedulers put a process's index: ours, Slurm, Open MPI, MPICH, an indexed Kubernetes job.
_PROCESS_VARIABLES = ("CKPTKIT_PROCESS", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
EVENTS_DIRECTORY = "CKPTKIT_EVENTS"  # a directory: managers that are given no log write one there
_EXPORT_EVERY_S = 0.1  # so that a burst of events does not wake the exporters' thread for each
# A thread that computes keeps the interpreter for 5 ms from one that woke up. The step loop waits for one turn at most.
_TURN_S = _PAUSE_S = 2e-4
_RESERVED = frozenset({"kind", "at_s", "process", "step", "tier"})
# Made once: `json.dumps` with separators makes an encoder in every call, half of its time.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Kind(StrEnum):
    """The kinds of event, in the order in which they come in a run."""

    STARTED = "started"  # a process came up: fields attempt, pid
    # a manager is ready: fields directory, tiers, places (tier -> path), steps (how many), newest, duration_s
    OPENED = "opened"
    # time that was spent: fields span (goodput's kind), duration_s, failed (true) where it ended in an exception; at_s
    # is its END
    SPAN = "span"
    CALLED = "called"  # the loop called the manager for step, and no span reports it: fields call
    PLANNED = "restore_planned"  # fields sources: tier -> bytes
    REJECTED = "restore_rejected"  # fields reason
    INCOMPLETE = "restore_incomplete"  # a save that some processes had not committed when the job ended: fields reason
    # fields sources: tier -> bytes, tree_bytes (of all processes), duration_s, verify (and share, seed of a sample); of
    # several processes broadcast (whether replicas read for each other), broadcast_why
    RESTORED = "restored"
    PHASE = "save_phase"  # a save crossed a phase boundary: fields phase
    # fields strategy, reason, bytes, tiers (it is due in), stall_s (the step loop's), waited_s of it for earlier saves,
    # computing_s (not in it: the time until the step had computed the state); tree_bytes (of all processes), if it is
    # due in the durable tier; policy "wait" if it waited for saves
    STAGED = "staged"
    # step is whole in tier on ALL processes: fields bytes, duration_s since staged; shared_bytes and shared_from if a
    # durable step took data files over from the step before; kept_bytes of a slot on a disk that had them already
    COMMITTED = "committed"
    SKIPPED = "save_skipped"  # dropped everywhere: fields reason, policy: skip (too early), wait (in vain), veto
    # replicas hold different bits: fields item, leaf, box, holders (process, host, device, digest), suspects, policy
    REPLICAS_DIFFER = "replicas_differ"
    RETRIED = "save_retried"  # a transient failure: fields reason, delay_s until the next attempt
    FAILED = "save_failed"  # fields reason
    # the last save is over: fields tiers (that hold it), unfinished, left_out: tier -> why, spent_s before it, grace_s
    PREEMPTED = "preempted"
    RESUMED = "resumed"  # a run continues at step: fields repeated (steps taken again; None: unknown), processes, mesh
    DEGRADED = "tier_degraded"  # fields reason
    SCRUBBED = "scrubbed"  # a damaged slot of this process: fields path, reason
    RECOVERED = "tier_recovered"  # a degraded tier works again: fields failures in a row before, failed_s
    LEFT_BEHIND = "left_behind"  # at start: fields names, of what a run that died did not commit, and path
    CLEANED = "left_behind_cleaned"  # the same fields: it went, once this run's epoch had fenced its writers off
    # at start: a tier's mount is not what it looks like: fields path, file_system, medium, problem (empty: none); of
    # the durable tier commit (rename, mark), of a fast one rate_bytes_s where it was measured
    MOUNTED = "tier_mounted"
    # the launcher lost a process: fields attempt, lost (which), cause, wiped, detect_s since it killed it, if it did
    DISRUPTED = "disrupted"
    # `ckptkit chaos` did harm: fields fault (its number), what (the kind of fault; wipe, flip), target, did (in words)
    # and lasts_s of what ends by itself
    INJECTED = "fault_injected"
    RELAUNCHED = "relaunched"  # the launcher starts the processes again: fields attempt
    FINISHED = "finished"
    CLOSED = "closed"  # a manager was closed: fields failed (true) if an exception ended its block
    # a guard found a value suspicious, and the values before it not: fields signal, value, rule, limit
    SUSPECTED = "suspected"
    ALARM = "alarm"  # a guard wants to go back: fields rule, signal, onset, value, limit
    # the run continues from step, in the same process: fields from_step (the alarm's), first_step (the first that takes
    # another batch), batches (skipped: first, stop), rollbacks of the run so far, alarm
    ROLLED_BACK = "rolled_back"
    GUARD_STOPPED = "guard_stopped"  # a guard does not go back once more: fields reason, alarm
    INTERVAL = "interval_changed"  # a policy saves the tier at another interval: fields seconds, before, reason


_KINDS = frozenset(map(str, Kind))
_KIND_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class UnknownKindError(ValueError):
    """A line is an event of a kind that this version does not know: a newer ckptkit wrote it."""

    def __init__(self, kind: str):
        super().__init__(f"{kind!r} is not a kind of event that this ckptkit knows; a newer one may have written it")
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `at_s` is wall-clock seconds, `process` the JAX process index (-1: launcher)."""

    kind: Kind
    at_s: float
    process: int
    step: int | None = None
    tier: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def span(cls, name: str, *, start_s: float, end_s: float, process: int = 0, step: int | None = None) -> Event:
        """Time that was spent under goodput kind `name`, from one wall-clock time to another: for logs of others.

        Raises ValueError for an end before the start.
        """
        if end_s < start_s:
            raise ValueError(f"span {name!r} ends at {end_s}, before it starts at {start_s}")
        fields = {"span": name, "duration_s": round(end_s - start_s, 6)}
        return cls(kind=Kind.SPAN, at_s=end_s, process=process, step=step, fields=fields)

    def to_json(self) -> str:
        """One line of JSON without a newline."""
        record: dict[str, Any] = {"kind": self.kind, "at_s": round(self.at_s, 6), "process": self.process}
        if self.step is not None:
            record["step"] = self.step
        if self.tier is not None:
            record["tier"] = self.tier
        record.update(self.fields)
        return _encode(record)

    @classmethod
    def from_json(cls, line: str) -> Event:
        """The event of one line; raises `ValueError` for a line that is not an event, like a torn last line.

        The error is an `UnknownKindError` for an event of a kind that this version does not know.
        """
        record = json.loads(line)
        try:
            kind, at_s, process = record.pop("kind"), float(record.pop("at_s")), int(record.pop("process"))
            if kind not in _KINDS and _KIND_NAME.fullmatch(kind):
                raise UnknownKindError(kind)
            step, tier = record.pop("step", None), record.pop("tier", None)
            return cls(kind=Kind(kind), at_s=at_s, process=process, step=step, tier=tier, fields=record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an event: {line[:200]!r}") from error


class _OpenFile:
    """A file that is closed once no thread uses it: else a line could go to another file with the same number."""

    __slots__ = ("fd",)

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class EventLog:
    """Appends events to a JSONL file and shows each to observers.

    Cost: one encoded line and one `os.write` per event, no sync; 8 microseconds (bench/LOG.md). The line is written in
    the thread that emits it, so a process that is killed loses at most the line that it was writing. A queue with
    a writer of its own would lose all lines in it. Safe from several threads. `EventLog()` writes no file.

    `exporters` get every event in a thread of their own (`ckptkit.goodput.exporters`); at most 10,000 events wait for
    them, and later ones are dropped for the exporters, never for the file. `close` ends them, as the end of the process
    does.

    `load_run` finds it as `attempt-<a>-process-<p>.jsonl` in the directory of the run. Raises ValueError for a URL,
    which takes no lines at its end, and OSError for a file that cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        process: int = 0,
        exporters: Sequence[Exporter] = (),
    ):
        self.opened_s = clock.wall_s()  # older lines in the file are of an earlier attempt
        path = None if path is None else _local(path)
        self._process = process
        self._observers: list[Callable[[Event], None]] = []
        self._named: set[str] = set()  # which observers there are that several managers would add
        self._tells_steps = False
        self._file: _OpenFile | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _OpenFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))
            _cut_torn_line(self._file.fd)
        self._exporting = ExporterThread(exporters, process) if exporters else None
        if self._exporting is not None:
            self.observe(self._exporting)

    @classmethod
    def for_run(
        cls,
        directory: str | os.PathLike[str],
        *,
        process: int | None = None,
        attempt: int | None = None,
        exporters: Sequence[Exporter] = (),
    ) -> EventLog:
        """The log of this start of a run, below `directory`, which holds the logs of all starts and processes.

        Give every start the same directory. Opens `attempt-<a>-process-<p>.jsonl` and writes a `started` event.
        The process is the argument, else that of `jax.distributed` where it is initialized, else that of the launcher
        or scheduler (CKPTKIT_PROCESS, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK, JOB_COMPLETION_INDEX), else 0. The
        attempt is the argument, else CKPTKIT_ATTEMPT, else the next number for which this process has no log. A
        number that was used before is continued: `load_run` distinguishes the starts. Raises as the constructor does,
        and ValueError for a variable that holds no number.
        """
        root = _local(directory)
        process = _process_index() if process is None else process
        attempt = _variable("CKPTKIT_ATTEMPT") if attempt is None else attempt
        path = root / f"attempt-{attempt}-process-{process}.jsonl" if attempt is not None else None
        log = cls(path, process=process, exporters=exporters)
        if attempt is None:
            attempt = log._open_next(root)
        log.emit(Kind.STARTED, attempt=attempt, pid=os.getpid())
        return log

    def _open_next(self, root: Path) -> int:
        """Opens the log of the next attempt of this process; returns its number."""
        root.mkdir(parents=True, exist_ok=True)
        while True:
            named = filter(None, map(LOG_NAME.fullmatch, os.listdir(root)))
            used = [int(name[1]) for name in named if int(name[2]) == self._process]
            attempt = max([*used, (_variable("SLURM_RESTART_COUNT") or 0) - 1]) + 1
            path = root / f"attempt-{attempt}-process-{self._process}.jsonl"
            try:
                fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:  # another start took the number since the listing
                continue
            self._file = _OpenFile(fd)
            return attempt

    @property
    def process(self) -> int:
        """The process whose events these are."""
        return self._process

    @property
    def has_file(self) -> bool:
        """Whether events go to a file, and not to observers alone."""
        return self._file is not None

    @property
    def tells_steps(self) -> bool:
        """Whether the loop records `step` spans here: signs of steps from elsewhere are not needed."""
        return self._tells_steps

    def observe(self, observer: Callable[[Event], None], *, once: str | None = None) -> None:
        """Calls `observer` with every later event, in the thread that emits it.

        Its exceptions are logged, not raised: other processes may wait for that thread. An observer with a name
        (`once`) that the log has already is left out.
        """
        if once is None or once not in self._named:
            self._named.update({once} if once is not None else ())
            self._observers.append(observer)

    def emit(self, kind: Kind, *, step: int | None = None, tier: str | None = None, **fields: Any) -> None:
        """Records that something happened now. A full disk loses events, never the job; observers still get them.

        Raises ValueError for a field with the name of something that every event has.
        """
        if not _RESERVED.isdisjoint(fields):
            raise ValueError(f"{sorted(_RESERVED & set(fields))} of a {kind} event: every event has its own")
        self.record(Event(kind=kind, at_s=clock.wall_s(), process=self._process, step=step, tier=tier, fields=fields))

    def record(self, event: Event) -> None:
        """Records an event whose time is given, as `emit` records one that happens now: for logs of others."""
        if self._file is not None:
            self._append((event.to_json() + "\n").encode())
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001  it is of the caller
                _log.exception("an observer of events failed at a %s event", event.kind)

    def _append(self, line: bytes) -> None:
        file = self._file  # no lock: a signal handler in the middle of this may wait for a thread that emits
        try:
            if file is not None and os.write(file.fd, line) < len(line):  # one write is appended as a whole
                _cut_torn_line(file.fd)
        except OSError:
            return

    def span(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Records the time spent in the block under goodput kind `name`; the event is stamped at its end."""
        self._tells_steps |= name == "step"
        return _Span(self, name, step)

    def close(self) -> None:
        """Closes the file, and the exporters once they have what was recorded; later events reach only observers."""
        if self._exporting is not None:
            self._observers = [each for each in self._observers if each is not self._exporting]
            self._exporting.close()
            self._exporting = None
        self._file = None


class Exporter(Protocol):
    """Shows events elsewhere. One thread calls `export`; `begin` and `close` are called once."""

    def begin(self, process: int) -> None:
        """The log of this process begins."""
        ...

    def export(self, event: Event) -> None:
        """Takes an event, in order."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...


@final
class ExporterThread:
    """An observer that hands each event over to the exporters, which run in a thread of its own, in order.

    At most `waiting_max` events wait: later ones are dropped and counted. An exception of an exporter is logged, once
    for each type. Cost of a call: below a microsecond; no lock, no wake-up. The thread pauses after each 0.2 ms of
    work, so that it does not keep the interpreter from the thread that emits.
    """

    def __init__(self, exporters: Sequence[Exporter], process: int, *, waiting_max: int = 10_000):
        self._exporters = tuple(exporters)
        for exporter in self._exporters:
            exporter.begin(process)
        self._events: deque[Event] = deque()
        self._waiting_max = waiting_max
        self.dropped = 0
        self._failed: set[type[Exception]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptkit-exporters", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        """Hands an event over, or drops it where too many wait."""
        if len(self._events) < self._waiting_max:
            self._events.append(event)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Exports the events that wait, joins the thread, and closes the exporters."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join()
        for exporter in self._exporters:
            exporter.close()

    def _run(self) -> None:
        while not self._ended.wait(_EXPORT_EVERY_S):
            self._drain()
        self._drain()
        if self.dropped:
            _log.warning("%s: %d values were dropped: too many waited", self._thread.name, self.dropped)

    def _drain(self) -> None:
        turn_s = clock.monotonic_s()
        while self._events:
            self._export(self._events.popleft())
            if clock.monotonic_s() - turn_s > _TURN_S:
                self._ended.wait(_PAUSE_S)
                turn_s = clock.monotonic_s()

    def _export(self, event: Event) -> None:
        for exporter in self._exporters:
            try:
                exporter.export(event)
            except Exception as error:  # noqa: BLE001  it is of the user: training goes on
                if type(error) not in self._failed:
                    self._failed.add(type(error))
                    _log.exception("%s failed; more like this are not logged", self._thread.name)


class _Span(AbstractContextManager[None]):
    """A class and no generator: that costs the step loop another microsecond per span."""

    __slots__ = ("_log", "_name", "_start_s", "_step")

    def __init__(self, log: EventLog, name: str, step: int | None):
        self._log, self._name, self._step = log, name, step

    def __enter__(self) -> None:
        self._start_s = clock.monotonic_s()

    def __exit__(self, error: object, *_: object) -> None:
        duration_s = round(clock.monotonic_s() - self._start_s, 6)
        failed: dict[str, Any] = {} if error is None else {"failed": True}
        self._log.emit(Kind.SPAN, step=self._step, span=self._name, duration_s=duration_s, **failed)
        if self._step is not None and self._name == "step":
            heartbeat.beat(self._step, done=True)


def default_log() -> EventLog:
    """The log of a manager that is given none: no file, or that of the process in the directory of `CKPTKIT_EVENTS`,
    which `ckptkit chaos --report` sets."""
    directory = os.environ.get(EVENTS_DIRECTORY)
    return _log_in(directory) if directory else EventLog()


@cache
def _log_in(directory: str) -> EventLog:
    return EventLog.for_run(directory)


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(f"events in {path!r}: give a local path, and copy the logs to a bucket when they are whole")
    return Path(path)


def _process_index() -> int:
    jax = sys.modules.get("jax")  # a log needs no JAX, and before `jax.distributed` a question would start a backend
    if jax is not None and jax.distributed.is_initialized():
        return jax.process_index()
    return next((value for value in map(_variable, _PROCESS_VARIABLES) if value is not None), 0)


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number, 0 or more")
    return int(text) if text else None


def _cut_torn_line(fd: int) -> None:
    """Removes what a writer that died, or a full disk, left after the last newline: the next event begins a line."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, min(size, _LINE_BYTES_MAX), max(0, size - _LINE_BYTES_MAX))
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)


def read_events(path: str | os.PathLike[str], *, unknown: Counter[str] | None = None) -> list[Event]:
    """The events of one log, in order. A torn last line is dropped; a bad line before it raises ValueError.

    With `unknown`, lines with a kind of event that this version does not know are skipped, and counted there by kind.
    """
    lines = Path(path).read_text(errors="replace").split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            events.append(Event.from_json(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer died in mid-write
                break
            if unknown is None or not isinstance(error, UnknownKindError):
                raise ValueError(f"{path}:{number}: {error}") from error
            unknown[error.kind] += 1
    return events
