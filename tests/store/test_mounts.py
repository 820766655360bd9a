"""File systems that look local: recognised by their mount, and treated by what they guarantee."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from ckptkit.store import LocalStore, mounts, properties_of
from ckptkit.store.mounts import FILE_SYSTEMS, Mount, file_system_of, parse_mounts, row_of
from tests.mount import MountedBucket
from tests.mounts import Mounts

# proc(5) gives the fields. A space is \040, and one mount covers another at /data. The lines of type `fuse` are as the
# documents of gcs-fuse-csi-driver, mountpoint-s3-csi-driver and blob-csi-driver show them, and as MooseFS mounts.
TABLE = r"""
22 1 0:21 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
23 22 0:30 / /dev/shm rw - tmpfs shm rw,size=65536k
24 22 0:31 / /data rw - ext4 /dev/sda1 rw
25 22 0:32 / /data rw - nfs4 filer:/export rw,vers=4.2
26 22 0:33 / /gcs/my\040runs rw,nosuid - fuse.gcsfuse my-bucket rw,user_id=0
27 22 0:34 / /lustre rw - lustre 10.0.0.1@tcp:/fs rw,flock
28 22 0:35 / /new rw - fuse.sometool tool rw
29 22 0:36 / /odd rw - oddfs odd rw
30 22 0:37 / /data/bucket rw,nosuid,nodev,noexec,relatime - fuse my-bucket rw,user_id=0,group_id=0,default_permissions
52 22 0:38 / /s3 ro,nosuid,nodev,noatime - fuse mountpoint-s3 ro,user_id=0,group_id=0,default_permissions,allow_other
53 22 0:39 / /mnt/blob rw,nosuid,nodev,relatime - fuse blobfuse2 rw,user_id=0,group_id=0,allow_other
54 22 0:40 / /old rw,nosuid,nodev,relatime - fuse.s3fs s3fs rw,user_id=0,group_id=0,allow_other
55 22 0:41 / /jfs rw,relatime - fuse.juicefs JuiceFS:prod rw,user_id=0,group_id=0,default_permissions,allow_other
56 22 0:42 / /workspace rw,nosuid,nodev,relatime - fuse mfs#eu.example.net:9421 rw,user_id=0,group_id=0,allow_other
57 22 0:43 / /home/b rw,nosuid,nodev,relatime - fuse.sshfs b@host:/home rw,user_id=1000,group_id=1000
torn line
""".splitlines()


def test_mounts_are_read_with_their_types_and_devices() -> None:
    """If it failed, a bucket with a space in its name would be taken for the disk above it."""
    found = parse_mounts(TABLE)
    assert len(found) == 15
    assert found[4] == Mount(point="/gcs/my runs", type="fuse.gcsfuse", device="my-bucket")


@pytest.mark.parametrize(
    ("path", "type_name", "medium", "atomic_rename"),
    [
        ("/home/a", "overlay", "disk", True),
        ("/dev/shm/run", "tmpfs", "memory", True),
        ("/data/run", "nfs4", "network", True),
        ("/database", "overlay", "disk", True),
        ("/gcs/my runs/run", "fuse.gcsfuse", "bucket", False),
        ("/lustre/run", "lustre", "network", True),
        ("/new/run", "fuse.sometool", "other", False),
        ("/odd/run", "oddfs", "other", True),
        ("/data/bucket/run", "fuse", "other", False),  # GKE: the device is the bucket's name
        ("/s3/run", "fuse.mount-s3", "bucket", False),
        ("/mnt/blob/run", "fuse.blobfuse2", "bucket", False),
        ("/old/run", "fuse.s3fs", "bucket", False),
        ("/jfs/run", "fuse.juicefs", "network", True),
        ("/workspace/run", "fuse.mfs", "network", False),
        ("/home/b/run", "fuse.sshfs", "network", False),
    ],
)
def test_a_path_has_the_guarantees_of_its_mount(
    path: str, type_name: str, medium: str, atomic_rename: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it failed, a run would commit steps to a mounted bucket by a rename that stops half way. (A faked table: this
    kernel has neither NFS nor Lustre.)"""
    parsed = parse_mounts(TABLE)
    monkeypatch.setattr(mounts, "parse_mounts", lambda lines: parsed)
    monkeypatch.setattr(mounts, "_magic", lambda path: 0)
    monkeypatch.setattr(mounts, "existing", lambda path: path)
    monkeypatch.setattr(os.path, "realpath", os.fspath)
    found = file_system_of(path)
    assert (found.name, found.medium, found.atomic_rename) == (type_name, medium, atomic_rename)
    assert properties_of(path).atomic_rename == atomic_rename


