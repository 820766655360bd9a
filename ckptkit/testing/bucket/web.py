"""Between aiohttp and the API: one handler that routes, lets faults happen, answers and logs."""

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.api import Api
from ckptkit.testing.bucket.batch import Batches, refuse
from ckptkit.testing.bucket.call import (
    Call,
    CallKind,
    Reply,
    Route,
    error_reply,
    json_reply,
    partial_reply,
    resolve,
    split_target,
)
from ckptkit.testing.bucket.delivery import Delivery, Interrupted, reset
from ckptkit.testing.bucket.faults import Effect, FaultPlan, Hang, Reset
from ckptkit.testing.bucket.injector import Injector, TokenBucket
from ckptkit.testing.bucket.log import Exchange, RequestLog
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.sessions import Sessions
from ckptkit.testing.bucket.upload import Opening, Uploads, read_small

SMALL_BODY_LIMIT_BYTES: Final = 8 << 20  # every body but an upload's
HEADER_LIMIT_BYTES: Final = 16 * 1024  # ours: Google publishes none for this API
TARGET_LIMIT_BYTES: Final = 16 * 1024
_GONE_POLL_S: Final = 0.1
_UPLOADS: Final = frozenset({"media", "multipart", "resumable", "chunk", "abandon", "refuse"})


@final
class RequestBody:
    """The body of a request: counted, paced by the shared bandwidth, and cut off at the place that the script gives."""

    def __init__(self, content: StreamReader, shared: TokenBucket) -> None:
        self._content = content
        self._shared = shared
        self.cut_bytes: int | None = None  # `Interrupted` is raised instead of reading on after so many
        self.received_bytes = 0

    async def read(self) -> bytes:
        """The next bytes, none at the end."""
        if self.cut_bytes is None:
            chunk = await self._chunk()
        elif self.cut_bytes > self.received_bytes:
            chunk = await self._content.read(self.cut_bytes - self.received_bytes)
        else:
            raise Interrupted
        self.received_bytes += len(chunk)
        await self._shared.take(len(chunk))
        return chunk

    async def _chunk(self) -> bytes:
        # An empty chunk that does not end the body only marks a border of chunked encoding.
        while True:
            chunk, _ = await self._content.readchunk()
            if chunk or self._content.at_eof():
                return chunk


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """The log entry of a request; filled in during the request."""

    body: RequestBody
    route: Route
    name: str = ""
    status: int = 0
    effect: Effect | None = None
    delivery: Delivery | None = None
    noted: bool = False
    started_s: float = field(default_factory=time.monotonic)


