"""What TensorStore has to be told of a bucket that its URL does not say."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import fsspec

from ckptkit.store.roots import is_remote

_AMAZON = ".amazonaws.com"


def base_of(directory: str) -> str | dict[str, Any]:
    """The key-value store below a directory, a path or a bucket URL, which ends in `/`.

    In parts, since a name may have what a URL gives a meaning (`%`, `#`, `?`, a space). On `s3://` TensorStore does not
    read where other clients are led (`AWS_ENDPOINT_URL`, profiles): endpoint and region are those that s3fs has found.
    Raises what s3fs raises without credentials; ImportError without s3fs.
    """
    if not is_remote(directory):
        return {"driver": "file", "path": f"{directory}/"}
    scheme, _, rest = directory.partition("://")
    bucket, _, path = rest.partition("/")
    within: dict[str, Any] = {"bucket": bucket, "path": f"{path}/" if path else ""}
    if scheme == "gs":
        return {"driver": "gcs", **within}
    if scheme != "s3":
        return f"{directory}/"
    endpoint, region = _s3_service()
    service = {} if endpoint is None else {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return {"driver": "s3", **within, **service}


@lru_cache(maxsize=1)
def _s3_service() -> tuple[str | None, str | None]:
    """Endpoint and region of another service than Amazon's; for Amazon's TensorStore finds the bucket's own region."""
    client: Any = fsspec.filesystem("s3")
    client.connect()
    meta = client._s3.meta
    return (None, None) if _AMAZON in meta.endpoint_url else (meta.endpoint_url, meta.region_name)
