"""Read amplification: bytes that have to be read over bytes that are needed, when chunks are read whole. Pure.

A chunk at the end of an array is stored whole, so it counts whole. Bytes are those of the elements in memory; with
compression less is read, before and after alike. One process per device is counted, the finest split: a process with
several devices reads a chunk that they share once at best (TensorStore joins reads that are under way together).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckptkit.conversion.resharding.meshes import Mesh, Spec, box_shape, full_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Amplification:
    """Over the processes of one mesh: all bytes read and needed, and the ratio of the process with the largest."""

    read_bytes: int
    needed_bytes: int
    worst: float

    @property
    def mean(self) -> float:
        """Bytes read over bytes needed of all processes together; 1 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


def read_by_devices(shape: tuple[int, ...], spec: Spec, mesh: Mesh, cell: tuple[int, ...]) -> np.ndarray:
    """For each device, in the mesh's order, the elements that it reads of one array: int64[devices].

    A product over dimensions, for boxes and cells are both grids.
    """
    inner = box_shape(shape, spec, mesh)
    found = np.ones(mesh.devices, np.int64)
    if 0 in shape:
        return found * 0
    for names, rows, step in zip(full_spec(spec, len(shape)), inner, cell, strict=True):
        low = mesh.part_of_devices(names) * rows
        found *= ((low + rows - 1) // step - low // step + 1) * step
    return found


_remembered = lru_cache(maxsize=4096)(read_by_devices)  # a model has many leaves of few kinds

Laid = tuple[tuple[int, ...], Spec, tuple[int, ...], int]  # shape, spec, cell, bytes per element


def amplification(leaves: Sequence[Laid], mesh: Mesh) -> Amplification:
    """Of a whole checkpoint on one mesh. Cost: one array of the mesh's size for each kind of leaf."""
    counts: dict[Laid, int] = {}
    for leaf in leaves:
        counts[leaf] = counts.get(leaf, 0) + 1
    read = np.zeros(mesh.devices, np.int64)
    needed = 0
    for (shape, spec, cell, itemsize), count in counts.items():
        read += _remembered(shape, spec, mesh, cell) * (itemsize * count)
        needed += math.prod(box_shape(shape, spec, mesh)) * itemsize * count
    worst = float(read.max()) / needed if needed else 1.0
    return Amplification(read_bytes=int(read.sum()), needed_bytes=needed * mesh.devices, worst=worst)
