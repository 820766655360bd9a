"""A request and an answer without their transport, what a path means, and the part of an answer that is asked for."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qsl, urlsplit

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.records import JsonObject, decode_segment

_FIELDS_WORD: Final = re.compile(r"[A-Za-z0-9_-]+|\*|[(),/]")
_DEPTH_MAX: Final = 8
Selection = dict[str, Any]  # by field: what is selected below it; empty: all of it


class CallKind(StrEnum):
    """The kind of a request: the unit of faults and of the request log."""

    BUCKET = "bucket"
    LIST = "list"
    STAT = "stat"
    READ = "read"
    WRITE = "write"
    RESUME = "resume"  # opens a resumable session
    CHUNK = "chunk"  # a part of one, or the question how far it got
    PATCH = "patch"
    DELETE = "delete"
    COPY = "copy"  # copyTo, rewriteTo and moveTo
    COMPOSE = "compose"
    BATCH = "batch"  # the envelope; its parts count by their own kinds
    ADMIN = "admin"  # /_ckptkit: never disturbed, never logged
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r} is not a valid Kind; the kinds are {', '.join(cls)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The meaning of a method and a path; `target` is the destination of copies and moves."""

    kind: CallKind
    action: str
    method: str = ""
    bucket: str = ""
    name: str = ""
    target: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request. `body` is empty for uploads, whose bytes are streamed."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    base_url: str
    body: bytes = b""

    def json(self) -> JsonObject:
        """The body as a JSON object; an absent body is an empty one."""
        return parse_json(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Part of an object's bytes, sent from its open file and closed by the sender."""

    file: BinaryIO
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer; its body is `body`, or `span` when that is given."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    span: Span | None = None


def json_reply(value: JsonObject, *, status: int = 200) -> Reply:
    """An answer in JSON."""
    return Reply(status=status, headers={"Content-Type": "application/json; charset=UTF-8"}, body=_dump(value))


def partial_reply(call: Call, reply: Reply) -> Reply:
    """The part of an answer in JSON that the parameter `fields` selects."""
    fields, is_json = call.query.get("fields"), reply.headers.get("Content-Type", "").startswith("application/json")
    if not fields or not is_json or reply.status != 200:
        return reply
    return replace(reply, body=_dump(selected(json.loads(reply.body), fields)))


def error_reply(error: errors.GoogleError, action: str) -> Reply:
    """An error in the body shape of the API that was asked."""
    if error.status == 304:
        return Reply(status=304, headers=error.headers)
    shapes = {
        "read": ("text/html; charset=UTF-8", error.as_text),
        "xml": ("application/xml; charset=UTF-8", error.as_xml),
    }
    content_type, body = shapes.get(action, ("application/json; charset=UTF-8", error.as_json))
    return Reply(status=error.status, headers={"Content-Type": content_type, **error.headers}, body=body())


def parse_json(body: bytes) -> JsonObject:
    """A JSON object, or 400 with Google's reason."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.invalid("Parse Error", reason="parseError") from error
    if not isinstance(value, dict):
        raise errors.invalid("Parse Error", reason="parseError")
    return value


def split_target(target: str) -> tuple[str, dict[str, str]]:
    """The raw path and the decoded query of a request target, absolute or not."""
    try:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, errors="strict"))
    except (ValueError, UnicodeError) as error:
        raise errors.invalid("Invalid request target.") from error
    if query.get("fields"):
        parse_fields(query["fields"])  # refused before anything is done
    return parts.path, query


def resolve(method: str, path: str, query: Mapping[str, str]) -> Route:
    """Find the call; 404 for a path that is not a part of the API."""
    parts = [decode_segment(segment) for segment in path.split("/")[1:]]
    if parts[-1:] == [""]:
        parts.pop()
    route = _resolve(method, parts, path, query)
    if route is not None:
        return replace(route, method=method)
    if any(_resolve(other, parts, path, query) for other in _METHODS):
        raise errors.GoogleError(405, "methodNotAllowed", "The specified method is not allowed against this resource.")
    raise errors.no_such_path()


def _resolve(method: str, parts: list[str], path: str, query: Mapping[str, str]) -> Route | None:
    match parts:
        case ["_ckptkit", *rest]:
            return Route(kind=CallKind.ADMIN, action="/".join(rest))
        case ["storage", "v1", "b", *rest]:
            return _json(method, rest, query)
        case ["upload", "storage", "v1", "b", bucket, "o"] | ["resumable", "upload", "storage", "v1", "b", bucket, "o"]:
            return _upload(method, bucket, query)
        case ["download", "storage", "v1", "b", bucket, "o", name] if method in {"GET", "HEAD"}:
            return Route(kind=CallKind.READ, action="read", bucket=bucket, name=name)
        case ["batch", "storage", "v1"] | ["batch"] if method == "POST":
            return Route(kind=CallKind.BATCH, action="batch")
        case [("storage" | "upload" | "download" | "batch" | "resumable"), *_]:
            return None
        case [bucket, _, *_] if method in {"GET", "HEAD"}:
            # The XML API takes slashes as they are; only the cut between bucket and name counts.
            name = decode_segment(path[1:].partition("/")[2])
            return Route(kind=CallKind.READ, action="xml", bucket=bucket, name=name)
    return None


def _json(method: str, parts: list[str], query: Mapping[str, str]) -> Route | None:
    match parts:
        case []:
            action = {"GET": "buckets.list", "POST": "buckets.insert"}.get(method)
            return Route(kind=CallKind.BUCKET, action=action) if action else None
        case [bucket]:
            action = _BUCKET_ACTIONS.get(method)
            return Route(kind=CallKind.BUCKET, action=action, bucket=bucket) if action else None
        case [bucket, "o"] if method == "GET":
            return Route(kind=CallKind.LIST, action="list", bucket=bucket, name=query.get("prefix", ""))
        case [bucket, "o", name]:
            kind, action = _OBJECT_ACTIONS.get(method, (None, ""))
            if action == "stat" and query.get("alt") == "media":
                kind, action = CallKind.READ, "read"
            return Route(kind=kind, action=action, bucket=bucket, name=name) if kind else None
        case [bucket, "o", name, "compose"] if method == "POST":
            return Route(kind=CallKind.COMPOSE, action="compose", bucket=bucket, name=name)
        case [bucket, "o", name, "moveTo", "o", target] if method == "POST":
            return Route(kind=CallKind.COPY, action="move", bucket=bucket, name=name, target=(bucket, target))
        case [bucket, "o", name, ("copyTo" | "rewriteTo") as verb, "b", other, "o", target] if method == "POST":
            action = verb.removesuffix("To")
            return Route(kind=CallKind.COPY, action=action, bucket=bucket, name=name, target=(other, target))
    return None


def _upload(method: str, bucket: str, query: Mapping[str, str]) -> Route | None:
    if "upload_id" in query:
        action = {"PUT": "chunk", "POST": "chunk", "DELETE": "abandon"}.get(method)
        return Route(kind=CallKind.CHUNK, action=action, bucket=bucket) if action else None
    if method != "POST":
        return None
    kinds = {"media": CallKind.WRITE, "multipart": CallKind.WRITE, "resumable": CallKind.RESUME}
    upload = query.get("uploadType", "")
    action = upload if upload in kinds else "refuse"
    return Route(kind=kinds.get(upload, CallKind.WRITE), action=action, bucket=bucket, name=query.get("name", ""))


def _dump(value: JsonObject) -> bytes:
    return json.dumps(value).encode("ascii")


_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_BUCKET_ACTIONS: Final = {
    "GET": "buckets.get",
    "DELETE": "buckets.delete",
    "PATCH": "buckets.patch",
    "PUT": "buckets.update",
}
_OBJECT_ACTIONS: Final = {
    "GET": (CallKind.STAT, "stat"),
    "HEAD": (CallKind.STAT, "stat"),
    "PATCH": (CallKind.PATCH, "patch"),
    "PUT": (CallKind.PATCH, "update"),
    "DELETE": (CallKind.DELETE, "delete"),
}


def selected(resource: JsonObject, fields: str) -> JsonObject:
    """The selected part of `resource`. Raises 400 for an invalid selection."""
    return _selected(resource, parse_fields(fields))


def parse_fields(text: str) -> Selection:
    """A selection as a tree. Raises 400 for what is none."""
    words = _FIELDS_WORD.findall(text)
    if "".join(words) != text.replace(" ", "") or not words:
        raise _bad_fields(text)
    selection, rest = _selections(words, text, 0)
    if rest:
        raise _bad_fields(text)
    return selection


def _selections(words: list[str], text: str, depth: int) -> tuple[Selection, list[str]]:
    selection: Selection = {}
    while True:
        name, below, words = _field(words, text, depth)
        selection[name] = {**selection.get(name, {}), **below}
        if words[:1] != [","]:
            return selection, words
        words = words[1:]


def _field(words: list[str], text: str, depth: int) -> tuple[str, Selection, list[str]]:
    """One field, the selection below it, and the words after it."""
    if not words or words[0] in "(),/" or depth > _DEPTH_MAX:
        raise _bad_fields(text)
    name, words = words[0], words[1:]
    below: Selection = {}
    if words[:1] == ["("]:
        below, words = _selections(words[1:], text, depth + 1)
        if words[:1] != [")"]:
            raise _bad_fields(text)
        words = words[1:]
    elif words[:1] == ["/"]:
        child, grandchildren, words = _field(words[1:], text, depth + 1)
        below = {child: grandchildren}
    return name, below, words


def _selected(value: Any, selection: Selection) -> Any:
    if not selection:
        return value
    if isinstance(value, list):
        return [_selected(each, selection) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        below = selection.get(name, selection.get("*"))
        if below is not None:
            found[name] = _selected(each, below)
    return found


def _bad_fields(text: str) -> errors.GoogleError:
    return errors.GoogleError(
        400, "invalidParameter", f"Invalid field selection {text[:64]}", location=("parameter", "fields")
    )
