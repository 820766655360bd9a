"""Trials of profiles on a root: leaves like a state's, written and read by each profile in turn."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.reader import CellReader
from ckptkit.durable.cells.tensorstore_wait import small_objects
from ckptkit.durable.cells.writer import CellWriter
from ckptkit.formats.tensors import Tensor
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import COMPRESSORS, Codec, DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.store.backends import properties_of
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


_LATENCY_TRIES = 5
_ITEM = "probe"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLatency:
    """Medians of one small object, in seconds."""

    put_s: float
    get_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A profile that was tried: bytes per second, medians over the rounds."""

    profile: DurableProfile
    write_bytes_per_s: float
    read_bytes_per_s: float


class Probe:
    """Writes below `<url>/_ckptkit/tune-*`, and deletes what it wrote. Raises what stores and TensorStore raise."""

    def __init__(self, url: str, leaves: Sequence[np.ndarray]):
        self._url = url
        self._blocks = leaves

    @property
    def nbytes(self) -> int:
        """Of one trial."""
        return sum(block.nbytes for block in self._blocks)

    def latency(self) -> ProbedLatency:
        """Of a small object, put and got."""
        with self._place() as place:
            store = small_objects(place, DurableProfile())
            puts, gets = [], []
            for index in range(_LATENCY_TRIES):
                began_s = clock.monotonic_s()
                store.put(f"small-{index}", b"x")
                put_s = clock.monotonic_s()
                store.get(f"small-{index}")
                puts.append(put_s - began_s)
                gets.append(clock.monotonic_s() - put_s)
        return ProbedLatency(put_s=median(puts), get_s=median(gets))

    def trials(self, profiles: Sequence[DurableProfile], rounds: int) -> list[Trial]:
        """Tries the profiles in rotation: each `rounds` times, after one that does not count."""
        taken: list[list[tuple[float, float]]] = [[] for _ in profiles]
        for number in range(rounds + 1):
            for profile, samples in zip(profiles, taken, strict=True):
                sample = self._once(profile)
                if number:
                    samples.append(sample)
        return [
            Trial(
                profile=profile,
                write_bytes_per_s=self.nbytes / median(write_s for write_s, _ in samples),
                read_bytes_per_s=self.nbytes / median(read_s for _, read_s in samples),
            )
            for profile, samples in zip(profiles, taken, strict=True)
        ]

    def _once(self, profile: DurableProfile) -> tuple[float, float]:
        leaves = [_leaf(f"leaf{index}", block) for index, block in enumerate(self._blocks)]
        with self._place() as place:
            began_s = clock.monotonic_s()
            cells = [(leaf, [(leaf.boxes[0].box, block)]) for leaf, block in zip(leaves, self._blocks, strict=True)]
            writer = CellWriter(f"{place}/{_ITEM}", profile, expected=cells)
            for leaf, blocks in cells:
                writer.add(leaf, blocks, describe=True)
            writer.commit()
            written_s = clock.monotonic_s()
            reader = CellReader(place, profile)
            reader.expect([(_ITEM, leaf, leaf.boxes[0], leaf.boxes[0].box) for leaf in leaves])
            for leaf in leaves:
                assert reader.fetch(_ITEM, leaf, leaf.boxes[0].box) is not None
            return written_s - began_s, clock.monotonic_s() - written_s

    @contextmanager
    def _place(self) -> Iterator[str]:
        place = f"{self._url}/{paths.SIDECAR_DIR}/tune-{uuid.uuid4().hex[:8]}"
        on_disk = properties_of(place).file_system
        new = on_disk and not os.path.isdir(self._url)
        if on_disk:
            os.makedirs(f"{place}/{_ITEM}")
        try:
            yield place
        finally:
            if on_disk:
                shutil.rmtree(place, ignore_errors=True)
                with suppress(OSError):  # what else is kept there stays
                    os.rmdir(os.path.dirname(place))
                    if new:
                        os.rmdir(self._url)
            else:
                store = small_objects(place, DurableProfile())
                store.delete_many(store.list_all(""))


def _leaf(name: str, block: np.ndarray) -> LeafRecord:
    shape, dtype = block.shape, block.dtype.name
    box = BoxRecord(box=Box.whole(shape), offset=-1, digests=())
    return LeafRecord(path=(name,), keys="d", kind="jax", shape=shape, dtype=dtype, cell=shape, boxes=(box,))
