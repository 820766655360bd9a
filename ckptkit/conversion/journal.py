"""What an interrupted conversion has done, and whether its source is still what it was."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ckptkit.errors import CheckpointError
from ckptkit.store import Store, open_store
from ckptkit.store.backends import properties_of

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


_PLAN = "plan.json"


@final
class Journal:
    """One process's notes. A work is known by a fingerprint of its plan and of what it reads."""

    def __init__(self, store: Store, process: int = 0):
        self._store = store
        self._process = process
        self._next = 0

    def holds(self, fingerprint: str) -> bool:
        """Whether what was begun here is this work; raises `CheckpointError` where it is another."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if json.loads(self._store.get(_PLAN))["plan"] != fingerprint:
                raise CheckpointError(
                    f"{self._store.url} is other work than this (another source or target, other options or rules, or "
                    "another --memory); leave --resume out to begin anew",
                    path=self._store.url,
                )
            return True
        return False

    def begin(self, fingerprint: str) -> None:
        """Says that a new work begins; one process does."""
        self._store.put(_PLAN, json.dumps({"plan": fingerprint}).encode())

    def entries(self) -> Iterable[Any]:
        """What this process noted, in order; ends at what is damaged, which is then done again."""
        while True:
            try:
                entry = json.loads(self._store.get(self._key()))
            except (FileNotFoundError, ValueError):
                return
            self._next += 1
            yield entry

    def add(self, entry: Any) -> None:
        """Notes what is written and safe."""
        self._store.put(self._key(), json.dumps(entry).encode())
        self._next += 1

    def _key(self) -> str:
        return f"done-{self._process}-{self._next}.json"
