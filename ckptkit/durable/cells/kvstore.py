"""Settings of a bucket that TensorStore needs besides its URL."""

from __future__ import annotations

from typing import Any

from ckptkit.errors import StoreError
from ckptkit.store.backends import BACKENDS, backend_of

BUCKET_DRIVERS = sorted(
    {each.driver for each in BACKENDS.values() if each.driver is not None and not each.properties.file_system}
)


def require_usable(directory: str) -> None:
    """Raises `StoreError` for a path with a backslash: TensorStore takes it for a slash, and would write elsewhere."""
    if "\\" in directory and backend_of(directory).properties.file_system:
        raise StoreError(
            f"{directory} has a backslash, which TensorStore takes for a slash: rename the directory", path=directory
        )


def base_of(directory: str) -> str | dict[str, Any]:
    """The key-value store below a directory, a path or a bucket URL, which ends in `/`.

    In parts, since a name may have what a URL gives a meaning (`%`, `#`, `?`, a space). Raises what the service's
    client raises without credentials; ImportError without that client; `StoreError` as `require_usable` does.
    """
    require_usable(directory)
    backend = backend_of(directory)
    if backend.driver is None:
        return f"{directory}/"
    if backend.properties.file_system:
        return {"driver": backend.driver, "path": f"{directory}/"}
    bucket, _, path = directory.partition("://")[2].partition("/")
    return {"driver": backend.driver, "bucket": bucket, "path": f"{path}/" if path else "", **backend.service()}
