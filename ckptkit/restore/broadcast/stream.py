"""One process's part of what replicas share: its stream, read ahead and packed, and the others' unpacked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import final

import numpy as np
import xxhash

from ckptkit.model.boxes import Box
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast.cost_model import rate_of
from ckptkit.restore.broadcast.schedule import Stream
from ckptkit.restore.plan import BoxRead, Key, Piece, RestorePlan, plan_restore
from ckptkit.restore.prepare import Prepared
from ckptkit.restore.read import OnRejected, execute
from ckptkit.util import clock

DIGEST_BYTES = 16  # at the head of each window: of what it holds
_MEASURED_BYTES = 64 << 20  # asked for at once, or what may be read ahead: some requests of 16 MiB side by side
_REQUEST_BYTES = 64 << 10  # smaller values may be in the tree, and are read with it
_REQUESTS = 8  # of 16 MiB in `DurableProfile.read_ahead_bytes`
_REQUEST_MIN_BYTES = 1 << 20
_APART_S = 0.003  # TensorStore joins what comes within 1 ms
_PART_S = 0.5  # the reads besides its own stream: a process that is ready to send does not wait longer for them


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
        self._missing: set[Piece] | None = None  # None: all

    def missing(self, assembly: Assembly) -> list[tuple[int, Piece]]:
        """The pieces of these streams that have not come yet, each behind the byte of its stream at which it begins."""
        missing = assembly.missing()
        placed = (each for stream in self._streams.values() for each in stream.placed)
        return [(start, piece) for start, piece in placed if piece.box in missing.get(piece.key, ())]

    def leave_out_all_but(self, missing: Iterable[tuple[int, Piece]]) -> int:
        """Takes from now on only these pieces; returns how many rounds bring all of them that others read."""
        wanted = self._missing = {piece for _, piece in missing}
        others = (stream for stream in self._streams.values() if stream is not self.own)
        return max(stream.windows_until(wanted.__contains__) for stream in others)

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
                if self._missing is not None and piece not in self._missing:
                    continue
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
        self._measured = 0  # windows
        self._rate: float | None = None
        self._ahead = ahead
        self._reads_on = False
        self._unread_bytes = sum(piece.nbytes for piece in sending.own.pieces)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-broadcast")
        self._windows: dict[int, Future[None]] = {}
        for number in range(min(ahead, sending.rounds)):
            self._submit(number)

    @property
    def storage_rate(self) -> float | None:
        """Bytes per second from the durable tier while all read and nobody sent; None where none was read. Known once
        the first window is."""
        return self._rate

    def unread_bytes(self) -> int:
        """Of the stream of this process, what is not read and proven yet."""
        return self._unread_bytes

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

    def read_on(self) -> None:
        """Reads all that is missing here, after what it may read ahead, until `stop`: what would be sent last first."""
        self._reads_on = True
        self._thread.submit(self._read_missing)

    def stop(self) -> None:
        """Begins to read nothing more of that; what is being read still comes."""
        self._reads_on = False

    def close(self) -> None:
        """Waits for the end of what is being read; what waits is not begun."""
        self.stop()
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
        """The first windows, timed: what they take beyond a short read is what the storage gives.

        The step is opened by an earlier read, of the smallest piece; the short one is the next separate piece.
        """
        self._plan_all()
        size = 0
        for number in range(min(self._ahead, self._sending.rounds)):
            self._measured = number + 1
            size += sum(piece.nbytes for piece in self._sending.own.begins_in(number))
            if size >= _MEASURED_BYTES:
                break
        plan = self._part(range(self._measured))
        by_size = sorted(plan.reads, key=lambda read: read.nbytes)
        requests = [read for read in by_size[1:] if read.nbytes >= _REQUEST_BYTES] or by_size[1:]
        opening, short = by_size[:1], requests[:1]
        rest = replace(plan, reads=tuple(read for read in plan.reads if read not in opening and read not in short))
        self._timed(replace(plan, reads=tuple(opening)))
        some = self._timed(replace(plan, reads=tuple(short)))
        more = self._timed(rest, self._announce_apart)
        if some[0] or more[0]:
            self._rate = rate_of(some, more) if more[0] else rate_of((0, 0.0), some)

    def _read_missing(self) -> None:
        """In parts that take about `_PART_S`; what goes wrong is left to whoever reads it again.

        Of its own stream too, what the budget does not let it keep to be sent: it is read again if it is sent.
        """
        most_bytes = min(_MEASURED_BYTES, int((self._rate or 0.0) * _PART_S))
        part: dict[Key, list[Box]] = {}
        size = 0
        missing = self._sending.missing(self._assembly)
        pieces = [piece for _, piece in sorted(missing, key=lambda each: -each[0])]
        for place, piece in enumerate(pieces):
            if not self._reads_on:
                return
            part.setdefault(piece.key, []).append(piece.box)
            size += piece.nbytes
            if size < most_bytes and place + 1 < len(pieces):
                continue
            try:
                plan = plan_restore(self._prepared.plan.save_id, part, self._prepared.holdings.sources)
                self._announce_plan(plan)
                self._count(execute(plan, self._prepared.holdings.readers, self._rejected, self._assembly.deliver))
            except Exception:  # noqa: BLE001  raised when it is read again, in a vote
                return
            part, size = {}, 0

    def _count(self, read_bytes: Mapping[str, int]) -> None:
        for tier, size in read_bytes.items():
            self.read_bytes[tier] = self.read_bytes.get(tier, 0) + size

    def _timed(
        self, plan: RestorePlan, announce: Callable[[RestorePlan], None] = lambda plan: None
    ) -> tuple[int, float]:
        """Bytes of the durable tier, and the seconds that it took to read and prove them."""
        began_s = clock.monotonic_s()
        announce(plan)
        return self._execute(plan).get(DURABLE, 0), clock.monotonic_s() - began_s

    def _execute(self, plan: RestorePlan) -> Mapping[str, int]:
        read_bytes = execute(plan, self._prepared.holdings.readers, self._rejected, self._proven)
        self._count(read_bytes)
        self._unread_bytes -= sum(read.nbytes for read in plan.reads)
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
        """The additional reads for some windows, beyond those for the one before."""
        begun = [piece for number in numbers for piece in self._sending.own.begins_in(number)]
        return replace(self._prepared.plan, reads=tuple(self._reads[piece.key, piece.box] for piece in begun))

    def _announce_apart(self, plan: RestorePlan) -> None:
        """With as many requests in flight as a process that reads alone: it has more to read, and a storage often
        limits the rate of each request. Reads that are requested together are merged by the store (`durable.cells`)."""
        least_bytes = max(_REQUEST_MIN_BYTES, sum(read.nbytes for read in plan.reads) // _REQUESTS)
        part: list[BoxRead] = []
        size = 0
        for place, read in enumerate(plan.reads):
            part.append(read)
            size += read.nbytes
            if size >= least_bytes or place + 1 == len(plan.reads):
                self._announce_plan(replace(plan, reads=tuple(part)))
                part, size = [], 0
                time.sleep(_APART_S)

    def _announce(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._announce_plan(self._part([number]))

    def _announce_plan(self, plan: RestorePlan) -> None:
        if (expect := self._prepared.holdings.expect) is not None:
            expect(plan.first_reads(len(plan.tiers) - 1))
            self.announced |= {(read.key, read.wanted) for read in plan.reads}
