"""Every store and every wrapper that keeps the contract, and a clock for those that wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.config import conf as fsspec_conf

from ckptkit.store import LocalStore, MemoryStore, RemoteStore, RetryStore, Store
from ckptkit.store import retry as retry_module
from ckptkit.testing import FaultyStore, StoreFault
from ckptkit.util import clock

serial = itertools.count()


FLAKY = (StoreFault(effect="fail", probability=0.2), StoreFault(effect="fail after", probability=0.2))


def remote_file(root: Path) -> RemoteStore:
    """fsspec's local file system; a bucket has no directories to make, so it makes them itself."""
    fsspec_conf["file"] = {"auto_mkdir": True}
    try:
        return RemoteStore(f"file://{root}/deep/store")
    finally:
        del fsspec_conf["file"]


STORES: dict[str, Callable[[Path], Store]] = {
    "local": lambda root: LocalStore(root / "store"),
    "local, not synced": lambda root: LocalStore(root / "store", durable=False),
    "memory": lambda root: MemoryStore(),
    "remote memory": lambda root: RemoteStore(f"memory://contract-{next(serial)}/run"),
    "remote file": remote_file,
    # Asynchronous, as the clients of buckets are; and of that type, and not asynchronous.
    "remote, asynchronous": lambda root: RemoteStore(f"async_wrapper::memory://contract-{next(serial)}/run"),
    "remote, wrapped": lambda root: RemoteStore(f"dir::memory://contract-{next(serial)}/run"),
    "retry over flaky local": lambda root: RetryStore(
        FaultyStore(LocalStore(root / "store"), FLAKY), first_delay_s=0.0
    ),
    "retry over flaky memory": lambda root: RetryStore(FaultyStore(MemoryStore(), FLAKY), first_delay_s=0.0),
    "faulty, reordered": lambda root: FaultyStore(MemoryStore(), [StoreFault(effect="reorder", probability=0.5)]),
    "faulty, slow": lambda root: FaultyStore(LocalStore(root / "store"), [StoreFault(effect="delay", delay_s=0.001)]),
}


class FakeTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)
        monkeypatch.setattr(retry_module, "time", SimpleNamespace(sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now_s += max(seconds, 0.01)  # an attempt takes time too
