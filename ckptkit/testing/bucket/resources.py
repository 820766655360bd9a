"""Records as Google's JSON resources and response headers. Pure."""

from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from urllib.parse import quote

from ckptkit.testing.bucket.records import BucketRecord, JsonObject, ObjectRecord

STORAGE_CLASS: Final = "STANDARD"
_LOCATION: Final = "US"


def location_of(bucket: BucketRecord) -> str:
    """Where a bucket's bytes are."""
    return str(bucket.fields.get("location", _LOCATION)).upper()


def storage_class_of(record: BucketRecord | ObjectRecord) -> str:
    """The storage class of an object, or the one that new objects of a bucket get."""
    return record.fields.get("storageClass", STORAGE_CLASS)


def object_resource(record: ObjectRecord, bucket: str, base_url: str) -> JsonObject:
    """The resource of `objects.get`."""
    path = f"storage/v1/b/{bucket}/o/{quote(record.name, safe='')}"
    content = record.content
    resource = {
        "kind": "storage#object",
        "id": f"{bucket}/{record.name}/{record.generation}",
        "selfLink": f"{base_url}/{path}",
        "mediaLink": f"{base_url}/download/{path}?generation={record.generation}&alt=media",
        "name": record.name,
        "bucket": bucket,
        "generation": str(record.generation),
        "metageneration": str(record.metageneration),
        "storageClass": STORAGE_CLASS,
        "size": str(content.size_bytes),
        "crc32c": content.crc32c,
        "etag": record.etag,
        "timeCreated": _rfc3339(record.created_us),
        "updated": _rfc3339(record.updated_us),
        "timeStorageClassUpdated": _rfc3339(record.created_us),
        **record.fields,
    }
    if content.md5 is not None:
        resource["md5Hash"] = content.md5
    if content.components is not None:
        resource["componentCount"] = content.components
    return resource


def bucket_resource(record: BucketRecord, base_url: str) -> JsonObject:
    """The resource of `buckets.get`."""
    return {
        "storageClass": STORAGE_CLASS,
        "location": _LOCATION,
        "locationType": "multi-region",
        **record.fields,
        "kind": "storage#bucket",
        "id": record.name,
        "name": record.name,
        "selfLink": f"{base_url}/storage/v1/b/{record.name}",
        "projectNumber": "0",
        "metageneration": str(record.metageneration),
        "etag": record.etag,
        "timeCreated": _rfc3339(record.created_us),
        "updated": _rfc3339(record.updated_us),
    }


def media_headers(record: ObjectRecord) -> dict[str, str]:
    """The headers of a download; TensorStore takes the generation from them, the clients the hashes."""
    content, fields = record.content, record.fields
    hashes = f"crc32c={content.crc32c}" + (f",md5={content.md5}" if content.md5 else "")
    headers = {
        "Content-Type": fields.get("contentType", "application/octet-stream"),
        "ETag": record.etag,
        "Last-Modified": format_datetime(_moment(record.updated_us), usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(record.generation),
        "x-goog-metageneration": str(record.metageneration),
        "x-goog-hash": hashes,
        "x-goog-storage-class": fields.get("storageClass", STORAGE_CLASS),
        "x-goog-stored-content-encoding": fields.get("contentEncoding", "identity"),
        "x-goog-stored-content-length": str(content.size_bytes),
    }
    for field, header in (
        ("contentEncoding", "Content-Encoding"),
        ("contentDisposition", "Content-Disposition"),
        ("contentLanguage", "Content-Language"),
        ("cacheControl", "Cache-Control"),
    ):
        if field in fields:
            headers[header] = fields[field]
    return headers


def _moment(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us / 1e6, UTC)


def _rfc3339(time_us: int) -> str:
    return _moment(time_us).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
