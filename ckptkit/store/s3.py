"""Amazon S3 and services that speak its protocol, through s3fs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ckptkit.store.backend import BUCKET, Access, Ask, Backend

_BATCH = 1000  # keys of one deletion
# S3's codes for single objects of a batch, in an answer that is a success as a whole.
_TRANSIENT = {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
_ABSENT = {"NoSuchKey", "NoSuchVersion"}
_AMAZON = ".amazonaws.com"


def _delete_many(client: Any, ask: Ask, paths: Sequence[str]) -> None:
    """S3 lists the objects that it did not delete in a successful answer. s3fs's own `rm` ignores that list, so a step
    would lose its bytes and keep its marker."""
    names = [client.split_path(path)[:2] for path in paths]
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        keys = {"Objects": [{"Key": key} for _, key in batch], "Quiet": True}
        answer = ask("call_s3", "delete_objects", Bucket=batch[0][0], Delete=keys)
        _raise_left(answer.get("Errors", []))


def _raise_left(errors: Sequence[Mapping[str, str]]) -> None:
    """Raises for objects that S3 has left where they are: a refusal, which no retry mends, before all else."""
    left = sorted((each for each in errors if each.get("Code") not in _ABSENT), key=_may_pass)
    if not left:
        return
    first = left[0]
    said = f"{first.get('Key')}: {first.get('Code')}: {first.get('Message')} ({len(left)} objects are not deleted)"
    refused = first.get("Code") == "AccessDenied"
    raise PermissionError(said) if refused else ConnectionError(said) if _may_pass(first) else OSError(said)


def _may_pass(error: Mapping[str, str]) -> bool:
    return error.get("Code") in _TRANSIENT


@lru_cache(maxsize=1)
def _service() -> Mapping[str, str]:
    """Endpoint and region of another service than Amazon's; for Amazon's TensorStore finds the bucket's own region.

    TensorStore does not read where other clients are led (`AWS_ENDPOINT_URL`, profiles): these are those that s3fs has
    found. Raises what s3fs raises without credentials; ImportError without s3fs.
    """
    import fsspec  # loaded by now: `RemoteStore` needs it

    client: Any = fsspec.filesystem("s3")
    client.connect()
    meta = client._s3.meta
    if _AMAZON in meta.endpoint_url:
        return {}
    return {"endpoint": meta.endpoint_url, "aws_region": meta.region_name or "us-east-1"}


def _caller(client: Any) -> str:
    if client.anon:
        return "an anonymous caller"
    key = client.key or importlib.import_module("botocore.session").get_session().get_credentials().access_key
    return f"the access key {key[:4]}...{key[-2:]}"


S3 = Backend(
    properties=BUCKET,
    access=Access(
        permissions={
            "get": "s3:GetObject",
            "list": "s3:ListBucket",
            "create": "s3:PutObject",
            "delete": "s3:DeleteObject",
        },
        grant="s3:GetObject, s3:ListBucket, s3:PutObject and s3:DeleteObject",
        sign_in="aws configure, or the host's role",
        caller=_caller,
        named=re.compile(r"\bs3:[A-Z][A-Za-z]+\b"),
        signed_out=frozenset({"NoCredentialsError"}),
        unanswered=frozenset({"botocore ConnectionError", "botocore HTTPClientError"}),
        extra="s3",
    ),
    driver="s3",
    service=_service,
    create_copies={"IfNoneMatch": "*"},  # Amazon's conditional copies, which other services may not have
    delete_many=_delete_many,
)
S3A = replace(S3, driver=None)  # s3fs's other name for it, which TensorStore does not know
