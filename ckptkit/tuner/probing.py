"""How fast a storage takes and gives back bytes, with a given profile: through the very writer and reader of saves."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import numpy as np

from ckptkit.durable.cells.reader import CellReader
from ckptkit.durable.cells.tensorstore_wait import small_objects
from ckptkit.durable.cells.writer import CellWriter
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.store.schemes import properties_of
from ckptkit.util import clock

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
        """Each profile, by turns, `rounds` times after one that does not count."""
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
