"""A slot with one committed save, and a server of it on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.peers.client import PeerClient
from ckptkit.peers.server import PeerServer, ServerLimits
from ckptkit.peers.share_index import ShareIndex
from ckptkit.slots.arena import Arena

SAVE = SaveId(2, 7, 4)
SECRET = "the secret of this job"
SHAPE = (3, 1 << 20)
LIMITS = ServerLimits(transfers_max=2, request_s=1.0, idle_s=1.0, busy_s=20.0)


def values(save_id: SaveId = SAVE) -> np.ndarray:
    """The leaf `w` of a save: 12 MiB, more than one request's worth."""
    return (np.arange(np.prod(SHAPE), dtype=np.int32) + save_id.step).reshape(SHAPE)


def manifest_of(array: np.ndarray, slot: str, save_id: SaveId = SAVE, process: int = 0, count: int = 2) -> Manifest:
    """Of a save with one leaf `w`, as one box and one cell at the beginning of the slot."""
    box = BoxRecord(box=Box.whole(array.shape), offset=0, digests=(digest_of(array),))
    leaf = LeafRecord(
        path=("w",), keys="d", kind="jax", shape=array.shape, dtype=array.dtype.name, cell=array.shape, boxes=(box,)
    )
    return Manifest(
        save_id=save_id,
        writer=Writer(process=process, count=count, host="h"),
        slot=slot,
        arrays={"state": (leaf,)},
        inline={},
    )


def commit(arena: Arena, save_id: SaveId = SAVE, process: int = 0) -> None:
    """Saves `values(save_id)` into the arena as a process would."""
    array = values(save_id)
    slot = arena.acquire(array.nbytes)
    assert slot is not None
    slot.memory[: array.nbytes] = array.reshape(-1).view(np.uint8)
    arena.commit(slot, save_id, manifest_of(array, slot.name, save_id, process).to_bytes())
    arena.release(slot)


@pytest.fixture
def host_dir(tmp_path: Path) -> Path:
    return tmp_path / "ram" / "job-0" / "host-0"


@pytest.fixture
def arena(host_dir: Path) -> Iterator[Arena]:
    """Of a process that has committed `SAVE`."""
    made = Arena.open(host_dir, 0, slots=2, synced=False)
    commit(made)
    yield made
    made.close()


@pytest.fixture
def share_index(arena: Arena) -> ShareIndex:
    assert arena.directory is not None
    return ShareIndex({"ram": arena.directory.parent})


@pytest.fixture
def server(share_index: ShareIndex) -> Iterator[PeerServer]:
    """Patient for a second only."""
    made = PeerServer(share_index, "127.0.0.1", limits=LIMITS)
    made.admit(SECRET)
    yield made
    made.close()


@pytest.fixture
def client(server: PeerServer) -> Iterator[PeerClient]:
    made = PeerClient([server.address, None], SECRET, timeout_s=30.0)
    yield made
    made.close()
