"""How `ElasticBatches` reads the rows of a process: by index, through a `DataLoader`, or from streams."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from ckptkit.job.data_position import DataPosition

BatchFn = Callable[[Sequence[Any]], Any]
RecordOf = Callable[[int], int]  # the first record of a step
_STEPS_MAX = 1 << 48  # of endless data, whose length is `sys.maxsize`


class _ByIndex(ABC):
    """The common part of data with an index: the end is known, and the position is a number."""

    stream_count = 0
    streams: frozenset[int] = frozenset()

    def __init__(self, length: int, global_batch: int, rows: np.ndarray):
        self.records = None if length >= sys.maxsize // 2 else length  # None: endless
        self._global_batch = global_batch
        self._rows = [int(row) for row in rows]
        self._last_start = length - global_batch  # of the last whole batch
        self._record_of: RecordOf = lambda step: step * global_batch
        self._iterator: Any = None

    def seek(self, position: DataPosition, record_of: RecordOf) -> None:
        """Opens an iterator over the steps from here on; none where no whole batch is left."""
        self.close()
        self._record_of = record_of
        left = 1 + (self._last_start - record_of(position.step)) // self._global_batch
        if left > 0:
            self._iterator = iter(self._steps(position.step, min(left, _STEPS_MAX)))

    def read(self, step: int) -> Any:
        """The rows of the next step, whose number the caller knows. Raises StopIteration at the end."""
        if self._iterator is None or self._record_of(step) > self._last_start:
            raise StopIteration
        return next(self._iterator)

    def states(self) -> Mapping[int, Any]:
        """None: the position is a number."""
        return {}

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        iterator, self._iterator = self._iterator, None
        _close(iterator)

    @abstractmethod
    def _steps(self, first: int, count: int) -> Any:
        """An iterator over the rows of `count` steps from `first` on."""


class IndexSource(_ByIndex):
    """The rows of a `MapDataset`."""

    def __init__(
        self,
        data: grain.MapDataset,
        global_batch: int,
        rows: np.ndarray,
        batch_fn: BatchFn,
        read_options: grain.ReadOptions,
        multiprocessing_options: grain.MultiprocessingOptions | None,
    ):
        super().__init__(len(data), global_batch, rows)
        self._data = data
        self._batch_fn = batch_fn
        self._reading = read_options, multiprocessing_options

    def _steps(self, first: int, count: int) -> Any:
        data, rows, batch_fn = self._data, self._rows, self._batch_fn
        record_of, last_start = self._record_of, self._last_start

        def read(step: int) -> Any:
            start = record_of(step)
            if start > last_start:  # read ahead, beyond the end: steps that skip batches need fewer of them
                return 0
            records = [data[start + row] for row in rows]
            if missing := [start + row for row, record in zip(rows, records, strict=True) if record is None]:
                raise ValueError(
                    f"ElasticBatches: record {missing[0]} is None: a transformation drops it, so records have no fixed "
                    "place; use filter on an IterDataset"
                )
            return batch_fn(records)

        reading, workers = self._reading
        steps = grain.MapDataset.range(first, first + count).map(read).to_iter_dataset(reading)
        return steps if workers is None else steps.mp_prefetch(workers)


class LoaderSource(_ByIndex):
    """The rows of a `DataLoader`, by a sampler that gives it those records alone."""

    def __init__(self, loader: grain.DataLoader, global_batch: int, rows: np.ndarray, batch_fn: BatchFn):
        sampler: Any = loader._sampler  # Grain's protocol has no length, its samplers have
        super().__init__(len(sampler), global_batch, rows)
        self._loader = loader
        self._batch_fn = batch_fn

    def _steps(self, first: int, count: int) -> Any:
        loader = self._loader
        options = loader.multiprocessing_options
        sampler = _RowSampler(
            loader._sampler, self._record_of, self._last_start, self._rows, first, count, max(1, options.num_workers)
        )
        batch = grain.transforms.Batch(len(self._rows), drop_remainder=True, batch_fn=self._batch_fn)
        return grain.DataLoader(
            data_source=loader._data_source,
            sampler=sampler,
            operations=(*loader._operations, batch),
            worker_count=options.num_workers,
            worker_buffer_size=options.per_worker_buffer_size,
            shard_options=grain.sharding.NoSharding(),
            read_options=loader._read_options,
        )


class _RowSampler:
    """The records of one process, in the order in which a loader gives them to its workers.

    A loader deals records to its workers in rotation, and batches what each of them gets. So that batches are
    those of the global order, record `i` is of batch `i % workers` of the current round.
    """

    def __init__(
        self,
        sampler: Any,
        record_of: RecordOf,
        last_start: int,
        rows: Sequence[int],
        first: int,
        count: int,
        workers: int,
    ):
        self._sampler = sampler
        self._record_of = record_of
        self._last_start = last_start
        self._rows = rows
        self._first = first
        self._workers = workers
        self._length = -(-count // workers) * workers * len(rows)  # whole rounds; what is beyond the end is not used

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        place, worker = divmod(index, self._workers)
        behind, row = divmod(place, len(self._rows))
        start = self._record_of(self._first + behind * self._workers + worker)
        found = self._sampler[min(start, self._last_start) + self._rows[row]]
        # Grain names a record by its index among those that it was given.
        return grain.RecordMetadata(index=index, record_key=found.record_key, rng=found.rng)

    def __repr__(self) -> str:
        return f"rows of {self._sampler!r}"


class StreamSource:
    """The rows of data without an index: whole streams are read, and the rows of this process are kept."""

    records = None

    def __init__(self, data: Sequence[Any], global_batch: int, rows: np.ndarray, batch_fn: BatchFn):
        if not data or global_batch % len(data):
            raise ValueError(
                f"ElasticBatches: {len(data)} streams do not divide a batch of {global_batch} rows; every batch takes "
                "as many rows from each"
            )
        for each in data:
            if not isinstance(each, grain.IterDataset | grain.DataLoader):
                raise ValueError(
                    f"ElasticBatches: {type(each).__name__} is not a MapDataset, an IterDataset, a DataLoader or a "
                    "sequence of IterDatasets"
                )
        self._data = data
        self._each = global_batch // len(data)
        self._batch_fn = batch_fn
        self._rows: dict[int, list[int]] = {}  # by stream, those of its rows that are kept
        for row in map(int, rows):
            self._rows.setdefault(row // self._each, []).append(row % self._each)
        self._iterators: dict[int, Iterator[Any]] = {}

    @property
    def stream_count(self) -> int:
        """How many streams the data has."""
        return len(self._data)

    @property
    def streams(self) -> frozenset[int]:
        """Those of which this process has rows."""
        return frozenset(self._rows)

    def seek(self, position: DataPosition, record_of: RecordOf) -> None:
        """Opens the streams at their states; from the start without any."""
        del record_of
        self.close()
        if missing := sorted(self.streams - set(position.streams)) if position.step else []:
            raise ValueError(f"ElasticBatches: the position lacks the states of streams {missing[:8]}")
        for number in sorted(self._rows):
            self._iterators[number] = iter(self._data[number])
            if number in position.streams:
                _set_state(self._iterators[number], position.streams[number])

    def read(self, step: int) -> Any:
        """The rows of the next step. Raises StopIteration at the end."""
        del step
        kept: list[Any] = []
        for number, rows in self._rows.items():
            records = [next(self._iterators[number]) for _ in range(self._each)]
            kept += [records[row] for row in rows]
        return self._batch_fn(kept)

    def states(self) -> Mapping[int, Any]:
        """The states of the streams, as plain values."""
        return {number: _state(iterator) for number, iterator in self._iterators.items()}

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        iterators, self._iterators = self._iterators, {}
        for iterator in iterators.values():
            _close(iterator)


Source = IndexSource | LoaderSource | StreamSource  # reads the rows of one process, step by step


def is_by_index(loader: grain.DataLoader) -> bool:
    """Whether a loader makes one element of each record, so that its rows can be read alone.

    Raises ValueError for a loader with shards: its order is that of a number of processes.
    """
    shards = 1 if loader._shard_options is None else loader._shard_options.shard_count
    if shards != 1:
        raise ValueError(
            f"ElasticBatches: the loader has {shards} shards; give one with grain.sharding.NoSharding(), rows are "
            "split here"
        )
    kinds = (grain.transforms.Map, grain.transforms.RandomMap)
    return hasattr(loader._sampler, "__len__") and all(isinstance(each, kinds) for each in loader._operations)


def _state(iterator: Any) -> Any:
    state = iterator.get_state()  # bytes of a DataLoader's, else plain values
    return state.decode() if isinstance(state, bytes) else state


def _set_state(iterator: Any, state: Any) -> None:
    iterator.set_state(state.encode() if isinstance(state, str) else state)


def _close(iterator: Any) -> None:
    inner = getattr(iterator, "_iterator", None) if isinstance(iterator, grain.DataLoaderIterator) else iterator
    if inner is not None:
        inner.close()
