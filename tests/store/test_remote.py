"""The remote store and its retries: what libraries raise becomes ours, once, and is tried again within a deadline."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import google.auth.exceptions
import pytest
from gcsfs.retry import validate_response

from ckptkit.errors import StoreError, StoreFullError, TransientStoreError
from ckptkit.store import MemoryStore, RemoteStore, RetryStore, Store
from ckptkit.store.base import PutMode
from ckptkit.store.retry import retried
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status
from tests.store.stores import FakeTime

# RemoteStore: what libraries raise becomes ours, once.


class Failing:
    """A file system of which every operation raises `error`."""

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fails(*_: Any, **__: Any) -> Any:
            raise self._error

        return fails


def operations_of(store: Store, without: str = "") -> list[Callable[[], Any]]:
    each = {
        "put": lambda: store.put("key", b""),
        "get": lambda: store.get("key"),
        "stat": lambda: store.stat("key"),
        "list": lambda: store.list("dir"),
        "delete": lambda: store.delete("key"),
    }
    return [operation for name, operation in each.items() if name != without]


def gcs_error(status: int) -> Exception:
    """gcsfs's own error for a status."""
    try:
        # Google's answers have the code in the body too; gcsfs before 2026.10 knows it from there alone.
        validate_response(status, b'{"error": {"code": %d, "message": "it says so"}}' % status, "b/key")
    except Exception as error:  # noqa: BLE001  any type: that is the point
        return error
    raise AssertionError(status)


@pytest.mark.parametrize("status", [500, 503, 504])
def test_error_with_an_object_as_message_is_transient(server: BucketServer, status: int) -> None:
    """One such answer of a front end would end the start of a manager."""
    store = RemoteStore("gs://runs/run")
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=status, nested=True)),))
    for operation in operations_of(store, without="get"):  # a download's error is plain text
        with pytest.raises(TransientStoreError):
            operation()


def test_refusal_with_an_object_as_message_is_not_tried_again(server: BucketServer) -> None:
    """A caller without credentials would wait until the deadline of the retries, and read of a busy service."""
    store = RetryStore(RemoteStore("gs://runs/run"))
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=401, nested=True)),))
    for operation in operations_of(store, without="get"):
        with pytest.raises(StoreError, match=r"grant storage\.objects\.") as caught:
            operation()
        assert type(caught.value) is StoreError
    asked = Counter(entry.kind for entry in server.log.entries())
    listings = asked.pop(Kind.LIST)  # gcsfs asks for one next to a stat
    assert (set(asked.values()), listings <= 2) == ({1}, True), (asked, listings)


def failing(error: Exception, url: str = "memory://bucket/run") -> RemoteStore:
    store = RemoteStore(url)
    store._fs = Failing(error)
    return store


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_or_down_bucket_is_transient(status: int) -> None:
    """If it failed, one 503 of a bucket would end a restart instead of being tried again."""
    for operation in operations_of(failing(gcs_error(status))):
        with pytest.raises(TransientStoreError, match=r"^memory://bucket/run/(key|dir): "):
            operation()


@pytest.mark.parametrize("status", [401, 403])
def test_refused_permission_error_says_what_to_grant(status: int) -> None:
    """If it failed, a missing permission would be retried, or be taken for an empty bucket."""
    for operation in operations_of(failing(gcs_error(status))):
        with pytest.raises(StoreError, match=r"grant storage\.objects\.get, \.list, \.create and") as caught:
            operation()
        assert type(caught.value) is StoreError


@pytest.mark.parametrize("name", ["DefaultCredentialsError", "RefreshError", "ReauthFailError"])
def test_missing_or_expired_credentials_say_how_to_sign_in(name: str) -> None:
    """One that has to sign in again is a kind of RefreshError, and had the words of an error of the service."""
    error = getattr(google.auth.exceptions, name)("no")
    for operation in operations_of(failing(error)):
        with pytest.raises(StoreError, match="gcloud auth application-default login"):
            operation()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionResetError("reset"), r"ConnectionResetError: reset"),
        (BrokenPipeError("pipe"), r"BrokenPipeError: pipe"),
        (TimeoutError(), r"no answer within \d+ s, or only .* \(429, 5xx\); look at the network and at the service"),
    ],
    ids=["reset", "pipe", "timeout"],
)
def test_a_broken_connection_is_transient(error: Exception, text: str) -> None:
    """If it failed, a network that blinks would end a run."""
    for operation in operations_of(failing(error)):
        with pytest.raises(TransientStoreError, match=text):
            operation()


