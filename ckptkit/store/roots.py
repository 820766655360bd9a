"""From a directory or URL to the store that serves it."""

from __future__ import annotations

import os
import re

from ckptkit.errors import StoreError
from ckptkit.store.backends import BACKENDS, backend_of
from ckptkit.store.base import Store
from ckptkit.store.local import LocalStore
from ckptkit.store.retry import RetryStore

_ONE_SLASH = re.compile(rf"({'|'.join(name for name in BACKENDS if name != 'file')}):/(?!/)")


def root_url(root: str | os.PathLike[str]) -> str:
    """One name for one root: a bucket URL without empty parts, or the real path of a directory.

    The real path, because fast tiers are keyed by it: through a link the same run must find the same ramdisk. Empty
    parts (`gs://b//run`, `gs://b/./run`) are left out, as Orbax's own paths leave them out: its part of a step and ours
    would be in two places. Raises `StoreError` for a URL without a bucket, and for one that has lost a slash.
    """
    root = os.fspath(root)
    if (scheme := _ONE_SLASH.match(root)) is not None:
        rest = root[scheme.end() :].lstrip("/")
        raise StoreError(
            f"{root} would be a directory of this host; for a bucket give the text {scheme[1]}://{rest}, not a "
            "pathlib.Path, which takes one of its slashes away"
        )
    if root.endswith("://") or (root.rstrip("/").endswith(":") and "://" in root):
        raise StoreError(f"{root} does not name a bucket; write {root.rstrip('/')}//BUCKET/PATH")
    if not backend_of(root).properties.file_system:
        scheme, _, path = root.partition("://")
        return f"{scheme}://{'/'.join(part for part in path.split('/') if part not in ('', '.'))}"
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
