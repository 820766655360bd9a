"""Requests shares from other processes of the job, and verifies them as the restore asks."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, final

import numpy as np

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError, StoreError, StoreFullError
from ckptkit.model.boxes import Box
from ckptkit.model.cells import copy_proven
from ckptkit.model.manifest import MANIFEST_BYTES_MAX, BoxRecord, LeafRecord, Manifest, SaveId
from ckptkit.peers.share_index import RANGE_BYTES_MAX, save_name, slot_bytes_of
from ckptkit.slots.reader import within
from ckptkit.util.clock import Deadline

_PAUSE_S = 0.1  # between tries
_TRY_S = 10.0  # for one step of one try: a connection, a piece of an answer
_PIECE_BYTES = 1 << 20
_KEPT_MAX = 64  # idle connections in all: a restore may ask a thousand processes
_PROVEN_PER_S = 1e9  # bytes of a copy that its keeper verifies in a second, at the least


@final
class PeerClient:
    """Requests to the processes at `addresses` (None: it serves nothing). Safe from several threads.

    A process that does not answer is retried for `timeout_s`, once. Later requests to it fail at once, until
    `try_again`.
    """

    def __init__(self, addresses: Sequence[str | None], secret: str, *, timeout_s: float):
        self._addresses = addresses
        self._secret = secret
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []  # by process, the last one used last
        self._lost: dict[int, str] = {}

    def serves(self, process: int) -> bool:
        """Whether a process reported that it serves."""
        return process < len(self._addresses) and self._addresses[process] is not None

    def try_again(self) -> None:
        """Forgets who did not answer."""
        with self._lock:
            self._lost.clear()

    def manifest(self, process: int, save_id: SaveId, share: int) -> tuple[Manifest, str]:
        """The manifest of `share` as `process` has it, without boxes beyond its slot's end, and the tag that `reader`
        needs.

        Raises `CorruptCheckpointError` where it has it no more or it is damaged, `PeerUnreachableError` where it does
        not answer, or refuses.
        """
        where = f"{self._where(process)}{_path(save_id, share, 'manifest')}"
        tag, body = self.ask(process, "GET", _path(save_id, share, "manifest"), {})
        manifest = Manifest.from_bytes(body, path=where)
        if (manifest.save_id, manifest.writer.process) != (save_id, share):
            raise CorruptCheckpointError(f"{where} is of save {manifest.save_id}, process {manifest.writer.process}")
        return within(manifest, slot_bytes_of(tag)), tag

    def reader(self, process: int, save_id: SaveId, share: int, tag: str) -> Any:
        """A `BoxReader` of that share's boxes; each cell is compared with its digest."""
        path = _path(save_id, share, "bytes")
        where = f"{self._where(process)}{path}"

        def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
            del item

            def fetch(cell: Box, start: int, stop: int, target: np.ndarray) -> np.ndarray:
                del cell, stop
                for at in range(0, target.nbytes, RANGE_BYTES_MAX):
                    piece = memoryview(target[at : at + RANGE_BYTES_MAX])  # pyright: ignore[reportArgumentType]
                    first = record.offset + start + at
                    asked = {"Range": f"bytes={first}-{first + piece.nbytes - 1}", "If-Match": f'"{tag}"'}
                    self.ask(process, "GET", path, asked, into=piece)
                return target

            copy_proven(leaf, record, wanted, into, fetch, where=where)

        return read

    def send_copy(
        self, process: int, save_id: SaveId, share: int, memory: np.ndarray, text_for: Callable[[str], bytes]
    ) -> Generator[int, None, None]:
        """Sends the bytes of a slot to be kept by `process`, and their manifest, which `text_for` makes for a slot's
        name; yields the bytes sent so far after each piece. When it ends, they are committed there.

        Raises what `manifest` does, and `StoreFullError` where that host has no room.
        """
        path = f"/copies/{save_name(save_id)}/{share}"
        _, slot = self.ask(process, "POST", path, {}, body=json.dumps({"bytes": memory.nbytes}).encode())
        for start in range(0, memory.nbytes, RANGE_BYTES_MAX):
            piece = memory[start : start + RANGE_BYTES_MAX]
            said = {"Content-Range": f"bytes {start}-{start + piece.nbytes - 1}/*"}
            self.ask(process, "PUT", f"{path}/bytes", said, body=memoryview(piece))  # pyright: ignore[reportArgumentType]
            yield start + piece.nbytes
        patience_s = memory.nbytes / _PROVEN_PER_S  # it answers once it has verified the whole copy
        self.ask(process, "POST", f"{path}/manifest", {}, body=text_for(slot.decode()), patience_s=patience_s)

    def ask(
        self,
        process: int,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: Any = None,
        into: memoryview | None = None,
        patience_s: float = 0.0,
    ) -> tuple[str, bytes]:
        """Tag and body of the answer; with `into`, the body is exactly that and is read there. See `manifest`.

        `patience_s` is added to `timeout_s`, for an answer that takes work.
        """
        if process in self._lost:
            raise PeerUnreachableError(self._lost[process])
        timeout_s = self._timeout_s + patience_s
        deadline = Deadline(timeout_s)
        while True:
            try:
                status, tag, data = self._once(process, method, path, headers, body, into, deadline)
                if status < 300:
                    return tag, data
                if status != 503:
                    raise _refused(status, self._where(process) + path, data)
                reason = "it is busy"
            except StoreError:  # its answer is final; one without room is an OSError too
                raise
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            if deadline.left_s < _PAUSE_S:
                message = (
                    f"process {process} at {self._where(process)} did not answer within {timeout_s:g} s "
                    f"({reason}); look at whether it runs and whether hosts reach each other there, or give the "
                    "address to use with PeerOptions(host=...)"
                )
                with self._lock:
                    self._lost[process] = message
                raise PeerUnreachableError(message)
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Ends the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _once(
        self,
        process: int,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Any,
        into: memoryview | None,
        deadline: Deadline,
    ) -> tuple[int, str, bytes]:
        connection = self._connection(process)
        try:
            connection.timeout = min(_TRY_S, max(_PAUSE_S, deadline.left_s))
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request(method, path, body=body, headers={"Authorization": f"Bearer {self._secret}", **headers})
            answer = connection.getresponse()
            direct = into is not None and answer.status < 300
            data = _read_into(answer, into, deadline) if direct and into is not None else _read(answer, deadline)
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._keep(process, connection)
        return answer.status, (answer.getheader("ETag") or "").strip('"'), data

    def _connection(self, process: int) -> http.client.HTTPConnection:
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == process:
                    return self._idle.pop(at)[1]
        host, _, port = self._where(process).rpartition(":")
        return http.client.HTTPConnection(host.strip("[]"), int(port))

    def _keep(self, process: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.append((process, connection))
            oldest = self._idle.pop(0)[1] if len(self._idle) > _KEPT_MAX else None
        if oldest is not None:
            oldest.close()

    def _where(self, process: int) -> str:
        address = self._addresses[process]
        if address is None:
            raise PeerUnreachableError(f"process {process} serves nothing to others")
        return address


def _path(save_id: SaveId, share: int, what: str) -> str:
    return f"/saves/{save_name(save_id)}/{share}/{what}"


def _refused(status: int, where: str, data: bytes) -> Exception:
    said = data[:200].decode(errors="replace")
    if status == 507:
        return StoreFullError(f"{where} has no room: {said}")
    if status in (404, 412, 416, 422):
        return CorruptCheckpointError(f"{where}: superseded, or deleted ({status}: {said})", path=where)
    # Not what it was: the next source is asked, and a restart finds others.
    return PeerUnreachableError(f"{where} was refused ({status}: {said}); it may belong to another job", path=where)


def _read_into(answer: http.client.HTTPResponse, into: memoryview, deadline: Deadline) -> bytes:
    if answer.length != into.nbytes:
        raise http.client.HTTPException(f"{answer.length} bytes came, {into.nbytes} were asked for")
    at = 0
    while at < into.nbytes:
        got = answer.readinto(into[at : at + _PIECE_BYTES])
        if not got or deadline.passed:
            raise http.client.HTTPException(f"{at} of {into.nbytes} bytes came in time")
        at += got
    answer.read()
    return b""


def _read(answer: http.client.HTTPResponse, deadline: Deadline) -> bytes:
    if answer.length is None or answer.length > MANIFEST_BYTES_MAX:
        raise http.client.HTTPException(f"an answer of {answer.length} bytes")
    data = bytearray(answer.length)
    _read_into(answer, memoryview(data), deadline)
    return bytes(data)
