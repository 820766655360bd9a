"""The table of storage backends: a new one is a row here, and a module for what it does in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from ckptkit.store.backend import BUCKET, Backend
from ckptkit.store.base import Properties
from ckptkit.store.gs import GCS, GS
from ckptkit.store.local import DIRECTORY, directory_properties
from ckptkit.store.s3 import S3, S3A

# Any other file system of fsspec: nothing is asked of it that not every bucket does.
_OTHER: Final = Backend(properties=BUCKET, access=replace(GS.access, permissions={}, caller=lambda _: None))

BACKENDS: Final = {
    "file": replace(_OTHER, properties=DIRECTORY, driver="file"),
    "gs": GS,
    "gcs": GCS,
    "s3": S3,
    "s3a": S3A,
    "memory": replace(_OTHER, properties=replace(BUCKET, round_trips=False)),
}
_AT_A_TIME = 16


def backend_of(url: str) -> Backend:
    """The row of a bucket URL, or of a path: nothing is asked."""
    scheme, found, _ = url.partition("://")
    return BACKENDS.get(scheme, _OTHER) if found else BACKENDS["file"]


def properties_of(url: str) -> Properties:
    """The properties of the store of a URL or path (see `Properties`), if no store is open. Cost: nothing for a bucket;
    for a path a look at its mount (`mounts.file_system_of`)."""
    properties = backend_of(url).properties
    return directory_properties(url) if properties.file_system else properties


def side_by_side(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts`, in their order.

    All of them have ended when this returns or raises, so what follows comes after each; among themselves they have no
    order. Raises what the first in the sequence has raised.
    """
    if len(acts) <= 1:
        return [act() for act in acts]
    with ThreadPoolExecutor(min(len(acts), _AT_A_TIME), thread_name_prefix="ckptkit-ask") as pool:
        begun = [pool.submit(act) for act in acts]
    return [each.result() for each in begun]


def all_of(root: str, acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts` on one store. They run in parallel if each waits for an answer (`Properties.round_trips`),
    else one after the other."""
    return side_by_side(acts) if properties_of(root).round_trips else [act() for act in acts]
