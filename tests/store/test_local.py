"""The local store: crash points, and what disks and directories raise."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.store import LocalStore
from ckptkit.store import local as local_module
from ckptkit.store.base import PutMode


class Crash(BaseException):
    """The process dies here: nobody handles it."""


class Crashing:
    """`os`, of which the n-th file system call kills the process, before or after it takes effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool):
        self.at, self.after, self.count = at, after, 0
        self.dead = False
        for name in ("fsync", "link", "unlink", "replace", "open", "mkdir", "fdopen", "close"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Crash  # a dead process makes no further call: no clean-up either
            self.count += 1
            if self.count != self.at:
                return call(*args, **kwargs)
            self.dead = True
            if self.after:
                call(*args, **kwargs)
            raise Crash

        return wrapped


def crash_points(prepare: Callable[[], Path], act: Callable[[Path], None], check: Callable[[Path, int], None]) -> None:
    """Runs `act` once for every call that it makes, dying there, and `check` after each."""
    for after in (False, True):
        for at in itertools.count(1):
            root = prepare()
            with pytest.MonkeyPatch.context() as monkeypatch:
                crashing = Crashing(monkeypatch, at, after=after)
                with suppress(Crash):
                    act(root)
            if not crashing.dead:
                assert at > 3, "the calls that are counted are not the calls that are made"
                break
            check(root, at)


@pytest.mark.parametrize("mode", ["create", "replace"])
@pytest.mark.parametrize("durable", [True, False], ids=["synced", "not synced"])
def test_crashed_put_leaves_the_old_or_the_new_object(tmp_path: Path, mode: PutMode, durable: bool) -> None:
    """If it failed, a crash in mid-put would leave half a manifest, or a name that no reader knows."""
    old = b"old " * 1000 if mode == "replace" else None
    new = b"new content " * 2000
    roots = (tmp_path / f"{n}" for n in itertools.count())

    def prepare() -> Path:
        root = next(roots)
        if old is not None:
            (root / "dir").mkdir(parents=True)
            (root / "dir" / "key").write_bytes(old)
        return root

    def act(root: Path) -> None:
        LocalStore(root, durable=durable).put("dir/key", new, mode=mode)

    def check(root: Path, at: int) -> None:
        again = LocalStore(root, durable=durable)
        found = again.get("dir/key") if again.stat("dir/key") else None
        assert found in (old, new), at
        assert again.list("dir") == ([] if found is None else ["key"]), at
        again.put("other/key", b"x")  # and the next put is not in its way
        if found is None:
            again.put("dir/key", new, mode="create")
            assert again.get("dir/key") == new

    crash_points(prepare, act, check)


def test_failed_put_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, every failed save would leave a file of its size on a disk that is full already."""
    store = LocalStore(tmp_path)
    store.put("dir/key", b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_module.os, "fsync", full)
    with pytest.raises(StoreFullError, match=r"/dir/key: No space left on device; free some space or take another"):
        store.put("dir/key", b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path / "dir") == ["key"]
    assert store.get("dir/key") == b"old"


def test_put_syncs_the_file_and_every_new_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a power failure would take a committed manifest together with its new directory (ext4)."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        synced.append("data" if ".put-" in name else str(Path(name).relative_to(tmp_path)))
        fsync(fd)

    monkeypatch.setattr(local_module.os, "fsync", watched)
    store = LocalStore(tmp_path / "root")
    store.put("one/two/key", b"1")
    assert synced.index("data") < synced.index("root/one/two")
    assert {".", "root", "root/one", "root/one/two"} <= set(synced)  # each new name, in the directory that holds it
    synced.clear()
    store.put("one/two/key", b"2")
    assert synced == ["data", "root/one/two"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.ESTALE, TransientStoreError),
        (errno.EINTR, TransientStoreError),
        (errno.ETIMEDOUT, TransientStoreError),
        (errno.EACCES, StoreError),
        (errno.EROFS, StoreError),
        (errno.EIO, StoreError),
    ],
)
def test_errors_of_the_disk_have_the_right_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    """If it failed, a full disk would be retried without an end, or a stale handle never."""

    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local_module.os, "replace", fails)
    with pytest.raises(StoreError) as caught:
        LocalStore(tmp_path).put("dir/key", b"x")
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{tmp_path}/dir/key: {os.strerror(code)}")
    assert caught.value.path == f"{tmp_path}/dir/key"
    assert isinstance(caught.value.__cause__, OSError)


def test_object_in_place_of_a_directory_is_a_separate_error(tmp_path: Path) -> None:
    """If it failed, an impossible put would report that its key exists already."""
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    with pytest.raises(StoreError, match=rf"^{tmp_path}/a/b: "):
        store.put("a/b", b"2")


def test_link_that_leads_to_itself_is_listed(tmp_path: Path) -> None:
    """One such link in a root would keep every command and every restart from it."""
    os.symlink("loop", tmp_path / "loop")
    os.symlink("nowhere", tmp_path / "dangling")
    (tmp_path / "step").mkdir()
    assert LocalStore(tmp_path).list("") == ["dangling", "loop", "step/"]
