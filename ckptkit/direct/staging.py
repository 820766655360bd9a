"""A tree that is saved to a directory of its own: copied to host memory and digested."""

from __future__ import annotations

import socket
from typing import Any

import jax

from ckptkit.direct.memory import StagingMemory
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.write_step import refuse_unwritable
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.snapshot.copying import copy_shards
from ckptkit.snapshot.describe import describe_items, with_digests
from ckptkit.snapshot.items import array_items, save_items
from ckptkit.snapshot.provenance import provenance_here
from ckptkit.snapshot.shards import local_shards

LONE = SaveId(epoch=0, step=0, number=0)  # of no run: a run's first epoch is 1


def staged(args: Any, item: str, kept: StagingMemory) -> HostTreeSave | None:
    """The boxes that this process writes of a tree, in host memory taken from `kept`, and its sidecar.

    None for a tree that only Orbax's handlers hold: one with leaves of another kind. When it returns, nothing refers to
    the arrays any more, and the caller may donate them. Cost: one copy at memory speed, and as much host memory as this
    process holds of the tree, until `kept` is closed.
    """
    captured = save_items({item: args})
    if isinstance(captured, str):
        return None
    description = describe_items(captured.trees, chunk_bytes=captured.chunk_bytes)
    records = [source.record for source in description.items[item]]
    if any(0 in record.shape for record in records):
        return None  # Orbax refuses it, and names the leaf
    refuse_unwritable(records)
    memory = kept.take(description.slot_bytes)
    digests = copy_shards(local_shards(description, captured.trees), memory)
    manifest = Manifest(
        save_id=LONE,
        writer=Writer(
            process=jax.process_index(),
            count=jax.process_count(),
            host=socket.gethostname(),
            provenance=provenance_here(),
        ),
        slot="",
        arrays=with_digests(description, digests),
        inline=captured.inline,
    )
    found = array_items(description, manifest, memory, captured)[item]
    assert isinstance(found, HostTreeSave), "a tree, and no files of a handler"
    return found