@final
class Web:
    """The handler of every connection; used from the server's event loop only."""

    def __init__(self, store: ObjectStore, injector: Injector, log: RequestLog, url: str = "") -> None:
        self._api = Api(store)
        self.sessions = Sessions(store)
        self._uploads = Uploads(store, self.sessions)
        self._batches = Batches(self._api, injector, log)
        self._injector = injector
        self._log = log
        self.stopped = asyncio.Event()  # releases the requests that never get an answer
        self.url = url
        self.defects: list[Exception] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request; raises only if the connection is lost."""
        exchange = _Exchange(
            body=RequestBody(request.content, self._injector.upload),
            route=Route(kind=CallKind.UNKNOWN, method=request.method, action=""),
        )
        try:
            return await self._serve(request, exchange)
        except ConnectionError:
            exchange.status = 0
            self._note(exchange)
            reset(request)
            return web.Response()  # never sent: the connection is closed

    async def _serve(self, request: web.BaseRequest, exchange: _Exchange) -> web.StreamResponse:
        reply = await self._reply(request, exchange)
        exchange.status = reply.status
        note = partial(self._note, exchange)
        exchange.delivery = Delivery(request, self._injector.download, note)
        return await exchange.delivery.send(reply, exchange.effect)

    async def _reply(self, request: web.BaseRequest, exchange: _Exchange) -> Reply:
        try:
            return await self._answer(request, exchange)
        except errors.GoogleError as error:
            return error_reply(error, exchange.route.action)
        except (web.RequestPayloadError, HttpProcessingError):
            return error_reply(errors.invalid("Malformed request body."), exchange.route.action)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the top of a request: kept, and raised when the server closes
            self.defects.append(error)
            return error_reply(errors.by_status(500), exchange.route.action)

    def _note(self, exchange: _Exchange) -> None:
        if not exchange.noted and exchange.route.kind is not CallKind.ADMIN:
            exchange.noted = True
            transport = Exchange(
                received_bytes=exchange.body.received_bytes,
                sent_bytes=0 if exchange.delivery is None else exchange.delivery.sent_bytes,
                started_s=exchange.started_s,
                elapsed_s=time.monotonic() - exchange.started_s,
            )
            self._log.add(exchange.route, exchange.name, exchange.status, exchange.effect, transport)

    async def _answer(self, request: web.BaseRequest, exchange: _Exchange) -> Reply:
        _check_head(request)
        path, query = split_target(request.raw_path)
        route = exchange.route = resolve(request.method, path, query)
        exchange.name = route.name
        if "100-continue" in request.headers.get("Expect", "").lower():
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        call = Call(
            method=request.method,
            path=path,
            query=query,
            headers=request.headers,
            base_url=f"http://{request.headers['Host']}" if request.headers.get("Host") else self.url,
        )
        if route.kind is CallKind.ADMIN:
            return await self._administer(route, exchange.body)
        opening = await self._open(call, route, exchange.body)
        exchange.name = opening.name
        return await self._undergo(request, exchange, call, opening)

    async def _open(self, call: Call, route: Route, body: RequestBody) -> Opening:
        if route.action in _UPLOADS:
            return await self._uploads.open(call, route, body)
        content = await read_small(body, SMALL_BODY_LIMIT_BYTES)
        return Opening(name=route.name, finish=partial(self._handle, replace(call, body=content), route))

    async def _handle(self, call: Call, route: Route) -> Reply:
        if route.kind is CallKind.BATCH:
            return self._batches.handle(call)
        if route.kind is CallKind.COMPOSE:  # the only verb that moves bytes
            return await asyncio.to_thread(self._api.handle, call, route)
        return self._api.handle(call, route)

    async def _undergo(self, request: web.BaseRequest, exchange: _Exchange, call: Call, opening: Opening) -> Reply:
        delay_s, effect = self._injector.decide(exchange.route.kind, opening.name)
        exchange.effect = effect
        if delay_s:
            await self._wait(request, delay_s)
        await self._strike(request, effect, "before")
        if isinstance(effect, Reset) and effect.stage == "upload":
            exchange.body.cut_bytes = effect.after_bytes
        reply = partial_reply(call, await opening.finish())
        try:
            await self._strike(request, effect, "after")
        except BaseException:
            if reply.span is not None:
                reply.span.file.close()
            raise
        return reply

    async def _strike(self, request: web.BaseRequest, effect: Effect | None, stage: str) -> None:
        refuse(effect, stage=stage)
        if isinstance(effect, Reset) and effect.stage == stage:
            raise Interrupted
        if isinstance(effect, Hang) and effect.stage == stage:
            await self._wait(request, float("inf"))
            raise Interrupted

    async def _wait(self, request: web.BaseRequest, duration_s: float) -> None:
        """Wait, unless the client disconnected or the server stops."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + duration_s
        while (left_s := end_s - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left_s, _GONE_POLL_S)):
                    await self.stopped.wait()
            except TimeoutError:
                if request.transport is None or request.transport.is_closing():
                    raise Interrupted from None
            else:
                raise Interrupted

    async def _administer(self, route: Route, body: RequestBody) -> Reply:
        content = await read_small(body, SMALL_BODY_LIMIT_BYTES)
        match route.method, route.action:
            case "POST", "faults":
                try:
                    self._injector.set_plan(FaultPlan.from_json(json.loads(content)))
                except (ValueError, RecursionError) as error:
                    raise errors.invalid(f"Invalid fault plan: {error}") from error
                return json_reply(self._injector.plan.as_json())
            case "GET", "faults":
                return json_reply({"plan": self._injector.plan.as_json(), "fired": self._injector.fired()})
            case "GET", "log":
                return json_reply(self._log.as_json())
            case "DELETE", "log":
                self._log.clear()
                return Reply(status=204)
            case _:
                raise errors.no_such_path()


def _check_head(request: web.BaseRequest) -> None:
    if len(request.raw_path) > TARGET_LIMIT_BYTES:
        raise errors.by_status(414)
    if sum(len(name) + len(value) for name, value in request.raw_headers) > HEADER_LIMIT_BYTES:
        raise errors.by_status(413)
