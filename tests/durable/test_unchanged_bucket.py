"""In a bucket the service copies the data files of leaves that did not change: no byte of them is sent."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.cells import sharing
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from tests.durable.stock import restored_alone
from tests.durable.test_unchanged import _save, _state
from tests.states import abstract, assert_same


def _received_bytes(server: BucketServer) -> int:
    return sum(entry.exchange.received_bytes for entry in server.log.entries())


@pytest.mark.long
def test_bucket_step_is_copied_by_the_service_and_stands_alone(server: BucketServer, tmp_path: Path) -> None:
    """A frozen base would be sent again with every step, and a step would need objects of a deleted one."""
    sent = list[int]()
    store = open_store("gs://runs/run")
    with ckptkit.CheckpointManager("gs://runs/run") as manager:
        for step in range(4):
            server.log.clear()
            _save(manager, step, _state(step))
            sent.append(_received_bytes(server))
    assert max(sent[2:]) * 10 < min(sent[:2]), sent
    for step in range(3):  # three roots, each with one step alone; the fourth is what is left after deletions
        for key in store.list_all(str(step)):
            open_store(f"gs://runs/alone-{step}").put(key, store.get(key))
        store.delete_many(store.list_all(str(step)))
    found = restored_alone({**{n: f"gs://runs/alone-{n}" for n in range(3)}, 3: "gs://runs/run"}, tmp_path / "found")
    for step, leaves in found.items():
        assert_same(leaves, {name: np.asarray(value) for name, value in _state(step).items()})


def test_bucket_step_is_written_where_an_object_of_the_last_step_is_missing(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save fails because the newest step was deleted, or leaves objects that no tree names."""
    profile = ckptkit.DurableProfile(data_file_bytes=1 << 19, in_flight_bytes=1 << 20)
    store, taken = open_store("gs://runs/run"), list[bool]()
    take_over = sharing.take_over
    monkeypatch.setattr(sharing, "take_over", lambda *args: taken.append(take_over(*args)) or taken[-1])
    with ckptkit.CheckpointManager("gs://runs/run", durable=profile) as manager:
        for step in range(3):
            _save(manager, step, _state(step))
        files = [key for key in store.list_all("2/default/d") if "/unchanged." in key]
        assert len(files) > 1
        store.delete(files[0])
        _save(manager, 3, _state(3))
        args = ocp.args.StandardRestore(abstract(_state(3)))  # pyright: ignore[reportCallIssue]
        assert_same(manager.restore(3, args=args), _state(3))
    assert taken == [True, False]
    left = {key.rpartition("/")[2] for key in store.list_all("3/default/d")}
    assert not left & {key.rpartition("/")[2] for key in files}


def test_unchanged_leaves_that_need_no_data_file_are_saved(server: BucketServer) -> None:
    """The moments of frozen weights are zeros, which compress to less than a file is made for: no save would commit."""
    state = {f"nu{number}": jnp.zeros((1 << 16,)) for number in range(8)} | {"w": jnp.arange(8.0)}
    profile = ckptkit.DurableProfile(compression="zstd")
    with ckptkit.CheckpointManager("gs://runs/run", durable=profile) as manager:
        for step in range(4):
            _save(manager, step, state)
    store = open_store("gs://runs/run")
    store.delete_many([key for step in range(3) for key in store.list_all(str(step))])
    with ocp.CheckpointManager("gs://runs/run") as stock:
        args = ocp.args.StandardRestore(abstract(state))  # pyright: ignore[reportCallIssue]
        assert_same(stock.restore(3, args=args), state)
