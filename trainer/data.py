"""The data pipeline: a global order of batches that no process count can change.

The position is one number, the next step. Row r of step k holds record `shuffled[k x global_batch + r]`, where no guard
has skipped batches, and each process reads the rows that its devices hold, whichever these are
(`ckptkit.resume.ElasticBatches`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from ckptkit.guard import GuardRecord, Skips
from ckptkit.job.coordination import Coordinator, gather
from ckptkit.resume import ElasticBatches
from tools.corpus import Corpus
from trainer.config import InputError

READ_THREADS, STEPS_AHEAD = 2, 4  # per process; a step's rows are read together


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position in the data: saved with the state, a few dozen bytes of JSON."""

    step: int  # the next step, which is also how many are done
    global_batch: int
    seed: int
    source_digest: str
    records: int
    guard: Mapping[str, Any] | None = None  # the record of a `ckptkit.guard.Guard`, with the batches that it skips

    @property
    def skips(self) -> Skips:
        """The batches that no step takes."""
        return GuardRecord.from_json(self.guard).skips

    def to_json(self) -> dict[str, Any]:
        """The form in which it is saved."""
        return asdict(self)


class Batch(NamedTuple):
    """One step's data."""

    step: int
    rows: np.ndarray  # int64[rows of this process, 2]: global row, record id
    tokens: jax.Array  # int32[global batch, T + 1], split over the mesh


def start_position(corpus: Corpus, *, global_batch: int, seed: int) -> Position:
    """The position before the first step."""
    return Position(step=0, global_batch=global_batch, seed=seed, source_digest=corpus.digest, records=corpus.records)


def check_same_data(start: Position, coordinator: Coordinator) -> None:
    """Refuse a job whose hosts have different text, on all processes. Else each would train on its own text, unnoticed.

    Raises:
        InputError: the first process that differs from process 0, and in what.
        ckptkit.CoordinationError: a process did not come within `coordinator.timeout_s`.
    """
    first, *others = gather(coordinator, "data", start.to_json())
    for process, other in enumerate(others, start=1):
        names = [name for name, value in first.items() if other[name] != value]
        if names:
            differences = [f"{name} {other[name]!r} against {first[name]!r}" for name in names]
            raise InputError(
                f"process {process} has other data than process 0: {', '.join(differences)}; give every host the same "
                "text (stdlib is that of each host's own Python) and the same flags"
            )


def resume_position(saved: dict[str, Any], start: Position) -> Position:
    """The saved position, when this run would have reached it with the same data in the same order.

    Raises:
        InputError: the run has another corpus, seed or batch; each difference with both values.
    """
    names = [field.name for field in fields(Position) if field.name not in ("step", "guard")]
    differences = [
        f"{name} is {saved.get(name)!r} in the checkpoint, {getattr(start, name)!r} here"
        for name in names
        if saved.get(name) != getattr(start, name)
    ]
    if differences:
        raise InputError(
            f"cannot resume step {saved.get('step')} with other data: {'; '.join(differences)}; "
            "give the same --data, --seed, --global-batch and preset, or another --checkpoint to start anew"
        )
    return Position(**(start.to_json() | {"step": saved["step"], "guard": saved.get("guard")}))


def shuffled_ids(records: int, seed: int) -> grain.MapDataset:
    """Record ids in the order of the run: each epoch a new permutation, without end, random access by position."""
    return grain.MapDataset.range(records).seed(seed).shuffle().repeat()


def open_batches(corpus: Corpus, position: Position, sharding: NamedSharding, *, steps: int) -> Iterator[Batch]:
    """Yield the batches of steps `position.step` to `steps`; records are read and decoded ahead by threads.

    Args:
        corpus: whose records hold T + 1 byte tokens.
        position: where to start.
        sharding: of the batch's rows.
        steps: where to end, exclusive.
    """
    if not Path(corpus.path).exists():
        raise InputError(f"{corpus.path}: the records disappeared after their index was read; build the corpus again")
    source = grain.sources.ArrayRecordDataSource([corpus.path])
    shape = (position.global_batch, corpus.record_bytes)

    def read(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        found = source.__getitems__(ids)  # pyright: ignore[reportAttributeAccessIssue]
        tokens = [np.frombuffer(record, np.uint8) for record in found]
        return np.array(ids, np.int64), np.stack(tokens).astype(np.int32)

    batches = ElasticBatches(
        shuffled_ids(corpus.records, position.seed),
        position.global_batch,
        rows=sharding,
        batch_fn=read,
        batch_of=position.skips.batch_of,
        first_step=position.step,
        read_options=grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=STEPS_AHEAD),
    )
    try:
        for step in range(position.step, steps):
            ids, local = next(batches)
            rows = np.stack([batches.rows, ids], axis=1)
            yield Batch(step, rows, _to_global(local, batches.rows, sharding, shape))
    finally:
        batches.close()


def _to_global(local: np.ndarray, rows: np.ndarray, sharding: NamedSharding, shape: tuple[int, int]) -> jax.Array:
    """Place this process's rows on its devices, as parts of the global array."""

    def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        wanted = np.arange(shape[0])[index[0]]
        return local[np.searchsorted(rows, wanted)]

    return jax.make_array_from_callback(shape, sharding, of_device)
