"""The guarantees of the file system below a path: a table, and the look at the mount that finds the row.

A path looks the same on a local disk, on NFS and on a bucket that GCSFuse mounts. The guarantees for a commit differ.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

Medium = Literal["memory", "disk", "network", "bucket", "other"]

_FUSE_MAGIC = 0x65735546  # FUSE_SUPER_MAGIC of linux/magic.h; virtiofs has it too
_MAGIC_NAMES: Final = {  # linux/magic.h, and statfs(2); what is not here is looked up among the mounts
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x01021994: "tmpfs",
    0x9123683E: "btrfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x01021997: "9p",
}
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """One kind of file system: where its bytes are, and what it guarantees about names."""

    name: str
    """The type, as `/proc/self/mountinfo` has it."""

    medium: Medium
    """Where its bytes are. `bucket`: a FUSE program turns calls into requests to an object store. `other`: unknown."""

    atomic_rename: bool
    """A rename of a directory happens whole or not at all, for every reader and after a crash."""

    hard_links: bool
    """`link(2)` gives a second name to a file, and fails where the name is taken."""

    source: str = ""
    """Where this is documented."""


_MAN = "https://man7.org/linux/man-pages/man2/rename.2.html"
_KERNEL = "https://docs.kernel.org/filesystems"
_GCSFUSE = "https://github.com/GoogleCloudPlatform/gcsfuse/blob/master/docs/semantics.md"
_SMB = "https://learn.microsoft.com/openspecs/windows_protocols/ms-fscc/1d2673a8-8fb9-4868-920a-775ccaa30cf8"


def _posix(name: str, medium: Medium, source: str = _MAN) -> FileSystem:
    return FileSystem(name=name, medium=medium, atomic_rename=True, hard_links=True, source=source)


def _other(name: str, medium: Medium, source: str) -> FileSystem:
    return FileSystem(name=name, medium=medium, atomic_rename=False, hard_links=False, source=source)


FILE_SYSTEMS: Final = {
    each.name: each
    for each in (
        *(
            _posix(name, "disk")
            for name in ("ext2", "ext3", "ext4", "xfs", "f2fs", "zfs", "bcachefs", "reiserfs", "jfs")
        ),
        _posix("btrfs", "disk", "https://btrfs.readthedocs.io/en/latest/"),
        # A directory of a lower layer is not renamed (EXDEV): ours are made in the upper one.
        _posix("overlay", "disk", f"{_KERNEL}/overlayfs.html#renaming-directories"),
        _posix("fuse.fuse-overlayfs", "disk", "https://github.com/containers/fuse-overlayfs"),
        _posix("fuse.bindfs", "disk", "https://bindfs.org/docs/bindfs.1.html"),
        *(_posix(name, "memory", f"{_KERNEL}/tmpfs.html") for name in ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")),
        # RFC 8881, 18.26.3: RENAME is atomic to the client. A repeated request may answer ENOENT after a success.
        *(_posix(name, "network", "https://man7.org/linux/man-pages/man5/nfs.5.html") for name in ("nfs", "nfs4")),
        # Also Amazon FSx for Lustre, Google's and Azure's Managed Lustre.
        _posix("lustre", "network", "https://doc.lustre.org/lustre_manual.xhtml"),
        _posix("ceph", "network", "https://docs.ceph.com/en/latest/cephfs/posix/"),
        _posix("fuse.ceph-fuse", "network", "https://docs.ceph.com/en/latest/cephfs/posix/"),
        _posix("gpfs", "network", "https://www.ibm.com/docs/en/storage-scale"),
        _posix("beegfs", "network", "https://doc.beegfs.io/latest/"),
        _posix("9p", "network", f"{_KERNEL}/9p.html"),
        _posix("virtiofs", "network", f"{_KERNEL}/virtiofs.html"),
        _posix("fuse.juicefs", "network", "https://juicefs.com/docs/community/posix_compatibility"),
        # A server refuses to rename a directory below which a file is open, and may have no hard links.
        *(_other(name, "network", _SMB) for name in ("cifs", "smb3")),
        *(_other(name, "disk", f"{_KERNEL}/vfat.html") for name in ("vfat", "exfat", "msdos")),
        # "renaming directories is not atomic": each object is copied and deleted.
        _other("fuse.gcsfuse", "bucket", _GCSFUSE),
        _other("fuse.s3fs", "bucket", "https://github.com/s3fs-fuse/s3fs-fuse#limitations"),
        _other("fuse.mount-s3", "bucket", "https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md"),
        _other("fuse.goofys", "bucket", "https://github.com/kahing/goofys#current-status"),
        _other("fuse.geesefs", "bucket", "https://github.com/yandex-cloud/geesefs"),
        _other("fuse.blobfuse2", "bucket", "https://github.com/Azure/azure-storage-fuse"),
        _other("fuse.rclone", "bucket", "https://rclone.org/commands/rclone_mount/"),
        _other("fuse.ossfs", "bucket", "https://github.com/aliyun/ossfs"),
    )
}

# Of a FUSE program that is not in the table nothing is known. A mark is right on every one.
_ANY_FUSE: Final = _other("fuse", "other", f"{_KERNEL}/fuse/index.html")
# The kernel's own file systems keep POSIX's word on rename(2).
_ANY: Final = _posix("unknown", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of `/proc/self/mountinfo`."""

    point: str
    type: str
    device: str  # what is mounted: a block device, a server's path, a bucket


