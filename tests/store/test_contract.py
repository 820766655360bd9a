"""One contract for every store and every wrapper: whole or absent, and errors that say what and where."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fsspec.config import conf as fsspec_conf
from gcsfs.retry import validate_response
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckptkit import clock
from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.store import LocalStore, MemoryStore, RemoteStore, RetryStore, Stat, Store, open_store
from ckptkit.store import local as local_module
from ckptkit.store import retry as retry_module
from ckptkit.store.base import PutMode, checked_key
from ckptkit.testing import BucketServer, FaultyStore, StoreFault
from ckptkit.testing.store_contract import StoreContract

_serial = itertools.count()


FLAKY = (StoreFault(effect="fail", probability=0.2), StoreFault(effect="fail after", probability=0.2))


def remote_file(root: Path) -> RemoteStore:
    """fsspec's local file system; a bucket has no directories to make, so it makes them itself."""
    fsspec_conf["file"] = {"auto_mkdir": True}
    try:
        return RemoteStore(f"file://{root}/deep/store")
    finally:
        del fsspec_conf["file"]


STORES: dict[str, Callable[[Path], Store]] = {
    "local": lambda root: LocalStore(root / "store"),
    "local, not synced": lambda root: LocalStore(root / "store", durable=False),
    "memory": lambda root: MemoryStore(),
    "remote memory": lambda root: RemoteStore(f"memory://contract-{next(_serial)}/run"),
    "remote file": remote_file,
    "retry over flaky local": lambda root: RetryStore(
        FaultyStore(LocalStore(root / "store"), FLAKY), first_delay_s=0.0
    ),
    "retry over flaky memory": lambda root: RetryStore(FaultyStore(MemoryStore(), FLAKY), first_delay_s=0.0),
    "faulty, reordered": lambda root: FaultyStore(MemoryStore(), [StoreFault(effect="reorder", probability=0.5)]),
    "faulty, slow": lambda root: FaultyStore(LocalStore(root / "store"), [StoreFault(effect="delay", delay_s=0.001)]),
}


class TestContract(StoreContract):
    """Every store and every wrapper keeps it."""

    @pytest.fixture(params=STORES)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        return STORES[request.param](tmp_path)


class TestBucketContract(StoreContract):
    """So does a bucket, over HTTP."""

    @pytest.fixture
    def store(self, bucket: str) -> Store:
        return RemoteStore(f"{bucket}/run-{next(_serial)}")


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


# Any sequence of operations, against a dictionary.

KEYS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "f/a"])
DATA = st.binary(max_size=20)


class StoreAgainstDict(RuleBasedStateMachine):
    """A store and a dictionary that is told the same."""

    make: Callable[[Path], Store]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(f"/dev/shm/ckptkit-contract-{os.getpid()}-{next(_serial)}")
        self.store = type(self).make(self.root)
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @rule(key=KEYS, data=DATA)
    def replace(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=KEYS, data=DATA)
    def create(self, key: str, data: bytes) -> None:
        if key in self.model:
            with pytest.raises(FileExistsError):
                # Different from what is there: a repeated create of equal content counts as the first one's success.
                self.store.put(key, self.model[key] + b"!", mode="create")
        else:
            self.store.put(key, data, mode="create")
            self.model[key] = data

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        expected = self.model.get(key)
        assert self.store.stat(key) == (None if expected is None else Stat(len(expected)))
        if expected is None:
            with pytest.raises(FileNotFoundError):
                self.store.get(key)
        else:
            assert self.store.get(key) == expected

    @invariant()
    def lists_agree(self) -> None:
        """If it failed, a list would show what is not there, or hide what is."""
        model = MemoryStore()
        for key, data in self.model.items():
            model.put(key, data)
        for prefix in ("", "d", "d/e", "f"):
            found, expected = self.store.list(prefix), model.list(prefix)
            assert found == sorted(found)
            assert set(expected) <= set(found)
            for extra in set(found) - set(expected):  # a directory whose last object went may stay behind, empty
                assert extra.endswith("/")
                assert self.store.list(f"{prefix}/{extra}".strip("/")) in ([], ["e/"])


