"""A store in memory: the model that the others are tested against."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from ckptkit.store.base import PutMode, Stat, checked_key


@final
class MemoryStore:
    """Objects in a dictionary; safe from several threads, gone with the process."""

    def __init__(self, url: str = "memory:"):
        self._url = url
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The name it was given."""
        return self._url

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """Stores a copy of `data` (see `Store.put`)."""
        with self._lock:
            if mode == "create" and checked_key(key) in self._objects:
                raise FileExistsError(f"{self._url}/{key} exists")
            self._objects[checked_key(key)] = bytes(data)

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """See `Store.copy`."""
        del replaces
        self.put(target, self.get(source), mode=mode)

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        try:
            return self._objects[checked_key(key)]
        except KeyError:
            raise FileNotFoundError(f"{self._url}/{key}") from None

    def stat(self, key: str) -> Stat | None:
        """Facts about an object; None where there is none."""
        data = self._objects.get(checked_key(key))
        return None if data is None else Stat(len(data))

    def list(self, prefix: str) -> list[str]:
        """The names right below `prefix`, sorted; directories end in `/`."""
        start = checked_key(prefix) + "/" if prefix else ""
        with self._lock:
            keys = [key[len(start) :] for key in self._objects if key.startswith(start)]
        return sorted({head + "/" * bool(rest) for head, rest, _ in (key.partition("/") for key in keys)})

    def delete(self, key: str) -> None:
        """Removes an object; one that is absent is no error."""
        with self._lock:
            self._objects.pop(checked_key(key), None)

    def list_all(self, prefix: str) -> list[str]:
        """Every key below `prefix`, sorted."""
        start = checked_key(prefix) + "/" if prefix else ""
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(start))

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `Store.delete_many`."""
        for key in keys:
            self.delete(key)
