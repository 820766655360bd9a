"""The knobs of the durable tier as one value: measured defaults, and a JSON file that `ckptkit tune` writes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

Codec = Literal["zstd", "zstd_shuffle", "lz4_shuffle"]
# As zarr 2 spells them. Shuffling puts bytes of equal significance next to each other: the exponents of weights are
# similar.
COMPRESSORS: Final[Mapping[Codec, Mapping[str, Any]]] = {
    "zstd": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 0, "blocksize": 0},
    "zstd_shuffle": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 0},
    "lz4_shuffle": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1, "blocksize": 0},
}
_UNITS = {"_bytes_per_s": "bytes per second", "_bytes": "bytes", "_s": "seconds"}
_OPTIONAL = frozenset(
    {
        *("write_bytes_per_s", "read_bytes_per_s", "job_write_bytes_per_s", "job_read_bytes_per_s"),
        *("job_write_concurrency", "job_read_concurrency", "start_spread_s"),
    }
)
# GCS takes 1,000 writes and 5,000 reads a second of a new bucket before it scales up (its page "request-rate").
_SPREAD_S_PER_PROCESS = 1e-3
_SLOWEST_BYTES_PER_S = 10e6  # of a tier that works: a tenth of what one connection to a bucket gives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DurableProfile:
    """How steps are written to the durable tier and read from it. Nothing in it changes what a step means.

    Args:
      data_file_bytes: a data file, or object, is closed once it is this large (OCDBT's target). Smaller files are
      written and read in parallel; each costs a request.
      copied_bytes: cells below this are handed to TensorStore as keys and values. Each is copied once and takes some
        microseconds. Larger ones go through its array driver, which opens each leaf (about a millisecond) and copies
        nothing.
      compression: how the cells of leaves whose cells are `copied_bytes` or larger are encoded (`COMPRESSORS`); None:
        not at all. Takes a core 1 to 5 s for each GB of floats, so it is for storage that is slower than that, or
        paid by the byte. Process 0's counts. Steps that Orbax has to write, and repaired ones, are not encoded.
      write_concurrency, read_concurrency: files or requests in flight at a time.
      read_ahead_bytes: how much of a restore is read ahead; this is host memory that the restore may take.
      in_flight_bytes: how much of a save is being written at a time. Between pieces of it (`piece_bytes`) the writer
      keeps to its rate and waits for a fast tier's commit. Small cells and encoded ones take host memory meanwhile: a
      sixth of their total, at least 9 MiB, and about this at most.
      write_bytes_per_s: the rate of this process's durable writes, on average over some seconds, before encoding; None:
        no limit.
      read_bytes_per_s: the rate at which this process's restores take bytes from the durable tier, on average over some
      seconds. A second's worth may be read ahead, `read_ahead_bytes` at most. None: no limit.
      job_write_bytes_per_s, job_read_bytes_per_s: the same for all processes of the job together; each keeps to an
        equal part of it. None: no limit. With both, the lower rate counts.
      job_write_concurrency, job_read_concurrency: requests in flight of all processes of the job together; each has an
        equal part of them, and at least one. With fewer writes than processes, so many processes write at a time, and
        the others wait for their turn. None: no limit of the job.
      start_spread_s: before its first request of a save or of a restore, each of several processes waits for a random
        time up to this. Only in a bucket. None: a millisecond for each process of the job.
      shared_steps_max: how many steps in a row may have the data files of leaves that do not change in common. A later
        step takes such files over (a hard link, or a copy within the bucket) and does not write them. 1: each step
        writes all its bytes. On a disk a damaged file damages every step that shares it.
      operation_timeout_s: the time limit of an operation that moves few bytes; after it the operation fails as
          transient. The limit grows by a second for every 10 MB that the operation moves (`limit_s`).
    """

    data_file_bytes: int = 256 << 20
    copied_bytes: int = 256 << 10
    compression: Codec | None = None
    write_concurrency: int = 32
    read_concurrency: int = 32
    read_ahead_bytes: int = 128 << 20
    in_flight_bytes: int = 2 << 30
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    job_write_bytes_per_s: float | None = None
    job_read_bytes_per_s: float | None = None
    job_write_concurrency: int | None = None
    job_read_concurrency: int | None = None
    start_spread_s: float | None = None
    shared_steps_max: int = 32
    operation_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "compression":
                if value is not None and value not in get_args(Codec):
                    raise ValueError(f"DurableProfile: compression is {value!r}; give None or one of {get_args(Codec)}")
                continue
            if value is None and field.name in _OPTIONAL:
                continue
            kinds = (int, float) if field.name.endswith("_s") else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                unit = next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "a count")
                raise ValueError(f"DurableProfile: {field.name} is {value!r}; give {unit} above 0")

    @property
    def piece_bytes(self) -> int:
        """How much is written in one piece: a quarter of what may be in flight, or a data file; of a rate that is
        limited, a second's worth."""
        second = math.inf if self.write_bytes_per_s is None else self.write_bytes_per_s
        return max(1, int(min(max(self.data_file_bytes, self.in_flight_bytes // 4), self.in_flight_bytes, second)))

    def for_one_of(self, processes: int) -> DurableProfile:
        """The profile of one process in a job of so many: its part of the job's limits is its own limit."""
        own: dict[str, Any] = {}
        for field in ("write_bytes_per_s", "read_bytes_per_s"):
            job, rate = getattr(self, f"job_{field}"), getattr(self, field)
            if job is not None:
                part = job / processes
                own |= {field: part if rate is None else min(part, rate), f"job_{field}": None}
        read_rate = own.get("read_bytes_per_s", self.read_bytes_per_s)
        if read_rate is not None:
            own["read_ahead_bytes"] = min(self.read_ahead_bytes, max(1, int(read_rate)))
        for field, job in (
            ("write_concurrency", self.job_write_concurrency),
            ("read_concurrency", self.job_read_concurrency),
        ):
            if job is not None:
                own[field] = min(getattr(self, field), max(1, job // processes))
        if self.start_spread_s is None and processes > 1:
            own["start_spread_s"] = processes * _SPREAD_S_PER_PROCESS
        return dataclasses.replace(self, **own) if own else self

    def writers_at_once(self, processes: int) -> int:
        """How many processes of a job write at a time: all, unless the job may have fewer writes in flight."""
        return processes if self.job_write_concurrency is None else min(processes, self.job_write_concurrency)

    def codec_of(self, cell_bytes: int) -> Codec | None:
        """How the cells of a leaf are encoded whose cells have `cell_bytes`."""
        return None if cell_bytes < self.copied_bytes else self.compression

    def limit_s(self, nbytes: int) -> float:
        """How long an operation that moves `nbytes` may take."""
        return self.operation_timeout_s + nbytes / _SLOWEST_BYTES_PER_S

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DurableProfile:
        """The profile of a file that `save` wrote; raises ValueError for what is none, naming the file."""
        try:
            if Path(path).exists() and not Path(path).is_file():  # a pipe, for example, which would never end
                raise ValueError("no regular file")
            document = json.loads(Path(path).read_text("utf-8"))
            known = {field.name for field in dataclasses.fields(cls)}
            if not isinstance(document, dict) or set(document) - known:
                raise ValueError(f"expected a JSON object with some of {', '.join(sorted(known))}")
            return cls(**document)
        except ValueError as error:
            raise ValueError(f"{path} is not a durable profile: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON, for `load`."""
        Path(path).write_text(self.text(), "utf-8")

    def text(self) -> str:
        """What `save` writes."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The profile as plain values."""
        return dataclasses.asdict(self)
