"""Ports that are free."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` ('': of any address) that was free a moment ago.

    Should another program take it, the attempt fails and the next one has a new port.
    """
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