def _machine(name: str) -> type:
    machine = type(f"StoreAgainstDict[{name}]", (StoreAgainstDict,), {"make": staticmethod(STORES[name])})
    case = cast(Any, machine).TestCase
    case.settings = settings(
        deadline=None, max_examples=15, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow]
    )
    return case


TestLocal = _machine("local")
TestRemoteMemory = _machine("remote memory")
TestRemoteFile = _machine("remote file")
TestRetryOverFlaky = _machine("retry over flaky local")
TestMemory = _machine("memory")
TestReordered = _machine("faulty, reordered")


# LocalStore: crash points.


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
def test_a_put_that_dies_anywhere_leaves_old_or_new_whole(tmp_path: Path, mode: PutMode, durable: bool) -> None:
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


def test_a_failed_put_leaves_no_junk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_put_syncs_the_file_the_directory_and_every_directory_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """If it failed, a full disk would be retried for ever, or a stale handle never."""

    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local_module.os, "replace", fails)
    with pytest.raises(StoreError) as caught:
        LocalStore(tmp_path).put("dir/key", b"x")
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{tmp_path}/dir/key: {os.strerror(code)}")
    assert caught.value.path == f"{tmp_path}/dir/key"
    assert isinstance(caught.value.__cause__, OSError)


def test_an_object_where_a_directory_should_be_is_an_error_of_its_own(tmp_path: Path) -> None:
    """If it failed, a put that cannot be would say that its key exists already."""
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    with pytest.raises(StoreError, match=rf"^{tmp_path}/a/b: "):
        store.put("a/b", b"2")


# RemoteStore: what libraries raise becomes ours, once.


class Failing:
    """A file system of which every operation raises `error`."""

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fails(*_: Any, **__: Any) -> Any:
            raise self._error

        return fails


def operations_of(store: Store) -> list[Callable[[], Any]]:
    return [
        lambda: store.put("key", b""),
        lambda: store.get("key"),
        lambda: store.stat("key"),
        lambda: store.list("dir"),
        lambda: store.delete("key"),
    ]


def gcs_error(status: int) -> Exception:
    """What gcsfs itself raises for a status."""
    try:
        # Google's answers have the code in the body too; gcsfs before 2026.10 knows it from there alone.
        validate_response(status, b'{"error": {"code": %d, "message": "it says so"}}' % status, "b/key")
    except Exception as error:  # noqa: BLE001  any type: that is the point
        return error
    raise AssertionError(status)


def failing(error: Exception) -> RemoteStore:
    store = RemoteStore("memory://bucket/run")
    store._fs = Failing(error)
    return store


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_bucket_that_is_busy_or_down_is_transient(status: int) -> None:
    """If it failed, one 503 of a bucket would end a restart instead of being tried again."""
    for operation in operations_of(failing(gcs_error(status))):
        with pytest.raises(TransientStoreError, match=r"^memory://bucket/run/(key|dir): "):
            operation()


@pytest.mark.parametrize("status", [401, 403])
def test_a_bucket_that_refuses_says_what_to_grant(status: int) -> None:
    """If it failed, a missing permission would be retried, or be taken for an empty bucket."""
    for operation in operations_of(failing(gcs_error(status))):
        with pytest.raises(StoreError, match=r"grant storage\.objects\.get, \.list, \.create and") as caught:
            operation()
        assert type(caught.value) is StoreError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionResetError("reset"), r"ConnectionResetError: reset"),
        (BrokenPipeError("pipe"), r"BrokenPipeError: pipe"),
        (TimeoutError(), r"no answer within \d+ s; look at the network and at the service"),
    ],
    ids=["reset", "pipe", "timeout"],
)
def test_a_broken_connection_is_transient(error: Exception, text: str) -> None:
    """If it failed, a network that blinks would end a run."""
    for operation in operations_of(failing(error)):
        with pytest.raises(TransientStoreError, match=text):
            operation()


