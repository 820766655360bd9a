"""Small file systems of a test's own: full, or read only, on the test's request. Needs root."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest


class Mounts:
    """Mounts that go when the test ends; `pytest.skip` with the reason where there can be none."""

    def __init__(self) -> None:
        self._mounted: list[Path] = []

    def small(self, path: Path, size: str) -> Path:
        """A tmpfs of `size` (as mount(8) writes it) at `path`, which is made."""
        path.mkdir(parents=True, exist_ok=True)
        self._mount(["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], path)
        return path

    def read_only(self, path: Path) -> None:
        """Makes everything at `path` read only for whoever opens it from now on; files that are open stay writable."""
        self._mount(["--bind", str(path), str(path)], path)
        self._run(["mount", "-o", "remount,ro,bind", str(path)])

    def writable(self, path: Path) -> None:
        """Undoes `read_only`."""
        self._mounted.remove(path)
        self._run(["umount", "-l", str(path)])

    def close(self) -> None:
        """Unmounts everything."""
        for path in reversed(self._mounted):
            subprocess.run(["umount", "-l", str(path)], check=True)

    def _mount(self, arguments: list[str], path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        self._run(["mount", *arguments])
        self._mounted.append(path)

    @staticmethod
    def _run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(command[:3])} cannot be done here: {done.stderr.strip()}")


def fill(path: Path) -> None:
    """Leaves no page free on the mount."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
