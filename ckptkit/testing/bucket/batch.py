"""`/batch/storage/v1`: up to 100 calls in one envelope, each answered, faulted and logged by itself."""

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, final
from uuid import uuid4

from multidict import CIMultiDict

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.api import Api
from ckptkit.testing.bucket.call import (
    Call,
    CallKind,
    Reply,
    Route,
    error_reply,
    partial_reply,
    resolve,
    split_target,
)
from ckptkit.testing.bucket.faults import PermissionWithdrawn, QuotaFull, Status
from ckptkit.testing.bucket.injector import Injector
from ckptkit.testing.bucket.log import Exchange, RequestLog
from ckptkit.testing.bucket.multipart import parse_headers, split_mixed

CALL_LIMIT: Final = 100
_KINDS: Final = frozenset(
    {CallKind.BUCKET, CallKind.STAT, CallKind.PATCH, CallKind.DELETE, CallKind.COPY, CallKind.COMPOSE, CallKind.LIST}
)


@final
class Batches:
    """Answers batches; only effects that are an answer (statuses, refusals) can hit a single part."""

    def __init__(self, api: Api, injector: Injector, log: RequestLog) -> None:
        self._api = api
        self._injector = injector
        self._log = log

    def handle(self, call: Call) -> Reply:
        """Do the parts one after the other, as Google does not promise but as clients can bear."""
        parts = split_mixed(call.body, call.headers.get("Content-Type", ""))
        if len(parts) > CALL_LIMIT:
            raise errors.invalid(f"The batch request has {len(parts)} calls, the limit is {CALL_LIMIT}.")
        boundary = f"batch_{uuid4().hex}"
        body = b"".join(_part(boundary, headers, self._answer(call, content)) for headers, content in parts)
        return Reply(
            headers={"Content-Type": f"multipart/mixed; boundary={boundary}"},
            body=body + f"--{boundary}--\r\n".encode(),
        )

    def _answer(self, call: Call, content: bytes) -> Reply:
        started_s = time.monotonic()
        route = Route(kind=CallKind.UNKNOWN, action="")
        effect = None
        try:
            inner = _parse(call, content)
            route = resolve(inner.method, inner.path, inner.query)
            if route.kind not in _KINDS:
                raise errors.invalid("This call cannot be part of a batch.")
            _, effect = self._injector.decide(route.kind, route.name)
            reply = answered(effect, lambda: partial_reply(inner, self._api.handle(inner, route)))
        except errors.GoogleError as error:
            reply = error_reply(error, route.action)
        exchange = Exchange(
            received_bytes=len(content),
            sent_bytes=len(reply.body),
            started_s=started_s,
            elapsed_s=time.monotonic() - started_s,
        )
        self._log.add(route, route.name, reply.status, effect, exchange)
        return reply


def answered(effect: object, handle: Callable[[], Reply]) -> Reply:
    """The reply under an effect that is an answer; other effects leave it as it is."""
    refuse(effect, stage="before")
    reply = handle()
    refuse(effect, stage="after")
    return reply


def refuse(effect: object, *, stage: str) -> None:
    """Raise the answer that `effect` puts in place of the work, or of its result."""
    match effect:
        case Status(code=code, stage=found, nested=nested) if found == stage:
            raise errors.by_status(code, nested=nested)
        case PermissionWithdrawn() if stage == "before":
            text = "The caller does not have permission to access the Google Cloud Storage object."
            raise errors.GoogleError(403, "forbidden", text)
        case QuotaFull() if stage == "before":
            text = "The storage quota for this project has been exceeded."
            raise errors.GoogleError(403, "quotaExceeded", text, domain="usageLimits")
        case _:
            return


def _parse(call: Call, content: bytes) -> Call:
    head, _, body = content.replace(b"\r\n", b"\n").partition(b"\n\n")
    request, _, lines = head.lstrip(b"\n").partition(b"\n")
    words = request.decode("utf-8", "replace").split()
    if len(words) not in {2, 3}:
        raise errors.invalid("Failed to parse batch request: a part has no request line.")
    path, query = split_target(words[1])
    headers = CIMultiDict(parse_headers(lines))
    return Call(method=words[0], path=path, query=query, headers=headers, base_url=call.base_url, body=body)


def _part(boundary: str, headers: Mapping[str, str], reply: Reply) -> bytes:
    content_id = headers.get("content-id", "").strip("<>")
    reason = HTTPStatus(reply.status).phrase
    lines = [
        f"--{boundary}",
        "Content-Type: application/http",
        *([f"Content-ID: <response-{content_id}>"] if content_id else []),
        "",
        f"HTTP/1.1 {reply.status} {reason}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
        f"Content-Length: {len(reply.body)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode("utf-8", "replace") + reply.body + b"\r\n"
