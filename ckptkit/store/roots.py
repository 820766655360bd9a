"""From a directory or URL to the store that serves it."""

from __future__ import annotations

import os

from ckptkit.errors import StoreError
from ckptkit.store.backends import backend_of
from ckptkit.store.base import Store
from ckptkit.store.local import LocalStore
from ckptkit.store.retry import RetryStore


def root_url(root: str | os.PathLike[str]) -> str:
    """One name for one root: a bucket URL without a trailing slash, or the real path of a directory.

    The real path, because fast tiers are keyed by it: through a link the same run must find the same ramdisk. Raises
    `StoreError` for a URL without a bucket.
    """
    root = os.fspath(root)
    if root.endswith("://") or (root.rstrip("/").endswith(":") and "://" in root):
        raise StoreError(f"{root} does not name a bucket; write {root.rstrip('/')}//BUCKET/PATH")
    if not backend_of(root).properties.file_system:
        return root.rstrip("/")
    return os.path.realpath(root.removeprefix("file://"))


def open_store(root: str | os.PathLike[str], *, deadline_s: float = 60.0, timeout_s: float | None = None) -> Store:
    """The store of a directory, a `file://` URL, or a bucket URL such as `gs://bucket/prefix`.

    An operation is tried for `deadline_s`; a bucket has `timeout_s` for each try (None: `RemoteStore`'s own), and never
    more than the deadline.
    """
    root = os.fspath(root)
    if backend_of(root).properties.file_system:
        return RetryStore(LocalStore(root.removeprefix("file://")), deadline_s=deadline_s)
    from ckptkit.store.remote import OPERATION_TIMEOUT_S, RemoteStore  # fsspec: 0.2 s that a directory does not need

    timeout_s = min(deadline_s, OPERATION_TIMEOUT_S if timeout_s is None else timeout_s)
    return RetryStore(RemoteStore(root, timeout_s=timeout_s), deadline_s=deadline_s)
