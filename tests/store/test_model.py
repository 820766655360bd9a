"""Any sequence of a store's operations, against a dictionary."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckptkit.store import MemoryStore, Stat, Store
from tests.store.stores import STORES, serial

KEYS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "f/a"])
DATA = st.binary(max_size=20)


class StoreAgainstDict(RuleBasedStateMachine):
    """A store and a dictionary that is told the same."""

    make: Callable[[Path], Store]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(f"/dev/shm/ckptkit-contract-{os.getpid()}-{next(serial)}")
        self.store = type(self).make(self.root)
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @rule(key=KEYS, data=DATA)
    def replace(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=KEYS, data=DATA)
    def create(self, key: str, data: bytes) -> None:
        if key in self.model:
            with pytest.raises(FileExistsError):
                # Different from what is there: a repeated create of equal content counts as the first one's success.
                self.store.put(key, self.model[key] + b"!", mode="create")
        else:
            self.store.put(key, data, mode="create")
            self.model[key] = data

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        expected = self.model.get(key)
        assert self.store.stat(key) == (None if expected is None else Stat(len(expected)))
        if expected is None:
            with pytest.raises(FileNotFoundError):
                self.store.get(key)
        else:
            assert self.store.get(key) == expected

    @invariant()
    def lists_agree(self) -> None:
        """If it failed, a list would show what is not there, or hide what is."""
        model = MemoryStore()
        for key, data in self.model.items():
            model.put(key, data)
        for prefix in ("", "d", "d/e", "f"):
            found, expected = self.store.list(prefix), model.list(prefix)
            assert found == sorted(found)
            assert set(expected) <= set(found)
            for extra in set(found) - set(expected):  # a directory whose last object went may stay behind, empty
                assert extra.endswith("/")
                assert self.store.list(f"{prefix}/{extra}".strip("/")) in ([], ["e/"])


def _machine(name: str) -> type:
    machine = type(f"StoreAgainstDict[{name}]", (StoreAgainstDict,), {"make": staticmethod(STORES[name])})
    case = cast(Any, machine).TestCase
    case.settings = settings(
        deadline=None, max_examples=15, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow]
    )
    return case


TestLocal = _machine("local")
TestRemoteMemory = _machine("remote memory")
TestRemoteFile = _machine("remote file")
TestRetryOverFlaky = _machine("retry over flaky local")
TestMemory = _machine("memory")
TestReordered = _machine("faulty, reordered")