def test_fuse_program_without_a_name_commits_by_a_mark() -> None:
    """Nothing is known of it: a rename may be a thousand copies."""
    assert not row_of("", is_fuse=True).atomic_rename
    assert not row_of("fuse").atomic_rename
    assert row_of("fuse.newtool").name == "fuse.newtool"
    assert row_of("").atomic_rename


def test_the_page_s_table_of_guarantees_is_that_of_the_code() -> None:
    """A reader would choose a file system for a guarantee that the code does not expect of it, or the reverse."""
    page = (Path(__file__).parents[2] / "docs/STORAGE.md").read_text()
    _, _, rows = page.partition("| type | directory rename | hard links |")[2].partition("\n")
    found: dict[str, tuple[bool, bool]] = {}
    for line in rows.splitlines()[1:]:
        if not line.startswith("|"):
            break
        types, *answers = (each.strip() for each in line.strip("|").split("|"))
        assert set(answers) <= {"yes", "no"}
        found |= dict.fromkeys(re.findall("`(.+?)`", types), (answers[0] == "yes", answers[1] == "yes"))
    assert found == {name: (row.atomic_rename, row.hard_links) for name, row in FILE_SYSTEMS.items()}


@pytest.mark.disk
def test_mounted_tmpfs_is_recognised_below_a_missing_directory(tmp_path: Path, mounts: Mounts) -> None:
    """If it failed, a ramdisk tier that is not made yet would have the properties of the disk above it."""
    there = mounts.small(tmp_path / "small", "1m")
    assert file_system_of(there / "not" / "made").name == "tmpfs"
    assert file_system_of(there / "not" / "made").medium == "memory"
    assert file_system_of(f"file://{there}/not").medium == "memory"
    assert file_system_of(tmp_path).medium != "memory"


def test_mounted_bucket_is_recognised(mounted_bucket: MountedBucket) -> None:
    """If it failed, every guarantee of a disk would be expected of a bucket."""
    found = file_system_of(mounted_bucket.path / "run" / "4")
    assert (found.name, found.atomic_rename, found.hard_links) == ("fuse.gcsfuse", False, False)
    assert not properties_of(f"file://{mounted_bucket.path}/run").atomic_rename
    assert not LocalStore(mounted_bucket.path).properties.atomic_rename
    mounted_bucket.close()
    assert properties_of(str(mounted_bucket.path)).atomic_rename, "the mount was removed"


def test_the_test_s_bucket_behaves_like_one(mounted_bucket: MountedBucket) -> None:
    """Everything that is shown on it would show nothing."""
    root = mounted_bucket.path
    (root / "a").write_bytes(b"1")
    with pytest.raises(OSError, match="not permitted"):
        os.link(root / "a", root / "b")
    (root / "d").mkdir()
    for name in ("x", "y"):
        (root / "d" / name).write_bytes(b"1")
    mounted_bucket.set(changes_max=3)  # the new directory, and one object of it: copied, and deleted
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.rename(root / "d", root / "e")
    mounted_bucket.revive()
    assert (os.listdir(root / "d"), os.listdir(root / "e")) == (["y"], ["x"]), "half of it has moved"
    with open(root / "lost", "wb") as file:
        file.write(b"1")
        file.flush()
        mounted_bucket.revive()  # its program died before the file was closed
    assert "lost" not in os.listdir(root)
    mounted_bucket.set(listing_lag=2)
    (root / "late").write_bytes(b"1")
    assert "late" not in os.listdir(root)
    assert (root / "late").exists()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_move_needs_its_source_and_a_free_target(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a writer that was fenced off could commit, or replace the commit of another."""
    if not links:

        def refused(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "link", refused)
    store = LocalStore(tmp_path)
    store.put("a", b"1", mode="create")
    store.put("b", b"2", mode="create")
    (tmp_path / "d").mkdir()
    store.move("a", "d/a")
    assert (store.get("d/a"), store.stat("a")) == (b"1", None)
    with pytest.raises(FileNotFoundError):
        store.move("a", "d/c")
    with pytest.raises(FileExistsError):
        store.move("b", "d/a")
    assert (store.get("d/a"), store.get("b")) == (b"1", b"2")
    with pytest.raises(FileExistsError):
        store.put("b", b"3", mode="create")
    assert store.get("b") == b"2"
