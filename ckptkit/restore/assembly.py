"""Leaves put together from pieces that come in any order, from here or from other processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from ckptkit.model.boxes import Box
from ckptkit.restore.place import place
from ckptkit.restore.plan import Key, Piece, pieces_of
from ckptkit.restore.tree import Target
from ckptkit.util.pages import empty_block


@final
class Assembly:
    """Places each leaf as soon as its last piece is there. Safe from several threads.

    Host memory: the boxes of leaves that are not whole yet. A piece that is a whole box is taken as it is.
    """

    def __init__(self, targets: Mapping[Key, Target], cells: Mapping[Key, Sequence[int]]):
        self.leaves: dict[Key, Any] = {}  # placed
        self._targets = targets
        self._lock = threading.Lock()
        self._missing = {
            key: {box: wanted for wanted in target.form.boxes for box in pieces_of(wanted, cells[key])}
            for key, target in targets.items()
        }
        self._blocks: dict[Key, dict[Box, np.ndarray]] = {key: {} for key in targets}
        for key, missing in self._missing.items():
            if not missing:  # no elements
                self._place(key)

    def __contains__(self, key: Key) -> bool:
        """Whether the leaf is one of those that are put together here."""
        return key in self._targets

    def missing(self) -> dict[Key, list[Box]]:
        """The pieces that have not come yet, by leaf."""
        with self._lock:
            return {key: list(missing) for key, missing in self._missing.items() if missing}

    def piece(self, piece: Piece) -> np.ndarray:
        """Memory for a piece that comes in parts."""
        return empty_block(piece.box.shape, np.dtype(self._targets[piece.key].form.dtype))

    def deliver(self, key: Key, blocks: Mapping[Box, np.ndarray]) -> None:
        """Takes verified pieces of a leaf; a piece that came before is left out."""
        with self._lock:
            news = [(box, self._missing[key].pop(box), block) for box, block in blocks.items() if self._waits(key, box)]
            for box, wanted, block in news:
                if box == wanted:
                    self._blocks[key][wanted] = block
                    continue
                if wanted not in self._blocks[key]:
                    self._blocks[key][wanted] = empty_block(wanted.shape, block.dtype)
                self._blocks[key][wanted][box.slices(wanted.start)] = block
            whole = bool(news) and not self._missing[key]
        if whole:
            self._place(key)

    def _waits(self, key: Key, box: Box) -> bool:
        return box in self._missing[key]

    def _place(self, key: Key) -> None:
        target, blocks = self._targets[key], self._blocks.pop(key)
        form = target.form
        if 0 in form.shape:
            blocks = {box: empty_block(box.shape, np.dtype(form.dtype)) for box in form.boxes}
        self.leaves[key] = place(target, {box: blocks[box] for box in form.boxes})
