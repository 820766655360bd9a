"""A bucket for each test; leaving it fails the test if the server itself failed on a request."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_http import BUCKET, Http

from ckptkit.testing.bucket import BucketServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BucketServer]:
    with BucketServer(dir=tmp_path / "bucket", buckets=[BUCKET]) as server:
        yield server


@pytest.fixture
def http(server: BucketServer) -> Http:
    return Http(server.url)


@pytest.fixture
def bucket_env(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    """The bucket, with this process's environment leading the clients to it."""
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return server
