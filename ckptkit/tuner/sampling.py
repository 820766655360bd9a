"""What the bytes of a checkpoint compress to, with and without putting the bytes of equal weight side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorstore as ts

from ckptkit import clock
from ckptkit.formats.tensors import Tensor

SAMPLE_BYTES = 4 << 20  # of one leaf
_LEAVES_MAX = 16  # the largest: they are what a save writes
_TRIES = 3  # of which the fastest counts: encoding has no luck, only interruptions
_CODECS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "zstd": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 0},
    "zstd, bytes shuffled": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1},
    "lz4, bytes shuffled": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A codec over the sampled leaves of one dtype: bytes after over bytes before, and bytes before per second."""

    dtype: str
    codec: str
    ratio: float
    bytes_per_s: float
    sampled_bytes: int

    def pays_below_bytes_per_s(self) -> float:
        """The rate of a storage below which a save is faster with this codec, encoding beside nothing else; 0: never.

        Encoding takes n / speed and sending r n / rate, against n / rate.
        """
        return self.bytes_per_s * (1 - self.ratio) if self.ratio < 1 else 0.0


def compressibility(tensors: Iterable[Tensor]) -> list[Compression]:
    """Each codec over a piece of the largest leaves of each dtype. Reads `SAMPLE_BYTES` of each of 16 leaves at most.

    Raises what reading raises.
    """
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)[:_LEAVES_MAX]
    by_dtype: dict[str, list[np.ndarray]] = {}
    for tensor in largest:
        if tensor.nbytes:
            by_dtype.setdefault(tensor.dtype.name, []).append(_sample(tensor))
    return [
        _compressed(dtype, codec, samples) for (dtype, samples), codec in itertools.product(by_dtype.items(), _CODECS)
    ]


def _sample(tensor: Tensor) -> np.ndarray:
    """Elements from the middle: the beginning of an embedding is what is trained most."""
    boxes = list(itertools.islice(tensor.blocks(8 * SAMPLE_BYTES), 1024))  # a block is an eighth of the budget
    return tensor.read(boxes[len(boxes) // 2]).reshape(-1)[: max(1, SAMPLE_BYTES // tensor.dtype.itemsize)]


def _compressed(dtype: str, codec: str, samples: list[np.ndarray]) -> Compression:
    before = after = 0
    taken_s = 0.0
    for sample in samples:
        context = ts.Context()
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "memory"},
            "metadata": {"compressor": _CODECS[codec], "chunks": [sample.size]},
            "store_data_equal_to_fill_value": True,
            "create": True,
        }
        array = ts.open(spec, dtype=ts.dtype(sample.dtype), shape=[sample.size], context=context).result()
        tries_s = []
        for _ in range(_TRIES):
            began_s = clock.monotonic_s()
            array.write(sample).result()
            tries_s.append(clock.monotonic_s() - began_s)
        taken_s += min(tries_s)
        stored = ts.KvStore.open({"driver": "memory"}, context=context).result().read("0").result().value
        before, after = before + sample.nbytes, after + len(stored)
    return Compression(
        dtype=dtype, codec=codec, ratio=after / before, bytes_per_s=before / max(taken_s, 1e-9), sampled_bytes=before
    )
