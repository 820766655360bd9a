"""Whether what is converted is still what it was: of every file that is read a name, a size and a version."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.store import open_store
from ckptkit.store.schemes import properties_of

Stamp = tuple[str, str, int]  # of one file; the version is a time, in a bucket a generation or an entity tag


def stamps_of(paths: Iterable[str]) -> list[Stamp]:
    """The files at these paths and below them, as they are now; those that are not there have none.

    Cost: a call for each file; in a bucket a small read and a listing for each path. Raises `StoreError`.
    """
    return [stamp for path in paths for stamp in _stamps(path)]


def fingerprint(described: Mapping[str, Any], paths: Iterable[str]) -> str:
    """Of a plan and of the files that it reads: where one changed, what was written before is of no use.

    Cost and errors: those of `stamps_of`.
    """
    return hashlib.sha256(json.dumps([described, stamps_of(paths)]).encode()).hexdigest()


def _stamps(path: str) -> list[Stamp]:
    return _on_disk(Path(path)) if properties_of(path).file_system else _in_bucket(path)


def _on_disk(path: Path) -> list[Stamp]:
    stamps = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # pruned meanwhile, or a link to nothing
            found = file.stat()
            stamps += [(str(file), str(found.st_mtime_ns), found.st_size)] if stat.S_ISREG(found.st_mode) else []
    return stamps


def _in_bucket(url: str) -> list[Stamp]:
    directory, _, name = url.rpartition("/")
    # The object itself first: what lists a web server reads the page, which may be the checkpoint.
    found = None if directory.endswith(":/") else open_store(directory).stat(name)
    below = open_store(url).stat_all("") if found is None else {"": found}
    return [(f"{url}/{key}", each.version, each.size_bytes) for key, each in sorted(below.items())]
