"""What the bytes of a checkpoint compress to, with and without putting the bytes of equal weight side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorstore as ts

from ckptkit.formats.tensors import Tensor
from ckptkit.model.durable_profile import COMPRESSORS, Codec
from ckptkit.util import clock

SAMPLE_BYTES = 4 << 20  # of one leaf
_LEAVES_MAX = 16  # the largest: they are what a save writes
_TRIES = 3  # of which the fastest counts: encoding has no luck, only interruptions
Samples = Mapping[str, Sequence[np.ndarray]]  # by dtype, of one dimension each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A codec over the sampled leaves of one dtype: bytes after over bytes before, and bytes before per second."""

    dtype: str
    codec: str
    ratio: float
    bytes_per_s: float
    sampled_bytes: int


def take_samples(tensors: Iterable[Tensor]) -> Samples:
    """A piece of each of the largest leaves, by dtype. Reads `SAMPLE_BYTES` of each of 16 leaves at most.

    Raises what reading raises.
    """
    largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)[:_LEAVES_MAX]
    by_dtype: dict[str, list[np.ndarray]] = {}
    for tensor in largest:
        if tensor.nbytes:
            by_dtype.setdefault(tensor.dtype.name, []).append(_sample(tensor))
    return by_dtype


def compressibility(samples: Samples) -> list[Compression]:
    """Each codec over the samples of each dtype, in one core."""
    codecs = [None, *COMPRESSORS]
    return [_compressed(dtype, codec, pieces) for (dtype, pieces), codec in itertools.product(samples.items(), codecs)]


def leaves_of(samples: Samples, sizes: Sequence[tuple[str, int]]) -> list[np.ndarray]:
    """Leaves of about these dtypes and bytes, cut out of the samples one after the other; of a dtype without samples
    random bytes, which no codec makes smaller. A leaf larger than all samples of its dtype repeats them, further apart
    than a codec looks unless they are tiny."""
    random = np.random.default_rng(0)
    pools = {dtype: np.concatenate(list(pieces)) for dtype, pieces in samples.items()}
    begins = dict.fromkeys(pools, 0)
    leaves = []
    for dtype, nbytes in sizes:
        if dtype not in pools:
            leaves.append(random.integers(0, 256, nbytes, np.uint8))
            continue
        pool, count = pools[dtype], max(1, nbytes // pools[dtype].itemsize)
        begin = begins[dtype] if begins[dtype] + count <= pool.size else 0
        begins[dtype] = begin + count
        leaves.append(pool[begin : begin + count] if count <= pool.size else np.resize(pool, count))
    return leaves


def _sample(tensor: Tensor) -> np.ndarray:
    """Elements from the middle: the beginning of an embedding is what is trained most."""
    boxes = list(itertools.islice(tensor.blocks(8 * SAMPLE_BYTES), 1024))  # a block is an eighth of the budget
    return tensor.read(boxes[len(boxes) // 2]).reshape(-1)[: max(1, SAMPLE_BYTES // tensor.dtype.itemsize)]


def _compressed(dtype: str, codec: Codec | None, samples: Sequence[np.ndarray]) -> Compression:
    before = after = 0
    taken_s = 0.0
    for sample in samples:
        context = ts.Context()
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "memory"},
            "metadata": {"compressor": None if codec is None else COMPRESSORS[codec], "chunks": [sample.size]},
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
        dtype=dtype,
        codec=codec or "none",
        ratio=after / before,
        bytes_per_s=before / max(taken_s, 1e-9),
        sampled_bytes=before,
    )
