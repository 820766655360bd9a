"""Jobs of 1 to 4 processes that are forked once and make one run after the other, until one of them is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
import warnings
from typing import Any

LIMIT_S = 90.0  # of a run; a hang is a finding


class Job:
    """`count` processes that JAX has joined. Fork them from a process that has not used JAX's backend itself."""

    def __init__(self, count: int):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.count, self.runs = count, 0
        self._orders: list[int] = []
        self._answers: list[int] = []
        self._pids: list[int] = []
        for process in range(count):
            self._fork(process, port)

    def _fork(self, process: int, port: int) -> None:
        order_out, order_in = os.pipe()
        answer_out, answer_in = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has no other thread yet that a child would need
            pid = os.fork()
        if pid == 0:
            try:
                for fd in (*self._orders, *self._answers, order_in, answer_out):
                    os.close(fd)
                _child(process, self.count, port, order_out, answer_in)
            finally:
                os._exit(1)
        os.close(order_out)
        os.close(answer_in)
        self._pids.append(pid)
        self._orders.append(order_in)
        self._answers.append(answer_out)

    def run(self, orders: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], str]:
        """The answers of each process, and how the run ended: `closed`, `killed`, `failed` or `hung`."""
        self.runs += 1
        for fd, order in zip(self._orders, orders, strict=True):
            os.write(fd, json.dumps(order | {"number": self.runs}).encode() + b"\n")
        answers: list[list[dict[str, Any]]] = [[] for _ in orders]
        open_, partial, end_s = set(range(self.count)), [b""] * self.count, time.monotonic() + LIMIT_S
        how = "closed"
        while open_:
            ready, _, _ = select.select([self._answers[each] for each in open_], [], [], end_s - time.monotonic())
            if not ready:
                how = "hung"
                break
            for process in [each for each in open_ if self._answers[each] in ready]:
                data = os.read(self._answers[process], 1 << 16)
                *lines, partial[process] = (partial[process] + data).split(b"\n")
                answers[process] += map(json.loads, lines)
                last = answers[process][-1] if answers[process] else {}
                if not data or "closed" in last or "failed" in last:
                    open_.discard(process)
                if not data or "failed" in last:
                    how = "failed" if "failed" in last else "killed" if how == "closed" else how
            if how in ("killed", "failed"):
                break
        if how != "closed":
            self.kill()
            for process, fd in enumerate(self._drained()):
                *lines, _ = (partial[process] + fd).split(b"\n")
                answers[process] += map(json.loads, lines)
            self.close()
        return answers, how

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pids = []

    def _drained(self) -> list[bytes]:
        found = []
        for fd in self._answers:
            data = b""
            while more := os.read(fd, 1 << 16):
                data += more
            found.append(data)
        return found

    @property
    def alive(self) -> bool:
        """Whether it can make another run."""
        return bool(self._pids)

    def close(self) -> None:
        """Ends the processes."""
        if self._pids:
            self.kill()
        for fd in (*self._orders, *self._answers):
            os.close(fd)
        self._orders, self._answers = [], []


def _child(process: int, count: int, port: int, orders: int, answers: int) -> None:
    from tests.book import process as module

    module.CLOCK.install()

    def answer(record: dict[str, Any]) -> None:
        os.write(answers, json.dumps(record).encode() + b"\n")

    module.serve(process, count, port, os.fdopen(orders), answer)


class Jobs:
    """A job of each size, made when it is needed."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def of(self, count: int) -> Job:
        """A job of so many processes that is ready for a run."""
        job = self._jobs.get(count)
        if job is None or not job.alive:
            job = self._jobs[count] = Job(count)
        return job

    def close(self) -> None:
        """Ends all."""
        for job in self._jobs.values():
            if job.alive:
                job.close()
        self._jobs = {}
