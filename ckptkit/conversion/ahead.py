"""Reading the next block while its predecessor is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Data = TypeVar("Data")


def read_ahead(read: Callable[[Job], Data], jobs: Iterable[Job]) -> Iterator[tuple[Job, Data]]:
    """Each job with what `read` gives for it, in order; one is being read while its predecessor is with the caller."""
    with ThreadPoolExecutor(1, thread_name_prefix="ckptkit-read") as reader:
        before = None
        for job in jobs:
            after = (job, reader.submit(read, job))
            if before is not None:
                yield before[0], before[1].result()
            before = after
        if before is not None:
            yield before[0], before[1].result()
