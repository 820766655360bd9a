"""The guarantees of the file system below a path: a table, and the look at the mount that finds the row.

`tier_problem` and `root_problem` judge it for a fast tier and for a durable root.

A path looks the same on a local disk, on NFS and on a bucket that GCSFuse mounts. The guarantees for a commit differ.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, get_args

from ckptkit.model.tiers import RAM, SSD
from ckptkit.util import clock

Medium = Literal["memory", "disk", "network", "bucket", "other"]
Guarantee = Literal[
    "rename",  # of a directory: whole or not at all, for every reader and after a crash
    "links",  # link(2) gives a file a second name, and fails where the name is taken
    "locks",  # flock(2) between hosts, or between processes where one host uses it
    "close_to_open",  # who opens a file after another host closed it sees all of it
    "directory_sync",  # fsync(2) of a directory makes the names in it durable
    "direct",  # O_DIRECT
    "mmap",  # a shared mapping sees what another host writes
]

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
_PROBE_BYTES = 32 << 20  # at most, and for at most a second
_PIECE_BYTES = 4 << 20
_PROBE_S = 1.0
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming
_URL_IS_BETTER = "it needs fewer requests, and its commit is one (docs/STORAGE.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """One kind of file system: where its bytes are, and which guarantees it has."""

    name: str
    """The type in `/proc/self/mountinfo`; that of the program, if the type is `fuse` and the device names it."""

    medium: Medium
    """Where its bytes are. `bucket`: a FUSE program turns calls into requests to an object store. `other`: unknown."""

    lacks: frozenset[Guarantee] = frozenset()
    """The guarantees that it does not have, that need an option of the mount, or that its documents do not state."""

    source: str = ""
    """Where this is documented."""

    device: str = ""
    """The device of a FUSE mount, such as the name of a bucket. Empty in the table."""

    @property
    def atomic_rename(self) -> bool:
        """A rename of a directory happens whole or not at all, for every reader and after a crash."""
        return "rename" not in self.lacks

    @property
    def hard_links(self) -> bool:
        """`link(2)` gives a second name to a file, and fails where the name is taken."""
        return "links" not in self.lacks

    @property
    def is_fuse(self) -> bool:
        """Whether a program serves it, and not the kernel."""
        return self.name == "fuse" or self.name.startswith("fuse.")


_RENAME = "https://man7.org/linux/man-pages/man2/rename.2.html"
_KERNEL = "https://docs.kernel.org/filesystems"
_GCSFUSE = "https://github.com/GoogleCloudPlatform/gcsfuse/blob/master/docs/semantics.md"
_SMB = "https://learn.microsoft.com/openspecs/windows_protocols/ms-fscc/1d2673a8-8fb9-4868-920a-775ccaa30cf8"
_NFS = "https://man7.org/linux/man-pages/man5/nfs.5.html"
_LUSTRE = "https://cloud.google.com/managed-lustre/docs/posix-compliance"
_CEPH = "https://docs.ceph.com/en/latest/cephfs/posix/"
_ALL: Final[frozenset[Guarantee]] = frozenset(get_args(Guarantee))


def _rows(medium: Medium, lacks: Iterable[Guarantee], source: str, *names: str) -> list[FileSystem]:
    return [FileSystem(name=name, medium=medium, lacks=frozenset(lacks), source=source) for name in names]


_ROWS: Final = (
    *_rows("disk", (), _RENAME, "ext2", "ext3", "ext4", "reiserfs", "jfs", "xfs", "f2fs", "bcachefs"),
    *_rows("disk", (), "https://btrfs.readthedocs.io/en/latest/", "btrfs"),
    # A directory of a lower layer is not renamed (EXDEV): ours are made in the upper one.
    *_rows("disk", (), f"{_KERNEL}/overlayfs.html#renaming-directories", "overlay"),
    # Direct I/O came with 2.3.
    *_rows("disk", ("direct",), "https://github.com/openzfs/zfs/releases", "zfs"),
    *_rows("disk", ("direct",), "https://github.com/containers/fuse-overlayfs", "fuse.fuse-overlayfs"),
    *_rows("disk", ("direct",), "https://bindfs.org/docs/bindfs.1.html", "fuse.bindfs"),
    *_rows("disk", ("rename", "links"), f"{_KERNEL}/vfat.html", "vfat", "exfat", "msdos"),
    # ntfs-3g, and others on a block device.
    *_rows("disk", ("rename", "links", "direct"), f"{_KERNEL}/fuse/index.html", "fuseblk"),
    # Direct I/O on a tmpfs came with Linux 6.6.
    *_rows("memory", ("direct",), f"{_KERNEL}/tmpfs.html", "tmpfs"),
    *_rows("memory", ("direct",), f"{_KERNEL}/tmpfs.html", "ramfs", "hugetlbfs", "devtmpfs"),
    # RFC 8881, 18.26.3: RENAME is atomic to the client. A repeated request may answer ENOENT after a success.
    *_rows("network", ("mmap",), _NFS, "nfs", "nfs4"),
    # `flock` needs the mount option of this name (ENOSYS without it): Google's service sets it, Amazon's FSx leaves it
    # to the user (https://docs.aws.amazon.com/fsx/latest/LustreGuide/mounting-ec2-instance.html).
    *_rows("network", ("locks",), _LUSTRE, "lustre"),
    *_rows("network", ("mmap",), _CEPH, "ceph"),
    *_rows("network", ("mmap", "direct"), _CEPH, "fuse.ceph-fuse"),
    *_rows("network", (), "https://www.ibm.com/docs/en/storage-scale", "gpfs"),
    *_rows("network", (), "https://docs.weka.io/weka-system-overview/filesystems", "wekafs"),
    # `tuneUseGlobalFileLocks` and `tuneFileCacheType` of its client, both off or other by default.
    *_rows("network", ("locks", "mmap"), "https://doc.beegfs.io/latest/", "beegfs"),
    *_rows("network", ("locks", "direct", "mmap"), f"{_KERNEL}/9p.html", "9p"),
    *_rows("network", ("locks",), f"{_KERNEL}/virtiofs.html", "virtiofs"),
    *_rows("network", ("direct",), "https://juicefs.com/docs/community/posix_compatibility", "fuse.juicefs"),
    # A server refuses to rename a directory below which a file is open, and may have no hard links.
    *_rows("network", ("rename", "links", "mmap"), _SMB, "cifs", "smb3"),
    *_rows("network", _ALL - {"directory_sync"}, "https://github.com/libfuse/sshfs", "fuse.sshfs"),
    # A directory is on every brick: its rename is one on each.
    *_rows("network", ("rename", "direct", "mmap"), "https://docs.gluster.org/en/latest/", "fuse.glusterfs"),
    *_rows("network", _ALL - {"directory_sync"}, "https://docs.daos.io/latest/user/filesystem/", "fuse.daos"),
    *_rows("network", _ALL - {"directory_sync"}, "https://moosefs.com/support/", "fuse.mfs"),
    # "renaming directories is not atomic": each object is copied and deleted.
    *_rows("bucket", _ALL, _GCSFUSE, "fuse.gcsfuse"),
    *_rows("bucket", _ALL, "https://github.com/s3fs-fuse/s3fs-fuse#limitations", "fuse.s3fs"),
    *_rows("bucket", _ALL, "https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md", "fuse.mount-s3"),
    *_rows("bucket", _ALL, "https://github.com/kahing/goofys#current-status", "fuse.goofys"),
    *_rows("bucket", _ALL, "https://github.com/yandex-cloud/geesefs", "fuse.geesefs"),
    *_rows("bucket", _ALL, "https://github.com/Azure/azure-storage-fuse/wiki/Blobfuse2-Limitations", "fuse.blobfuse2"),
    *_rows("bucket", _ALL, "https://rclone.org/commands/rclone_mount/", "fuse.rclone"),
    *_rows("bucket", _ALL, "https://github.com/aliyun/ossfs", "fuse.ossfs"),
)
FILE_SYSTEMS: Final = {each.name: each for each in _ROWS}

# Many programs mount themselves as plain `fuse`, and only the device shows which one it is: `mountpoint-s3 on /mnt type
# fuse`, `blobfuse2 on /mnt type fuse`, as their own documents and those of their CSI drivers show. GKE's driver for
# GCSFuse gives the bucket's name (gcs-fuse-csi-driver, pkg/csi_mounter/csi_mounter.go), and so does goofys: those
# stay unknown.
_BY_DEVICE: Final = {
    "mountpoint-s3": "fuse.mount-s3",
    "blobfuse": "fuse.blobfuse2",
    "blobfuse2": "fuse.blobfuse2",
    "mfs": "fuse.mfs",
    "juicefs": "fuse.juicefs",
    **{name: f"fuse.{name}" for name in ("gcsfuse", "s3fs", "goofys", "geesefs", "rclone", "ossfs", "sshfs")},
}
# Of a FUSE program that is not in the table nothing is known. A mark is right on every one.
_ANY_FUSE: Final = FileSystem(name="fuse", medium="other", lacks=_ALL, source=f"{_KERNEL}/fuse/index.html")
# The kernel's own file systems keep POSIX's word on rename(2).
_ANY: Final = FileSystem(name="unknown", medium="other", lacks=frozenset(("locks", "direct", "mmap")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of `/proc/self/mountinfo`."""

    point: str
    type: str
    device: str  # what is mounted: a block device, a server's path, a bucket


