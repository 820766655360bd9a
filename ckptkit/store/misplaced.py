"""Problems of a fast tier, or of a durable root, on the file system that holds it."""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from ckptkit.model.tiers import RAM, SSD
from ckptkit.store.mounts import FileSystem
from ckptkit.util import clock

_PROBE_BYTES = 32 << 20  # at most, and for at most a second
_PIECE_BYTES = 4 << 20
_PROBE_S = 1.0
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming
_URL_IS_BETTER = "it needs fewer requests, and its commit is one (docs/STORAGE.md)"


def tier_problem(medium: str | None, found: FileSystem) -> str | None:
    """The problem of a fast tier of this medium (None: it may be any) on that file system; None if none is known."""
    is_remote = found.medium in ("network", "bucket")
    if found.is_fuse and found.medium == "other":
        where = f"{found.name} ({found.device})" if found.device else found.name
        what = f"is on {where}, a FUSE program of which nothing is known"
        return f"{what}: take a tmpfs for Tier.ram, a local disk for Tier.ssd"
    if medium == RAM and (is_remote or found.medium == "disk"):
        return f"is a ramdisk tier on {found.name}, which is not memory: mount a tmpfs there, or take Tier.ssd"
    if medium == SSD and is_remote:
        return f"is an SSD tier on {found.name}, which is not a disk of this host: take a local disk"
    if medium == SSD and found.medium == "memory":
        return f"is an SSD tier on {found.name}, which is memory: it is lost with the host; take a disk, or Tier.ram"
    if medium is None and is_remote:
        return f"is a fast tier on {found.name}, which is neither memory nor a disk of this host: take one of both"
    return None


def root_problem(found: FileSystem) -> str | None:
    """The remedy for a durable root on that file system, as a sentence; None if it has no problem."""
    url = f"gs://{found.device}" if _BUCKET_NAME.fullmatch(found.device) else None
    if found.name == "fuse":
        return f"It is probably a mounted bucket: on GKE give {url or 'the gs:// URL'} instead; {_URL_IS_BETTER}"
    if found.name == "fuse.blobfuse2":
        return None  # ckptkit reads no URL of Azure
    if found.medium == "bucket":
        named = url if found.name == "fuse.gcsfuse" and url else "the bucket's own URL"
        return f"Give {named} instead: {_URL_IS_BETTER}"
    if found.medium == "memory":
        return "It is lost with the host: give a disk, a shared file system or a bucket"
    return None


def measured_rate_bytes_s(directory: Path) -> float | None:
    """How fast a directory takes bytes, synced at the end; None where it takes none. Leaves nothing there."""
    path = directory / f".rate-{uuid.uuid4().hex}"
    piece, written = os.urandom(_PIECE_BYTES), 0
    try:
        began_s = clock.monotonic_s()
        with open(path, "wb", buffering=0) as file:
            while written < _PROBE_BYTES and clock.monotonic_s() - began_s < _PROBE_S:
                written += file.write(piece)
            os.fsync(file.fileno())
        return written / max(clock.monotonic_s() - began_s, 1e-9)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            path.unlink()
