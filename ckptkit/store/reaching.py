"""Why a service does not answer: one connection to it, made after a timeout, names what fails on the way."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies

from ckptkit.util import clock

_LIMIT_S = 0.5  # of the connection, and of the wait for it
_AGAIN_S = 60.0  # as long a finding counts: tries follow each other
_BUNDLES = ("TENSORSTORE_CA_BUNDLE", "AWS_CA_BUNDLE")  # of the clients
_found: dict[str, tuple[float, str | None]] = {}  # by endpoint: when, and what


def network_problem(endpoint: str) -> str | None:
    """Names the part of the way to `endpoint` that fails (its name, the connection, TLS), and the remedy.

    None where nothing fails within half a second, or this host uses a proxy. Cost: at most half a second, once a minute
    for each endpoint.
    """
    if getproxies().keys() - {"no"}:
        return None
    now_s = clock.monotonic_s()
    at_s, problem = _found.get(endpoint, (now_s - _AGAIN_S, None))
    if now_s - at_s < _AGAIN_S:
        return problem
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_tried(endpoint)), name="ckptkit-connect", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)  # no limit ends the search for a name
    _found[endpoint] = now_s, found[0] if found else None
    return _found[endpoint][1]


def _tried(endpoint: str) -> str | None:
    parts = urlsplit(endpoint)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    try:
        with socket.create_connection((host, port), timeout=_LIMIT_S) as connection:
            if is_tls:
                context = ssl.create_default_context()
                for name in _BUNDLES:
                    if path := os.environ.get(name):
                        context.load_verify_locations(path)
                context.wrap_socket(connection, server_hostname=host).close()
    except socket.gaierror as error:
        return f"the name {host} is not found ({error.strerror}); check it, and the name service of this host"
    except ssl.SSLCertVerificationError as error:
        why = f"the certificate of {host}:{port} is not trusted here ({error.verify_message})"
        return f"{why}; see that TENSORSTORE_CA_BUNDLE, and for s3:// AWS_CA_BUNDLE, name the file of its authority"
    except ssl.SSLError as error:
        return f"TLS with {host}:{port} fails ({error.reason}); check its address, and the certificates of this host"
    except ConnectionRefusedError:
        return f"{host}:{port} refuses the connection; check its address, and that the service runs"
    except OSError as error:
        return f"{host}:{port} cannot be reached ({error.strerror or error}); check the network of this host"
    return None