def file_system_of(path: str | os.PathLike[str]) -> FileSystem:
    """The row of the file system that holds a path (or `file://` URL), or would hold it: of the nearest directory that
    exists.

    Looks each time: a mount may change. Cost: a `stat` for each directory that is missing, and a `statfs`; a read of
    `/proc/self/mountinfo` where the answer is not a common disk or tmpfs. Elsewhere than on Linux nothing is known.
    """
    if sys.platform != "linux":
        return _ANY
    there = existing(os.fspath(path).removeprefix("file://"))
    magic = _magic(there)
    name = _MAGIC_NAMES.get(magic)
    if name is not None:
        return FILE_SYSTEMS[name]
    mount = mount_of(there)
    is_fuse = magic == _FUSE_MAGIC
    return row_of("", is_fuse=is_fuse) if mount is None else row_of(mount.type, mount.device, is_fuse=is_fuse)


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """The mount that holds a path; None where the kernel does not list mounts."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse_mounts(file)
    except OSError:
        return None
    real = os.path.realpath(path)
    holding = [mount for mount in mounts if Path(real).is_relative_to(mount.point)]
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
def row_of(name: str, device: str = "", *, is_fuse: bool = False) -> FileSystem:
    """The row of a type and a device as mountinfo names them; that of every FUSE program, or of every kernel file
    system, for one that is not in the table."""
    if name == "fuse":
        name = _BY_DEVICE.get(re.split("[#:]", device)[0].lower(), name)
    is_fuse = is_fuse or name.startswith("fuse")
    row = FILE_SYSTEMS.get(name) or replace(_ANY_FUSE if is_fuse else _ANY, **({"name": name} if name else {}))
    return replace(row, device=device) if row.is_fuse else row


def existing(path: str | os.PathLike[str]) -> str:
    """The path, or the nearest one above it that exists."""
    there = os.path.abspath(path)
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    return there


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
