"""The JSON API, except uploads: a call and its route in, a reply out."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Final, final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.call import Call, Reply, Route, Span, json_reply
from ckptkit.testing.bucket.conditions import Preconditions, number, read_range
from ckptkit.testing.bucket.content import Spool
from ckptkit.testing.bucket.listing import ListQuery
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.records import (
    BucketRecord,
    JsonObject,
    ObjectRecord,
    check_object,
    now_us,
    patched_fields,
    settable_fields,
)
from ckptkit.testing.bucket.resources import (
    bucket_resource,
    location_of,
    media_headers,
    object_resource,
    storage_class_of,
)

COMPOSE_LIMIT: Final = 32
_COPY_BYTES: Final = 1 << 20
_BUCKET_FIXED: Final = frozenset({"name", "id", "kind", "metageneration", "etag", "selfLink", "timeCreated", "updated"})
TOKEN_LIFE_US: Final = 7 * 86_400 * 1_000_000  # https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite
CALL_BYTES: Final = 4 << 20  # of one call, where the caller leaves it to the service
_UNIT_BYTES: Final = 1 << 20
_TOKEN_LENGTH_MAX: Final = 4096


@final
class Api:
    """Answers every verb that has no body to stream; thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._actions: dict[str, Callable[[Call, Route], Reply]] = {
            "buckets.list": self._list_buckets,
            "buckets.insert": self._insert_bucket,
            "buckets.get": self._get_bucket,
            "buckets.patch": self._patch_bucket,
            "buckets.update": self._patch_bucket,
            "buckets.delete": self._delete_bucket,
            "list": self._list,
            "stat": self._stat,
            "read": self._read,
            "xml": self._read,
            "patch": self._patch,
            "update": self._patch,
            "delete": self._delete,
            "copy": self._copy,
            "rewrite": self._rewrite,
            "move": self._move,
            "compose": self._compose,
        }

    def handle(self, call: Call, route: Route) -> Reply:
        """Answer, or raise the `GoogleError` that is the answer."""
        action = self._actions.get(route.action)
        if action is None:
            raise errors.no_such_path()
        return action(call, route)

    def _list_buckets(self, call: Call, _route: Route) -> Reply:
        prefix = call.query.get("prefix", "")
        found = [record for record in self._store.buckets() if record.name.startswith(prefix)]
        return json_reply(
            {"kind": "storage#buckets", "items": [bucket_resource(each, call.base_url) for each in found]}
        )

    def _insert_bucket(self, call: Call, _route: Route) -> Reply:
        resource = call.json()
        name = resource.get("name")
        if not isinstance(name, str):
            raise errors.required("name")
        return json_reply(bucket_resource(self._store.create_bucket(name, _bucket_fields(resource)), call.base_url))

    def _get_bucket(self, call: Call, route: Route) -> Reply:
        record = self._store.bucket(route.bucket, Preconditions.parse(call.query, call.headers))
        return json_reply(bucket_resource(record, call.base_url))

    def _patch_bucket(self, call: Call, route: Route) -> Reply:
        conditions = Preconditions.parse(call.query, call.headers)
        record = self._store.patch_bucket(route.bucket, _bucket_fields(call.json()), conditions)
        return json_reply(bucket_resource(record, call.base_url))

    def _delete_bucket(self, call: Call, route: Route) -> Reply:
        self._store.delete_bucket(route.bucket, Preconditions.parse(call.query, call.headers))
        return Reply(status=204)

    def _list(self, call: Call, route: Route) -> Reply:
        records, page = self._store.list(route.bucket, ListQuery.parse(call.query))
        listing: JsonObject = {"kind": "storage#objects"}
        if records:
            listing["items"] = [object_resource(record, route.bucket, call.base_url) for record in records]
        if page.prefixes:
            listing["prefixes"] = page.prefixes
        if page.token is not None:
            listing["nextPageToken"] = page.token
        return json_reply(listing)

    def _stat(self, call: Call, route: Route) -> Reply:
        conditions = Preconditions.parse(call.query, call.headers)
        generation = number(call.query, "generation")
        record = self._store.stat(route.bucket, route.name, conditions, generation=generation)
        return json_reply(object_resource(record, route.bucket, call.base_url))

    def _read(self, call: Call, route: Route) -> Reply:
        is_xml = route.action == "xml"
        conditions = Preconditions.parse_xml(call.headers) if is_xml else Preconditions.parse(call.query, call.headers)
        generation = number(call.query, "generation")
        record, file = self._store.open(route.bucket, route.name, conditions, generation=generation)
        try:
            size_bytes = record.content.size_bytes
            part = read_range(call.headers.get("Range"), size_bytes)
        except errors.GoogleError:
            file.close()
            raise
        headers = media_headers(record)
        if part is not None:
            headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{size_bytes}"
        start, stop = part or (0, size_bytes)
        return Reply(status=206 if part else 200, headers=headers, span=Span(file=file, start=start, stop=stop))

    def _patch(self, call: Call, route: Route) -> Reply:
        change = call.json()

        def changed(fields: JsonObject) -> JsonObject:
            return settable_fields(change) if route.action == "update" else patched_fields(fields, change)

        conditions = Preconditions.parse(call.query, call.headers)
        return self._object(call, route.bucket, self._store.patch(route.bucket, route.name, changed, conditions))

    def _delete(self, call: Call, route: Route) -> Reply:
        conditions = Preconditions.parse(call.query, call.headers)
        self._store.delete(route.bucket, route.name, conditions, generation=number(call.query, "generation"))
        return Reply(status=204)

    def _copy(self, call: Call, route: Route) -> Reply:
        return self._object(call, route.target[0], self._copied(call, route))

    def _copied(self, call: Call, route: Route) -> ObjectRecord:
        resource = call.json()
        return self._store.copy(
            (route.bucket, route.name),
            route.target,
            Preconditions.parse_source(call.query),
            Preconditions.parse(call.query, call.headers),
            generation=number(call.query, "sourceGeneration"),
            fields=settable_fields(resource) if resource else None,
        )

    def _rewrite(self, call: Call, route: Route) -> Reply:
        sources, generation = Preconditions.parse_source(call.query), number(call.query, "sourceGeneration")
        buckets = [self._store.bucket(name, Preconditions()) for name in (route.bucket, route.target[0])]
        source = self._store.source(route.bucket, route.name, sources, generation=generation)
        fields = settable_fields(call.json())
        if moves_bytes(source, buckets[0], buckets[1], fields):
            same = {name: value for name, value in call.query.items() if name != "rewriteToken"}
            request = {"path": call.path, "query": same, "fields": fields}
            rewritten_bytes, token = advance(source, call.query, request)
            if token is not None:
                return json_reply(_rewritten(source, rewritten_bytes, rewriteToken=token))
        elif call.query.get("rewriteToken"):
            raise errors.invalid("The rewrite token does not belong to this request.")
        record = self._copied(call, route)
        resource = object_resource(record, route.target[0], call.base_url)
        return json_reply(_rewritten(record, record.content.size_bytes, resource=resource))

    def _move(self, call: Call, route: Route) -> Reply:
        record = self._store.move(
            route.bucket,
            route.name,
            route.target[1],
            Preconditions.parse_source(call.query),
            Preconditions.parse(call.query, call.headers),
        )
        return self._object(call, route.bucket, record)

    def _compose(self, call: Call, route: Route) -> Reply:
        request = call.json()
        sources = request.get("sourceObjects")
        if not isinstance(sources, list) or not 1 <= len(sources) <= COMPOSE_LIMIT:
            raise errors.invalid(f"The number of source components must be between 1 and {COMPOSE_LIMIT}.")
        fields = settable_fields(_object_of(request, "destination"))
        conditions = Preconditions.parse(call.query, call.headers)
        spool = self._store.directory(route.bucket).new_spool()
        try:
            records = [self._append_source(route.bucket, source, spool) for source in sources]
            content = spool.seal(components=sum(record.content.components or 1 for record in records))
            fields.setdefault("contentType", records[0].fields.get("contentType", "application/octet-stream"))
            record = self._store.commit(route.bucket, route.name, spool, content, fields, conditions)
        finally:
            spool.discard()
        return self._object(call, route.bucket, record)

    def _append_source(self, bucket: str, source: object, spool: Spool) -> ObjectRecord:
        if not isinstance(source, dict):
            raise errors.invalid("Invalid value for sourceObjects.")
        texts = {key: str(value) for key, value in _object_of(source, "objectPreconditions").items()}
        generation = source.get("generation")
        record, file = self._store.open(
            bucket,
            check_object(source.get("name")),
            Preconditions(generation=number(texts, "ifGenerationMatch")),
            generation=None if generation is None else number({"generation": str(generation)}, "generation"),
        )
        with file:
            while chunk := file.read(_COPY_BYTES):
                spool.append([chunk])
        return record

    def _object(self, call: Call, bucket: str, record: ObjectRecord) -> Reply:
        return json_reply(object_resource(record, bucket, call.base_url))


