"""Serves the shares of a host to the other processes of its job, over HTTP, in one background thread.

Requests, each with `Authorization: Bearer <secret>`:

    GET /saves/<epoch>.<step>.<number>/<process>/manifest                  the current manifest, ETag names it
    GET /saves/<epoch>.<step>.<number>/<process>/bytes   Range, If-Match   a part of one box of its slot

401 without the secret, 404 for what is not held, 412 for what was superseded, 416 for other bytes, 503 when busy, 507
when full. Copies that others send are taken by `ckptkit.peers.receiver`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, final

from aiohttp import web

from ckptkit.errors import CheckpointError, StoreFullError
from ckptkit.model.manifest import MANIFEST_BYTES_MAX
from ckptkit.peers.share_index import (
    NAMED_SAVE,
    BadRangeError,
    NotHeldError,
    ShareIndex,
    SupersededError,
    save_named,
)
from ckptkit.util import clock

_SAVE = re.compile(rf"/saves/{NAMED_SAVE}/([0-9]{{1,6}})/(manifest|bytes)")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_STATUS: dict[type[CheckpointError], int] = {
    NotHeldError: 404,
    SupersededError: 412,
    BadRangeError: 416,
    StoreFullError: 507,
}
_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on clients. Numbers: requests in work, answers of 8 MiB in memory until they are sent, connections (the
    oldest idle one is closed for a new one). Seconds: for a request, from its first byte to the last of its answer, and
    for an idle connection."""

    transfers_max: int = 8
    answers_max: int = 64
    connections_max: int = 512
    request_s: float = 30.0
    idle_s: float = 30.0
    busy_s: float = 5.0  # of waiting for a turn, before the answer 503 (try again): less than a client's try


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: int
    body: bytes = b""
    tag: str | None = None


Also = Callable[[str, str, str, bytes], Answer | None]  # method, path, Content-Range, body
_LOGGED_EVERY_S = 60.0
BODY_BYTES_MAX = MANIFEST_BYTES_MAX  # what a save may write, a peer can be given; pieces of a copy are smaller


@final
class _OneLine(logging.Filter):
    """Lets one record a minute pass, as a warning of one line: anyone can send requests that aiohttp cannot parse."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record passes; it has lost its traceback then."""
        if record.levelno < logging.WARNING:
            return False
        if clock.monotonic_s() < self._next_s:
            self._left_out += 1
            return False
        error = record.exc_info[1] if record.exc_info else None
        why = str(error or record.getMessage()).splitlines() or [""]
        record.msg = f"peer server: a request was not understood: {why[0][:200]} ({self._left_out} others like it)"
        record.args, record.exc_info = (), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        self._next_s, self._left_out = clock.monotonic_s() + _LOGGED_EVERY_S, 0
        return True


def _request_log() -> logging.Logger:
    """A logger of one server's requests, whose records reach the handlers of `ckptkit`."""
    log = logging.Logger("ckptkit.peers.requests", logging.WARNING)
    log.parent = logging.getLogger("ckptkit")
    log.addFilter(_OneLine())
    return log


