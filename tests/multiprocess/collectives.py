"""Counts what device collectives leave behind: bytes between processes, and compiled programs that hold one.

On the CPU backend collectives go through TCP connections of their own (gloo). Any collective, from any thread, sends
bytes over them; the coordination service has its own port and does not count.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

_BYTES_SENT_AT = 200  # tcpi_bytes_sent in struct tcp_info (linux/tcp.h), since Linux 4.19
_COLLECTIVE = re.compile(
    r"= \S+ (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
)


def sent_bytes(coordinator: str) -> int:
    """Bytes that this process has sent over its TCP connections, those with the coordination service left out."""
    port = int(coordinator.rsplit(":", 1)[1])
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not a connection
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {connection.getsockname()[1], connection.getpeername()[1]}
                if port not in ports:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
                    total += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
    return total


def programs_with_collectives(dump: Path) -> set[str]:
    """The compiled programs below `dump` (XLA's `--xla_dump_to`) that hold a collective."""
    return {
        path.name
        for path in dump.glob("*after_optimizations.txt")
        if _COLLECTIVE.search(path.read_text(errors="replace"))
    }
