"""Copies that others send: proven before they count, and an end to those that do not come whole."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError, StoreError, StoreFullError
from ckptkit.model.manifest import SaveId
from ckptkit.peers import client as client_module
from ckptkit.peers import receiver as receiver_module
from ckptkit.peers.client import PeerClient
from ckptkit.peers.receiver import CopyReceiver
from ckptkit.peers.server import PeerServer
from ckptkit.peers.share_index import ShareIndex
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import read_manifests
from tests.peers.conftest import LIMITS, SECRET, manifest_of, values
from tests.peers.test_server import say
from tests.peers.test_server_load import wait_until_cut

SENDER = 1
FIRST = SaveId(2, 7, 4)
SECOND = SaveId(2, 8, 5)
THIRD = SaveId(2, 9, 6)


@pytest.fixture
def peer_arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.open(tmp_path / "ram" / "job-0" / "host-0", "buddy-0-0", slots=2, synced=False)
    yield made
    made.close()


@pytest.fixture
def receiver(peer_arena: Arena) -> CopyReceiver:
    return CopyReceiver({SENDER: peer_arena})


@pytest.fixture
def server(peer_arena: Arena, receiver: CopyReceiver) -> Iterator[PeerServer]:
    """Of a process that keeps copies of process 1."""
    assert peer_arena.directory is not None
    made = PeerServer(ShareIndex({"ram": peer_arena.directory.parent}), "127.0.0.1", limits=LIMITS, also=receiver)
    made.admit(SECRET)
    yield made
    made.close()


@pytest.fixture
def keeper(server: PeerServer) -> Iterator[PeerClient]:
    """How process 1 reaches it."""
    client = PeerClient([server.address], SECRET, timeout_s=1.0)
    yield client
    client.close()


def flat(save_id: SaveId) -> np.ndarray:
    return values(save_id).reshape(-1).view(np.uint8)


def text_for(save_id: SaveId, slot: str) -> bytes:
    return manifest_of(values(save_id), slot, save_id, SENDER).to_bytes()


def send(client: PeerClient, save_id: SaveId, memory: np.ndarray | None = None) -> None:
    data = flat(save_id) if memory is None else memory
    for _ in client.send_copy(0, save_id, SENDER, data, lambda slot: text_for(save_id, slot)):
        pass


def committed(peer_arena: Arena) -> list[SaveId]:
    assert peer_arena.directory is not None
    return [manifest.save_id for _, manifest in read_manifests([peer_arena.directory])[0]]


def test_copy_is_an_ordinary_slot(keeper: PeerClient, peer_arena: Arena) -> None:
    """A restart would not find it, or give other bytes."""
    send(keeper, FIRST)
    assert committed(peer_arena) == peer_arena.held() == [FIRST]
    manifest, tag = keeper.manifest(0, FIRST, SENDER)
    (leaf,) = manifest.arrays["state"]
    into = np.empty(leaf.shape, np.int32)
    keeper.reader(0, FIRST, SENDER, tag)("state", leaf, leaf.boxes[0], leaf.boxes[0].box, into)
    np.testing.assert_array_equal(into, values(FIRST))


def test_copy_with_a_flipped_bit_is_refused_and_its_slot_freed(keeper: PeerClient, peer_arena: Arena) -> None:
    """Damage on the way would be found at the restart, when nothing else is left."""
    damaged = flat(FIRST).copy()
    damaged[5_000_000] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"422: leaf w, cell \(0, 0\) came with digest"):
        send(keeper, FIRST, damaged)
    assert committed(peer_arena) == []
    slots = [peer_arena.acquire(1), peer_arena.acquire(1)]
    assert None not in slots, "both are free"


def test_crashed_sender_releases_the_slot(keeper: PeerClient, peer_arena: Arena, receiver: CopyReceiver) -> None:
    """The slots of a lane would be gone for good, and the copy before with them."""
    send(keeper, FIRST)
    peer_arena.protect(FIRST)
    for _ in range(5):
        half = keeper.send_copy(0, SECOND, SENDER, flat(SECOND), lambda slot: text_for(SECOND, slot))
        next(half)
        half.close()
    assert committed(peer_arena) == [FIRST]
    send(keeper, THIRD)
    assert sorted(committed(peer_arena)) == [FIRST, THIRD]
    next(keeper.send_copy(0, SaveId(2, 10, 7), SENDER, flat(FIRST), lambda slot: b""))
    peer_arena.protect(THIRD)
    receiver.end(SaveId(2, 10, 7))
    slot = peer_arena.acquire(1)
    assert slot is not None, "a dropped slot is free"


def test_newest_copy_is_kept_until_the_next_is_committed(keeper: PeerClient, peer_arena: Arena) -> None:
    """A host that is lost in the middle of a copy would take the share with it."""
    send(keeper, FIRST)
    peer_arena.protect(FIRST)
    send(keeper, SECOND)
    send(keeper, THIRD)  # SECOND was not committed by all
    assert sorted(committed(peer_arena)) == [FIRST, THIRD]


def test_keeper_without_memory_reports_it(
    keeper: PeerClient, peer_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full ramdisk would end the job, or be taken for a lost host."""

    def full(*_: object, **__: object) -> None:
        raise StoreFullError("12 bytes needed, 3 free")

    monkeypatch.setattr(peer_arena, "acquire", full)
    with pytest.raises(StoreFullError, match="has no room: 12 bytes needed, 3 free"):
        send(keeper, FIRST)


