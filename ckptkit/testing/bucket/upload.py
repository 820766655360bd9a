"""Uploads: media, multipart and resumable, streamed to disk."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.call import Call, Reply, Route, json_reply, parse_json
from ckptkit.testing.bucket.conditions import ChunkRange, Preconditions, chunk_range, number
from ckptkit.testing.bucket.content import Checksums, Spool
from ckptkit.testing.bucket.multipart import HEAD_LIMIT_BYTES, Body, RelatedBody
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.records import JsonObject, ObjectRecord, check_bucket, check_object, settable_fields
from ckptkit.testing.bucket.resources import object_resource
from ckptkit.testing.bucket.sessions import Plan, Session, Sessions

BATCH_BYTES: Final = 1 << 20  # handed to the threads that write and hash; at most two of them are held


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An upload of which the name is known and nothing is done yet: where faults are decided."""

    name: str
    finish: Callable[[], Awaitable[Reply]]


@final
class Uploads:
    """Answers the `/upload/` paths; used from the server's event loop only."""

    def __init__(self, store: ObjectStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._actions = {
            "media": self._open_media,
            "multipart": self._open_multipart,
            "resumable": self._open_resumable,
            "chunk": self._open_chunk,
            "abandon": self._open_abandon,
            "refuse": self._refuse,
        }

    async def open(self, call: Call, route: Route, body: Body) -> Opening:
        """Read as much of the request as names the object."""
        check_bucket(route.bucket)
        return await self._actions[route.action](call, route, body)

    async def _open_media(self, call: Call, route: Route, body: Body) -> Opening:
        metadata: JsonObject = {
            "contentType": call.headers.get("Content-Type", "application/octet-stream"),
            "contentEncoding": call.query.get("contentEncoding") or call.headers.get("Content-Encoding"),
        }
        name = check_object(route.name)
        return Opening(name=name, finish=partial(self._insert, call, route, name, metadata, body))

    async def _open_multipart(self, call: Call, route: Route, body: Body) -> Opening:
        related = RelatedBody(body, call.headers.get("Content-Type", ""))
        metadata = await related.metadata()
        metadata.setdefault("contentType", related.media_type or "application/octet-stream")
        name = _name(metadata, route)
        return Opening(name=name, finish=partial(self._insert, call, route, name, metadata, related))

    async def _open_resumable(self, call: Call, route: Route, body: Body) -> Opening:
        metadata = parse_json(await read_small(body, HEAD_LIMIT_BYTES))
        metadata.setdefault("contentType", call.headers.get("X-Upload-Content-Type", "application/octet-stream"))
        name = _name(metadata, route)
        return Opening(name=name, finish=partial(self._start, call, route, name, metadata))

    async def _open_chunk(self, call: Call, route: Route, body: Body) -> Opening:
        session = self._sessions.find(call.query["upload_id"], route.bucket)
        return Opening(name=session.plan.name, finish=partial(self._continue, call, route, session.lock, body))

    async def _open_abandon(self, call: Call, route: Route, _body: Body) -> Opening:
        session = self._sessions.find(call.query["upload_id"], route.bucket)
        return Opening(name=session.plan.name, finish=partial(self._abandon, session))

    async def _refuse(self, call: Call, _route: Route, _body: Body) -> Opening:
        raise errors.invalid(f"Invalid value for uploadType: {call.query.get('uploadType', '')[:64]!a}")

    async def _insert(self, call: Call, route: Route, name: str, metadata: JsonObject, body: Body) -> Reply:
        fields = settable_fields(metadata)
        checksums = Checksums.parse(metadata, call.headers)
        conditions = Preconditions.parse(call.query, call.headers)
        spool = self._store.directory(route.bucket).new_spool()
        try:
            await pump(body, spool)
            content = spool.seal()
            checksums.check(content)
            record = self._store.commit(route.bucket, name, spool, content, fields, conditions)
        finally:
            spool.discard()
        return json_reply(object_resource(record, route.bucket, call.base_url))

    async def _start(self, call: Call, route: Route, name: str, metadata: JsonObject) -> Reply:
        session = self._sessions.open(
            Plan(
                bucket=route.bucket,
                name=name,
                fields=settable_fields(metadata),
                checksums=Checksums.parse(metadata, call.headers),
                conditions=Preconditions.parse(call.query, call.headers),
                total_bytes=number(call.headers, "X-Upload-Content-Length"),
            )
        )
        location = f"{call.base_url}/upload/storage/v1/b/{route.bucket}/o?uploadType=resumable&upload_id={session.id}"
        return Reply(headers={"Location": location, "X-GUploader-UploadID": session.id})

    async def _abandon(self, session: Session) -> Reply:
        async with session.lock:
            if session.result is None:
                self._sessions.drop(session)
        return Reply(status=499)  # what Google answers to a cancelled upload

    async def _continue(self, call: Call, route: Route, lock: asyncio.Lock, body: Body) -> Reply:
        async with lock:
            session = self._sessions.find(call.query["upload_id"], route.bucket)  # it may have ended meanwhile
            if session.result is not None:
                return _done(call, session, session.result)
            spool = session.spool
            assert spool is not None
            header = call.headers.get("Content-Range")
            chunk = chunk_range(header) if header else ChunkRange(start=0, stop=None, total=session.plan.total_bytes)
            if chunk.start is not None:
                await _append(spool, chunk, body)
            if not _complete(spool, chunk):
                await asyncio.to_thread(spool.drop_partial_block)
                return _progress(call, spool)
            _check_total(session, spool)
            record = self._sessions.finish(session, spool, Checksums.parse({}, call.headers))
            return _done(call, session, record)


async def pump(body: Body, spool: Spool, *, skip_bytes: int = 0) -> None:
    """Append what arrives, writing and hashing in two threads while more arrives; keeps what came before a break."""
    pending: asyncio.Future[tuple[None, None]] | None = None
    batch: list[bytes] = []
    size_bytes = 0
    try:
        while chunk := await body.read():
            skipped = min(skip_bytes, len(chunk))
            skip_bytes -= skipped
            batch.append(chunk[skipped:] if skipped else chunk)
            size_bytes += len(chunk)
            if size_bytes >= BATCH_BYTES:
                if pending is not None:
                    await pending
                pending = asyncio.gather(asyncio.to_thread(spool.write, batch), asyncio.to_thread(spool.hash, batch))
                batch, size_bytes = [], 0
    finally:
        if pending is not None:
            await pending
        spool.append(batch)


@final
class _LimitedBody:
    """Refuses more bytes than Content-Range promised before any of the excess is stored."""

    def __init__(self, body: Body, limit_bytes: int) -> None:
        self._body = body
        self._left_bytes = limit_bytes

    async def read(self) -> bytes:
        chunk = await self._body.read()
        self._left_bytes -= len(chunk)
        if self._left_bytes < 0:
            raise errors.invalid("Invalid request. There are more bytes than Content-Range announces.")
        return chunk


async def read_small(body: Body, limit_bytes: int) -> bytes:
    """A whole body, or 413 when it is larger than the API takes here."""
    chunks: list[bytes] = []
    size_bytes = 0
    while chunk := await body.read():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise errors.by_status(413)
    return b"".join(chunks)


async def _append(spool: Spool, chunk: ChunkRange, body: Body) -> None:
    start = chunk.start or 0
    if start > spool.size_bytes:
        raise errors.invalid(f"Invalid request. The upload got to byte {spool.size_bytes}, not to {start}.")
    limited = body if chunk.stop is None else _LimitedBody(body, chunk.stop - start)
    # Bytes that are there already are ignored, as by Google.
    try:
        await pump(limited, spool, skip_bytes=spool.size_bytes - start)
    except BaseException:
        await asyncio.to_thread(spool.drop_partial_block)
        raise


def _complete(spool: Spool, chunk: ChunkRange) -> bool:
    if chunk.start is not None and chunk.stop is None:
        return True  # no Content-Range: all in one request
    return chunk.total is not None and spool.size_bytes == chunk.total


def _check_total(session: Session, spool: Spool) -> None:
    expected = session.plan.total_bytes
    if expected is not None and expected != spool.size_bytes:
        raise errors.invalid(f"Invalid request. Expected {expected} bytes, found {spool.size_bytes}.")


def _progress(call: Call, spool: Spool) -> Reply:
    headers = {"Range": f"bytes=0-{spool.size_bytes - 1}"} if spool.size_bytes else {}
    if call.headers.get("X-GUploader-No-308", "").lower() == "yes":  # for clients that follow every 308 by themselves
        return Reply(headers={**headers, "X-Http-Status-Code-Override": "308"})
    return Reply(status=308, headers=headers)


def _done(call: Call, session: Session, record: ObjectRecord) -> Reply:
    return json_reply(object_resource(record, session.plan.bucket, call.base_url))


def _name(metadata: JsonObject, route: Route) -> str:
    return check_object(metadata.get("name") or route.name)
