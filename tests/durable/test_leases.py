"""Leases: whatever the order of a reader's and a writer's steps, no step goes while a reader counts on it."""

from __future__ import annotations

import itertools
import json
import os
import threading
from typing import Any

import pytest

from ckptkit.durable.lifecycle import leases
from ckptkit.durable.lifecycle.leases import Lease, PruneGuard, announced_deletions
from ckptkit.errors import TransientStoreError
from ckptkit.model import paths
from ckptkit.store import MemoryStore


class Clock:
    """Time that does not pass until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def ended_process() -> str:
    """The name of a process of this machine that has ended."""
    *place, _, _ = leases._process_name(os.getpid()).split(" ")
    return " ".join([*place, str(2**22 + 1), "1"])


def take(store: Any, step: int, *, lease_s: float = 60.0, clock: Clock | None = None) -> Lease:
    return Lease(store, step, lease_s=lease_s, monotonic_s=clock or Clock())


def test_leased_step_is_kept_until_released(store: MemoryStore) -> None:
    """An evaluator would lose the step that it reads."""
    guard = PruneGuard(store)
    with take(store, 2) as lease:
        assert lease.granted()
        assert guard.spare([1, 2]) == {2}
        assert announced_deletions(store) == {1}
    assert guard.spare([2]) == set()
    assert store.list(paths.LEASES_DIR) == []


def test_lease_on_a_doomed_step_is_refused(store: MemoryStore) -> None:
    """The writer has looked for leases already, and deletes it."""
    guard = PruneGuard(store)
    assert guard.spare([2]) == set()
    with take(store, 2) as lease:
        assert not lease.granted()
    guard.settle()
    with take(store, 2) as lease:
        assert lease.granted()


class Turns:
    """A store whose every operation waits for its turn, so that a test can order those of two threads."""

    def __init__(self, inner: MemoryStore, name: str, order: list[str], condition: threading.Condition):
        self._inner, self._name, self._order, self._condition = inner, name, order, condition

    def __getattr__(self, operation: str) -> Any:
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            with self._condition:
                assert self._condition.wait_for(lambda: not self._order or self._order[0] == self._name, timeout=10)
                try:
                    return getattr(self._inner, operation)(*args, **kwargs)
                finally:
                    if self._order:
                        self._order.pop(0)
                    self._condition.notify_all()

        return in_turn


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("rrwww"))), ids="".join)
def test_concurrent_lease_and_prune_detect_each_other(order: tuple[str, ...]) -> None:
    """A step would be granted and deleted, in one order of operations out of ten."""
    inner, left, condition = MemoryStore(), list(order), threading.Condition()
    spared: set[int] = set()
    guard = PruneGuard(Turns(inner, "w", left, condition))  # pyright: ignore[reportArgumentType]

    def prune() -> None:
        spared.update(guard.spare([2]))
        with condition:  # where it found no lease it has read none: that turn is the reader's
            left[:] = [turn for turn in left if turn == "r"]
            condition.notify_all()

    writer = threading.Thread(target=prune)
    writer.start()
    lease = take(Turns(inner, "r", left, condition), 2)
    granted = lease.granted()
    with condition:
        left.clear()  # what is left to do needs no order
        condition.notify_all()
    writer.join()
    lease.release()
    assert not granted or spared == {2}


def test_dead_reader_holds_a_step_only_for_its_lease(store: MemoryStore) -> None:
    """An evaluator that was killed would fill the bucket."""
    clock = Clock()
    guard = PruneGuard(store, monotonic_s=clock)
    store.put(f"{paths.LEASES_DIR}/dead.json", json.dumps({"step": 2, "beat": 5, "lease_s": 60}).encode())
    clock.now_s += 1e6  # the age of the lease on any clock does not matter, only how long it does not change
    assert guard.spare([2]) == {2}
    clock.now_s += 59
    assert guard.spare([2]) == {2}
    clock.now_s += 2
    assert guard.spare([2]) == set()
    assert store.list(paths.LEASES_DIR) == []


def test_lease_of_an_ended_process_of_this_machine_holds_nothing(store: MemoryStore) -> None:
    """A command that was killed would hold up every pruning for the lifetime of its lease."""
    record = {"step": 2, "beat": 0, "lease_s": 3600.0, "process": ended_process()}
    store.put(f"{paths.LEASES_DIR}/dead.json", json.dumps(record).encode())
    assert PruneGuard(store).spare([2]) == set()
    record["process"] = leases._process_name(os.getpid())
    store.put(f"{paths.LEASES_DIR}/alive.json", json.dumps(record).encode())
    assert PruneGuard(store).leased([2]) == {2}


def test_renewed_lease_stays_valid(store: MemoryStore) -> None:
    """A long evaluation would lose its step."""
    clock = Clock()
    guard = PruneGuard(store, monotonic_s=clock)
    key = f"{paths.LEASES_DIR}/live.json"
    for beat in range(5):
        store.put(key, json.dumps({"step": 2, "beat": beat, "lease_s": 60}).encode())
        assert guard.spare([2]) == {2}
        clock.now_s += 59


def notice(**fields: Any) -> bytes:
    return json.dumps({"steps": [2], "beat": 5, "lease_s": 60.0, **fields}).encode()


@pytest.mark.parametrize("key", [paths.DOOMED_KEY, f"{paths.LEASES_DIR}/doomed-{'0' * 32}.json"])
def test_notice_of_a_dead_process_blocks_no_reader(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A prune or a job that was killed would lock its steps: no pin, no conversion, no repair, without an end."""
    clock, watched = Clock(), list[float]()

    def sleep(seconds: float) -> None:
        watched.append(seconds)
        clock.now_s += seconds

    monkeypatch.setattr(leases.time, "sleep", sleep)
    store.put(key, notice(process=ended_process()))
    assert announced_deletions(store, monotonic_s=clock) == set()
    assert watched == [], "the system knows that it has ended"
    for record in (notice(), notice(process="another-boot pid:[1] 7 7"), notice(process=7)):
        watched.clear()
        store.put(key, record)
        assert announced_deletions(store, [1], monotonic_s=clock) == set()
        assert watched == [], "it is about other steps"
        assert announced_deletions(store, [1, 2], monotonic_s=clock) == set()
        assert 59 < sum(watched) < 63


