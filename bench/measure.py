"""Clocks, processor time and memory of this process, as cheaply as the kernel gives them."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import final

import click

from ckptkit.util import clock

_ROOT = Path(__file__).parent.parent
_SAMPLE_S = 0.01  # one read of /proc/self/status takes about 40 microseconds: below 1 % of a core

now_s = clock.monotonic_s


def cpu_s() -> float:
    """User and system seconds of all threads of this process so far."""
    return _busy_s(resource.getrusage(resource.RUSAGE_SELF))


def whole_process(words: list[str]) -> tuple[str, dict[str, float]]:
    """The output of a Python process of its own, and its cost from start to end: `wall_s` and `cpu_s`."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), now_s()
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *words], cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    wall_s, after = now_s() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)} ended with code {done.returncode}; its output is above")
    return done.stdout, {"wall_s": wall_s, "cpu_s": _busy_s(after) - _busy_s(before)}


def _busy_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def settle() -> None:
    """Frees what is garbage and gives freed heap back, so that a contender neither inherits nor hides memory."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library: the heap keeps what it has
        ctypes.CDLL(None).malloc_trim(0)


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon): neither tmpfs mappings, such as slots, nor files."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: Linux 4.5 or newer is needed")


def allocated_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes that the files below `directory` take on their mount."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # deleted while we look
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def remove_root(root: Path | str) -> None:
    """Deletes a directory that was measured; a bucket goes with the process that serves it."""
    if "://" not in str(root):
        shutil.rmtree(root, ignore_errors=True)


@final
class PeakMemory:
    """The highest anonymous memory inside a `with` block, above what it was at its beginning. One sampling thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)
        self._base_bytes = 0
        self._peak_bytes = 0

    @property
    def extra_bytes(self) -> int:
        """The peak above the beginning."""
        return max(0, self._peak_bytes - self._base_bytes)

    def __enter__(self) -> PeakMemory:
        self._base_bytes = self._peak_bytes = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak_bytes = max(self._peak_bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes())
