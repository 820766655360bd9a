"""Which cells a restore compares with their digests: all, a seeded share of them, or none."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal, final

import xxhash

from ckptkit.model.boxes import Box
from ckptkit.model.manifest import LeafRecord

VerifyMode = Literal["always", "sample", "never"]
_ALL = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Proves each cell of a restore with probability `share`, chosen by `seed` (None: a new one for each restore).

    A fault that touches `k` cells goes unseen with probability `(1 - share) ** k`. With `share=0.1` a flipped bit is
    missed 9 times out of 10, and damage in 50 cells 5 times in 1,000. A fixed seed chooses the same cells of the same
    leaves each time: what it misses once it misses always. If a sample finds damage, everything is verified.
    """

    share: float = 0.1
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"Sample(share={self.share}): give a share between 0 and 1, or verify='always' or 'never'")


Verify = VerifyMode | Sample


@final
@dataclass(frozen=True, slots=True)
class VerifySelection:
    """The choice of one restore. Safe from several threads; the same cell gives the same answer."""

    mode: VerifyMode = "always"
    share: float = 1.0
    seed: int = 0

    def __call__(self, leaf: LeafRecord, cell: Box) -> bool:
        """Whether a cell is compared with its digest."""
        if self.mode != "sample":
            return self.mode == "always"
        return xxhash.xxh3_64_intdigest(f"{self.seed}:{leaf.name}:{cell.start}".encode()) < self.share * _ALL

    @property
    def is_sample(self) -> bool:
        """Whether only some cells are verified, so that found damage may be a sign of more."""
        return self.mode == "sample"

    @property
    def proves_all(self) -> bool:
        """Whether every restored byte is verified."""
        return self.mode == "always"

    def words(self) -> dict[str, Any]:
        """The text in the event of the restore."""
        sample = {"share": self.share, "seed": self.seed} if self.mode == "sample" else {}
        return {"verify": self.mode, **sample}


def checked_verify(verify: Verify) -> Verify:
    """`verify` if it is a mode or a `Sample`; raises ValueError naming them."""
    if isinstance(verify, Sample) or verify in ("always", "sample", "never"):
        return verify
    raise ValueError(f"verify {verify!r}: give 'always', 'sample', 'never' or ckptkit.Sample(share=..., seed=...)")


def begin(verify: Verify) -> VerifySelection:
    """The choice of a restore that begins now."""
    sample = Sample() if verify == "sample" else verify
    if not isinstance(sample, Sample):
        return VerifySelection(mode=sample)
    return VerifySelection(
        mode="sample", share=sample.share, seed=secrets.randbits(32) if sample.seed is None else sample.seed
    )
