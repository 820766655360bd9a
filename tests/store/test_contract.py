"""One contract for every store and every wrapper: whole or absent, and errors that name the object and the cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.store import LocalStore, Properties, RemoteStore, RetryStore, Store, open_store, properties_of
from ckptkit.store.backends import BACKENDS, backend_of
from ckptkit.store.base import checked_key
from ckptkit.testing import BucketServer
from ckptkit.testing.store_contract import StoreContract
from tests.mount import MountedBucket
from tests.store.stores import STORES, FakeTime, serial


class TestContract(StoreContract):
    """Every store and every wrapper keeps it."""

    @pytest.fixture(params=STORES)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        return STORES[request.param](tmp_path)


class TestBucketContract(StoreContract):
    """So does a bucket, over HTTP."""

    @pytest.fixture
    def store(self, bucket: str) -> Store:
        return RemoteStore(f"{bucket}/run-{next(serial)}")


class TestMountContract(StoreContract):
    """So does a directory of a bucket that is mounted: it has no hard links, and renames by copies."""

    @pytest.fixture
    def store(self, mounted_bucket: MountedBucket) -> Store:
        return LocalStore(mounted_bucket.path / "store")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket in this process."""
    with (
        BucketServer(dir=tmp_path_factory.mktemp("bucket"), buckets=["runs"]) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.env().items():
            patch.setenv(name, value)
        yield "gs://runs"


def test_keys_are_checked_by_one_rule() -> None:
    """If it failed, one store would take what another refuses."""
    assert checked_key("a/b.c/_d-e") == "a/b.c/_d-e"


# From a root to a store.


def test_root_url_selects_its_store(tmp_path: Path) -> None:
    """If it failed, a bucket would be a directory called `gs:` in the working directory."""
    open_store(tmp_path).put("key", b"1")
    assert (tmp_path / "key").read_bytes() == b"1"
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").get("key") == b"1"
    remote = open_store("memory://bucket/run/")
    assert isinstance(remote, RetryStore)
    assert remote.url == "memory://bucket/run"


@pytest.mark.parametrize("scheme", BACKENDS)
def test_a_row_is_found_by_its_scheme(scheme: str) -> None:
    """If it failed, a bucket would be committed to by a rename."""
    assert backend_of(f"{scheme}://bucket/run") is BACKENDS[scheme]
    assert properties_of(f"{scheme}://bucket/run").atomic_rename == (scheme == "file")


@pytest.mark.parametrize("root", ["/run", "run", "file:///run", "runs/gs:/x"])
def test_paths_are_a_file_system_s(root: str) -> None:
    """If it failed, a directory would be asked for as a bucket."""
    assert backend_of(root) is BACKENDS["file"]


@pytest.mark.parametrize("root", ["abfs://c/run", "https://host/run", "simplecache::gs://b/run", "gs:2://b"])
def test_unknown_scheme_has_the_properties_of_any_bucket(root: str) -> None:
    """If it failed, generations would be asked of a service that has none, or Orbax not be told of its marks."""
    expected = Properties(
        file_system=False,
        round_trips=True,
        atomic_rename=False,
        generations=False,
        may_ignore_conditions=True,
        known_to_orbax=False,
    )
    assert properties_of(root) == expected


def test_a_shared_directory_is_retried_as_a_bucket_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, one stale NFS handle would end a restart (unreachable is not absent)."""
    store = open_store(tmp_path)
    store.put("key", b"1")
    fake = FakeTime(monkeypatch)
    read_bytes, calls = Path.read_bytes, []

    def stale_once(path: Path) -> bytes:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", stale_once)
    assert store.get("key") == b"1"
    assert len(fake.slept) == 1
