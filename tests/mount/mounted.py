"""The test's side of a mounted bucket; `__main__` is the process that serves it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, final

_DETACH = 2  # MNT_DETACH
_END_S = 10.0
_CHECKOUT = Path(__file__).parents[2]  # where `tests.mount` is found


def why_not() -> str | None:
    """Why this host cannot mount; None where it can."""
    if sys.platform != "linux":
        return "FUSE is Linux's"
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None


@final
class MountedBucket:
    """A bucket at `path`, which is made, until `close`. The kernel lists it as `type` (`fuse.gcsfuse`), and remembers
    names and attributes for `cached_s` seconds: most calls then ask nobody, but one after the mount's death may work.

    Served by another process: a call of this one that holds the interpreter's lock waits for nobody here. Raises
    OSError where the kernel refuses the mount.
    """

    def __init__(self, path: Path, type: str = "fuse.gcsfuse", *, cached_s: int = 0):
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        command = [sys.executable, "-m", "tests.mount", str(path.absolute()), type, str(cached_s)]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_CHECKOUT
        )
        if (refused := self._answer()) is not None:
            self._server.wait(_END_S)
            raise OSError(f"{path} cannot be mounted: {refused}")

    def set(self, *, changes_max: int | None = None, listing_lag: int = 0) -> None:
        """Counts changes from here. After `changes_max` the mount is dead (see `ObjectTree`)."""
        self._ask({"set": {"changes_max": changes_max, "listing_lag": listing_lag}})

    def changes(self) -> int:
        """How many changes of the bucket there were since `set` or `revive`."""
        return self._ask({"changes": None})

    def revive(self) -> None:
        """Mounts it again, in effect: it answers, and what was not an object yet is lost."""
        self._ask({"revive": None})

    def put(self, name: str, source: Path) -> None:
        """Copies a directory, without links, to `path / name` as another client of the bucket would: not through here.

        Neither this nor the next two count as changes. A hundred times cheaper than the same through the kernel.
        """
        self._ask({"put": {"name": name, "source": str(source.absolute())}})

    def delete(self, name: str) -> None:
        """Deletes `path / name` and all in it as another client would, where it is there."""
        self._ask({"delete": name})

    def listing(self, name: str) -> dict[str, str]:
        """The content of `path / name` for another client: a SHA-256 for each file, "directory" for each directory."""
        return self._ask({"listing": name})

    def close(self) -> None:
        """Unmounts, and ends the process."""
        ctypes.CDLL(None).umount2(os.fsencode(self.path), _DETACH)
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(_END_S)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __enter__(self) -> MountedBucket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline() or '"its process has ended"')
