"""Records every operation that a command does below one directory, as the kernel sees it, by strace.

Stores into mapped memory are not system calls: a traced program announces them through `Notes`. At the end, the
recording is compared with the disk, so no change is missed silently.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from ckptkit.testing.crash.calls import CALLS, Reader, TraceError
from ckptkit.testing.crash.disk import Disk, DiskEffect, NodeKind, Note, Operation

NOTES_NAME = "_notes"  # a file in the traced directory that is not a part of it
_EVERY = 64  # operations: a state is replayed from the last of these points before it
_STRING_BYTES = 64 << 20  # of one write: a longer one is not a valid trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The changes that a command made below its directory. `before` makes the initial files; `operations` are in the
    order in which the kernel finished them."""

    kinds: Mapping[int, NodeKind]
    before: tuple[DiskEffect, ...]
    operations: tuple[Operation, ...]
    _passed: list[Disk] = field(default_factory=list, init=False, repr=False, compare=False)  # after each `_EVERY`

    def disk(self, count: int | None = None) -> Disk:
        """The state after the first `count` operations, all of them by default. One thread at a time."""
        count = len(self.operations) if count is None else count
        if not self._passed:
            self._passed.append(Disk(self.kinds).replay(self.before))
        while len(self._passed) <= count // _EVERY:
            self._passed.append(self._after(len(self._passed) * _EVERY))
            self._passed[-1].digest()  # its copies know the digests of all files
        return self._after(count)

    def _after(self, count: int) -> Disk:
        start = min(count // _EVERY, len(self._passed) - 1)
        effects = (operation.effect for operation in self.operations[start * _EVERY : count])
        return self._passed[start].copy().replay(effects)


@final
class Notes:
    """Notes of a traced program about itself, in order with its operations. Safe from several threads."""

    def __init__(self, root: Path):
        self._root = root
        self._fd = os.open(root / NOTES_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, text: str) -> None:
        """A `Note` in the trace."""
        os.write(self._fd, json.dumps({"say": text}).encode())

    def stored(self, path: Path, offset: int, data: bytes) -> None:
        """These bytes were stored through a mapping of a file, by now."""
        record = {"stored": self._below(path), "offset": offset, "data": base64.b64encode(data).decode()}
        os.write(self._fd, json.dumps(record).encode())

    def unchanged(self, path: Path) -> None:
        """Declares that every store through a mapping of the file was announced; the recording fails if that is
        wrong."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        os.write(self._fd, json.dumps({"unchanged": self._below(path), "digest": digest}).encode())

    def _below(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def can_trace() -> bool:
    """Whether strace is there and may trace."""
    command = shutil.which("strace")
    return command is not None and subprocess.run([command, "-o", "/dev/null", "true"], check=False).returncode == 0


def record(
    command: Sequence[str], root: Path, *, env: Mapping[str, str] | None = None, timeout_s: float = 300.0
) -> Trace:
    """Runs `command` and returns what it did below `root`, whose bytes are held in memory some times over.

    Raises `TraceError` where the command fails, did what cannot be followed, or has not ended after `timeout_s`: then
    it is killed, with all processes of its session.
    """
    root = root.resolve()
    before = _snapshot(root)
    output = root.with_name(f"{root.name}.strace")
    traced = ["strace", "-f", "-qq", "--seccomp-bpf", "-xx", "-s", str(_STRING_BYTES), "-o", str(output)]
    traced += ["-e", f"trace={','.join(CALLS)}", *command]
    try:
        code, errors = _run(traced, env, timeout_s)
        if code:
            raise TraceError(f"{' '.join(command)} ended with code {code}:\n{errors[-2000:]}")
        reader = Reader(root, NOTES_NAME, before)
        with output.open() as lines:
            for line in lines:
                reader.feed(line)
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"{' '.join(command)} did not end within {timeout_s:g} s") from error
    finally:
        output.unlink(missing_ok=True)
    trace = Trace(kinds=reader.kinds, before=(*before.effects, *reader.targets), operations=tuple(reader.operations))
    _require_same(root, trace)
    return trace


def _run(words: Sequence[str], env: Mapping[str, str] | None, timeout_s: float) -> tuple[int, str]:
    """Its exit code and its stderr. A killed strace leaves the traced processes running: kills them too."""
    with subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, errors


def notes(trace: Trace) -> list[tuple[int, str]]:
    """The program's notes, each with the number of operations before it."""
    found = ((number, each.effect) for number, each in enumerate(trace.operations))
    return [(number, effect.text) for number, effect in found if isinstance(effect, Note)]


def _snapshot(root: Path) -> Reader:
    """A reader that knows the content there."""
    reader = Reader(root, NOTES_NAME, None)
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory) / name
            if path != root / NOTES_NAME:
                reader.found(path)
    return reader


def _require_same(root: Path, trace: Trace) -> None:
    found = _snapshot(root)
    recorded, real = trace.disk(), Disk(found.kinds).replay(found.effects)
    mine = {path: (trace.kinds[node], recorded.content(node)) for path, node in recorded.tree()}
    theirs = {path: (found.kinds[node], real.content(node)) for path, node in real.tree()}
    wrong = sorted(path for path in {*mine, *theirs} if mine.get(path) != theirs.get(path))
    if wrong:
        raise TraceError(f"the trace does not lead to the content of the disk: {', '.join(wrong[:5])}")