def file_system_of(path: str | os.PathLike[str]) -> FileSystem:
    """The row of the file system that holds a path, or would hold it: of the nearest directory that exists.

    Looks each time: a mount may change. Cost: a `stat` for each directory that is missing, and a `statfs`; a read of
    `/proc/self/mountinfo` where the answer is not a common disk or tmpfs. Elsewhere than on Linux nothing is known.
    """
    if sys.platform != "linux":
        return _ANY
    there = _existing(path)
    magic = _magic(there)
    name = _MAGIC_NAMES.get(magic)
    if name is not None:
        return FILE_SYSTEMS[name]
    mount = mount_of(there)
    return row_of(mount.type if mount is not None else "", is_fuse=magic == _FUSE_MAGIC)


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """The mount that holds a path; None where the kernel does not list mounts."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse_mounts(file)
    except OSError:
        return None
    real = os.path.realpath(path)
    holding = [mount for mount in mounts if _is_below(real, mount.point)]
    # Of two at one point the later one covers the earlier.
    return max(enumerate(holding), key=lambda each: (len(each[1].point), each[0]), default=(0, None))[1]


def parse_mounts(lines: Iterable[str]) -> list[Mount]:
    """The mounts of a mountinfo text (proc(5)), in its order. A line that is none is left out."""
    mounts = []
    for line in lines:
        before, found, after = line.rstrip("\n").partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if found and len(fields) >= 6 and len(rest) >= 2:
            mounts.append(Mount(point=_unescaped(fields[4]), type=rest[0], device=_unescaped(rest[1])))
    return mounts


@lru_cache(maxsize=256)
def row_of(name: str, *, is_fuse: bool = False) -> FileSystem:
    """The row of a type as mountinfo names it; that of every FUSE program, or of every kernel file system, for one
    that is not in the table."""
    row = FILE_SYSTEMS.get(name)
    if row is not None:
        return row
    is_fuse = is_fuse or name.startswith("fuse")
    other = _ANY_FUSE if is_fuse else _ANY
    return replace(other, name=name) if name else other


def _existing(path: str | os.PathLike[str]) -> str:
    there = os.path.abspath(path)
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    return there


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _magic(path: str) -> int:
    """`f_type` of statfs(2), which Python's `os.statvfs` leaves out; 0 where the kernel refuses."""
    buffer = ctypes.create_string_buffer(256)  # the struct has 120 bytes, and begins with `f_type`
    if _libc().statfs(os.fsencode(path), buffer):
        return 0
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
