"""Settings of a bucket that TensorStore needs besides its URL."""

from __future__ import annotations

from typing import Any

from ckptkit.store.backends import BACKENDS, backend_of

BUCKET_DRIVERS = sorted(
    {each.driver for each in BACKENDS.values() if each.driver is not None and not each.properties.file_system}
)


def base_of(directory: str) -> str | dict[str, Any]:
    """The key-value store below a directory, a path or a bucket URL, which ends in `/`.

    In parts, since a name may have what a URL gives a meaning (`%`, `#`, `?`, a space). Raises what the service's
    client raises without credentials; ImportError without that client.
    """
    backend = backend_of(directory)
    if backend.driver is None:
        return f"{directory}/"
    if backend.properties.file_system:
        return {"driver": backend.driver, "path": f"{directory}/"}
    bucket, _, path = directory.partition("://")[2].partition("/")
    return {"driver": backend.driver, "bucket": bucket, "path": f"{path}/" if path else "", **backend.service()}
