"""Meshes and partition specs as plain values: which box of an array each device holds. No device is asked. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that split it; trailing ones may be left out

_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([0-9]{1,7})")
_DEVICES_MAX = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, slowest first, as `jax.make_mesh` takes them."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise ValueError(f"a mesh has axes of different names and sizes of 1 or more, not {self}")
        if self.devices > _DEVICES_MAX:
            raise ValueError(f"mesh {self} has {self.devices} devices, and {_DEVICES_MAX} are the most")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh of `data=2,model=4`; raises ValueError for text that is not a mesh."""
        matches = [_AXIS.fullmatch(part.strip()) for part in text.split(",")]
        if any(match is None for match in matches):
            raise ValueError(f"{text!r} is not a mesh; write its axes and their sizes: data=2,model=4")
        return cls(tuple((match[1], int(match[2])) for match in matches if match is not None))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def devices(self) -> int:
        """How many."""
        return math.prod(size for _, size in self.axes)

    def size(self, names: Sequence[str]) -> int:
        """Into how many parts these axes split a dimension; one that the mesh has not splits nothing."""
        sizes = dict(self.axes)
        return math.prod(sizes.get(name, 1) for name in names)

    def part_of_devices(self, names: Sequence[str]) -> np.ndarray:
        """For each device, in the mesh's order, the index of its part of a dimension that these axes split."""
        grid = np.indices([size for _, size in self.axes]).reshape(len(self.axes), -1)
        sizes, at = dict(self.axes), {name: i for i, (name, _) in enumerate(self.axes)}
        part = np.zeros(self.devices, np.int64)
        for name in names:
            if name in sizes:
                part = part * sizes[name] + grid[at[name]]
        return part


def box_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of every device's box. Raises ValueError where the spec does not fit the shape, as JAX refuses it."""
    if len(spec) > len(shape):
        raise ValueError(f"spec {spec_text(spec)} has {len(spec)} dimensions, and the shape {list(shape)}")
    used = [name for part in spec for name in part]
    if len(set(used)) != len(used):
        raise ValueError(f"spec {spec_text(spec)} uses an axis twice")
    counts = [mesh.size(part) for part in full_spec(spec, len(shape))]
    for size, count in zip(shape, counts, strict=True):
        if size % count:
            raise ValueError(f"spec {spec_text(spec)} on {mesh} splits a dimension of {size} into {count} parts")
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def full_spec(spec: Spec, dimensions: int) -> Spec:
    """The spec with an entry for every dimension."""
    return (*spec, *((),) * (dimensions - len(spec)))


def default_spec(shape: Sequence[int], mesh: Mesh) -> Spec:
    """The largest dimension that all axes together divide, split by them; else by the axes that split one the most.

    The first of equal dimensions; `()` where no axis divides any.
    """
    for names in _subsets(mesh):
        count = mesh.size(names)
        fitting = [size for size in shape if size and size % count == 0]
        if fitting and count > 1:
            axis = list(shape).index(max(fitting))
            return (*((),) * axis, names)
    return ()


@lru_cache(maxsize=256)
def _subsets(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Every choice of axes, in the mesh's order, those that split the most first; beyond 8 axes, runs of axes only."""
    names = [name for name, size in mesh.axes if size > 1]
    found = {tuple(names[a:b]) for a in range(len(names)) for b in range(a + 1, len(names) + 1)}
    if len(names) <= 8:
        found |= {tuple(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(1, 1 << len(names))}
    return tuple(sorted(found, key=lambda each: (-mesh.size(each), [names.index(n) for n in each])))


def spec_text(spec: Spec) -> str:
    """As JAX prints it: `P('data', ('model', 'x'), None)`."""
    words = ["None" if not part else repr(part[0]) if len(part) == 1 else repr(part) for part in spec]
    return f"P({', '.join(words)})"


def sharding_json(spec: Spec, mesh: Mesh) -> str:
    """Orbax's JSON of the sharding. It names no devices: a restoring job uses its own, in JAX's order."""
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": [size for _, size in mesh.axes],
            "axis_names": [name for name, _ in mesh.axes],
            "axis_types": ["AxisType.Auto"] * len(mesh.axes),
            "partition_spec": [None if not part else part[0] if len(part) == 1 else list(part) for part in spec],
        }
    )
