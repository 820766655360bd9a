"""Reading the next blocks while their predecessor is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Job = TypeVar("_Job")
Data = TypeVar("Data")


def read_ahead(read: Callable[[_Job], Data], jobs: Iterable[_Job], ahead: int = 1) -> Iterator[tuple[_Job, Data]]:
    """Each job with what `read` gives for it, in order; up to `ahead` more are read while one is with the caller."""
    reader = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-read")
    under_way: deque[tuple[_Job, Future[Data]]] = deque()
    try:
        for job in jobs:
            under_way.append((job, reader.submit(read, job)))
            if len(under_way) > ahead:
                first, data = under_way.popleft()
                yield first, data.result()
        while under_way:
            first, data = under_way.popleft()
            yield first, data.result()
    finally:
        reader.shutdown(cancel_futures=True)
