"""How a state lies over a mesh: bytes per device, and what repeats or splits that should not. Pure values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ckptkit.util.words import count_text

LARGE_BYTES = 1_000_000  # a smaller leaf on every device costs nothing that matters

LayoutProblem = Literal["whole", "idle axis", "split over replicas", "uneven", "unknown axis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One leaf: `spec` has the mesh axes of each dimension, none where the dimension is whole."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    spec: tuple[tuple[str, ...], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that splits the leaf."""
        return tuple(axis for entry in self.spec for axis in entry)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize

    def device_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes on the fullest device; an uneven split leaves the last devices with less."""
        dimensions = list(self.shape)
        for place, entry in enumerate(self.spec[: len(dimensions)]):
            dimensions[place] = -(-dimensions[place] // math.prod(sizes.get(axis, 1) for axis in entry))
        return math.prod(dimensions) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFinding:
    """One thing to look at. `about` is a leaf or an axis; `extra_bytes` what it costs on each device, if anything."""

    problem: LayoutProblem
    about: str
    text: str
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingReport:
    """Bytes of a state over a mesh. `groups`: the first part of the leaves' names to (whole bytes, device bytes)."""

    mesh: Mapping[str, int]
    leaves: int
    whole_bytes: int
    device_bytes: int
    groups: Mapping[str, tuple[int, int]]
    findings: tuple[LayoutFinding, ...]

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "devices": self.devices}

    def __str__(self) -> str:
        share = self.device_bytes * self.devices / self.whole_bytes if self.whole_bytes else 1.0
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        lines = [
            f"mesh {axes}: {count_text(self.devices, 'device')}; {count_text(self.leaves, 'leaf', 'leaves')}, "
            f"{_megabytes(self.whole_bytes)} in all, "
            f"{_megabytes(self.device_bytes)} on a device: {share:.2f} copies of the state"
        ]
        lines += [
            f"  {group}: {_megabytes(whole)} in all, {_megabytes(device)} on a device"
            for group, (whole, device) in self.groups.items()
        ]
        lines += [f"  {each.problem}: {each.text}" for each in self.findings] or ["  nothing to look at"]
        return "\n".join(lines)


def report_layouts(
    layouts: Iterable[Layout], mesh: Mapping[str, int], *, replica_axes: Collection[str] = ("data",)
) -> ShardingReport:
    """The report of leaves over a mesh, given as axis sizes. See `ckptkit.diagnosis.sharding_report`."""
    leaves = list(layouts)
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for leaf in leaves:
        group = groups[leaf.name.split("/")[0]]
        group[0] += leaf.whole_bytes
        group[1] += leaf.device_bytes(mesh)
    return ShardingReport(
        mesh=dict(mesh),
        leaves=len(leaves),
        whole_bytes=sum(leaf.whole_bytes for leaf in leaves),
        device_bytes=sum(leaf.device_bytes(mesh) for leaf in leaves),
        groups={name: (whole, device) for name, (whole, device) in groups.items()},
        findings=(*_idle_axes(leaves, mesh, replica_axes), *_leaf_findings(leaves, mesh, replica_axes)),
    )


def _idle_axes(
    leaves: Sequence[Layout], mesh: Mapping[str, int], replica_axes: Collection[str]
) -> Iterable[LayoutFinding]:
    used = {axis for leaf in leaves if leaf.whole_bytes > LARGE_BYTES for axis in leaf.axes}
    for axis, size in mesh.items():
        if size > 1 and axis not in used and axis not in replica_axes:
            yield LayoutFinding(
                problem="idle axis",
                about=axis,
                text=f"axis {axis} ({size} devices) splits no leaf above 1 MB: where it does not split the batch "
                "either, its devices repeat each other's work",
            )


def _leaf_findings(
    leaves: Sequence[Layout], mesh: Mapping[str, int], replica_axes: Collection[str]
) -> Iterable[LayoutFinding]:
    could_split = math.prod(size for axis, size in mesh.items() if axis not in replica_axes)
    for leaf in sorted(leaves, key=lambda each: (-each.whole_bytes, each.name)):
        shown = f"{leaf.name}: [{','.join(map(str, leaf.shape))}], {_megabytes(leaf.whole_bytes)}"
        if unknown := [axis for axis in leaf.axes if axis not in mesh]:
            yield LayoutFinding(
                problem="unknown axis",
                about=leaf.name,
                text=f"{shown} names axis {unknown[0]}; the mesh has {', '.join(mesh)}",
            )
            continue
        if split := [axis for axis in leaf.axes if axis in replica_axes and mesh[axis] > 1]:
            yield LayoutFinding(
                problem="split over replicas",
                about=leaf.name,
                text=f"{shown} is split over {split[0]}, where every data replica should be whole",
            )
        ways = math.prod(mesh[axis] for axis in leaf.axes)
        if ways == 1 and could_split > 1 and leaf.whole_bytes > LARGE_BYTES:
            yield LayoutFinding(
                problem="whole",
                about=leaf.name,
                text=f"{shown} is whole on every device",
                extra_bytes=leaf.whole_bytes - leaf.whole_bytes // could_split,
            )
        for size, entry in zip(leaf.shape, leaf.spec, strict=False):
            parts = math.prod(mesh[axis] for axis in entry)
            if size % parts:
                yield LayoutFinding(
                    problem="uneven",
                    about=leaf.name,
                    text=f"{shown}: {'x'.join(entry)}={parts} does not divide {size}",
                )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
