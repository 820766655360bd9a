"""Sends an answer, whole or as the fault in force has it."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, final

from aiohttp import web

from ckptkit.testing.bucket.call import Reply, Span
from ckptkit.testing.bucket.faults import Effect, Reset, SlowBody, Truncate
from ckptkit.testing.bucket.injector import QUANTUM_BYTES, TokenBucket

_PIECE_BYTES: Final = 512 * 1024
_LINGER_NOT: Final = struct.pack("ii", 1, 0)  # close() sends RST instead of FIN
_DRAIN_POLL_S: Final = 0.005


class Interrupted(ConnectionError):
    """The exchange ends here: the script or the client closed the connection."""


def reset(request: web.BaseRequest) -> None:
    """Answer with RST; what was not sent yet is lost."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    transport.abort()


@final
class Delivery:
    """One answer in flight; memory is one piece of the body, for bodies of any size."""

    def __init__(self, request: web.BaseRequest, shared: TokenBucket, note: Callable[[], None]) -> None:
        self._request = request
        self._shared = shared
        # Called before the client can see the end, so that who has the answer finds it in the log.
        self._note = note
        self.sent_bytes = 0

    async def send(self, reply: Reply, effect: Effect | None) -> web.StreamResponse:
        """Send `reply`; raises `Interrupted` when the effect cuts it short."""
        try:
            return await self._send(reply, effect)
        finally:
            if reply.span is not None:
                reply.span.file.close()

    async def _send(self, reply: Reply, effect: Effect | None) -> web.StreamResponse:
        size_bytes = len(reply.body) if reply.span is None else reply.span.stop - reply.span.start
        cut = _cut(effect, size_bytes)
        if cut is not None and size_bytes == 0:
            self._end(effect)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        if reply.status not in {204, 304}:
            response.content_length = size_bytes
        bodiless = size_bytes == 0 or self._request.method == "HEAD"
        if bodiless:
            self._note()  # the head, which `prepare` sends, is the end
        writer = await response.prepare(self._request)
        if not bodiless:
            await self._send_body(response, reply, size_bytes if cut is None else cut, effect)
        if cut is not None:
            assert writer is not None
            writer.send_headers()
            await self._drain()
            self._end(effect)
        self._note()
        await response.write_eof()
        return response

    async def _send_body(
        self, response: web.StreamResponse, reply: Reply, size_bytes: int, effect: Effect | None
    ) -> None:
        own = TokenBucket(effect.bytes_per_s if isinstance(effect, SlowBody) else None)
        paced = self._shared.rate is not None or own.rate is not None
        for piece in _pieces(reply, size_bytes, QUANTUM_BYTES if paced else _PIECE_BYTES):
            await self._shared.take(len(piece))
            await own.take(len(piece))
            self.sent_bytes += len(piece)
            if self.sent_bytes == size_bytes:
                self._note()
            await response.write(piece)

    def _end(self, effect: Effect | None) -> NoReturn:
        self._note()
        if isinstance(effect, Truncate) and self._request.transport is not None:
            self._request.transport.close()
        else:
            reset(self._request)
        raise Interrupted

    async def _drain(self) -> None:
        """Wait until the system has what was written, so that a reset loses none of it on this side."""
        while (transport := self._request.transport) is not None and not transport.is_closing():
            assert isinstance(transport, asyncio.WriteTransport)
            if transport.get_write_buffer_size() == 0:
                return
            await asyncio.sleep(_DRAIN_POLL_S)


def _cut(effect: Effect | None, size_bytes: int) -> int | None:
    """How many bytes of the body are sent when it is to break off: always fewer than there are."""
    if isinstance(effect, Truncate) or (isinstance(effect, Reset) and effect.stage == "download"):
        return max(0, min(effect.after_bytes, size_bytes - 1))
    return None


def _pieces(reply: Reply, size_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    span = reply.span
    for start in range(0, size_bytes, piece_bytes):
        stop = min(start + piece_bytes, size_bytes)
        yield reply.body[start:stop] if span is None else _read(span, start, stop)


def _read(span: Span, start: int, stop: int) -> bytes:
    data = os.pread(span.file.fileno(), stop - start, span.start + start)
    assert len(data) == stop - start, "stored bytes are never shortened"
    return data