def test_any_other_error_is_a_store_error_with_its_cause() -> None:
    """If it failed, a bug in a library would look like an absent object."""
    cause = RuntimeError("what is this")
    for operation in operations_of(failing(cause)):
        with pytest.raises(StoreError, match="RuntimeError: what is this") as caught:
            operation()
        assert type(caught.value) is StoreError
        assert caught.value.__cause__ is cause


def test_absent_and_existing_are_not_translated() -> None:
    """If it failed, absent objects would be store errors, and a lost race for an epoch would be retried."""
    absent, exists = failing(FileNotFoundError("key")), failing(gcs_error(412))
    with pytest.raises(FileNotFoundError):
        absent.get("key")
    assert (absent.stat("key"), absent.list("dir")) == (None, [])
    absent.delete("key")
    with pytest.raises(FileExistsError):
        exists.put("key", b"", mode="create")


# RetryStore.


class FakeTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)
        monkeypatch.setattr(retry_module, "time", SimpleNamespace(sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now_s += max(seconds, 0.01)  # an attempt takes time too


def test_a_store_that_stays_down_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a restart would hang for ever on a bucket that is gone, or give up at the first 503."""
    fake = FakeTime(monkeypatch)
    down = TransientStoreError("gs://b: 503")
    store = RetryStore(cast(Any, Failing(down)), deadline_s=60.0)
    with pytest.raises(TransientStoreError, match=r"^gs://b: 503$"):
        store.get("key")
    assert 59.0 <= fake.now_s - 100.0 <= 61.0
    assert max(fake.slept) <= 5.0
    assert len(fake.slept) >= 10


def test_tries_leave_the_numbers_of_a_job_that_seeds_random_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that throttles in the background would change the data order, or the dropout, of a seeded run."""
    FakeTime(monkeypatch)
    before = random.getstate()
    with pytest.raises(TransientStoreError):
        RetryStore(cast(Any, Failing(TransientStoreError("503"))), deadline_s=60.0).get("key")
    assert random.getstate() == before


@pytest.mark.parametrize(
    "error", [StoreError("403"), StoreFullError("full"), FileNotFoundError("key"), KeyError("bug")]
)
def test_only_transient_errors_are_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """If it failed, a missing permission would cost a minute per operation."""
    fake = FakeTime(monkeypatch)
    for operation in operations_of(RetryStore(cast(Any, Failing(error)))):
        with pytest.raises(type(error)):
            operation()
    assert fake.slept == []


class LosesAnswers:
    """A store whose first put takes effect, and whose answer is lost."""

    def __init__(self, inner: MemoryStore):
        self.inner = inner
        self.puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        self.puts += 1
        self.inner.put(key, data, mode=mode)
        if self.puts == 1:
            raise TransientStoreError("connection reset")


def test_a_create_that_took_effect_is_no_conflict_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a lost answer would make a run fail with `another run has begun this epoch`."""
    FakeTime(monkeypatch)
    inner = LosesAnswers(MemoryStore())
    RetryStore(cast(Any, inner)).put("key", b"mine", mode="create")
    assert (inner.puts, inner.inner.get("key")) == (2, b"mine")


def test_a_create_that_finds_another_content_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a retry would hide that another run was first."""
    FakeTime(monkeypatch)
    inner = MemoryStore()
    inner.put("key", b"theirs")
    with pytest.raises(FileExistsError, match="key"):
        RetryStore(inner).put("key", b"mine", mode="create")
    with pytest.raises(FileExistsError, match="key"):
        RetryStore(inner).put("key", b"theirs", mode="create")  # not repeated, so it cannot be ours


# From a root to a store.


def test_roots_open_the_store_that_serves_them(tmp_path: Path) -> None:
    """If it failed, a bucket would be a directory called `gs:` in the working directory."""
    open_store(tmp_path).put("key", b"1")
    assert (tmp_path / "key").read_bytes() == b"1"
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").get("key") == b"1"
    remote = open_store("memory://bucket/run/")
    assert isinstance(remote, RetryStore)
    assert remote.url == "memory://bucket/run"


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
