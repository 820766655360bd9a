"""One piece of work shared by several threads, and the sizes from which that is faster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")

_CORES = len(os.sched_getaffinity(0))
# Most of the cores: on 16 of them 4 threads copy and digest 16 GB/s, 8 do 27, 12 do 33 and 16 do 30 (bench/LOG.md).
COPY_THREADS = min(12, max(min(4, _CORES), _CORES * 3 // 4))
_host = {"processes": 1}
SMALL_BYTES = 64 << 10  # below it a piece is bound by the interpreter
_SHARED_BYTES = 16 << 20  # below it the copy is over before a second thread has started


def share_work(work: Callable[[], None], threads: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Runs `work` on so many threads, of which this one is the last: it does `meanwhile` first.

    Small shards belong into `meanwhile`: it is bound by the interpreter, and threads would only get in each other's
    way. Raises what one of them raised, once all have ended.
    """
    with ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="ckptkit-copy") as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        meanwhile()
        work()
        for other in others:
            other.result()


def share_items(items: Iterable[_Item], act: Callable[[_Item], None], threads: int) -> None:
    """Calls `act` with each item, on so many threads, of which this one is the last. After an error or an interrupt no
    further item is begun. Raises what one of them raised, once all have ended."""
    waiting, lock, failed = iter(items), threading.Lock(), threading.Event()

    def next_item() -> list[_Item]:
        with lock:
            return [] if failed.is_set() else list(islice(waiting, 1))

    def work() -> None:
        try:
            while chosen := next_item():
                act(chosen[0])
        except BaseException:
            failed.set()
            raise

    share_work(work, threads)


def copy_threads(size_bytes: int) -> int:
    """How many threads copying so many bytes is worth: this process's part of those of its host, or four."""
    return max(min(4, COPY_THREADS), COPY_THREADS // host_processes()) if size_bytes >= _SHARED_BYTES else 1


def host_processes() -> int:
    """The processes of the job on this host that share its cores and memory, as far as a manager has counted them."""
    return _host["processes"]


def share_host(processes: int) -> None:
    """So many processes of the job are on this host."""
    _host["processes"] = max(1, processes)