@final
class PeerServer:
    """Owner of the thread `ckptkit-peers`. Answers no request before `admit` has given it the job's secret.

    `also` handles requests that are not reads (the receiver of copies); None: without a receiver.
    """

    def __init__(
        self, share_index: ShareIndex, host: str, *, limits: ServerLimits | None = None, also: Also | None = None
    ):
        self._share_index = share_index
        self._limits = limits or ServerLimits()
        self._also = also
        self._secret: bytes | None = None
        self._idle_since: dict[Any, float] = {}  # by connection; aiohttp's allow no weak references
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="ckptkit-peers-read")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ckptkit-peers", daemon=True)
        self._thread.start()
        try:
            self.address = self._call(self._start(host))
        except BaseException:
            self._stop_thread()
            raise

    def admit(self, secret: str) -> None:
        """From now on answers those who know `secret`."""
        self._secret = secret.encode()

    def close(self) -> None:
        """Cuts every connection and joins the thread."""
        if self._loop.is_closed():
            return
        self._call(self._end())
        self._stop_thread()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_S)

    def _stop_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # In the thread.

    async def _start(self, host: str) -> str:
        self._turns = asyncio.Semaphore(self._limits.transfers_max)
        self._answers = asyncio.Semaphore(self._limits.answers_max)
        self._web = web.Server(
            self._handle,
            access_log=None,
            logger=_request_log(),
            keepalive_timeout=self._limits.idle_s,
            lingering_time=0,
        )
        # One address, even for a name with several: the other processes get this one.
        family, *_, place = (await self._loop.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM))[0]
        self._listener = await self._loop.create_server(
            self._connect, str(place[0]), 0, family=family, backlog=self._limits.connections_max
        )
        self._reaper = self._loop.create_task(self._reap())
        address = self._listener.sockets[0].getsockname()
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"

    async def _end(self) -> None:
        self._reaper.cancel()
        self._listener.close()
        for connection in list(self._web.connections):
            _cut(connection)
        await self._web.shutdown(0.5)

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self._web.connections) >= self._limits.connections_max and not self._make_room():
            return _Refusal()
        connection = self._web()
        self._idle_since[connection] = clock.monotonic_s()
        return connection

    def _make_room(self) -> bool:
        """Cuts the connection on which nothing was asked for longest: clients that are done keep theirs for a while,
        and of a thousand hosts the last would not get in. False where all of them are being answered."""
        idle = [each for each in self._idle_since if each.transport is not None]
        if not idle:
            return False
        oldest = min(idle, key=self._idle_since.__getitem__)
        del self._idle_since[oldest]
        _cut(oldest)
        return True

    async def _reap(self) -> None:
        """Cuts connections on which nothing was asked for too long: one that never sends its request, too."""
        while True:
            await asyncio.sleep(min(1.0, self._limits.idle_s / 4))
            for connection, since_s in list(self._idle_since.items()):
                if clock.monotonic_s() - since_s > self._limits.idle_s:
                    _cut(connection)
                    self._idle_since.pop(connection, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._idle_since.pop(connection, None)  # while it is being answered, the request's own limit holds
        response = web.StreamResponse()
        try:
            async with asyncio.timeout(self._limits.request_s), AsyncExitStack() as sent:
                answer = await self._answer(request, sent)
                response.set_status(answer.status)
                response.content_length = len(answer.body)
                if answer.tag is not None:
                    response.headers["ETag"] = f'"{answer.tag}"'
                if answer.status >= 400:
                    response.force_close()  # what may follow on it is not read
                await response.prepare(request)
                await response.write(answer.body)
                await response.write_eof()
        except TimeoutError:
            _cut(connection)
        finally:
            self._idle_since[connection] = clock.monotonic_s()
        return response

    async def _answer(self, request: web.BaseRequest, sent: AsyncExitStack) -> Answer:
        """The answer; what it takes in memory is given back when `sent` ends."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._secret is None or not hmac.compare_digest(given, b"Bearer " + self._secret):
            return Answer(401)
        try:
            # Not wait_for: until Python 3.12 it swallows a cancellation that coincides with the end of its task. The
            # request's own limit, if it expires in that moment, would never end it.
            async with asyncio.timeout(self._limits.busy_s):
                await sent.enter_async_context(self._answers)
                await self._turns.acquire()
        except TimeoutError:
            return Answer(503)
        try:
            return await self._told(request)
        except asyncio.IncompleteReadError:
            return Answer(400)
        except tuple(_STATUS) as error:
            return Answer(_STATUS[type(error)], str(error).encode())
        finally:
            self._turns.release()

    async def _told(self, request: web.BaseRequest) -> Answer:
        named = _SAVE.fullmatch(request.path)
        if request.method != "GET" or named is None:
            return await self._ask_also(request)
        save_id, process = save_named(named[1]), int(named[2])
        if named[3] == "manifest":
            tag, text = await self._in_pool(self._share_index.manifest, save_id, process)
            return Answer(200, text, tag)
        asked = _RANGE.fullmatch(request.headers.get("Range", ""))
        if asked is None:
            return Answer(416)
        tag = request.headers.get("If-Match", "").strip('"')
        data = await self._in_pool(self._share_index.read, save_id, process, tag, int(asked[1]), int(asked[2]) + 1)
        return Answer(206, data, tag)

    async def _ask_also(self, request: web.BaseRequest) -> Answer:
        length = request.content_length
        if self._also is None or length is None or length > BODY_BYTES_MAX:
            return Answer(404 if self._also is None or length is None else 413)
        body = await request.content.readexactly(length)
        said = request.headers.get("Content-Range", "")
        return await self._in_pool(self._also, request.method, request.path, said, body) or Answer(404)

    async def _in_pool(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._loop.run_in_executor(self._pool, function, *args)


class _Refusal(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ends it."""
        transport.close()


def _cut(connection: Any) -> None:
    if connection.transport is not None:
        connection.transport.abort()
