"""A store in memory: the model that the others are tested against."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from ckptkit.store.backends import BUCKET
from ckptkit.store.base import Properties, PutMode, Stat, checked_key

_PROPERTIES = replace(BUCKET, round_trips=False, generations=True)


@final
class MemoryStore:
    """Objects in a dictionary, with generations like `gs://`; safe from several threads, gone with the process."""

    def __init__(self, url: str = "memory:"):
        self._url = url
        self._objects: dict[str, tuple[bytes, int]] = {}  # with the generation
        self._puts = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The name it was given."""
        return self._url

    @property
    def properties(self) -> Properties:
        """A bucket's with generations, whose answers are there at once."""
        return _PROPERTIES

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """Stores a copy of `data` (see `Store.put`)."""
        with self._lock:
            self._put(key, data, 0 if mode == "create" else None)

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """See `Store.copy`."""
        with self._lock:
            self._put(target, self.get(source), 0 if mode == "create" else replaces)

    def _put(self, key: str, data: bytes, replaces: int | None) -> None:
        _, generation = self._objects.get(checked_key(key), (b"", 0))
        if replaces is not None and replaces != generation:
            raise FileExistsError(f"{self._url}/{key} exists")
        self._puts += 1
        self._objects[key] = bytes(data), self._puts

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        try:
            return self._objects[checked_key(key)][0]
        except KeyError:
            raise FileNotFoundError(f"{self._url}/{key}") from None

    def stat(self, key: str) -> Stat | None:
        """Facts about an object; None where there is none."""
        found = self._objects.get(checked_key(key))
        return None if found is None else Stat(len(found[0]), found[1])

    def list(self, prefix: str) -> list[str]:
        """The names right below `prefix`, sorted; directories end in `/`."""
        start = checked_key(prefix) + "/" if prefix else ""
        with self._lock:
            keys = [key[len(start) :] for key in self._objects if key.startswith(start)]
        return sorted({head + "/" * bool(rest) for head, rest, _ in (key.partition("/") for key in keys)})

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is not an error."""
        with self._lock:
            self._objects.pop(checked_key(key), None)

    def list_all(self, prefix: str) -> list[str]:
        """Every key below `prefix`, sorted."""
        return list(self.stat_all(prefix))

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `Store.delete_many`."""
        for key in keys:
            self.delete(key)

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """See `Store.stat_all`."""
        start = checked_key(prefix) + "/" if prefix else ""
        with self._lock:
            below = sorted((key, *found) for key, found in self._objects.items() if key.startswith(start))
        return {key: Stat(len(data), generation) for key, data, generation in below}

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """See `Store.delete_unchanged`."""
        for key, stat in found.items():
            with self._lock:
                if key in self._objects and self._objects[key][1] == stat.generation:
                    del self._objects[key]
