"""A small file that is replaced in one step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NAME_BYTES = 200  # of the name, in that of the temporary file: file systems have 255


def write_whole(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Replaces the file: a reader sees the old one or the new one, never half of it. It is not synced to the disk.

    `mode` is less what the umask takes away. Raises OSError, and leaves the old file as it was, and no temporary file.
    """
    short = os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])
    temporary = path.with_name(f".{short}.{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # the one that was asked for
        raise
    finally:
        with suppress(OSError):  # it is not there, or never could be
            temporary.unlink()
