"""Why a service does not answer, in words that name the remedy."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptkit.store import reaching
from ckptkit.store.reaching import network_problem


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[int]:
    """The port of a server whose certificate is its own."""
    own = tmp_path / "own.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *words.split(), "-keyout", own, "-out", tmp_path / "certificate.pem"], check=True)
    with own.open("a") as both:
        both.write((tmp_path / "certificate.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the client ends the handshake, the test the server
                connection, _ = server.accept()
                context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
    thread.join(10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")
def test_certificate_of_a_bundle_that_is_set_is_no_problem(
    untrusted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who has set the variables would be sent to set them, while the service has an outage."""
    monkeypatch.setattr(reaching, "_LIMIT_S", 20.0)
    monkeypatch.setenv("TENSORSTORE_CA_BUNDLE", str(tmp_path / "certificate.pem"))
    assert network_problem(f"https://localhost:{untrusted}") is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")
def test_certificate_that_is_not_trusted_is_named_with_the_variables_to_set(
    untrusted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message would only have that the service does not answer."""
    monkeypatch.setattr(reaching, "_LIMIT_S", 20.0)
    problem = network_problem(f"https://localhost:{untrusted}")
    assert problem is not None
    assert f"the certificate of localhost:{untrusted} is not trusted here (self" in problem
    assert "TENSORSTORE_CA_BUNDLE, and for s3:// AWS_CA_BUNDLE" in problem


def test_service_that_refuses_is_named() -> None:
    """A wrong port would pass for an outage."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refuses the connection" in (network_problem(f"http://localhost:{port}") or "")
