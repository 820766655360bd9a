"""The one interface of every format: a checkpoint is a set of named tensors that are read box by box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, final

import numpy as np

from ckptkit.errors import CheckpointError, CorruptCheckpointError, MemoryBudgetError
from ckptkit.inspection.records import SaveOrigin
from ckptkit.model.boxes import Box, blocks_of, cell_shape, pieces_of
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.model.manifest import describe
from ckptkit.util.words import first_of

Format = Literal["orbax", "slot", "safetensors", "npz", "msgpack", "torch"]

MEMORY_BYTES = 1 << 30  # the default budget of everything that reads or writes tensors
LEAVES_MAX = 500_000  # of one checkpoint: about 1 KiB of memory each
DEPTH_MAX = 64  # of nested containers
_NAMED = 5  # in a note
_BLOCK_SHARE = 8  # of the budget: what is read, what is made of it, and what libraries hold meanwhile
_BLOCK_BYTES_MAX = 32 << 20  # larger blocks were not faster, and three to six of them are in memory at a time
CELL_SHARE = 4  # of the budget: a zarr chunk is read whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One array of a checkpoint. Nothing of it is in memory until it is read.

    `fetch` reads a box and gives an array of the box's shape and the leaf's dtype. `sources` are the tensors that it is
    computed from: what reading them takes counts for it. `stored` gives the shape of a chunk and the boxes of those
    that exist, where a writer may leave out those of its fill value.
    """

    item: str
    leaf: LeafInfo
    fetch: Callable[[Box], np.ndarray]
    sources: tuple[Tensor, ...] = ()
    stored: Callable[[], tuple[tuple[int, ...], Sequence[Box]]] | None = None

    @property
    def name(self) -> str:
        """The leaf's."""
        return self.leaf.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        assert self.leaf.shape is not None
        return self.leaf.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in memory: small integers take a byte each."""
        return np.dtype(self.leaf.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in memory."""
        return self.leaf.array_bytes

    def read(self, box: Box | None = None) -> np.ndarray:
        """A box, or all of it, in memory; the array is contiguous.

        Raises `CorruptCheckpointError` where the bytes are not there, cannot be decoded or do not match their digest,
        `StoreError` where they cannot be reached.
        """
        box = Box.whole(self.shape) if box is None else box
        if self.leaf.cell is None or self.sources or not box.size:
            return self._fetched(box)
        pieces = list(pieces_of(box, self._cell, 2 * box.size))  # a box may touch many chunks and be small
        if len(pieces) == 1:
            return self._fetched(box)
        made = np.empty(box.shape, self.dtype)
        for piece in pieces:
            made[piece.slices(box.start)] = self._fetched(piece)
        return made

    def _fetched(self, box: Box) -> np.ndarray:
        found = np.ascontiguousarray(self.fetch(box)).reshape(box.shape)
        if found.dtype != self.dtype:
            raise CorruptCheckpointError(f"leaf {self.name} is {found.dtype} where {self.dtype} was announced")
        return found

    def blocks(self, memory_bytes: int) -> Iterator[Box]:
        """Boxes in C order that together are the array, each small enough for a budget of `memory_bytes`.

        A box is a whole number of the chunks that are read whole, so that no byte is read twice. Raises
        `MemoryBudgetError` for a chunk above a quarter of the budget.
        """
        yield from blocks_of(self.shape, self.block_shape(memory_bytes))

    def block_shape(self, memory_bytes: int) -> tuple[int, ...]:
        """The shape of these boxes."""
        limit = block_bytes(memory_bytes)
        check_chunk(self.name, self.chunk_bytes, memory_bytes)
        if self.leaf.cell is None:
            return cell_shape(self.shape, self.shape, self.widest_bytes, limit)
        check_chunk(self.name, math.prod(self._cell) * self.dtype.itemsize, memory_bytes)  # and what becomes of one
        return _grown(self._cell, self.shape, self.widest_bytes, limit)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk that is read whole for a box; 0 where none is."""
        if self.sources:
            return max(source.chunk_bytes for source in self.sources)
        return 0 if self.leaf.cell is None else math.prod(self._cell) * self.dtype.itemsize

    @property
    def widest_bytes(self) -> int:
        """Bytes of an element where it is widest: before a cast, or after it."""
        return max([self.dtype.itemsize, *(source.widest_bytes for source in self.sources)])

    @property
    def _cell(self) -> tuple[int, ...]:
        assert self.leaf.cell is not None
        return tuple(max(1, min(a, b)) for a, b in zip(self.leaf.cell, self.shape, strict=True))


@final
class Checkpoint:
    """An open checkpoint: its tensors by name, and what it has besides. A context manager, which closes its files.

    `others` are leaves that are not arrays (text, None, empty containers). `values` are small items by name. `sources`
    are the paths whose files are read; a checkpoint that was assembled from several has all their paths. `tensors` by
    name keep these names.
    """

    def __init__(
        self,
        *,
        path: str,
        format: Format,
        tensors: Sequence[Tensor] | Mapping[str, Tensor],
        layout: str,
        others: Sequence[tuple[str, LeafInfo]] = (),
        facts: FormatFacts | None = None,
        sources: Sequence[str] = (),
        close: Callable[[], None] = lambda: None,
    ):
        self.path = path
        self.sources = tuple(sources) or (path,)
        self.format: Format = format
        self._named = dict(tensors) if isinstance(tensors, Mapping) else None
        self.tensors = tuple(tensors.values() if isinstance(tensors, Mapping) else tensors)
        self.layout = layout
        self.others = tuple(others)
        self.facts = facts or FormatFacts()
        self._close = close

    @property
    def proven(self) -> bool:
        """Whether all that is read is compared with digests of when it was saved."""
        return self.format == "slot" or self.facts.origin.proven

    def by_name(self) -> dict[str, Tensor]:
        """The tensors by name; of several array items, `item.name`. Raises `CheckpointError` if two have one name."""
        if self._named is not None:
            return dict(self._named)
        several = len({tensor.item for tensor in self.tensors}) > 1
        named: dict[str, Tensor] = {}
        for tensor in self.tensors:
            name = f"{tensor.item}.{tensor.name}" if several else tensor.name
            if name in named:
                raise CheckpointError(
                    f"{self.path} has two leaves of the name {name}: {_described(named[name])}, and "
                    f"{_described(tensor)}; keys that differ only in their type, or in dots, give one name. Rename one "
                    "of them where the file was written",
                    path=self.path,
                )
            named[name] = tensor
        return named

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()


def _described(tensor: Tensor) -> str:
    """The keys that lead to a leaf, one by one, and what is there."""
    return f"{list(tensor.leaf.path)} of item {tensor.item}, {describe(tensor.dtype.name, tensor.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """The facts that a checkpoint records besides its tensors. `unread`: items that only their own handlers read.

    `stored_bytes`: of the file, or of those files of a directory that have tensors; None for an Orbax directory or a
    slot, whose items have sizes of their own.
    """

    kind: Literal["step", "item", "slot", "file", "directory"] = "file"
    step: int | None = None
    origin: SaveOrigin = field(default_factory=lambda: SaveOrigin(writer="unknown"))
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    stored_bytes: int | None = None


def left_out(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """A note on the parts of a file that are neither read nor converted; none without `names`."""
    return (f"not read: {what}: {first_of(names, _NAMED)}",) if names else ()


def check_chunk(name: str, chunk_bytes: int, memory_bytes: int) -> None:
    """Raises `MemoryBudgetError` for a chunk above a quarter of the budget: what is made of it has to fit too."""
    if chunk_bytes > memory_bytes // CELL_SHARE:
        raise MemoryBudgetError(
            f"leaf {name} has chunks of {chunk_bytes} bytes, which are read whole, and a quarter of the memory budget "
            f"is {memory_bytes // CELL_SHARE}; give --memory at least {chunk_bytes * CELL_SHARE} bytes"
        )


def block_bytes(memory_bytes: int) -> int:
    """How many bytes of one tensor are held at once under a budget."""
    return max(1, min(memory_bytes // _BLOCK_SHARE, _BLOCK_BYTES_MAX))


def _grown(cell: tuple[int, ...], shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """`cell` times whole numbers, the last dimensions first, up to `limit` bytes: longer runs in C order."""
    grown = list(cell)
    for axis in reversed(range(len(shape))):
        row_bytes = max(1, math.prod(grown) * itemsize)
        if row_bytes >= limit:
            break
        times = min(limit // row_bytes, -(-shape[axis] // grown[axis]))
        grown[axis] = max(1, min(grown[axis] * max(1, times), shape[axis]))
        if grown[axis] < shape[axis]:
            break
    return tuple(grown)
