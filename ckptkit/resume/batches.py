"""`ElasticBatches`: a data iterator that any number of processes continues, with the same records in the same order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from ckptkit.job.data_position import DataPosition
from ckptkit.resume.sources import BatchFn, IndexSource, LoaderSource, Source, StreamSource, is_by_index

Rows = Sequence[int] | np.ndarray | jax.sharding.Sharding


class ElasticBatches(grain.DatasetIterator):
    """The batches of a job over one global order of records. Each process gets its rows of every batch.

    Row r of step k holds record `k * global_batch + r` of the global order, on any number of processes. A run that
    continues on more or fewer processes takes the same records in the same order: none twice, none left out. Save it as
    `grain.checkpoint.CheckpointSave(batches)`; the state is the same on every process, some 150 bytes. A restore by
    `grain.checkpoint.CheckpointRestore(batches)` sets it on any number of processes, from every tier. A batch that
    is not complete at the end of the data is left out.

    Cost for each kind of `data`:

    * `grain.MapDataset`, without shards and batches: a process reads its rows alone. Transformations that drop elements
      (`filter`) raise ValueError at the first missing element: use them on an `IterDataset`.
    * `grain.DataLoader` with `NoSharding`, whose operations are `Map` and `RandomMap`: the same, in the loader's worker
      processes. Other operations: as an `IterDataset`.
    * `grain.IterDataset`, for data without an index (filter, packing, Parquet): every process reads the whole stream
      and keeps its rows. The state is that of the stream.
    * A sequence of `IterDataset`s, one for each part of the data: every batch takes `global_batch / len(data)` rows
      from each, and a process reads only those of which it has rows. The number of streams is fixed for the run, the
      number of processes is not. Streams of equal length, or endless ones: a process stops at the end of its streams.

    Args:
      data: the records, in the order of the run. Shuffle and repeat them before.
      global_batch: rows of a step over all processes. A restore may change it: the order of records stays the same.
        Not together with `batch_of`, now or later in the run.
      rows: the rows of this process, or the sharding of the batch, whose local rows are read.
        Default: an even, consecutive part for each process of the JAX job.
      batch_fn: makes a batch from the list of a step's records. Default: NumPy arrays are stacked, leaf by leaf.
      batch_of: the batch that a step takes, by number: `lambda step: guard.skips.batch_of(step)`
        leaves out what a `ckptkit.guard.Guard` skips. Not for streams.
      first_step: where to begin, for loops that keep a position of their own. Not for streams.
      read_options, multiprocessing_options: Grain's, for a `MapDataset`: threads and worker processes that read ahead.

    Raises ValueError for rows outside of the batch, or options that the kind of data does not have. Raises ImportError
    without Grain.
    """

    def __init__(
        self,
        data: grain.MapDataset | grain.IterDataset | grain.DataLoader | Sequence[grain.IterDataset],
        global_batch: int,
        *,
        rows: Rows | None = None,
        batch_fn: BatchFn | None = None,
        batch_of: Callable[[int], int] | None = None,
        first_step: int = 0,
        read_options: grain.ReadOptions | None = None,
        multiprocessing_options: grain.MultiprocessingOptions | None = None,
    ):
        super().__init__()
        self._rows = rows_of(rows, global_batch)
        self._global_batch = global_batch
        self._batch_of = batch_of
        self._source: Source = self._open(data, batch_fn, read_options, multiprocessing_options)
        if self._source.stream_count and (batch_of or first_step):
            raise ValueError(
                "ElasticBatches: streams are read in order; batch_of and first_step need data with an index"
            )
        self._step = first_step
        self._origin = self._position(first_step, first_step * global_batch)
        self._is_open = False  # nothing is read ahead before the first batch: a restore, or a guard, moves the position

    @property
    def rows(self) -> np.ndarray:
        """The rows of the global batch that this process reads, ascending: int64[rows]."""
        return self._rows

    @property
    def step(self) -> int:
        """The step of the next batch."""
        return self._step

    @property
    def streams(self) -> frozenset[int]:
        """The streams that this process reads."""
        return self._source.streams

    def __next__(self) -> Any:
        """The next step's rows. Raises StopIteration where the data has no further whole batch."""
        if self._closed:
            raise ValueError("ElasticBatches is closed")
        if not self._is_open:
            self._source.seek(self._origin, self._record_of())
            self._is_open = True
        batch = self._source.read(self._step)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position of the next batch, as plain values; equal on every process, except for streams."""
        streams = self._source.states() if self._is_open else self._origin.streams
        return self._position(self._step, self._record_of()(self._step), streams).to_json()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position. Raises ValueError if it is that of other data."""
        position = DataPosition.from_json(state)
        here = self._origin
        if position.records != here.records:
            raise ValueError(
                f"the position was saved for data of {position.records} records, this data has {here.records}: its "
                "order is another one"
            )
        if position.stream_count != here.stream_count:
            raise ValueError(
                f"the position was saved for {position.stream_count} streams, this data has {here.stream_count}; their "
                "number is fixed for a run"
            )
        if self._batch_of and position.global_batch != self._global_batch:
            raise ValueError(
                f"global_batch is {position.global_batch} in the saved position, {self._global_batch} here: batches "
                "are skipped by number (batch_of), so they have to stay the same"
            )
        if self._batch_of and not self._is_numbered(position, self._batch_of):
            raise ValueError(
                f"step {position.step} continues at record {position.record}, and by batch_of it begins at record "
                f"{self._batch_of(position.step) * self._global_batch}. A guard knows what to skip after "
                f"`guard.resume`: make ElasticBatches anew there, with first_step={position.step}. Else the run has "
                "changed its batch size, and batch_of counts batches of one size from record 0"
            )
        self._source.close()
        self._is_open = False
        self._step = position.step
        self._origin = self._position(position.step, position.record, position.streams)

    # Grain calls `close` then too. Modules are empty by that time, and Grain's own iterators end by themselves.
    _interpreter_ends = staticmethod(sys.is_finalizing)

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        source: Source | None = getattr(self, "_source", None)  # None: the constructor raised, and Grain closes it
        if source is not None and not self._interpreter_ends():
            source.close()
        super().close()

    def __str__(self) -> str:
        return f"ElasticBatches(step={self.step}, global_batch={self._global_batch}, rows={len(self._rows)})"

    def _open(
        self,
        data: Any,
        batch_fn: BatchFn | None,
        read_options: grain.ReadOptions | None,
        multiprocessing_options: grain.MultiprocessingOptions | None,
    ) -> Source:
        stacked = batch_fn or stack
        if isinstance(data, grain.MapDataset):
            reading = (read_options or grain.ReadOptions(), multiprocessing_options)
            return IndexSource(data, self._global_batch, self._rows, stacked, *reading)
        if read_options or multiprocessing_options:
            raise ValueError(
                "ElasticBatches: read_options and multiprocessing_options are for a MapDataset; give a DataLoader or "
                "an IterDataset its own"
            )
        if isinstance(data, grain.DataLoader) and is_by_index(data):
            return LoaderSource(data, self._global_batch, self._rows, stacked)
        streams = [data] if isinstance(data, grain.IterDataset | grain.DataLoader) else list(data)
        return StreamSource(streams, self._global_batch, self._rows, stacked)

    def _is_numbered(self, position: DataPosition, batch_of: Callable[[int], int]) -> bool:
        """Whether the steps before a position took all batches before it, but those that are skipped now.

        It may have been saved before later batches were skipped: then it lies before the batch that its step takes now.
        """
        batch, rest = divmod(position.record, self._global_batch)
        before = batch_of(position.step - 1) if position.step else -1
        return rest == 0 and before < batch <= batch_of(position.step)

    def _record_of(self) -> Callable[[int], int]:
        """The first record of a step. The function goes to threads and worker processes, so it holds values alone."""
        size, batch_of, first, record = self._global_batch, self._batch_of, self._origin.step, self._origin.record
        if batch_of is not None:
            return lambda step: batch_of(step) * size
        return lambda step: record + (step - first) * size

    def _position(self, step: int, record: int, streams: Mapping[int, Any] | None = None) -> DataPosition:
        return DataPosition(
            step=step,
            record=record,
            global_batch=self._global_batch,
            records=self._source.records,
            stream_count=self._source.stream_count,
            streams=streams or {},
        )


