"""The one storage interface, and a store around another one: retries, refusals and faults are subclasses of
`WrapperStore` that change one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from typing_extensions import override

from ckptkit.model.paths import checked_key as checked_key
from ckptkit.model.paths import is_key as is_key

PutMode = Literal["create", "replace"]
T = TypeVar("T")
StoreOperation = Literal["put", "get", "stat", "list", "delete"]


@dataclass(frozen=True, slots=True)
class Stat:
    """The facts about a stored object that are known without reading it."""

    size_bytes: int
    generation: int | None = field(default=None, compare=False)  # in a bucket: which of those that had its name
    version: str = field(default="", compare=False)  # in a bucket: changes with the content (generation, tag or time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The differences between stores: code asks for one of these, never for the name of a backend."""

    file_system: bool
    """Keys are paths of this host, which can be opened, mapped, locked and synced (POSIX)."""

    round_trips: bool
    """Each operation waits for an answer: independent ones are asked side by side, and few are asked."""

    atomic_rename: bool
    """A directory is renamed in one step, so its name commits a step; elsewhere a marker does, as with Orbax."""

    generations: bool
    """Each version of an object has a number, which copies and deletions may require (`ifGenerationMatch` of GCS)."""

    known_to_orbax: bool
    """Orbax has code of its own for the service, and commits by a marker there without any setting (`gs://` alone)."""

    may_ignore_conditions: bool = False
    """Some services with this protocol store an object although the request forbids to replace one (S3)."""


@runtime_checkable
class Store(Protocol):
    """Objects under one root, named by relative keys with `/` between parts.

    Every store guarantees: an object is whole or absent, never partly written; what `put` returned for is read
    by every later `get`. Every method raises `StoreError`, or `TransientStoreError` where a retry may help.
    """

    @property
    def url(self) -> str:
        """The root, as error messages name it."""
        ...

    @property
    def properties(self) -> Properties:
        """The properties of this store. A wrapper has those of the store that it wraps."""
        ...

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """Stores `data` whole. `create` raises `FileExistsError` where the key exists already."""
        ...

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """Makes `target` hold what `source` holds, whole; in a bucket it is one request and moves no bytes.

        Raises `FileNotFoundError` if `source` does not exist. Raises `FileExistsError` as `put` does, and if `target`
        no longer has the generation `replaces`. A bucket decides all of this in the copy request itself: once `source`
        is deleted, no copy of it can succeed. Other stores have no generations.
        """
        ...

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        ...

    def stat(self, key: str) -> Stat | None:
        """Facts about an object; None where there is none."""
        ...

    def list(self, prefix: str) -> list[str]:
        """The names right below the directory `prefix`, sorted: objects and, ending in `/`, directories."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is not an error."""
        ...

    def list_all(self, prefix: str) -> list[str]:
        """The keys of every object below the directory `prefix`, sorted. Cost in a bucket: a request per 1,000."""
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects in any order; absent ones are not an error. Cost in a bucket: a request per 100."""
        ...

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """The objects of `list_all`, each with its known facts. Cost in a bucket: the same requests."""
        ...

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """Removes those of these objects that are still the ones that `stat_all` found, where the store has
        generations (`gs://`): what was put since under the same name stays. Elsewhere it is `delete_many`."""
        ...


def put_new(store: Store, key: str, data: bytes) -> None:
    """Puts an object; raises `FileExistsError` where it exists already with other content.

    The same content is success: a client below us may have repeated a put whose answer was lost.
    """
    try:
        store.put(key, data, mode="create")
    except FileExistsError:
        if store.get(key) != data:
            raise


class WrapperStore(Store):
    """Passes every operation to `inner` through `_run`, which a subclass overrides to change all of them.

    To `_run` a copy is a `put` of its target, `list_all` and `stat_all` are a `list`, and `delete_many` and
    `delete_unchanged` are one `delete` of the root.
    """

    def __init__(self, inner: Store):
        self._inner = inner

    def _run(self, operation: StoreOperation, key: str, request: Callable[[], T]) -> T:
        """Sends `request`, an operation on `key`, to the wrapped store and returns its answer."""
        del operation, key
        return request()

    @property
    @override
    def url(self) -> str:
        return self._inner.url

    @property
    @override
    def properties(self) -> Properties:
        return self._inner.properties

    @override
    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        self._run("put", key, lambda: self._inner.put(key, data, mode=mode))

    @override
    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        self._run("put", target, lambda: self._inner.copy(source, target, mode=mode, replaces=replaces))

    @override
    def get(self, key: str) -> bytes:
        return self._run("get", key, lambda: self._inner.get(key))

    @override
    def stat(self, key: str) -> Stat | None:
        return self._run("stat", key, lambda: self._inner.stat(key))

    @override
    def list(self, prefix: str) -> list[str]:
        return self._run("list", prefix, lambda: self._inner.list(prefix))

    @override
    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete(key))

    @override
    def list_all(self, prefix: str) -> list[str]:
        return self._run("list", prefix, lambda: self._inner.list_all(prefix))

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        self._run("delete", "", lambda: self._inner.delete_many(keys))

    @override
    def stat_all(self, prefix: str) -> dict[str, Stat]:
        return self._run("list", prefix, lambda: self._inner.stat_all(prefix))

    @override
    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        self._run("delete", "", lambda: self._inner.delete_unchanged(found))
