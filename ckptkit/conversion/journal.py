"""The record of a conversion's finished work, and whether its source is unchanged."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from ckptkit.errors import CheckpointError
from ckptkit.model.digests import digest_of
from ckptkit.model.paths import OCDBT_MANIFEST
from ckptkit.store import Stat, Store, open_store
from ckptkit.store.backends import properties_of

LOCK_SUFFIX = ".__lock"  # of TensorStore's files while they are written

Stamp = tuple[str, str, int]  # of one file; the version is a time, in a bucket a generation or an entity tag


def fingerprint(described: Mapping[str, Any], paths: Iterable[str]) -> str:
    """A fingerprint of a plan and of the files that it reads, at these paths and below them. If it has changed, earlier
    output is of no use. A path without a file adds nothing.

    Cost: a call for each file; in a bucket a small read and a listing for each path. Raises `StoreError`.
    """
    stamps: list[Stamp] = []
    for path in paths:
        stamps += _on_disk(Path(path)) if properties_of(path).file_system else _in_bucket(path)
    return hashlib.sha256(json.dumps([described, stamps]).encode()).hexdigest()


def _on_disk(path: Path) -> list[Stamp]:
    stamps = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # pruned meanwhile, or a link to nothing
            found = file.stat()
            stamps += [(str(file), str(found.st_mtime_ns), found.st_size)] if stat.S_ISREG(found.st_mode) else []
    return stamps


def _in_bucket(url: str) -> list[Stamp]:
    directory, _, name = url.rpartition("/")
    # The object itself first: a listing of a web server reads the page, which may be the checkpoint.
    found = None if directory.endswith(":/") else open_store(directory).stat(name)
    below = open_store(url).stat_all("") if found is None else {"": found}
    return [(f"{url}/{key}", each.version, each.size_bytes) for key, each in sorted(below.items())]


_PLAN = "plan.json"
_NOTES = re.compile(r"(?:done|put)-[0-9a-f-]+\.json")
_RECORDS = re.compile(r"(?:plan|(?:done|put)-[0-9a-f-]+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A file of the target. `digest` is known before it is put, `version` (in a bucket) only after.

    A file without either is written in place, on a disk.
    """

    size: int | None
    digest: str | None = None
    version: str | None = None


@final
class Journal:
    """One process's notes. A work is known by a fingerprint of its plan and of what it reads.

    `work` is a random number of the work, which the names of its data files have.
    """

    def __init__(self, store: Store, process: int = 0):
        self._store = store
        self._process = process
        self._next = 0
        self.work = ""

    def holds(self, fingerprint: str) -> bool:
        """Whether what was begun here is this work; raises `CheckpointError` where it is another."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            plan = json.loads(self._store.get(_PLAN))
            if plan["plan"] != fingerprint:
                raise CheckpointError(
                    f"{self._store.url} is other work than this (another source or target, other options or rules, or "
                    "another --memory); leave --resume out to begin anew",
                    path=self._store.url,
                )
            self.work = str(plan["work"])
            return True
        return False

    def begin(self, fingerprint: str) -> None:
        """Records that a new work begins; one process calls it."""
        self.work = uuid.uuid4().hex[:16]
        self._store.put(_PLAN, json.dumps({"plan": fingerprint, "work": self.work}).encode())

    def recall(self) -> None:
        """Reads which work was begun here, for an interrupted one that is removed."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            self.work = str(json.loads(self._store.get(_PLAN))["work"])

    def entries(self) -> Iterable[Any]:
        """The entries of this process, in order. Stops at the first damaged entry; that work is repeated."""
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

    def note(self, files: Mapping[str, Noted]) -> None:
        """Notes files of the target: before they are put, and again with their versions."""
        text = json.dumps({"files": {key: asdict(each) for key, each in files.items()}})
        self._store.put(f"put-{time.time_ns():016x}-{uuid.uuid4().hex[:8]}.json", text.encode())

    def files(self) -> dict[str, list[Noted]]:
        """The files of the target that any process noted, oldest note first. Cost: a read for each note."""
        found: dict[str, list[Noted]] = {}
        for name in self._store.list(""):
            if _NOTES.fullmatch(name):
                with suppress(FileNotFoundError, ValueError, TypeError, AttributeError):  # damaged, or a list of leaves
                    for key, each in json.loads(self._store.get(name)).get("files", {}).items():
                        found.setdefault(key, []).append(Noted(**each))
        return found

    def remove(self) -> None:
        """Deletes all notes, and nothing else; the record of the work goes last."""
        names = [name for name in self._store.list("") if _RECORDS.fullmatch(name)]
        self._store.delete_many([name for name in names if name != _PLAN])
        self._store.delete_many([name for name in names if name == _PLAN])

    def _key(self) -> str:
        return f"done-{self._process}-{self._next}.json"


def foreign(
    found: Mapping[str, Stat], noted: Mapping[str, Sequence[Noted]], work: str, read: Callable[[str], bytes]
) -> list[str]:
    """Which of the files below a target the interrupted work did not write. Calls `read` for few, and small ones.

    Data files have the number of the work in their names; a database without others is of this work or empty. Of all
    else the journal has the version, or the digest where the work ended before the version was known.
    """
    data = re.compile(rf"(?:.*/)?{re.escape(data_prefix(work))}[0-9a-f]+(?:{LOCK_SUFFIX})?") if work else None
    known = re.compile(rf"{re.escape(OCDBT_MANIFEST)}(?:_[0-9a-f]+)?(?:{LOCK_SUFFIX})?") if work else None

    def is_as(key: str, stat: Stat, each: Noted) -> bool:
        if each.size is not None and each.size != stat.size_bytes:
            return False
        if each.version:
            return each.version == stat.version
        return each.digest is None or digest_of(read(key)) == each.digest

    def is_ours(key: str, stat: Stat) -> bool:
        if known is not None and known.fullmatch(key.rpartition("/")[2]):
            return True
        if data is not None and data.fullmatch(key):
            return True
        return any(is_as(key, stat, each) for each in noted.get(key, ()))

    return [key for key, stat in sorted(found.items()) if not is_ours(key, stat)]


def data_prefix(work: str) -> str:
    """The prefix of the names of a job's data files, below the directory of a database."""
    return f"d/{work}-"
