"""The faulty store follows its plan, and does the same every time: a fault that does not happen tests nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.model.manifest import SaveId
from ckptkit.store import MemoryStore, RetryStore, Store
from ckptkit.testing import FaultyStore, StoreCrash, StoreFault


def faulty(*faults: StoreFault, seed: int = 0) -> tuple[FaultyStore, MemoryStore]:
    inner = MemoryStore()
    return FaultyStore(inner, faults, seed=seed), inner


@pytest.mark.parametrize(
    ("effect", "error", "done"),
    [
        ("fail", TransientStoreError, False),
        ("fail after", TransientStoreError, True),
        ("full", StoreFullError, False),
        ("io error", StoreError, False),
    ],
)
def test_errors_are_raised_before_or_after_the_work(effect: Any, error: type[Exception], done: bool) -> None:
    """A retry would be tested against the wrong half of what may happen."""
    store, inner = faulty(StoreFault(effect=effect, operations=("put",), count=1))
    with pytest.raises(error, match=r"memory:/key: put.* as planned"):
        store.put("key", b"1")
    assert (inner.stat("key") is not None) == done
    store.put("key", b"2")
    assert inner.get("key") == b"2"
    assert (store.hits, store.operations) == ([1], 2)


def test_fault_selects_keys_operations_and_a_skip_count() -> None:
    """A plan could not select `the third record of an epoch`."""
    store, _ = faulty(StoreFault(effect="fail", operations=("get",), keys="a/*", skip=1, count=1))
    store.put("a/key", b"1")
    store.put("b", b"1")
    for key in ("b", "b", "a/key"):
        store.get(key)
    with pytest.raises(TransientStoreError):
        store.get("a/key")
    assert store.get("a/key") == b"1"


def test_the_same_seed_gives_the_same_faults() -> None:
    """A failure could not be repeated."""

    def failed(seed: int) -> list[int]:
        store, _ = faulty(StoreFault(effect="fail", probability=0.5), seed=seed)
        found = []
        for number in range(40):
            try:
                store.list("")
            except TransientStoreError:
                found.append(number)
        return found

    assert failed(3) == failed(3) != failed(4)
    assert 5 < len(failed(3)) < 35


def test_delay_does_not_stop_later_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store could not fail as well."""
    slept: list[float] = []
    monkeypatch.setattr("ckptkit.testing.faulty_store.time.sleep", slept.append)
    store, _ = faulty(StoreFault(effect="delay", delay_s=7.0), StoreFault(effect="fail", skip=1))
    store.put("key", b"1")
    with pytest.raises(TransientStoreError):
        store.get("key")
    assert slept == [7.0, 7.0]


def test_a_dead_process_makes_no_further_call() -> None:
    """Clean-up that no crash leaves time for would hide what a crash leaves."""
    store, inner = faulty(StoreFault(effect="tear"))
    with pytest.raises(StoreCrash):
        store.put("key", b"12345678")
    assert inner.get("key") == b"1234"
    with pytest.raises(StoreCrash):
        store.delete("key")
    assert inner.get("key") == b"1234"


def test_reordered_writes_are_visible_and_arrive_in_any_order() -> None:
    """Code that needs an order would be tested only in the one that it happened to have."""

    def left(seed: int) -> tuple[str, ...]:
        store, inner = faulty(StoreFault(effect="reorder"), StoreFault(effect="crash", skip=4), seed=seed)
        inner.put("old", b"0")
        store.put("a", b"1")
        store.put("d/b", b"2")
        store.delete("old")
        assert (inner.list(""), store.list("")) == (["old"], ["a", "d/"])
        with pytest.raises(StoreCrash):
            store.get("a")
        return tuple(inner.list(""))

    found = {left(seed) for seed in range(60)}
    assert found == {(*a, *d, *old) for a in ((), ("a",)) for d in ((), ("d/",)) for old in ((), ("old",))}
    store, inner = faulty(StoreFault(effect="reorder"))
    store.put("a", b"1")
    store.settle()
    assert inner.get("a") == b"1"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"effect": "explode"}, "effect 'explode', expected one of fail"),
        ({"effect": "tear", "operations": ("get",)}, "effect 'tear' is for put"),
        ({"effect": "reorder", "operations": ("list",)}, "effect 'reorder' is for delete, put"),
        ({"effect": "fail", "probability": 2.0}, "probability is 0 to 1"),
    ],
)
def test_invalid_plan_is_refused(fault: dict[str, Any], said: str) -> None:
    """A typing error would be a fault that never happens."""
    with pytest.raises(ValueError, match=said):
        StoreFault(**fault)


def test_crashed_epoch_claim_is_complete_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a claim would stop every later run, or let two runs commit under one epoch."""
    monkeypatch.setattr("ckptkit.store.retry.time.sleep", lambda _: None)
    for point in range(8):
        inner = MemoryStore()
        first = Ancestry().begin(1, None, "a" * 16)
        second = first.begin(2, SaveId(1, 7, 0), "b" * 16)
        EpochRecords(inner).write(first)
        lost: Store = FaultyStore(
            inner, [StoreFault(effect="fail after", count=1), StoreFault(effect="crash", skip=point)]
        )
        with suppress(StoreCrash):
            EpochRecords(RetryStore(lost)).write(second)
        assert EpochRecords(inner).read() in (first, second)


def test_crash_during_a_batch_deletes_some_objects() -> None:
    """A batch that is half done would never be tried: what is left of a step has to be no step."""
    store, inner = faulty(StoreFault(effect="crash", operations=("delete",), skip=2))
    for key in ("run/a", "run/b", "run/c"):
        store.put(key, b"1")
    with pytest.raises(StoreCrash):
        store.delete_many(store.list_all("run"))
    assert inner.list_all("") == ["run/c"]
