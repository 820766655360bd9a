"""The model of crashes: the files after a process dies, the losses of a power failure, and the needed entries of a
trace."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from ckptkit.testing.crash import (
    CrashState,
    Disk,
    TraceError,
    is_operation,
    notes,
    power_failures,
    process_crashes,
    record,
    unsynced,
)
from tests.strace import needs_strace

PUT = """
import os, sys
root, synced = sys.argv[1], sys.argv[2] == "synced"
with open(root + "/new", "wb") as file:
    file.write(b"x" * 1000)
    file.flush()
    if synced:
        os.fsync(file.fileno())
os.rename(root + "/new", root + "/name")
if synced:
    fd = os.open(root, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
"""


def traced(root: Path, code: str, *arguments: str):
    root.mkdir(exist_ok=True)
    return record([sys.executable, "-c", code, str(root), *arguments], root)


def files(disk: Disk, target: Path) -> dict[str, bytes]:
    disk.materialise(target)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def outcomes(trace, count: int, scratch: Path) -> list[dict[str, bytes]]:
    states = power_failures(trace, count - 1, lambda _: True, random.Random(0))
    return [files(state.disk(trace), scratch) for state in states]


@needs_strace
def test_every_operation_is_recorded_in_order(tmp_path: Path) -> None:
    """A crash point that is not recorded is one that nobody looks at."""
    trace = traced(tmp_path / "run", PUT, "synced")
    assert [each.call for each in trace.operations] == ["create", "write", "fsync", "rename", "fsync"]
    assert [each.path for each in trace.operations[:4]] == ["new", "new", "new", "name"]
    assert files(trace.disk(2), tmp_path / "at") == {"new": b"x" * 1000}
    assert files(trace.disk(), tmp_path / "at") == {"name": b"x" * 1000}


@needs_strace
def test_crash_tears_the_last_write(tmp_path: Path) -> None:
    """Half a file would never be read by anybody."""
    trace = traced(tmp_path / "run", PUT, "synced")
    sizes = [len(files(state.disk(trace), tmp_path / "at")["new"]) for state in process_crashes(trace, 1)]
    assert sorted(sizes) == [500, 512, 999, 1000]


@needs_strace
def test_power_failure_loses_unsynced_writes_in_any_order(tmp_path: Path) -> None:
    """A missing sync would be survived in the model, and not on a disk."""
    trace = traced(tmp_path / "run", PUT, "unsynced")
    found = outcomes(trace, len(trace.operations), tmp_path / "at")
    for left in ({}, {"name": b""}, {"name": b"x" * 1000}, {"new": b"x" * 1000}, {"name": b"x" * 512}):
        assert left in found
    synced = traced(tmp_path / "other", PUT, "synced")
    assert unsynced(synced, len(synced.operations), lambda _: True) == []
    assert outcomes(synced, 5, tmp_path / "at") == [{"name": b"x" * 1000}]


@needs_strace
def test_sync_by_another_process_covers_nothing_between_hosts(tmp_path: Path) -> None:
    """A process that leaves its syncs to another one would pass, and lose its files on a file system of two hosts."""
    code = """
import os, subprocess, sys
SYNC = "import os, sys; [os.fsync(os.open(path, os.O_RDONLY)) for path in sys.argv[1:]]"
with open(sys.argv[1] + "/a", "wb") as file:
    file.write(b"x" * 1000)
subprocess.run([sys.executable, "-c", SYNC, sys.argv[1] + "/a", sys.argv[1]], check=True)
"""
    trace = traced(tmp_path / "run", code)
    assert [each.call for each in trace.operations] == ["create", "write", "fsync", "fsync"]
    assert [each.process == trace.operations[0].process for each in trace.operations] == [True, True, False, False]
    assert unsynced(trace, 4, lambda _: True) == []
    assert unsynced(trace, 4, lambda _: True, syncs="own") == [0, 1]
    lost = power_failures(trace, 3, lambda _: True, random.Random(0), syncs="own")
    assert {} in [files(state.disk(trace), tmp_path / "at") for state in lost]


@needs_strace
def test_a_name_in_a_new_directory_needs_a_sync_of_both(tmp_path: Path) -> None:
    """A directory that was made and not synced takes everything in it away."""
    code = """
import os, sys
os.mkdir(sys.argv[1] + "/d")
with open(sys.argv[1] + "/d/file", "wb") as file:
    file.write(b"1")
    file.flush()
    os.fsync(file.fileno())
fd = os.open(sys.argv[1] + "/d", os.O_RDONLY)
os.fsync(fd)
"""
    trace = traced(tmp_path / "run", code)
    assert {} in outcomes(trace, len(trace.operations), tmp_path / "at")


@needs_strace
def test_trace_follows_existing_files_threads_and_offsets(tmp_path: Path) -> None:
    """A tree that differs from what a crash leaves proves nothing."""
    code = """
import os, sys, shutil, threading
root = sys.argv[1]
def write(name):
    fd = os.open(f"{root}/{name}", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"tail", 6)
    os.lseek(fd, 2, 0)
    os.write(fd, b"ab")
    os.ftruncate(fd, 9)
    os.close(fd)
threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
shutil.copytree(f"{root}/old", f"{root}/copy")
with open(f"{root}/old/file", "ab") as file: file.write(b"+")
os.link(f"{root}/t0", f"{root}/linked"); os.symlink("t1", f"{root}/pointer")
shutil.rmtree(f"{root}/doomed")
"""
    root = tmp_path / "run"
    for name in ("old", "doomed"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_bytes(b"before")
    trace = traced(root, code)
    assert files(trace.disk(0), tmp_path / "at") == {"old/file": b"before", "doomed/file": b"before"}
    after = files(trace.disk(), tmp_path / "at")
    assert after["t3"] == b"\0\0ab\0\0tai"
    assert (after["copy/file"], after["old/file"]) == (b"before", b"before+")
    assert os.readlink(tmp_path / "at" / "pointer") == "t1"
    assert os.path.samefile(tmp_path / "at" / "linked", tmp_path / "at" / "t0")
    assert not any(name.startswith("doomed") for name in after)


MAPPED = """
import mmap, os, sys
from pathlib import Path
from ckptkit.testing.crash import Notes
path = Path(sys.argv[1]) / "slot"
notes = Notes(path.parent)
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
notes.unchanged(path)
memory[:4] = b"data"
{say}
"""


@needs_strace
def test_undeclared_stores_through_a_mapping_are_refused(tmp_path: Path) -> None:
    """Bytes that no system call writes would be missing, and nobody would know."""
    trace = traced(tmp_path / "run", MAPPED.replace("{say}", "notes.stored(path, 0, b'data'); notes.say('hello')"))
    assert [each.call for each in trace.operations] == ["create", "ftruncate", "store", "note"]
    assert notes(trace) == [(3, "hello")]
    assert [is_operation(each) for each in trace.operations] == [True, True, True, False]
    with pytest.raises(TraceError, match="does not lead to the content of the disk: slot"):
        traced(tmp_path / "silent", MAPPED.replace("{say}", ""))
    with pytest.raises(TraceError, match="slot was changed through a mapping before the program announced it"):
        traced(tmp_path / "late", MAPPED.replace("{say}", "notes.unchanged(path); notes.stored(path, 0, b'data')"))


@needs_strace
def test_failed_command_gives_no_trace(tmp_path: Path) -> None:
    """Half a run would be judged as a whole one."""
    with pytest.raises(TraceError, match="ended with code 1"):
        traced(tmp_path / "run", "raise SystemExit(1)")


@needs_strace
def test_state_is_described_by_its_missing_operations(tmp_path: Path) -> None:
    """A violation could not be repeated."""
    trace = traced(tmp_path / "run", PUT, "unsynced")
    state = CrashState(count=3, dropped=frozenset({1}), torn=())
    assert files(state.disk(trace), tmp_path / "at") == {"name": b""}
    assert str(state) == "CrashState(count=3, dropped=frozenset({1}), torn=())"


@needs_strace
def test_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """strace alone would die, and the program go on in a directory that the next test uses."""
    code = "import sys, time, pathlib\nwhile True: pathlib.Path(sys.argv[1], 'tick').touch(); time.sleep(0.01)"
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(TraceError, match="did not end within 1 s"):
        record([sys.executable, "-c", code, str(root)], root, timeout_s=1.0)
    (root / "tick").unlink(missing_ok=True)
    time.sleep(0.3)
    assert not (root / "tick").exists()
