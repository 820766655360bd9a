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
from typing import Final, Literal, TypeVar, final, get_args

from typing_extensions import override

from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.store.base import PutMode, Stat, Store, StoreOperation, WrapperStore, checked_key

_T = TypeVar("_T")
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
class FaultyStore(WrapperStore):
    """Fails according to `faults`, with draws from `seed`; all other answers are those of `inner`.

    Safe from several threads; one operation at a time. `operations` counts what was asked for, so that a crash after
    every operation of an act can be enumerated: `FaultyStore(inner, [StoreFault(effect="crash", skip=n)])`.
    """

    def __init__(self, inner: Store, faults: list[StoreFault] | tuple[StoreFault, ...] = (), *, seed: int = 0):
        self._chance = random.Random(seed)
        self._delayed = _DelayedStore(inner, self._chance)
        super().__init__(self._delayed)
        self._faults = [[fault, 0, 0] for fault in faults]  # with how many matched, and how many were hit
        self._lock = threading.RLock()
        self._dead = False
        self.operations = 0

    @property
    def hits(self) -> list[int]:
        """How many operations each fault has hit."""
        return [hits for _, _, hits in self._faults]

    @override
    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        self._run(
            "put",
            key,
            lambda: self._delayed.put(key, data, mode=mode),
            torn=lambda: self._delayed.tear(key, data),
        )

    @override
    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """To faults a `get` of the source and a `put` of the target."""
        del replaces
        self.put(target, self.get(source), mode=mode)

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        """To faults a `delete` of each key, so that a crash finds some of them gone."""
        for key in keys:
            self.delete(key)

    @override
    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """To faults a `delete` of each object."""
        for key, stat in found.items():
            self._run("delete", key, lambda key=key, stat=stat: self._delayed.delete_unchanged({key: stat}))

    def settle(self) -> None:
        """Delayed writes reach the wrapped store, in any order."""
        with self._lock:
            self._delayed.arrive(1.0)

    @override
    def _run(
        self, operation: StoreOperation, key: str, request: Callable[[], _T], torn: Callable[[], None] | None = None
    ) -> _T:
        if key or operation != "list":  # the root itself may be listed
            checked_key(key)
        with self._lock:
            if self._dead:
                raise StoreCrash(f"{self.url} belongs to a process that died")
            self.operations += 1
            where = f"{self.url}/{key}: {operation}"
            self._delayed.delays = False
            for fault in self._hit(operation, key):
                match fault.effect:
                    case "delay":
                        time.sleep(fault.delay_s)
                    case "reorder":
                        self._delayed.delays = True
                    case "fail":
                        raise TransientStoreError(f"{where} failed, as planned", path=key)
                    case "fail after":
                        request()
                        raise TransientStoreError(f"{where} was done, and the answer is lost, as planned", path=key)
                    case "full":
                        raise StoreFullError(f"{where}: {os.strerror(errno.ENOSPC)}, as planned", path=key)
                    case "io error":
                        raise StoreError(f"{where}: {os.strerror(errno.EIO)}, as planned", path=key)
                    case "tear" | "crash":
                        self._die(torn if fault.effect == "tear" else None)
            return request()

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
        self._delayed.arrive(0.5)
        if torn is not None:
            torn()
        raise StoreCrash(f"{self.url}: the process dies here, as planned")


@final
class _DelayedStore(WrapperStore):
    """Holds back what is written while `delays` is true, until `arrive`; its own reads see it at once."""

    def __init__(self, inner: Store, chance: random.Random):
        super().__init__(inner)
        self._chance = chance
        self._waiting: dict[str, bytes | None] = {}  # None: a deletion
        self.delays = False

    def arrive(self, share: float) -> None:
        """About this share of the delayed writes reaches the wrapped store, in any order."""
        keys = [key for key in self._waiting if share == 1.0 or self._chance.random() < share]
        self._chance.shuffle(keys)
        for key in keys:
            data = self._waiting.pop(key)
            if data is None:
                self._inner.delete(key)
            else:
                self._inner.put(key, data)

    def tear(self, key: str, data: bytes) -> None:
        """Half of a put reaches the wrapped store."""
        self._inner.put(key, data[: len(data) // 2])

    @override
    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        if not self.delays and key not in self._waiting:
            self._inner.put(key, data, mode=mode)
            return
        if mode == "create" and self.stat(key) is not None:
            raise FileExistsError(f"{self.url}/{key} exists")
        self._waiting[key] = bytes(data)

    @override
    def get(self, key: str) -> bytes:
        if key not in self._waiting:
            return self._inner.get(key)
        data = self._waiting[key]
        if data is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        return data

    @override
    def stat(self, key: str) -> Stat | None:
        if key not in self._waiting:
            return self._inner.stat(key)
        data = self._waiting[key]
        return None if data is None else Stat(len(data))

    @override
    def delete(self, key: str) -> None:
        if self.delays or key in self._waiting:
            self._waiting[key] = None
        else:
            self._inner.delete(key)

    @override
    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """A delayed write has no generation yet: it was found as such, or put since."""
        for key, stat in found.items():
            if key not in self._waiting:
                self._inner.delete_unchanged({key: stat})  # not held back: what it is to delete is decided now
            elif stat.generation is None:
                self._waiting[key] = None

    @override
    def stat_all(self, prefix: str) -> dict[str, Stat]:
        found = {key: self.stat(key) for key in self.list_all(prefix)}
        return {key: stat for key, stat in found.items() if stat is not None}

    @override
    def list_all(self, prefix: str) -> list[str]:
        waiting = self._waiting_below(prefix)
        put = {key for key, data in waiting.items() if data is not None}
        return sorted((set(self._inner.list_all(prefix)) - set(waiting)) | put)

    @override
    def list(self, prefix: str) -> list[str]:
        start = len(prefix) + 1 if prefix else 0
        below = {key[start:]: data for key, data in self._waiting_below(prefix).items()}
        gone = {name for name, data in below.items() if data is None}
        parts = (name.partition("/") for name, data in below.items() if data is not None)
        return sorted((set(self._inner.list(prefix)) - gone) | {head + "/" * bool(slash) for head, slash, _ in parts})

    def _waiting_below(self, prefix: str) -> dict[str, bytes | None]:
        start = f"{prefix}/" if prefix else ""
        return {key: data for key, data in self._waiting.items() if key.startswith(start)}
