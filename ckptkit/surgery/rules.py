"""The rules of a surgery: which stored leaves go where in a changed model, and which of its leaves begin afresh.

A pattern is one of `ckptkit.conversion.leaf_patterns`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.conversion.leaf_patterns import Rename, matches


@dataclass(frozen=True, slots=True)
class Take:
    """Stored leaves that match go to the leaf of the same name."""

    pattern: str

    def target_of(self, name: str) -> str | None:
        """Where a stored leaf goes; None where the rule does not match."""
        return name if matches(self.pattern, name) else None


@dataclass(frozen=True, slots=True)
class Skip:
    """Stored leaves that match are not read: the new model has no use for them."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Init:
    """Leaves of the new model that match keep the value that they have in it."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Cast:
    """Leaves of the new model that match take their own dtype instead of the stored one.

    Keys are never cast, and complex numbers never to real ones. A Python number takes a stored value without loss, or
    the surgery fails.
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Quantize:
    """Weights that match are int8 or float8_e4m3fn with scales on one side, and floats on the other: those of the new
    model are quantised, those of the checkpoint are read back.

    `pattern` and `scale` name the two leaves of a weight on the side that has scales; the wildcards of `scale` are
    replaced as in `Rename`. By default the leaf with the scales is NAME_scale. Its shape determines which elements
    share a scale: `[1, out]` for a weight `[in, out]` is one for each output channel. `block` has the sizes of the
    blocks along the last dimensions (`(128, 128)`), for shapes that can be of several: the last block of a dimension
    may be cut by the edge.
    Raises ValueError where the wildcards of the two differ, or a size is not positive.
    """

    pattern: str
    scale: str | None = None
    block: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.block is not None and (not self.block or min(self.block) < 1):
            raise ValueError(f"{self.block} is not a block: give positive sizes, such as (128, 128)")
        if self.scale is not None:
            Rename(self.pattern, self.scale)

    def scale_of(self, name: str) -> str | None:
        """The leaf with the scales of a weight; None where the rule does not match."""
        if self.scale is not None:
            return Rename(self.pattern, self.scale).target_of(name)
        return f"{name}_scale" if matches(self.pattern, name) else None


Rule = Take | Rename | Skip | Init | Cast | Quantize
