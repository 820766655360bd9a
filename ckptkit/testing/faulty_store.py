"""A store that misbehaves by a plan: the same interface, wrapped around any other store."""

from __future__ import annotations

import errno
import fnmatch
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.store.base import Properties, PutMode, Stat, Store, checked_key

StoreOperation = Literal["put", "get", "stat", "list", "delete"]
StoreEffect = Literal["fail", "fail after", "delay", "tear", "reorder", "full", "io error", "crash"]
_ONLY_PUTS: Final = ("tear", "full")
_CHANGES: Final = ("put", "delete")


class StoreCrash(BaseException):
    """The process died at this operation. Every later operation of the store raises it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """One line of a plan: `effect` on `operations` (none: all that it fits) of keys that match the glob `keys`.

    Of the matching operations the first `skip` pass; each later one is hit with `probability`, until `count` are.

    - `fail`: `TransientStoreError`, nothing was done. `fail after`: it was done, and the answer is lost.
    - `full`: `StoreFullError` (ENOSPC). `io error`: `StoreError` (EIO). Nothing was done.
    - `delay`: `delay_s` later; later faults apply too.
    - `tear`: a put of which only the first half arrives, and the process dies.
    - `reorder`: a put or a deletion that this store shows and the wrapped one gets only at `settle`; of those that
      wait when the process dies, any arrive, in any order.
    - `crash`: the process dies, before anything is done.
    """

    effect: StoreEffect
    operations: tuple[StoreOperation, ...] = ()
    keys: str = "*"
    skip: int = 0
    count: int | None = None
    probability: float = 1.0
    delay_s: float = 0.01

    def __post_init__(self) -> None:
        if self.effect not in get_args(StoreEffect):
            raise ValueError(f"effect {self.effect!r}, expected one of {', '.join(get_args(StoreEffect))}")
        fits = {"put"} if self.effect in _ONLY_PUTS else set(_CHANGES) if self.effect == "reorder" else None
        if fits is not None and not set(self.operations) <= fits:
            raise ValueError(f"effect {self.effect!r} is for {', '.join(sorted(fits))}, found {self.operations}")
        if not 0.0 <= self.probability <= 1.0 or self.skip < 0 or (self.count is not None and self.count < 0):
            raise ValueError(f"{self}: probability is 0 to 1, skip and count are 0 or more")

    def fits(self, operation: StoreOperation, key: str) -> bool:
        """Whether the fault is for such an operation."""
        possible = ("put",) if self.effect in _ONLY_PUTS else _CHANGES if self.effect == "reorder" else ()
        allowed = self.operations or possible
        return (not allowed or operation in allowed) and fnmatch.fnmatchcase(key, self.keys)


@final
class FaultyStore:
    """Fails according to `faults`, with draws from `seed`; all other answers are those of `inner`.

    Safe from several threads; one operation at a time. `operations` counts what was asked for, so that a crash after
    every operation of an act can be enumerated: `FaultyStore(inner, [StoreFault(effect="crash", skip=n)])`.
    """

    def __init__(self, inner: Store, faults: list[StoreFault] | tuple[StoreFault, ...] = (), *, seed: int = 0):
        self._inner = inner
        self._faults = [[fault, 0, 0] for fault in faults]  # with how many matched, and how many were hit
        self._chance = random.Random(seed)
        self._lock = threading.RLock()
        self._waiting: dict[str, bytes | None] = {}  # None: a deletion
        self._dead = False
        self.operations = 0

    @property
    def url(self) -> str:
        """The wrapped store's."""
        return self._inner.url

    @property
    def properties(self) -> Properties:
        """The wrapped store's."""
        return self._inner.properties

    @property
    def hits(self) -> list[int]:
        """How many operations each fault has hit."""
        return [hits for _, _, hits in self._faults]

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """See `Store.put`."""

        def do(waits: bool) -> None:
            if not waits and key not in self._waiting:
                self._inner.put(key, data, mode=mode)
                return
            if mode == "create" and self._stat(key) is not None:
                raise FileExistsError(f"{self.url}/{key} exists")
            self._waiting[key] = bytes(data)

        self._do("put", key, do, torn=lambda: self._inner.put(key, data[: len(data) // 2]))

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """See `Store.copy`; to faults a `get` of the source and a `put` of the target."""
        del replaces
        self.put(target, self.get(source), mode=mode)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._do("get", key, lambda _: self._get(key))

    def stat(self, key: str) -> Stat | None:
        """See `Store.stat`."""
        return self._do("stat", key, lambda _: self._stat(key))

    def list(self, prefix: str) -> list[str]:
        """See `Store.list`."""
        return self._do("list", prefix, lambda _: self._list(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""

        def do(waits: bool) -> None:
            if waits or key in self._waiting:
                self._waiting[key] = None
            else:
                self._inner.delete(key)

        self._do("delete", key, do)

    def list_all(self, prefix: str) -> list[str]:
        """See `Store.list_all`; to faults a `list`."""
        return self._do("list", prefix, lambda _: self._list_all(prefix))

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `Store.delete_many`; to faults a `delete` of each key, so that a crash finds some of them gone."""
        for key in keys:
            self.delete(key)

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """See `Store.stat_all`; to faults a `list`."""
        found = self._do("list", prefix, lambda _: {key: self._stat(key) for key in self._list_all(prefix)})
        return {key: stat for key, stat in found.items() if stat is not None}

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """See `Store.delete_unchanged`; to faults a `delete` of each object."""
        for key, stat in found.items():
            self._do("delete", key, lambda _, key=key, stat=stat: self._delete_unchanged(key, stat))

    def settle(self) -> None:
        """Delayed writes reach the wrapped store, in any order."""
        with self._lock:
            self._arrive(list(self._waiting))

    def _do(
        self, operation: StoreOperation, key: str, do: Callable[[bool], Any], torn: Callable[[], None] | None = None
    ) -> Any:
        if key or operation != "list":  # the root itself may be listed
            checked_key(key)
        with self._lock:
            if self._dead:
                raise StoreCrash(f"{self.url} belongs to a process that died")
            self.operations += 1
            where = f"{self.url}/{key}: {operation}"
            waits = False
            for fault in self._hit(operation, key):
                match fault.effect:
                    case "delay":
                        time.sleep(fault.delay_s)
                    case "reorder":
                        waits = True
                    case "fail":
                        raise TransientStoreError(f"{where} failed, as planned", path=key)
                    case "fail after":
                        do(waits)
                        raise TransientStoreError(f"{where} was done, and the answer is lost, as planned", path=key)
                    case "full":
                        raise StoreFullError(f"{where}: {os.strerror(errno.ENOSPC)}, as planned", path=key)
                    case "io error":
                        raise StoreError(f"{where}: {os.strerror(errno.EIO)}, as planned", path=key)
                    case "tear" | "crash":
                        self._die(torn if fault.effect == "tear" else None)
            return do(waits)

    def _hit(self, operation: StoreOperation, key: str) -> list[StoreFault]:
        """The faults that hit this operation, up to the first that ends it."""
        found: list[StoreFault] = []
        for entry in self._faults:
            fault, matched, hits = entry
            if not fault.fits(operation, key):
                continue
            entry[1] += 1
            drawn = self._chance.random() < fault.probability
            if matched < fault.skip or (fault.count is not None and hits >= fault.count) or not drawn:
                continue
            entry[2] += 1
            found.append(fault)
            if fault.effect not in ("delay", "reorder"):
                break
        return found

    def _die(self, torn: Callable[[], None] | None) -> None:
        self._dead = True
        self._arrive([key for key in self._waiting if self._chance.random() < 0.5])
        if torn is not None:
            torn()
        raise StoreCrash(f"{self.url}: the process dies here, as planned")

    def _arrive(self, keys: list[str]) -> None:
        self._chance.shuffle(keys)
        for key in keys:
            data = self._waiting.pop(key)
            if data is None:
                self._inner.delete(key)
            else:
                self._inner.put(key, data)

    def _get(self, key: str) -> bytes:
        if key not in self._waiting:
            return self._inner.get(key)
        data = self._waiting[key]
        if data is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        return data

    def _stat(self, key: str) -> Stat | None:
        if key not in self._waiting:
            return self._inner.stat(key)
        data = self._waiting[key]
        return None if data is None else Stat(len(data))

    def _delete_unchanged(self, key: str, stat: Stat) -> None:
        """A delayed write has no generation yet: it was found as such, or put since."""
        if key not in self._waiting:
            self._inner.delete_unchanged({key: stat})  # not held back: what it is to delete is decided now
        elif stat.generation is None:
            self._waiting[key] = None

    def _list_all(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        waiting = {key: data for key, data in self._waiting.items() if key.startswith(start)}
        return sorted(
            (set(self._inner.list_all(prefix)) - set(waiting)) | {k for k, d in waiting.items() if d is not None}
        )

    def _list(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        below = {key[len(start) :]: data for key, data in self._waiting.items() if key.startswith(start)}
        gone = {name for name, data in below.items() if data is None}
        parts = (name.partition("/") for name, data in below.items() if data is not None)
        return sorted((set(self._inner.list(prefix)) - gone) | {head + "/" * bool(slash) for head, slash, _ in parts})
