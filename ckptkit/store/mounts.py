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
from typing import Final, Literal

from ckptkit.model.tiers import RAM, SSD
from ckptkit.util import clock

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
_PROBE_BYTES = 32 << 20  # at most, and for at most a second
_PIECE_BYTES = 4 << 20
_PROBE_S = 1.0
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming
_URL_IS_BETTER = "it needs fewer requests, and its commit is one (docs/STORAGE.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """One kind of file system: where its bytes are, and what a commit can use there."""

    name: str
    """The type in `/proc/self/mountinfo`; that of the program, if the type is `fuse` and the device names it."""

    medium: Medium
    """Where its bytes are. `bucket`: a FUSE program turns calls into requests to an object store. `other`: unknown."""

    atomic_rename: bool = True
    """A rename of a directory happens whole or not at all, for every reader and after a crash."""

    hard_links: bool = True
    """`link(2)` gives a second name to a file, and fails where the name is taken."""

    device: str = ""
    """The device of a FUSE mount, such as the name of a bucket. Empty in the table."""

    @property
    def is_fuse(self) -> bool:
        """Whether a program serves it, and not the kernel."""
        return self.name == "fuse" or self.name.startswith("fuse.")


def _rows(medium: Medium, names: str, *, renames: bool = True, links: bool = True) -> list[FileSystem]:
    return [FileSystem(name=name, medium=medium, atomic_rename=renames, hard_links=links) for name in names.split()]


# Above each group: its documents, also for the other guarantees in the table of docs/STORAGE.md. Those of the kernel
# are below docs.kernel.org/filesystems.
_ROWS: Final = (
    # rename(2); btrfs.readthedocs.io.
    *_rows("disk", "ext2 ext3 ext4 reiserfs jfs xfs f2fs bcachefs btrfs"),
    # overlayfs.html#renaming-directories: one of a lower layer is not renamed (EXDEV), ours are made in the upper one.
    # github.com/containers/fuse-overlayfs; bindfs(1); github.com/openzfs/zfs/releases: 2.3 brought direct I/O.
    *_rows("disk", "overlay fuse.fuse-overlayfs fuse.bindfs zfs"),
    # vfat.html; fuse/index.html. `fuseblk` is ntfs-3g, and others on a block device.
    *_rows("disk", "vfat exfat msdos fuseblk", renames=False, links=False),
    # tmpfs.html. Direct I/O on a tmpfs came with Linux 6.6.
    *_rows("memory", "tmpfs ramfs hugetlbfs devtmpfs"),
    # nfs(5). RFC 8881, 18.26.3: RENAME is atomic to the client. A repeated request may answer ENOENT after a success.
    *_rows("network", "nfs nfs4"),
    # `flock` needs the mount option of this name (ENOSYS without it): Google's service sets it
    # (cloud.google.com/managed-lustre/docs/posix-compliance), Amazon's FSx leaves it to the user
    # (docs.aws.amazon.com/fsx/latest/LustreGuide/mounting-ec2-instance.html).
    *_rows("network", "lustre"),
    # docs.ceph.com/en/latest/cephfs/posix; www.ibm.com/docs/en/storage-scale; docs.weka.io; 9p.html; virtiofs.html;
    # juicefs.com/docs/community/posix_compatibility; doc.beegfs.io: `tuneUseGlobalFileLocks` and `tuneFileCacheType` of
    # its client are both off or other by default.
    *_rows("network", "ceph fuse.ceph-fuse gpfs wekafs 9p virtiofs fuse.juicefs beegfs"),
    # MS-FSCC: a server refuses to rename a directory below which a file is open, and may have no hard links.
    # github.com/libfuse/sshfs; docs.daos.io/latest/user/filesystem; moosefs.com/support.
    *_rows("network", "cifs smb3 fuse.sshfs fuse.daos fuse.mfs", renames=False, links=False),
    # docs.gluster.org: a directory is on every brick; its rename is one on each.
    *_rows("network", "fuse.glusterfs", renames=False),
    # docs/semantics.md of GCSFuse: "renaming directories is not atomic", each object is copied and deleted. The same in
    # the README of s3fs, goofys, geesefs and ossfs, SEMANTICS.md of mountpoint-s3, "Blobfuse2 Limitations" in the wiki
    # of azure-storage-fuse, and rclone.org/commands/rclone_mount.
    *_rows("bucket", "fuse.gcsfuse fuse.s3fs fuse.mount-s3 fuse.goofys fuse.geesefs", renames=False, links=False),
    *_rows("bucket", "fuse.blobfuse2 fuse.rclone fuse.ossfs", renames=False, links=False),
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
_ANY_FUSE: Final = FileSystem(name="fuse", medium="other", atomic_rename=False, hard_links=False)
# The kernel's own file systems keep POSIX's word on rename(2).
_ANY: Final = FileSystem(name="unknown", medium="other")


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
