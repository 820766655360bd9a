"""The data that a process serves, and the requests that it refuses: without the secret, beyond a box, or stalled."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.model.manifest import SaveId
from ckptkit.peers.client import PeerClient
from ckptkit.peers.server import PeerServer
from ckptkit.peers.share_index import BadRangeError, NotHeldError, ShareIndex, SupersededError
from ckptkit.slots.arena import Arena
from tests.peers.conftest import LIMITS, SAVE, SECRET, commit, manifest_of, values

MANIFEST = "/saves/2.7.4/0/manifest"
BYTES = "/saves/2.7.4/0/bytes"


def say(address: str, text: str, *, read: bool = True) -> socket.socket | bytes:
    """Sends bytes as they are; the answer, or the connection."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(text.encode())
    if not read:
        return connection
    with connection:
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
        return found


def status(address: str, path: str, *, secret: str | None = SECRET, method: str = "GET", **headers: str) -> int:
    """The status of one request, sent without anything that tidies it up."""
    given = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in given.items()]
    answer = say(address, "\r\n".join(lines) + "\r\n\r\n")
    assert isinstance(answer, bytes)
    return int(answer.split(b" ", 2)[1])


def read_all(client: PeerClient) -> np.ndarray:
    manifest, tag = client.manifest(0, SAVE, 0)
    (leaf,) = manifest.arrays["state"]
    into = np.empty(leaf.shape, np.int32)
    client.reader(0, SAVE, 0, tag)("state", leaf, leaf.boxes[0], leaf.boxes[0].box, into)
    return into


def test_box_is_bit_exact_over_several_requests(client: PeerClient) -> None:
    """A restore from a peer would be another state."""
    np.testing.assert_array_equal(read_all(client), values())


def test_part_of_a_box_is_extracted(client: PeerClient) -> None:
    """On another mesh a process would get rows that are not its own."""
    manifest, tag = client.manifest(0, SAVE, 0)
    (leaf,) = manifest.arrays["state"]
    wanted = type(leaf.boxes[0].box)((1, 5), (3, 9))
    into = np.empty(wanted.shape, np.int32)
    client.reader(0, SAVE, 0, tag)("state", leaf, leaf.boxes[0], wanted, into)
    np.testing.assert_array_equal(into, values()[1:3, 5:9])


@pytest.mark.parametrize("secret", [None, "", "the secret of another job", SECRET + "x", SECRET[:-1], "\udcff"])
def test_request_without_the_secret_is_refused(server: PeerServer, secret: str | None) -> None:
    """Anybody in the network could read the weights."""
    if secret == "\udcff":
        answer = say(server.address, f"GET {MANIFEST} HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\r\n\r\n")
        assert isinstance(answer, bytes)
        assert answer.split(b" ")[1] in (b"400", b"401")
        return
    assert status(server.address, MANIFEST, secret=secret) == 401
    assert status(server.address, BYTES, secret=secret, Range="bytes=0-1") == 401


def test_requests_before_the_secret_is_set_are_refused(share_index: ShareIndex) -> None:
    """An empty secret would be everybody's."""
    server = PeerServer(share_index, "127.0.0.1")
    try:
        assert status(server.address, MANIFEST, secret="") == 401
        assert status(server.address, MANIFEST, secret="None") == 401
    finally:
        server.close()


@pytest.mark.parametrize(
    "path",
    [
        "/saves/2.7.4/0/../0/manifest",
        "/saves/2.7.4/../../../../etc/passwd",
        "/saves/2.7.4/%2e%2e/manifest",
        "/saves/2.7.4/0/%2e%2e%2flock",
        "/saves/2.7.4/0/slot-0.bin",
        "/saves/2.7.4/0/lock",
        "/saves/2.7.4/1/manifest",
        "/saves/2.7.5/0/manifest",
        "/saves/02.7.4/0/manifest/",
        "//etc/passwd",
        "/",
    ],
)
def test_only_slots_named_by_a_manifest_have_a_path(server: PeerServer, path: str) -> None:
    """A `..` in a name would read the host's files."""
    assert status(server.address, path) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD"])
