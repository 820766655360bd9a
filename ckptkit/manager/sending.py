"""One process's part of what replicas share: its stream, read ahead and packed, and the others' unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import final

import numpy as np
import xxhash

from ckptkit import clock
from ckptkit.assembly import Assembly
from ckptkit.manager.preparing import Prepared
from ckptkit.manager.taken import DURABLE
from ckptkit.plan import BoxRead, Key, RestorePlan, plan_restore
from ckptkit.reading import Rejected, execute
from ckptkit.rounds import Piece, Stream
from ckptkit.sharding import Box

DIGEST_BYTES = 16  # at the head of each window: of what it holds
_AHEAD = 2  # windows that are read while one is sent
_MEASURED_BYTES = 16 << 20  # or what may be read ahead: a request's latency is little beside the time that they take


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
    """Reads the stream of this process, window by window, on one thread, at most `_AHEAD` windows before it is sent."""

    def __init__(self, sending: Sending, prepared: Prepared, rejected: Rejected, assembly: Assembly):
        self.read_bytes: dict[str, int] = {}
        self.announced: set[tuple[Key, Box]] = set()
        self._sending = sending
        self._prepared = prepared
        self._rejected = rejected
        self._assembly = assembly
        self._reads: dict[tuple[Key, Box], BoxRead] = {}
        self._blocks: dict[tuple[Key, Box], np.ndarray] = {}  # read, and not sent to the end
        self._measured = 0  # windows
        self._measured_s = 0.0
        self._measured_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-broadcast")
        self._windows: dict[int, Future[None]] = {}
        self._submit(0)

    @property
    def storage_rate(self) -> float | None:
        """Bytes per second from the durable tier while all read and nobody sent; None where none was read."""
        return self._measured_bytes / max(self._measured_s, 1e-9) if self._measured_bytes else None

    def go_on(self) -> None:
        """Reads ahead, once it is known that it will be sent; until then what is read is measured alone."""
        for number in range(1, min(1 + _AHEAD, self._sending.rounds)):
            self._submit(number)

    def fill(self, number: int, window: np.ndarray) -> None:
        """Writes a window of the stream, behind its digest, into `window`; raises what kept it from being read."""
        self._windows.pop(number).result()
        if number and number + _AHEAD < self._sending.rounds:
            self._submit(number + _AHEAD)
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
            self._read_measured()
            return
        if number == 1:
            self._announce(range(self._measured, self._sending.rounds))
        if number >= self._measured:
            self._execute(self._part([number]))

    def _read_measured(self) -> None:
        """The first windows, timed without what it takes to open the step: one piece is read before."""
        self._plan_all()
        size = 0
        for number in range(self._sending.rounds):
            self._measured = number + 1
            size += sum(piece.nbytes for piece in self._sending.own.begins_in(number))
            if size >= _MEASURED_BYTES or number == _AHEAD:
                break
        plan = self._part(range(self._measured))
        least = min(plan.reads, key=lambda read: read.nbytes, default=None)
        if least is None:
            return
        self._execute(replace(plan, reads=(least,)))
        rest = replace(plan, reads=tuple(read for read in plan.reads if read is not least))
        self._announce_plan(rest)
        began_s = clock.monotonic_s()
        self._measured_bytes = self._execute(rest).get(DURABLE, 0)
        self._measured_s = clock.monotonic_s() - began_s

    def _execute(self, plan: RestorePlan) -> Mapping[str, int]:
        read_bytes = execute(plan, self._prepared.holdings.readers, self._rejected, self._proven)
        for tier, size in read_bytes.items():
            self.read_bytes[tier] = self.read_bytes.get(tier, 0) + size
        return read_bytes

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

    def _part(self, numbers: Iterable[int]) -> RestorePlan:
        """What has to be read for some windows that was not read for the one before."""
        begun = [piece for number in numbers for piece in self._sending.own.begins_in(number)]
        return replace(self._prepared.plan, reads=tuple(self._reads[piece.key, piece.box] for piece in begun))

    def _announce(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._announce_plan(self._part([number]))

    def _announce_plan(self, plan: RestorePlan) -> None:
        if (expect := self._prepared.holdings.expect) is not None:
            expect(plan.first_reads(len(plan.tiers) - 1))
            self.announced |= {(read.key, read.wanted) for read in plan.reads}
