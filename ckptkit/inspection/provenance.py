"""The provenance of a save from its manifests: what its processes ran with, and its meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckptkit.inspection.places import readable
from ckptkit.inspection.words import sharding_words
from ckptkit.model.manifest import Manifest, Writer

_OF_EACH = "command"  # each process has its own: that of the first is shown
_SHOWN_MAX = 4  # values of one name


def provenance_of(writers: Sequence[Writer], manifest: Manifest) -> dict[str, str]:
    """By name, what the processes ran with, and under `mesh` the axes of the meshes in one of their manifests, the most
    used first.

    Where processes differ, the value names how many had which. Empty for a save without provenance. Raises
    `CorruptCheckpointError` for a sharding that no writer writes.
    """
    told = [writer.provenance for writer in writers if writer.provenance]
    if not told:
        return {}
    found = {name: _together(name, [each.get(name, "unknown") for each in told]) for name in told[0]}
    meshes = _meshes(manifest)
    return {**found, "mesh": "; ".join(meshes)} if meshes else found


def _together(name: str, values: Sequence[str]) -> str:
    counts = Counter(values)
    if name == _OF_EACH or len(counts) == 1:
        return values[0]
    shown = [f"{value} ({count} of {len(values)} processes)" for value, count in counts.most_common(_SHOWN_MAX)]
    return ", ".join(shown) + ", ..." * (len(counts) > _SHOWN_MAX)


def _meshes(manifest: Manifest) -> list[str]:
    texts = Counter(
        text
        for leaves in manifest.arrays.values()
        for leaf in leaves
        if (text := leaf.extra.get("sharding")) is not None
    )
    counts = Counter[str]()
    with readable("a sharding"):
        for text, count in texts.items():
            counts[sharding_words(text).partition(") on ")[2]] += count
    return [mesh for mesh, _ in counts.most_common(_SHOWN_MAX) if mesh]
