"""`--timeout`: a bucket that accepts connections and never answers ends every command in time, by one sentence."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import gcsfs
import numpy as np
import pytest

import ckptkit
from ckptkit.store import remote
from tests.cli.conftest import Run
from tests.formats.writers import by_safetensors

TIMEOUT_S = 0.3
COMMANDS = (
    ["inspect", "{bucket}"],
    ["steps", "{bucket}"],
    ["verify", "{bucket}"],
    ["scrub", "{bucket}"],
    ["plan-restore", "{bucket}"],
    ["prune", "{bucket}", "--keep", "newest=1"],
    ["copy", "{bucket}", "{out}"],
    ["diff", "{bucket}", "{good}"],
    ["convert", "{bucket}", "{out}", "--to", "npz"],
    ["convert", "{good}", "{bucket}", "--to", "orbax"],
    ["reshard", "{orbax}", "{bucket}", "--mesh", "a=1"],
)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket whose server never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.getsockname()[1]}")
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://silent/run"
    gcsfs.GCSFileSystem.clear_instance_cache()


def test_silent_bucket_ends_every_command_in_time(ckpt: Run, silent: str, tmp_path: Path) -> None:
    """A script would wait 38 s for `--timeout 5`, and be told of another limit than its own."""
    good = by_safetensors(tmp_path / "a.safetensors", {"w": np.arange(9.0)})
    assert ckpt("convert", good, tmp_path / "o", "--to", "orbax").code == 0
    places = {"bucket": silent, "out": tmp_path / "out", "good": good, "orbax": tmp_path / "o"}
    for words in COMMANDS:
        began_s = time.monotonic()
        said = ckpt(*(word.format(**places) for word in words), "--timeout", TIMEOUT_S)
        assert said.code == 1, words
        assert f"no answer within {TIMEOUT_S:g} s" in said.err, words
        assert time.monotonic() - began_s < TIMEOUT_S + 1, words


def test_search_for_credentials_has_the_limit_too(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without a network the client would look for credentials for 16 s before the first request."""
    monkeypatch.setattr(remote, "_reachable", set())
    monkeypatch.setattr(remote.fsspec.core, "url_to_fs", lambda url: time.sleep(3))
    began_s = time.monotonic()
    said = ckpt("inspect", "gs://silent/run", "--timeout", 0.2)
    assert (said.code, "no answer within 0.2 s" in said.err) == (1, True), said.err
    assert time.monotonic() - began_s < 1.5


@pytest.mark.parametrize(("scheme", "client", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_missing_client_of_a_bucket_names_the_extra(
    scheme: str, client: str, extra: str, ckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People would install s3fs alone, in a version that was never tried with the rest."""

    def missing(url: str) -> None:
        raise ImportError(f"Install {client} to access it")

    monkeypatch.setattr(remote, "_reachable", set())
    monkeypatch.setattr(remote.fsspec.core, "url_to_fs", missing)
    message = f"{scheme}://bucket/run needs {client}: pip install 'ckptkit-jax[{extra}]'"
    said = ckpt("steps", f"{scheme}://bucket/run")
    assert (said.code, said.err) == (1, f"ckptkit: {message}\n")
    with pytest.raises(ckptkit.StoreError, match=re.escape(message)):
        ckptkit.CheckpointManager(f"{scheme}://bucket/run")
    said = ckpt("steps", "abfs://bucket/run")
    assert said.err == f"ckptkit: abfs://bucket/run needs {client}: install the package that it names\n"