def _rewritten(record: ObjectRecord, rewritten_bytes: int, **more: str | JsonObject) -> JsonObject:
    return {
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": str(rewritten_bytes),
        "objectSize": str(record.content.size_bytes),
        "done": "resource" in more,
        **more,
    }


def _object_of(value: JsonObject, key: str) -> JsonObject:
    found = value.get(key, {})
    if not isinstance(found, dict):
        raise errors.invalid(f"Invalid value for {key}.")
    return found


def _bucket_fields(resource: JsonObject) -> JsonObject:
    if _object_of(resource, "versioning").get("enabled"):
        raise errors.GoogleError(501, "notImplemented", "This server keeps no versions of objects.")
    return {key: value for key, value in resource.items() if key not in _BUCKET_FIXED}


def moves_bytes(source: ObjectRecord, origin: BucketRecord, target: BucketRecord, fields: JsonObject) -> bool:
    """Whether a rewrite changes location or storage class: only then it may need several calls."""
    wanted = fields.get("storageClass") or storage_class_of(target)
    return location_of(origin) != location_of(target) or wanted != storage_class_of(source)


def advance(source: ObjectRecord, query: Mapping[str, str], request: JsonObject) -> tuple[int, str | None]:
    """One call's part of the rewrite of `source`; `request` is all that has to be the same in each call. Returns the
    bytes rewritten so far, and the token for the next call: None once all are.

    Raises 400 for a token of another request and 410 for one that is too old.
    """
    limit_bytes = number(query, "maxBytesRewrittenPerCall") or CALL_BYTES
    if limit_bytes % _UNIT_BYTES:
        raise errors.invalid("maxBytesRewrittenPerCall must be an integral multiple of 1048576.")
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    began_us, done_bytes, size_bytes = now_us(), 0, source.content.size_bytes
    if token := query.get("rewriteToken"):
        known = _read_token(token)
        if known.get("request") != digest or known.get("generation") != source.generation:
            raise errors.invalid("The rewrite token does not belong to this request.")
        began_us, done_bytes = known["began_us"], known["done_bytes"]
        if now_us() - began_us > TOKEN_LIFE_US:
            raise errors.GoogleError(410, "gone", "The rewrite token has expired.")
    done_bytes = min(size_bytes, done_bytes + limit_bytes)
    if done_bytes == size_bytes:
        return size_bytes, None
    state = {"request": digest, "generation": source.generation, "began_us": began_us, "done_bytes": done_bytes}
    return done_bytes, base64.urlsafe_b64encode(json.dumps(state).encode()).decode()


def _read_token(token: str) -> JsonObject:
    try:
        known = json.loads(base64.b64decode(token[:_TOKEN_LENGTH_MAX], altchars=b"-_", validate=True))
        if not all(isinstance(known[name], int) for name in ("generation", "began_us", "done_bytes")):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise errors.invalid(f"Invalid value for rewriteToken: {token[:64]!a}") from error
    return known