def test_notice_of_a_live_process_counts(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader would begin with a step that goes."""
    key, clock = f"{paths.LEASES_DIR}/doomed-{'0' * 32}.json", Clock()
    store.put(key, notice(process=leases._process_name(os.getpid())))
    assert announced_deletions(store) == {2}
    store.put(key, notice(process="another-boot pid:[1] 7 7"))
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: store.put(key, notice(beat=6)))
    assert announced_deletions(store, [2], monotonic_s=clock) == {2}, "it is renewed"
    store.put(key, notice())
    monkeypatch.setattr(leases.time, "sleep", lambda seconds: store.delete(key))
    assert announced_deletions(store, [2], monotonic_s=clock) == set(), "it was withdrawn"


def test_announcement_of_a_job_is_renewed_until_it_is_withdrawn(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion that takes longer than a minute would count as one of a dead job."""
    monkeypatch.setattr(leases, "_LEASE_S", 1.5)
    guard, beats = PruneGuard(store), set[int]()
    guard.announce({1, 2})
    guard.announce({2})
    while len(beats) < 3:
        record = json.loads(store.get(paths.DOOMED_KEY))
        beats.add(record["beat"])
        assert record["steps"] == [2]
    guard.close()
    assert store.list_all("") == []


def test_lease_is_renewed_in_the_background(store: MemoryStore) -> None:
    """The thread that keeps it would be missing."""
    beats = set()
    with take(store, 2, lease_s=0.03):
        while len(beats) < 3:
            (name,) = store.list(paths.LEASES_DIR)
            beats.add(json.loads(store.get(f"{paths.LEASES_DIR}/{name}"))["beat"])


def test_reader_sees_a_lost_lease_before_the_writer_deletes(store: MemoryStore) -> None:
    """It would read on, and take half a step for damage."""
    clock = Clock()
    with take(store, 2, clock=clock) as lease:
        clock.now_s += 60.1
        assert lease.lost
        assert not lease.granted()


def test_damaged_lease_protects_every_step(store: MemoryStore) -> None:
    """The step that it was for cannot be known."""
    clock = Clock()
    guard = PruneGuard(store, monotonic_s=clock)
    store.put(f"{paths.LEASES_DIR}/x.json", b"{")
    assert guard.spare([1, 2]) == {1, 2}
    clock.now_s += 61
    assert guard.spare([1, 2]) == set()


def test_unreadable_leases_prevent_deletion(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable bucket would count as one without readers."""

    def unreachable(prefix: str) -> list[str]:
        raise TransientStoreError(f"{prefix}: no answer")

    monkeypatch.setattr(store, "list", unreachable)
    assert PruneGuard(store).spare([1]) == {1}


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 3601.0])
def test_lease_duration_is_bounded(store: MemoryStore, lease_s: float) -> None:
    """A reader that died would hold a step without an end."""
    with pytest.raises(ValueError, match="lease_s is"):
        take(store, 1, lease_s=lease_s)


def test_leases_and_notices_of_ended_processes_are_dropped_and_no_others(store: MemoryStore) -> None:
    """The leases of a killed command would keep steps for a minute, and its notice would stay until a job runs."""
    take(store, 1)
    kept = set(store.list(paths.LEASES_DIR))
    dead = {"lease_s": 60, "process": ended_process()}
    store.put(f"{paths.LEASES_DIR}/{'0' * 32}.json", json.dumps({"step": 2, **dead}).encode())
    store.put(f"{paths.LEASES_DIR}/doomed-{'0' * 32}.json", json.dumps({"steps": [3], **dead}).encode())
    for name in (paths.pin_name(4), paths.claim_name("5")):
        record = {"step": 4, **dead, **({"copying": "5"} if name == paths.claim_name("5") else {})}
        store.put(f"{paths.LEASES_DIR}/{name}", json.dumps(record).encode())
        kept.add(name)
    assert PruneGuard(store).leased({1, 2, 3}) == {1}
    leases.drop_dead(store)
    assert set(store.list(paths.LEASES_DIR)) == kept
