"""One contract, three real clients, two servers: if this fails, a client sees a bucket that Google's is not.

The clients are TensorStore's `gcs` driver, gcsfs and google-cloud-storage. The servers are ours, which must pass
everything, and `gcp-storage-emulator` (2026.7.19), whose differences are expected failures below, strict: were one
mended, its test would fail here and the line go.

The emulator's differences, as these tests found them:

- `ifGenerationMatch` is ignored: every creator and every stale writer wins (all clients).
- Downloads carry no `x-goog-generation`: TensorStore takes every generation for 0, and its next conditional write
  fails with "Malformed StorageGeneration".
- `startOffset` and `endOffset` are ignored: TensorStore's listing of a key range gets other keys too.
- An empty media upload is never answered: the connection is closed (TensorStore).
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pytest
from bucket_clients import CLIENTS, Client
from bucket_http import BUCKET, Http

from ckptkit.testing.bucket import BucketServer, client_env

Connect = Callable[[], Client]
T = TypeVar("T")

DIFFERENCES: dict[tuple[str, str], str] = {
    ("tensorstore", "test_empty_object_exists"): "an empty media upload is never answered",
    ("tensorstore", "test_any_name_is_kept"): "startOffset and endOffset are ignored",
    ("tensorstore", "test_a_listing_follows_every_write_and_delete"): "startOffset and endOffset are ignored",
    ("tensorstore", "test_every_write_has_a_generation_of_its_own"): "downloads carry no generation",
    ("any", "test_create_of_an_existing_object_is_refused"): "ifGenerationMatch is ignored",
    ("any", "test_one_of_many_creators_wins"): "ifGenerationMatch is ignored",
    ("any", "test_only_the_generation_that_was_read_is_replaced"): "ifGenerationMatch is ignored",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BucketServer(dir=tmp_path_factory.mktemp("bucket"), buckets=[BUCKET]) as server:
        yield server.url


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--in-memory", "--default-bucket", BUCKET, "-q"]
    # It prints a traceback for every connection that a client closes early.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["ours", "emulator"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    url = request.getfixturevalue(request.param)
    for name, value in client_env(url).items():
        monkeypatch.setenv(name, value)
    return url


@pytest.fixture(params=list(CLIENTS))
def connect(request: pytest.FixtureRequest, url: str) -> Connect:
    """Makes clients that share nothing: each has its own connection, cache and context."""
    server = request.node.callspec.params["url"]
    test = request.node.originalname
    if server == "emulator" and (why := DIFFERENCES.get((request.param, test)) or DIFFERENCES.get(("any", test))):
        request.node.add_marker(pytest.mark.xfail(reason=why, strict=True))
    return lambda: CLIENTS[request.param](url)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """The servers live for the module, so each test has names of its own."""
    return f"{request.node.originalname}-{request.node.callspec.id}-{random.getrandbits(32):08x}"


def test_object_round_trips(connect: Connect, prefix: str) -> None:
    client = connect()
    data = os.urandom(100_000)
    client.write(f"{prefix}/name", data)
    assert connect().read(f"{prefix}/name") == data
    assert client.read(f"{prefix}/absent") is None


def test_object_of_many_chunks_round_trips(connect: Connect, prefix: str) -> None:
    data = os.urandom(5 * (1 << 20) + 12_345)
    connect().write(f"{prefix}/large", data)
    assert connect().read(f"{prefix}/large") == data


def test_empty_object_exists(connect: Connect, prefix: str) -> None:
    client = connect()
    client.write(f"{prefix}/empty", b"")
    assert client.read(f"{prefix}/empty") == b""


def test_range_is_read(connect: Connect, prefix: str) -> None:
    client = connect()
    data = os.urandom(10_000)
    client.write(f"{prefix}/name", data)
    assert client.read_range(f"{prefix}/name", 100, 5_000) == data[100:5_000]
    assert client.read_range(f"{prefix}/name", 9_990, 10_000) == data[9_990:]


@pytest.mark.parametrize("name", ["a b", "a%2Fb", "a?b=c&d", "é/ü/😀", "a+b", "a#b", "a..b/c", "..a/.b"])
def test_any_name_is_kept(connect: Connect, prefix: str, name: str) -> None:
    client = connect()
    client.write(f"{prefix}/{name}", name.encode())
    assert client.read(f"{prefix}/{name}") == name.encode()
    assert client.names(f"{prefix}/") == [f"{prefix}/{name}"]


def test_a_listing_follows_every_write_and_delete(connect: Connect, prefix: str) -> None:
    client, other = connect(), connect()
    names = [f"{prefix}/{number:03}" for number in range(25)]
    for name in names:
        client.write(name, b"x")
    assert other.names(f"{prefix}/") == names
    for name in names[::2]:
        client.delete(name)
    assert other.names(f"{prefix}/") == names[1::2]
    assert other.read(names[0]) is None


def test_an_overwrite_is_seen_by_the_next_reader(connect: Connect, prefix: str) -> None:
    client, other = connect(), connect()
    for number in range(20):
        client.write(f"{prefix}/name", b"%d" % number)
        assert other.read(f"{prefix}/name") == b"%d" % number


def test_every_write_has_a_generation_of_its_own(connect: Connect, prefix: str) -> None:
    client = connect()
    seen: set[object] = set()
    for _ in range(20):
        client.write(f"{prefix}/name", b"the same bytes")
        seen.add(client.generation(f"{prefix}/name"))
    assert len(seen) == 20


def test_create_of_an_existing_object_is_refused(connect: Connect, prefix: str) -> None:
    client = connect()
    assert client.create(f"{prefix}/name", b"first")
    assert not connect().create(f"{prefix}/name", b"second")
    assert client.read(f"{prefix}/name") == b"first"
    client.delete(f"{prefix}/name")
    assert client.create(f"{prefix}/name", b"third")


def test_one_of_many_creators_wins(connect: Connect, prefix: str) -> None:
    for round_number in range(3):
        name = f"{prefix}/{round_number}"
        won = together([partial(connect().create, name, b"x") for _ in range(6)])
        assert sorted(won) == [False] * 5 + [True]


def test_only_the_generation_that_was_read_is_replaced(connect: Connect, prefix: str) -> None:
    client = connect()
    if not client.by_generation:
        pytest.skip("this client cannot ask for it")
    client.write(f"{prefix}/name", b"first")
    old = client.generation(f"{prefix}/name")
    assert client.replace(f"{prefix}/name", b"second", old)
    assert not client.replace(f"{prefix}/name", b"third", old)
    assert client.read(f"{prefix}/name") == b"second"


def test_counters_guarded_by_generations_are_exact(connect: Connect, prefix: str, url: str, ours: str) -> None:
    if not connect().by_generation:
        pytest.skip("this client cannot ask for it")
    if url != ours:
        pytest.skip("nothing guards there, so what is lost is random; the test before this one shows why")
    name = f"{prefix}/counter"
    connect().write(name, b"0")

    def count(client: Client) -> None:
        done = 0
        while done < 5:
            generation = client.generation(name)
            done += client.replace(name, b"%d" % (int(client.read(name) or b"0") + 1), generation)

    together([partial(count, connect()) for _ in range(4)])
    assert connect().read(name) == b"20"


def test_an_absent_bucket_is_an_error(url: str) -> None:
    assert Http(url)("GET", "/storage/v1/b/absent-bucket/o").status == 404


def together(acts: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at once and return what each returned; raises what the first failing one raised."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run(act: Callable[[], T]) -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - the top of a thread; raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the emulator did not start")
