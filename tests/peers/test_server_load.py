"""A server of many clients: who stalls, idles or takes nothing keeps the others neither out nor waiting."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from ckptkit.peers import client as client_module
from ckptkit.peers.client import PeerClient
from ckptkit.peers.server import PeerServer
from ckptkit.peers.share_index import ShareIndex
from tests.peers.conftest import LIMITS, SAVE, SECRET, values
from tests.peers.test_server import BYTES, read_all, say, status


def test_stalled_client_is_disconnected_and_others_are_served(server: PeerServer, client: PeerClient) -> None:
    """One hanging process would stop the restore of all others, or never release memory."""
    head = f"GET {BYTES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    _, tag = client.manifest(0, SAVE, 0)
    ranged = head + f'Range: bytes=0-{(8 << 20) - 1}\r\nIf-Match: "{tag}"\r\n\r\n'
    silent = [say(server.address, "", read=False) for _ in range(3)]
    halfway = [say(server.address, head, read=False) for _ in range(3)]
    never_reading = [say(server.address, ranged, read=False) for _ in range(3 * LIMITS.transfers_max)]
    threads = threading.active_count()
    np.testing.assert_array_equal(read_all(client), values())
    assert threading.active_count() <= threads + 1, "one more to read, whatever comes"
    for connection in (*silent, *halfway, *never_reading):
        assert isinstance(connection, socket.socket)
        with connection:
            wait_until_cut(connection)
    np.testing.assert_array_equal(read_all(client), values())


def wait_until_cut(connection: socket.socket) -> None:
    """Reads the bytes in flight, until the server has ended the connection."""
    connection.settimeout(60)
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionError:
        return


def test_connections_beyond_the_limit_are_closed(share_index: ShareIndex) -> None:
    """A client that opens connections without an end would take the server's file descriptors."""
    server = PeerServer(share_index, "127.0.0.1", limits=type(LIMITS)(connections_max=3, idle_s=60))
    try:
        opened = [say(server.address, "", read=False) for _ in range(3)]
        deadline_s = time.monotonic() + 60
        while sum(each.transport is not None for each in server._web.connections) < 3:
            assert time.monotonic() < deadline_s, "the server does not see them"
            time.sleep(0.01)
        opened += [say(server.address, "", read=False) for _ in range(3)]
        for connection in opened[:3]:  # the oldest give way
            assert isinstance(connection, socket.socket)
            with connection:
                wait_until_cut(connection)
        assert sum(each.transport is not None for each in server._web.connections) <= 3
        for connection in opened[3:]:
            assert isinstance(connection, socket.socket)
            connection.close()
    finally:
        server.close()


def test_idle_clients_do_not_block_new_ones(share_index: ShareIndex) -> None:
    """Of a thousand hosts that read from one, the last would give it up while the first keep connections for later."""
    server = PeerServer(share_index, "127.0.0.1", limits=type(LIMITS)(connections_max=3, idle_s=60))
    server.admit(SECRET)
    clients = [PeerClient([server.address], SECRET, timeout_s=5.0) for _ in range(8)]
    try:
        for client in (*clients, *clients):
            client.manifest(0, SAVE, 0)
    finally:
        for client in clients:
            client.close()
        server.close()


def test_simultaneous_connections_are_accepted(server: PeerServer) -> None:
    """Of a thousand hosts some would fail: the kernel refuses connections beyond its queue."""
    busy = threading.Event()
    server._loop.call_soon_threadsafe(busy.wait, 60)  # the interpreter is busy, for example
    try:
        come = [say(server.address, "", read=False) for _ in range(120)]
    finally:
        busy.set()
    for connection in come:
        assert isinstance(connection, socket.socket)
        connection.close()


def test_queued_client_gets_busy_before_its_timeout() -> None:
    """It would go to the end of the line, again and again, and what was read for it be sent to nobody."""
    assert type(LIMITS)().busy_s < client_module._TRY_S


def test_unread_responses_are_bounded(share_index: ShareIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of slow hosts would hold 8 MiB each, gigabytes in addition to a ramdisk that fills the host already."""
    read: list[int] = []
    real = share_index.read

    def counted(*args: Any) -> bytes:
        data = real(*args)
        read.append(len(data))
        return data

    monkeypatch.setattr(share_index, "read", counted)
    limits = type(LIMITS)(transfers_max=2, answers_max=3, request_s=60.0, busy_s=60.0)
    server = PeerServer(share_index, "127.0.0.1", limits=limits)
    server.admit(SECRET)
    tag, _ = share_index.manifest(SAVE, 0)
    asked = f"GET {BYTES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    asked += f'Range: bytes=0-{(8 << 20) - 1}\r\nIf-Match: "{tag}"\r\n\r\n'
    stalled = [say(server.address, asked, read=False) for _ in range(8)]
    try:
        while len(read) < 3:
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(read) == 3
        for connection in stalled:  # one that goes makes room for the next
            assert isinstance(connection, socket.socket)
            connection.close()
        assert status(server.address, BYTES, Range="bytes=0-9", If_Match=f'"{tag}"') == 206
    finally:
        server.close()


def test_a_client_keeps_few_connections(server: PeerServer) -> None:
    """A restore that asks a thousand hosts for manifests would use up the files that a process may open."""
    client = PeerClient([server.address] * 200, SECRET, timeout_s=30.0)
    for process in range(200):
        client.manifest(process, SAVE, 0)
    assert 8 <= len(client._idle) <= 64
    assert client._idle[-1][0] == 199
    client.close()
