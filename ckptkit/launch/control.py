"""A connection between two agents. Each verifies that the other has the secret; messages are bounded and have a MAC.

A connection has two threads: one receives, and one sends pings. Messages and the end go to callbacks.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, final

from ckptkit.util.clock import Deadline

MESSAGE_BYTES_MAX = 1 << 20
SECRET_CHARS_MIN = 16
HANDSHAKE_S = 5.0
_PORT_S = 10.0  # for the port of the first agent to become free
_STRANGERS_MAX = 32  # connections that have not proved anything yet
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = b"ckptkit run 1\n"
_HEADER = struct.Struct("<I")
_PINGS = 5  # in the time after which silence is a loss


class ControlError(Exception):
    """A connection that cannot be used; the message gives the reason. `silent`: the other end may still be alive."""

    def __init__(self, message: str, *, silent: bool = False):
        super().__init__(message)
        self.silent = silent


@final
class Connection:
    """One end of an authenticated connection. `send` may be called from any thread."""

    def __init__(self, link: socket.socket, key: bytes, *, is_server: bool, silence_s: float):
        self._link = link
        self._key = key
        self._own, self._other = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = self._received = 0
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        link.settimeout(silence_s)
        self._threads: list[threading.Thread] = []

    def start(self, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[ControlError], None]) -> None:
        """Begins to receive and to ping. `on_lost` is called once, from the receiving thread; not after `close`."""
        reader = threading.Thread(
            target=self._read, args=(on_message, on_lost), name="ckptkit-run-control", daemon=True
        )
        pinger = threading.Thread(target=self._ping, name="ckptkit-run-ping", daemon=True)
        self._threads = [reader, pinger]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message. A connection that cannot take it is closed: `on_lost` reports that."""
        body = json.dumps(message).encode()
        if len(body) > MESSAGE_BYTES_MAX:
            raise ValueError(f"a control message of {len(body)} bytes, expected {MESSAGE_BYTES_MAX} at most")
        with self._lock:
            mac = self._mac(self._own, self._sent, body)
            self._sent += 1
            try:
                self._link.sendall(_HEADER.pack(len(body)) + mac + body)
            except OSError:
                with suppress(OSError):
                    self._link.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Closes after the other end has received everything and has closed, or after 5 s."""
        self._closed.set()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        self._threads[0].join(HANDSHAKE_S)
        self.close()

    def close(self) -> None:
        """Ends the connection and its threads."""
        self._closed.set()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._link.close()

    def _read(self, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[ControlError], None]) -> None:
        try:
            while True:
                message = self._receive()
                if message:  # a ping is an empty one
                    on_message(message)
        except ControlError as error:
            if not self._closed.is_set():
                self._closed.set()
                on_lost(error)

    def _receive(self) -> dict[str, Any]:
        (size,) = _HEADER.unpack(_read_exactly(self._link, _HEADER.size, self._silence_s))
        if size > MESSAGE_BYTES_MAX:
            raise ControlError(f"a message of {size} bytes, expected {MESSAGE_BYTES_MAX} at most")
        mac = _read_exactly(self._link, _MAC_BYTES, self._silence_s)
        body = _read_exactly(self._link, size, self._silence_s)
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, body)):
            raise ControlError("a message that the other agent did not write")
        self._received += 1
        try:
            found = json.loads(body)
        except ValueError as error:
            raise ControlError("a message that is not JSON") from error
        if not isinstance(found, dict):
            raise ControlError("a message that is not an object")
        return found

    def _ping(self) -> None:
        while True:
            self.send({})
            if self._closed.wait(self._silence_s / _PINGS):
                return

    def _mac(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + struct.pack("<Q", number) + body, hashlib.sha256)


@final
class Listener:
    """Accepts agents that know the secret, in a thread of its own. Strangers are closed after 5 s, and not reported."""

    def __init__(
        self, host: str, port: int, secret: str, silence_s: float, on_connection: Callable[[Connection, str], None]
    ):
        self._secret = checked_secret(secret)
        self._silence_s = silence_s
        self._on_connection = on_connection
        self._strangers = threading.Semaphore(_STRANGERS_MAX)
        self._server = _bound(host, port)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="ckptkit-run-listen", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.getsockname()[1]

    def close(self) -> None:
        """Accepts no more connections."""
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, address = self._server.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.05)  # no file descriptor is left: another connection has to end first
                continue
            if not self._strangers.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(
                target=self._welcome, args=(link, address[0]), name="ckptkit-run-hello", daemon=True
            ).start()

    def _welcome(self, link: socket.socket, address: str) -> None:
        try:
            key = _greet_client(link, self._secret)
        except (ControlError, OSError):
            link.close()
            return
        finally:
            self._strangers.release()
        self._on_connection(Connection(link, key, is_server=True, silence_s=self._silence_s), address)


def _bound(host: str, port: int) -> socket.socket:
    """A server at a port that others may hold for a moment: agents that wait for this one take it as their own port."""
    deadline = Deadline(_PORT_S)
    while True:
        try:
            return socket.create_server((host, port), backlog=128, reuse_port=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or deadline.passed:
                raise
        threading.Event().wait(0.1)


def connect(host: str, port: int, secret: str, silence_s: float) -> Connection:
    """A connection to the first agent. Raises `ControlError` for a wrong secret, and OSError where no agent answers, or
    where the connection breaks before the greeting."""
    known = checked_secret(secret)
    link = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    if link.getsockname() == link.getpeername():  # TCP connects a port of this host to itself without a listener
        link.close()
        raise ConnectionRefusedError(f"no process listens at {host}:{port}")
    try:
        key = _greet_server(link, known)
    except BaseException:
        link.close()
        raise
    return Connection(link, key, is_server=False, silence_s=silence_s)


def checked_secret(secret: str) -> bytes:
    """The secret's bytes. Raises ValueError for one that could be guessed."""
    if len(secret) < SECRET_CHARS_MIN:
        raise ValueError(
            f"the secret has {len(secret)} characters, expected {SECRET_CHARS_MIN} or more: openssl rand -hex 32"
        )
    return secret.encode()


