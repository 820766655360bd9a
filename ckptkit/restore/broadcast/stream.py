"""One process's part of what replicas share: its stream, read ahead and packed, and the others' unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import final

import numpy as np
import xxhash

from ckptkit.model.boxes import Box
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast.schedule import Stream
from ckptkit.restore.plan import BoxRead, Key, Piece, RestorePlan, plan_restore
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.read import OnRejected, execute

DIGEST_BYTES = 16  # at the head of each window: of what it holds


@final
class Sending:
    """The streams of one group, as this process sends and receives them."""

    def __init__(self, *, group: tuple[int, ...], streams: Mapping[int, Stream], rounds: int, process: int):
        self.group = group
        self.rounds = rounds
        self.own = streams[process]
        self._streams = streams
        self._process = process
        self._parts: dict[Piece, np.ndarray] = {}  # that have come in part
        self._spoilt: set[Piece] = set()

    def unpack(self, number: int, received: np.ndarray, assembly: Assembly, damaged: Callable[[int], None]) -> int:
        """Delivers the pieces of others that are whole with this round, and as they were sent; returns their bytes."""
        came_bytes = 0
        for process, window in zip(self.group, received, strict=True):
            stream = self._streams[process]
            filled = stream.filled(number)
            if process == self._process or not filled:
                continue
            payload = window[DIGEST_BYTES : DIGEST_BYTES + filled]
            whole = xxhash.xxh3_128_digest(payload.data) == window[:DIGEST_BYTES].tobytes()
            if not whole:
                damaged(process)
            for piece, start, stop, at in stream.in_window(number):
                if not whole:
                    self._spoilt.add(piece)
                    continue
                if piece not in self._parts:
                    self._parts[piece] = assembly.piece(piece)
                block = self._parts[piece]
                block.reshape(-1).view(np.uint8)[start:stop] = payload[at : at + stop - start]
                if stop == piece.nbytes:
                    del self._parts[piece]
                    if piece not in self._spoilt:
                        came_bytes += piece.nbytes
                        assembly.deliver(piece.key, {piece.box: block})
        return came_bytes


@final
class StreamReader:
    """Reads the stream of this process, window by window, on one thread, at most `ahead` windows before it is sent."""

    def __init__(self, sending: Sending, prepared: Prepared, rejected: OnRejected, assembly: Assembly, ahead: int):
        self.read_bytes: dict[str, int] = {}
        self.announced: set[tuple[Key, Box]] = set()
        self._sending = sending
        self._prepared = prepared
        self._rejected = rejected
        self._assembly = assembly
        self._reads: dict[tuple[Key, Box], BoxRead] = {}
        self._blocks: dict[tuple[Key, Box], np.ndarray] = {}  # read, and not sent to the end
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-broadcast")
        self._windows: dict[int, Future[None]] = {}
        for number in range(min(ahead, sending.rounds)):
            self._submit(number)

    def fill(self, number: int, window: np.ndarray) -> None:
        """Writes a window of the stream, behind its digest, into `window`; raises what kept it from being read."""
        self._windows.pop(number).result()
        if number + self._ahead < self._sending.rounds:
            self._submit(number + self._ahead)
        for piece, start, stop, at in self._sending.own.in_window(number):
            at += DIGEST_BYTES
            flat = self._blocks[piece.key, piece.box].reshape(-1).view(np.uint8)
            window[at : at + stop - start] = flat[start:stop]
            if stop == piece.nbytes:
                del self._blocks[piece.key, piece.box]
        payload = window[DIGEST_BYTES : DIGEST_BYTES + self._sending.own.filled(number)]
        window[:DIGEST_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(payload.data), np.uint8)

    def close(self) -> None:
        """Waits for the end of what is being read; what waits is not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, number: int) -> None:
        self._windows[number] = self._thread.submit(self._read, number)

    def _read(self, number: int) -> None:
        if number == 0:
            self._plan_all()
            for each in range(self._sending.rounds):
                self._announce(self._part(each))
        read_bytes = execute(self._part(number), self._prepared.holdings.readers, self._rejected, self._proven)
        for tier, size in read_bytes.items():
            self.read_bytes[tier] = self.read_bytes.get(tier, 0) + size

    def _proven(self, key: Key, blocks: Mapping[Box, np.ndarray]) -> None:
        for box, block in blocks.items():
            self._blocks[key, box] = block
        self._assembly.deliver(key, blocks)

    def _plan_all(self) -> None:
        wanted: dict[Key, list[Box]] = {}
        for piece in self._sending.own.pieces:
            wanted.setdefault(piece.key, []).append(piece.box)
        plan = plan_restore(self._prepared.plan.save_id, wanted, self._prepared.holdings.sources)
        self._reads = {(read.key, read.wanted): read for read in plan.reads}

    def _part(self, number: int) -> RestorePlan:
        """The additional reads for a window, beyond those for the one before."""
        begun = self._sending.own.begins_in(number)
        return replace(self._prepared.plan, reads=tuple(self._reads[piece.key, piece.box] for piece in begun))

    def _announce(self, plan: RestorePlan) -> None:
        if (expect := self._prepared.holdings.expect) is not None:
            expect(plan.first_reads(len(plan.tiers) - 1))
            self.announced |= {(read.key, read.wanted) for read in plan.reads}
