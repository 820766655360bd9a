"""The collective of a broadcast, in one process: what is allocated when."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np
import pytest

from ckptkit.restore.broadcast.collective import AllGather, links_of
from tests.contexts import CONTEXTS

WIDTH = 4 * 4 * 100


def test_room_for_the_result_is_taken_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without device memory would find out in the collective, and leave the others in it."""
    gather = AllGather(((0,),), WIDTH, links_of(1), 0)
    launch = gather._gather
    held: list[list[weakref.ref[Any]]] = []
    freed: list[bool] = []

    def launched(sent: Any) -> Any:
        freed.append(all(ref() is None for ref in held[-1]))
        return launch(sent)

    monkeypatch.setattr(gather, "_gather", launched)
    for number in range(3):
        window = np.random.default_rng(number).integers(0, 256, WIDTH, np.uint8)
        sent = gather.put(window)
        reserved = jax.tree.leaves(gather._reserved)
        assert sum(array.nbytes for array in reserved) == WIDTH
        assert {device for array in reserved for device in array.devices()} == set(jax.devices())
        held.append([weakref.ref(array) for array in reserved])
        del reserved
        received = gather(sent)
        assert (received == window).all()
    assert freed == [True] * 3, "the reserved memory would be held in addition to the result"


def test_a_device_without_room_is_known_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote would be that all are ready, and one process would raise in the collective."""
    gather = AllGather(((0,),), WIDTH, links_of(1), 0)
    put, launches = jax.device_put, []

    def full(value: Any, *where: Any, **how: Any) -> Any:
        if isinstance(value, list):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return put(value, *where, **how)

    monkeypatch.setattr(jax, "device_put", full)
    monkeypatch.setattr(gather, "_gather", launches.append)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        gather.put(np.zeros(WIDTH, np.uint8))
    assert not launches


class _Received:
    """A result whose bytes are copied to the host, as those of an accelerator are: a CPU copies packed types alone."""

    def __init__(self, array: Any):
        self._array = array
        self.addressable_shards = [_Received.Shard(shard) for shard in array.addressable_shards]

    class Shard:
        def __init__(self, shard: Any):
            self.device, self.data, self._words = shard.device, self, shard.data

        def addressable_data(self, _: int) -> Any:
            return self

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            np.asarray(jax.device_put(np.zeros(2, "int4"), self.device))
            return np.asarray(self._words)


@pytest.mark.parametrize("context", [*CONTEXTS, "explicit transfers too"])
def test_windows_are_exchanged_in_the_context_of_the_loop(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process would raise between two votes, which is fatal for the restore of all."""
    others = {**CONTEXTS, "explicit transfers too": lambda: jax.transfer_guard("disallow_explicit")}
    window = np.random.default_rng(0).integers(0, 256, WIDTH, np.uint8)
    with others[context]():
        gather = AllGather(((0,),), WIDTH, links_of(1), 0)
        launch = gather._gather
        monkeypatch.setattr(gather, "_gather", lambda sent: _Received(launch(sent)))
        for _ in range(2):
            assert (gather(gather.put(window)) == window).all()