def _greet_client(link: socket.socket, secret: bytes) -> bytes:
    """The server's side: it sends its MAC only after it has verified the client's."""
    deadline = Deadline(HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = secrets.token_bytes(_NONCE_BYTES)
    link.settimeout(HANDSHAKE_S)
    link.sendall(_HELLO + own)
    answer = _read_exactly(link, len(_HELLO) + _NONCE_BYTES + _MAC_BYTES, deadline.left_s, deadline)
    hello, other, mac = answer[: len(_HELLO)], answer[len(_HELLO) : -_MAC_BYTES], answer[-_MAC_BYTES:]
    if hello != _HELLO or not hmac.compare_digest(mac, _proof(secret, b"client", own, other)):
        raise ControlError("a stranger")
    link.sendall(_proof(secret, b"server", own, other))
    return _proof(secret, b"session", own, other)


def _greet_server(link: socket.socket, secret: bytes) -> bytes:
    deadline = Deadline(HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        greeting = _read_exactly(link, len(_HELLO) + _NONCE_BYTES, deadline.left_s, deadline)
    except ControlError as error:  # an agent that has just ended, or another that waits and had this port for a moment
        raise ConnectionResetError(f"no greeting: {error}") from error
    if not greeting.startswith(_HELLO):
        raise ControlError("what answers there is not an agent of ckptkit run")
    other, own = greeting[len(_HELLO) :], secrets.token_bytes(_NONCE_BYTES)
    link.sendall(_HELLO + own + _proof(secret, b"client", other, own))
    try:
        mac = _read_exactly(link, _MAC_BYTES, deadline.left_s, deadline)
    except ControlError as error:
        raise ControlError("the first agent has another secret") from error
    if not hmac.compare_digest(mac, _proof(secret, b"server", other, own)):
        raise ControlError("the first agent has another secret")
    return _proof(secret, b"session", other, own)


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, role + server + client, hashlib.sha256)


def _read_exactly(link: socket.socket, size: int, timeout_s: float, deadline: Deadline | None = None) -> bytes:
    """`size` bytes; each wait is `timeout_s`, or all together the deadline."""
    body = bytearray()
    while len(body) < size:
        link.settimeout(timeout_s if deadline is None else max(0.001, deadline.left_s))
        try:
            chunk = link.recv(min(65536, size - len(body)))
        except TimeoutError as error:
            raise ControlError(f"nothing was received for {timeout_s:.0f} s", silent=True) from error
        except OSError as error:
            raise ControlError(f"the connection broke: {error.strerror or error}") from error
        if not chunk:
            raise ControlError("the connection was closed")
        body += chunk
    return bytes(body)