@pytest.mark.parametrize(
    ("library", "name", "fields"),
    [
        ("botocore.exceptions", "EndpointConnectionError", {"endpoint_url": "https://s3"}),
        ("botocore.exceptions", "ConnectTimeoutError", {"endpoint_url": "https://s3"}),
        ("botocore.exceptions", "ReadTimeoutError", {"endpoint_url": "https://s3"}),
        ("botocore.exceptions", "ConnectionClosedError", {"endpoint_url": "https://s3"}),
        ("google.auth.exceptions", "TransportError", {}),
    ],
)
def test_timeout_errors_of_libraries_are_transient(library: str, name: str, fields: dict[str, str]) -> None:
    """If it failed, a network that blinks would end a run on Amazon, or wherever a token is due meanwhile."""
    error = getattr(pytest.importorskip(library), name)(**fields)
    if library.startswith("botocore"):
        pytest.importorskip("s3fs")
    url = "s3://bucket/run" if library.startswith("botocore") else "gs://bucket/run"
    for operation in operations_of(failing(error, url)):
        with pytest.raises(TransientStoreError, match=f"^{url}/(key|dir): {name}: "):
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


def test_retries_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a restart would hang on a lost bucket, or fail at the first 503."""
    fake = FakeTime(monkeypatch)
    down = TransientStoreError("gs://b: 503")
    store = RetryStore(cast(Any, Failing(down)), deadline_s=60.0)
    with pytest.raises(TransientStoreError, match=r"^gs://b: 503$"):
        store.get("key")
    assert 59.0 <= fake.now_s - 100.0 <= 61.0
    assert max(fake.slept) <= 5.0
    assert len(fake.slept) >= 10


def test_what_takes_longer_than_the_deadline_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, one 503 late in a large object would end a copy of hours."""
    fake, tries = FakeTime(monkeypatch), []

    def upload() -> None:
        tries.append(fake.now_s)
        fake.now_s += 600
        raise TransientStoreError("503")

    with pytest.raises(TransientStoreError):
        retried(upload, deadline_s=60.0, tries_min=4)
    assert len(tries) == 4
    assert len(fake.slept) == 3


def test_retries_do_not_use_the_global_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that throttles in the background would change the data order, or the dropout, of a seeded run."""
    FakeTime(monkeypatch)
    before = random.getstate()
    with pytest.raises(TransientStoreError):
        RetryStore(cast(Any, Failing(TransientStoreError("503"))), deadline_s=60.0).get("key")
    assert random.getstate() == before


@pytest.mark.parametrize(
    "error", [StoreError("403"), StoreFullError("full"), FileNotFoundError("key"), KeyError("bug")]
)
def test_only_transient_errors_are_retried(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
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


def test_retried_create_does_not_conflict_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a lost answer would make a run fail with `another run has begun this epoch`."""
    FakeTime(monkeypatch)
    inner = LosesAnswers(MemoryStore())
    RetryStore(cast(Any, inner)).put("key", b"mine", mode="create")
    assert (inner.puts, inner.inner.get("key")) == (2, b"mine")


def test_create_with_different_existing_content_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a retry would hide that another run was first."""
    FakeTime(monkeypatch)
    inner = MemoryStore()
    inner.put("key", b"theirs")
    with pytest.raises(FileExistsError, match="key"):
        RetryStore(inner).put("key", b"mine", mode="create")
    with pytest.raises(FileExistsError, match="key"):
        RetryStore(inner).put("key", b"theirs", mode="create")  # not repeated, so it cannot be ours
