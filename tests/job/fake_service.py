"""JAX's coordination service in memory, and a job of as many processes as are wanted over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from ckptkit.job import coordination
from ckptkit.job.coordination import make_coordinator


class FakeService:
    """JAX's coordination service in memory; its clients time out as the real one does, by a clock of its own."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.gone: set[int] = set()  # processes that never come: who waits for them times out at once
        self.most = 0
        self.listings = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists")
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        assert isinstance(timeout_ms, int)
        assert timeout_ms >= 1
        waits = 0.0 if key.rpartition("/")[2] in map(str, self.gone) else 60.0
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, waits):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        assert key.endswith("/")
        self.listings += 1
        with self.changed:
            return [(each, value) for each, value in self.values.items() if each.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for each in [k for k in self.values if k == key or k.startswith(key.rstrip("/") + "/")]:
                del self.values[each]


class FakeJob:
    """As many coordinators as there are processes, over one service; each speaks in a thread of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int):
        self.service = FakeService()
        monkeypatch.setattr(coordination.distributed.global_state, "client", self.service)
        self.processes: list[Any] = []
        for process in range(count):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            monkeypatch.setattr(jax, "process_count", lambda: count)
            monkeypatch.setattr(coordination, "_instances", iter([0]))
            self.processes.append(make_coordinator())

    def all(self, call: Callable[[Any], Any], absent: tuple[int, ...] = ()) -> list[Any]:
        """The result or error of `call(coordinator)` on every process."""
        self.service.gone = set(absent)

        def speak(coordinator: Any) -> Any:
            try:
                return call(coordinator)
            except Exception as error:  # noqa: BLE001  the error is the answer
                return error

        present = [c for c in self.processes if c.process not in absent]
        with ThreadPoolExecutor(len(present)) as pool:
            return list(pool.map(speak, present))
