"""The background threads: jobs in order, a bound on what waits, errors told once, and a thread that ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from ckptkit.job.coordination import LocalCoordinator
from ckptkit.save.agreement.protocol import Onto, SaveProtocol, drive
from ckptkit.save.threads import Worker

LONG_S = 60.0  # only ever waited out by a test that fails


class Gate:
    """A job that reports that it runs, and ends on request."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.running.set()
        assert self.go_on.wait(LONG_S)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("ckptkit-test", waiting_max=2)
    yield made
    made.close()


def test_jobs_run_in_the_order_of_submit(worker: Worker) -> None:
    """If it failed, two processes would hold their exchanges in different orders and deadlock."""
    ran: list[tuple[int, str]] = []
    for n in range(50):
        worker.submit(lambda n=n: ran.append((n, threading.current_thread().name)))
    worker.drain()
    assert ran == [(n, "ckptkit-test") for n in range(50)]


def test_submit_waits_while_the_queue_is_full(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a slow bucket would let saves pile up until the host has no memory left."""
    gate, ran = Gate(), []
    worker.submit(gate)
    assert gate.running.wait(LONG_S)
    worker.submit(lambda: ran.append(1))
    worker.submit(lambda: ran.append(2))
    settled, submitted = threading.Event(), threading.Event()
    wait_for = worker._notice.wait_for

    def told(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if not predicate():
            settled.set()  # about to wait
        return wait_for(predicate, timeout)

    def third() -> None:
        worker.submit(lambda: ran.append(3))
        submitted.set()
        settled.set()

    monkeypatch.setattr(worker, "_notice", SimpleNamespace(wait_for=told, give=worker._notice.give))
    thread = threading.Thread(target=third)
    thread.start()
    assert settled.wait(LONG_S)
    assert not submitted.is_set()
    assert ran == []
    gate.go_on.set()
    assert submitted.wait(LONG_S)
    thread.join(LONG_S)
    worker.drain()
    assert ran == [1, 2, 3]


def test_idle_is_true_only_without_running_or_queued_jobs(worker: Worker) -> None:
    """If it failed, `is_saving_in_progress` would lie, and a flush would begin while another one runs."""
    assert worker.idle
    gate = Gate()
    worker.submit(gate)
    assert not worker.idle  # whether it waits or runs
    assert gate.running.wait(LONG_S)
    assert not worker.idle
    assert not worker.wait_idle(0.0)
    gate.go_on.set()
    assert worker.wait_idle(LONG_S)
    assert worker.idle


def test_drain_raises_the_first_error_once_and_thread_survives(worker: Worker) -> None:
    """If it failed, a failed save would be silent, be raised twice, or end all later saves."""

    def fails(text: str) -> None:
        raise RuntimeError(text)

    ran = []
    worker.submit(lambda: fails("first"))
    worker.submit(lambda: fails("second"))
    worker.submit(lambda: ran.append(3))
    with pytest.raises(RuntimeError, match=r"^first$"):
        worker.drain()
    assert ran == [3]
    worker.drain()
    worker.submit(lambda: ran.append(4))
    worker.drain()
    assert ran == [3, 4]


def test_close_finishes_what_is_queued_and_joins_the_thread() -> None:
    """If it failed, the last checkpoint of a run would be lost, or the process would never end."""
    worker = Worker("ckptkit-closing", waiting_max=8)
    gate, ran = Gate(), []
    worker.submit(gate)
    for n in range(3):
        worker.submit(lambda n=n: ran.append(n))
    gate.go_on.set()
    worker.close()
    assert ran == [0, 1, 2]
    assert "ckptkit-closing" not in [thread.name for thread in threading.enumerate()]
    worker.close()
    with pytest.raises(RuntimeError, match=r"^ckptkit-closing was closed$"):
        worker.submit(lambda: None)


def test_a_finished_job_keeps_nothing_alive(worker: Worker) -> None:
    """If it failed, the last save's arrays would stay in memory until the next save."""

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    worker.submit(lambda held=held: None)
    del held
    worker.drain()
    assert gone() is None


def test_error_in_a_hand_over_leaves_the_protocol_to_the_other_thread() -> None:
    """The exception of a signal's handler would be thrown into a save in the middle, or end it without a vote."""
    queued, ran = list[Callable[[], SaveProtocol]](), list[str]()

    def interrupted(job: Callable[[], SaveProtocol]) -> None:
        queued.append(job)
        raise TimeoutError

    def protocol() -> SaveProtocol:
        try:
            yield Onto(SimpleNamespace(submit=interrupted))  # pyright: ignore[reportArgumentType]
        except TimeoutError:
            ran.append("error")
        ran.append("after")

    with pytest.raises(TimeoutError):
        drive(protocol(), LocalCoordinator())
    assert ran == []
    drive(queued[0](), LocalCoordinator())
    assert ran == ["after"]