def test_keeper_with_leased_slots_reports_busy(keeper: PeerClient, peer_arena: Arena) -> None:
    """A slot that a restore reads would be overwritten."""
    held = [peer_arena.acquire(1), peer_arena.acquire(1)]
    with pytest.raises(PeerUnreachableError, match="it is busy"):
        send(keeper, FIRST)
    for slot in held:
        assert slot is not None
        peer_arena.release(slot)
    keeper.try_again()
    send(keeper, FIRST)


def test_stalled_sender_is_disconnected(server: PeerServer, peer_arena: Arena) -> None:
    """One hanging host would keep all others from sending their copies."""
    head = f"PUT /copies/2.7.4/{SENDER}/bytes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    head += "Content-Range: bytes 0-8388607/*\r\nContent-Length: 8388608\r\n\r\nhalf"
    stalled = [say(server.address, head, read=False) for _ in range(2 * LIMITS.transfers_max)]
    patient = PeerClient([server.address], SECRET, timeout_s=60.0)
    send(patient, FIRST)
    patient.close()
    assert committed(peer_arena) == [FIRST]
    for connection in stalled:
        assert isinstance(connection, socket.socket)
        with connection:
            wait_until_cut(connection)


def test_zombie_of_an_earlier_run_cannot_send_copies(server: PeerServer, keeper: PeerClient, peer_arena: Arena) -> None:
    """Its step would replace this run's newest copy; each run creates a secret of its own."""
    send(keeper, FIRST)
    zombie = PeerClient([server.address], "the secret of the run before", timeout_s=5.0)
    with pytest.raises(StoreError, match="was refused"):
        send(zombie, THIRD)
    zombie.close()
    assert committed(peer_arena) == peer_arena.held() == [FIRST]


def test_oversized_request_body_is_not_read(server: PeerServer) -> None:
    """A client could fill the server's memory."""
    head = f"POST /copies/2.7.4/{SENDER}/manifest HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    answer = say(server.address, head + f"Content-Length: {1 << 40}\r\n\r\n")
    assert isinstance(answer, bytes)
    assert answer.split(b" ")[1] == b"413"


def test_commit_with_a_lost_response_is_committed_once(receiver: CopyReceiver, peer_arena: Arena) -> None:
    """A connection that breaks at the end would veto a copy that is whole."""
    path = f"/copies/2.7.4/{SENDER}"
    begun = receiver("POST", path, "", json.dumps({"bytes": 4096}).encode())
    assert begun is not None
    small = np.arange(8, dtype=np.int32)
    said = receiver("PUT", f"{path}/bytes", "bytes 0-31/*", small.tobytes())
    assert said is not None
    assert said.status == 200
    text = manifest_of(small, begun.body.decode(), FIRST, SENDER).to_bytes()
    for _ in range(2):
        answer = receiver("POST", f"{path}/manifest", "", text)
        assert answer is not None
        assert answer.status == 200
    assert peer_arena.held() == [FIRST]


def test_timeout_allows_verifying_a_large_copy(
    keeper: PeerClient, peer_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts with shares of 100 GB would never have copies: a keeper proves the whole before it answers."""
    real = receiver_module._prove

    def slow(*args: Any) -> None:
        time.sleep(2.5)  # the client waits 1 s longer, and so does the server
        real(*args)

    monkeypatch.setattr(receiver_module, "_prove", slow)
    monkeypatch.setattr(client_module, "_PROVEN_PER_S", 4e5)
    send(keeper, FIRST)
    assert committed(peer_arena) == [FIRST]


@pytest.mark.parametrize(
    ("method", "path", "content_range", "body", "status"),
    [
        ("POST", "/copies/2.7.4/0", "", b'{"bytes": 1}', 404),  # another process's copies are not kept here
        ("POST", "/copies/2.7.4/1", "", b"{}", 400),
        ("POST", "/copies/2.7.4/1", "", b'{"bytes": -1}', 400),
        ("POST", "/copies/2.7.4/1", "", b'{"bytes": 1e30}', 400),
        ("POST", "/copies/2.7.4/1", "", b'{"bytes": 1e400}', 400),
        ("POST", "/copies/2.7.4/1", "", b"[" * 100_000, 400),
        ("PUT", "/copies/2.7.4/1/bytes", "bytes 0-3/*", b"four", 412),  # nothing was begun
        ("POST", "/copies/2.7.4/1/manifest", "", b"{}", 412),
        ("PUT", "/copies/2.7.4/1/../bytes", "bytes 0-3/*", b"four", None),
        ("DELETE", "/copies/2.7.4/1", "", b"", None),
    ],
)
def test_invalid_copy_request_is_refused(
    receiver: CopyReceiver,
    peer_arena: Arena,
    method: str,
    path: str,
    content_range: str,
    body: bytes,
    status: int | None,
) -> None:
    """A client could write where it has no business."""
    answer = receiver(method, path, content_range, body)
    assert (None if answer is None else answer.status) == status
    assert peer_arena.held() == []


@pytest.mark.parametrize(
    ("content_range", "body"),
    [("bytes 4094-4097/*", b"four"), ("bytes 0-4/*", b"four"), ("bytes 3-0/*", b""), ("rows 0-3", b"four"), ("", b"")],
)
def test_bytes_outside_of_the_slot_are_refused(receiver: CopyReceiver, content_range: str, body: bytes) -> None:
    """A copy would overwrite memory that is not its own."""
    begun = receiver("POST", "/copies/2.7.4/1", "", b'{"bytes": 4096}')
    assert begun is not None
    answer = receiver("PUT", "/copies/2.7.4/1/bytes", content_range, body)
    assert answer is not None
    assert answer.status == 416


def test_concurrent_requests_are_not_mixed(receiver: CopyReceiver, peer_arena: Arena) -> None:
    """A sender that was restarted, and its zombie, would write one slot together."""
    begun = receiver("POST", "/copies/2.7.4/1", "", b'{"bytes": 4096}')
    assert begun is not None
    zombie = threading.Thread(target=lambda: receiver("POST", "/copies/2.8.5/1", "", b'{"bytes": 4096}'))
    zombie.start()
    zombie.join()
    answer = receiver("PUT", "/copies/2.7.4/1/bytes", "bytes 0-3/*", b"four")
    assert answer is not None
    assert answer.status == 412, "the newer one has taken the lane"
