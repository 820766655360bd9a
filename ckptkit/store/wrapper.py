"""A store around another one: retries, refusals and faults are subclasses that change one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from typing_extensions import override

from ckptkit.store.base import Properties, PutMode, Stat, Store

T = TypeVar("T")
StoreOperation = Literal["put", "get", "stat", "list", "delete"]


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