def test_write_requests_are_refused(server: PeerServer, method: str) -> None:
    """A client could overwrite a slot."""
    assert status(server.address, MANIFEST, method=method) == 404


def test_a_range_outside_of_a_box_is_refused(server: PeerServer, share_index: ShareIndex) -> None:
    """The bytes between and behind boxes belong to other saves, and a huge range would fill the server's memory."""
    tag, _ = share_index.manifest(SAVE, 0)
    size = values().nbytes
    end = f"bytes={size - 1}-{size}"
    for asked in ("bytes=0-", "bytes=-5", "bytes=5-4", end, f"bytes=0-{9 << 20}", "bytes=0-1,3-4", "rows=0-1", ""):
        assert status(server.address, BYTES, Range=asked, If_Match=f'"{tag}"') == 416, asked
    assert status(server.address, BYTES, Range="bytes=0-9", If_Match=f'"{tag}"') == 206
    assert status(server.address, BYTES, Range="bytes=0-9", If_Match='"0123"') == 412
    for start, stop in ((-1, 4), (4, 4), (size, size + 4), (0, 9 << 20)):
        with pytest.raises(BadRangeError):
            share_index.read(SAVE, 0, tag, start, stop)


def test_unreadable_slot_is_reported_as_damage(client: PeerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector of one host's SSD would end the restore on all, though others hold the same bytes."""

    def bad(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", bad)
        with pytest.raises(CorruptCheckpointError, match="404: cannot be read: Input/output error"):
            read_all(client)
    np.testing.assert_array_equal(read_all(client), values())


def test_replaced_save_is_superseded_not_corrupt(client: PeerClient, arena: Arena) -> None:
    """A running job would be reported as damaged, or a restore mix two saves."""
    manifest, tag = client.manifest(0, SAVE, 0)
    (leaf,) = manifest.arrays["state"]
    for step in (8, 9):
        commit(arena, SaveId(2, step, step))
    into = np.empty(leaf.shape, np.int32)
    with pytest.raises(CorruptCheckpointError, match="superseded, or deleted"):
        client.reader(0, SAVE, 0, tag)("state", leaf, leaf.boxes[0], leaf.boxes[0].box, into)
    with pytest.raises(CorruptCheckpointError, match="superseded, or deleted"):
        client.manifest(0, SAVE, 0)


def test_slot_replaced_during_a_read_is_superseded(
    host_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes could be of the newer save: a read takes no lease."""
    share_index = ShareIndex({"ram": host_dir})
    tag, _ = share_index.manifest(SAVE, 0)
    from ckptkit.peers import share_index as module

    real = module.os.pread

    def replace(fd: int, size: int, offset: int) -> bytes:
        data = real(fd, size, offset)
        arena.forget_step(SAVE.step)
        return data

    monkeypatch.setattr(module.os, "pread", replace)
    with pytest.raises(SupersededError):
        share_index.read(SAVE, 0, tag, 0, 8)
    with pytest.raises(NotHeldError):
        share_index.read(SAVE, 0, tag, 0, 8)


def test_truncated_slot_file_is_not_held(host_dir: Path, share_index: ShareIndex) -> None:
    """A mapping of it would kill the process that serves."""
    tag, _ = share_index.manifest(SAVE, 0)
    (slot,) = host_dir.glob("0/slot-0.bin")
    with slot.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(NotHeldError, match="ends before byte 4096"):
        share_index.read(SAVE, 0, tag, 0, 4096)


def test_boxes_beyond_the_end_of_a_slot_are_not_listed(host_dir: Path, client: PeerClient) -> None:
    """A restore would make room for, and wait for, what no slot has."""
    (slot,) = host_dir.glob("0/slot-0.bin")
    assert [len(leaf.boxes) for leaf in client.manifest(0, SAVE, 0)[0].arrays["state"]] == [1]
    slot.write_bytes(b"cut short")
    fresh = PeerServer(ShareIndex({"ram": host_dir}), "127.0.0.1", limits=LIMITS)
    fresh.admit(SECRET)
    other = PeerClient([fresh.address], SECRET, timeout_s=30.0)
    assert [len(leaf.boxes) for leaf in other.manifest(0, SAVE, 0)[0].arrays["state"]] == [0]
    other.close()
    fresh.close()


def test_dead_process_times_out_once(server: PeerServer, share_index: ShareIndex) -> None:
    """A restore of a thousand boxes would wait a thousand times for a host that has died."""
    gone = PeerClient([server.address], SECRET, timeout_s=0.5)
    gone.manifest(0, SAVE, 0)
    server.close()
    with pytest.raises(PeerUnreachableError, match=r"^process 0 at .* did not answer within 0\.5 s .*PeerOptions"):
        gone.manifest(0, SAVE, 0)
    began_s = time.monotonic()
    for _ in range(1000):
        with pytest.raises(PeerUnreachableError):
            gone.manifest(0, SAVE, 0)
    assert time.monotonic() - began_s < 100, "a thousand waits of 0.5 s"
    with pytest.raises(PeerUnreachableError, match="process 1 serves nothing"):
        PeerClient([None, None], SECRET, timeout_s=1).manifest(1, SAVE, 0)


def test_process_of_another_job_is_unreachable_not_absent(server: PeerServer) -> None:
    """A zombie of an earlier run, at a reused port, would be taken for a host without the save. Or it would end the
    restore on all processes, by an error without a retry, although others hold the same bytes."""
    with pytest.raises(PeerUnreachableError, match="was refused"):
        PeerClient([server.address], "another secret", timeout_s=5).manifest(0, SAVE, 0)


def test_server_error_is_reported_as_unreachable(
    server: PeerServer, client: PeerClient, share_index: ShareIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in one process's server would end the restore on all."""

    def broken(*_: Any) -> bytes:
        raise MemoryError

    _, tag = client.manifest(0, SAVE, 0)
    with monkeypatch.context() as patched:
        patched.setattr(share_index, "read", broken)
        assert status(server.address, BYTES, Range="bytes=0-9", If_Match=f'"{tag}"') == 500
        with pytest.raises(PeerUnreachableError, match="was refused"):
            read_all(client)
    np.testing.assert_array_equal(read_all(client), values())


def test_manifest_of_a_stale_epoch_is_refused(
    server: PeerServer, client: PeerClient, share_index: ShareIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that came back with an old ramdisk, or a cache in front of it, would give an abandoned branch its name."""
    stale = SaveId(SAVE.epoch - 1, SAVE.step, SAVE.number)
    text = manifest_of(values(stale), "slot-0.bin", stale).to_bytes()
    tag, _ = share_index.manifest(SAVE, 0)
    monkeypatch.setattr(ShareIndex, "manifest", lambda *_: (tag, text))
    with pytest.raises(CorruptCheckpointError, match=r"/saves/2\.7\.4/0/manifest is of save 7@1\.4, process 0"):
        client.manifest(0, SAVE, 0)
    assert status(server.address, "/saves/1.7.4/0/bytes", Range="bytes=0-9", If_Match=f'"{tag}"') == 404


def test_damage_in_transit_is_detected(client: PeerClient, host_dir: Path) -> None:
    """A flipped bit in another host's memory would be restored."""
    (slot,) = host_dir.glob("0/slot-0.bin")
    with slot.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptCheckpointError, match=r"/saves/2\.7\.4/0/bytes: leaf w, cell .* has digest"):
        read_all(client)


def test_malformed_requests_are_one_line_a_minute(server: PeerServer, caplog: pytest.LogCaptureFixture) -> None:
    """Anyone who reaches the port would fill the log with tracebacks."""
    with caplog.at_level("DEBUG"):
        for _ in range(5):
            say(server.address, "GET / HTTP/9.x\r\nHost: \x01\r\nbroken\r\n\r\n")
    (record,) = [each for each in caplog.records if each.name.startswith(("aiohttp", "ckptkit"))]
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert record.getMessage().startswith("peer server: a request was not understood: ")
    assert "\n" not in record.getMessage()