def rows_of(rows: Rows | None, global_batch: int) -> np.ndarray:
    """The rows of a batch that a process reads, each once, ascending: int64[rows].

    Raises ValueError for a process without rows, and rows outside of the batch.
    """
    if rows is None:
        found = np.array_split(np.arange(global_batch), jax.process_count())[jax.process_index()]
    elif isinstance(rows, jax.sharding.Sharding):
        if isinstance(rows, jax.sharding.NamedSharding):  # the batch may have more axes than its rows
            rows = jax.sharding.NamedSharding(rows.mesh, jax.sharding.PartitionSpec(*rows.spec[:1]))
        boxes = rows.addressable_devices_indices_map((global_batch,)).values()
        found = np.unique(np.concatenate([np.arange(global_batch)[box] for box in boxes if box is not None]))
    else:
        found = np.unique(np.asarray(rows, np.int64))
    if not found.size or found[0] < 0 or found[-1] >= global_batch:
        raise ValueError(
            f"ElasticBatches: process {jax.process_index()} has rows {found.tolist()} of a batch of {global_batch}; "
            f"give one or more of 0 to {global_batch - 1}"
        )
    return found.astype(np.int64)


def stack(records: Sequence[Any]) -> Any:
    """A batch from records of one structure: arrays and numbers are stacked, text and bytes become object arrays."""

    def one(*leaves: Any) -> np.ndarray:
        return np.array(leaves, object) if isinstance(leaves[0], str | bytes) else np.stack(leaves)

    return jax.tree.map(one, *records)
