"""Crash points: what a program did to a directory, operation by operation, and every state that a crash may leave.

`record` runs a program under strace; `process_crashes` and `power_failures` give the states of each point, and
`CrashState.disk(trace).materialise(...)` makes one, for the program's own reader to be asked about.
"""

from ckptkit.testing.crash.calls import TraceError
from ckptkit.testing.crash.disk import Disk, Names, Note, Operation, Resize, Sync, Write
from ckptkit.testing.crash.points import CrashState, Syncs, is_operation, power_failures, process_crashes, unsynced
from ckptkit.testing.crash.trace import Notes, Trace, can_trace, notes, record

__all__ = [
    "CrashState",
    "Disk",
    "Names",
    "Note",
    "Notes",
    "Operation",
    "Resize",
    "Sync",
    "Syncs",
    "Trace",
    "TraceError",
    "Write",
    "can_trace",
    "is_operation",
    "notes",
    "power_failures",
    "process_crashes",
    "record",
    "unsynced",
]
