"""Checkpointers keep the host memory of a save for the next one, and never write into bytes that are in use."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ckptkit import direct
from ckptkit.direct import staging
from tests.states import assert_same

SIZE = 1 << 18


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weak references to the blocks that were allocated."""
    made: list[Any] = []
    allocate = staging.empty_block

    def counted(shape: Any, dtype: Any) -> np.ndarray:
        block = allocate(shape, dtype)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(staging, "empty_block", counted)
    return made


def tree_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full(SIZE, step, jnp.float32), "host": np.full(SIZE, -step), "step": step}


@pytest.mark.parametrize("waits", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: direct.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        direct.StandardCheckpointer,
        lambda: direct.Checkpointer(ocp.StandardCheckpointHandler()),
        direct.PyTreeCheckpointer,
    ],
)
def test_saves_share_one_block_of_host_memory(tmp_path: Path, blocks: list[Any], make: Any, waits: bool) -> None:
    """Each save would touch fresh pages, while the step loop waits: 0.2 to 4 s per GB."""
    with make() as checkpointer:
        for step in range(5):
            checkpointer.save(tmp_path / str(step), tree_of(step))
            if waits:
                getattr(checkpointer, "wait_until_finished", lambda: None)()
        getattr(checkpointer, "wait_until_finished", lambda: None)()
        assert len(blocks) == 1
        assert blocks[0]() is not None
    gc.collect()
    assert blocks[0]() is None, "a closed checkpointer holds no memory"
    for step in range(5):
        assert_same(direct.load(tmp_path / str(step)), tree_of(step))


def test_larger_tree_takes_a_larger_block_that_smaller_ones_use(blocks: list[Any]) -> None:
    """A checkpointer of several trees would allocate at each save, or keep all blocks."""
    kept = staging.StagingMemory()
    for size in (100, 5000, 200, 5000):
        kept.take(size)[:] = 7
    assert [each() is not None for each in blocks] == [False, True]


def test_block_in_use_is_not_given_again(blocks: list[Any]) -> None:
    """The bytes of a save in transfer to storage would be those of the next one."""
    kept = staging.StagingMemory()
    first = kept.take(4096)
    part = first[10:20].view(np.uint8).reshape(2, 5)
    first[:] = 1
    del first
    second = kept.take(4096)
    second[:] = 2
    assert (part == 1).all()
    assert len(blocks) == 2
    del part
    third = kept.take(4096)
    third[:] = 3
    assert (second == 2).all()
    assert len(blocks) == 2
    kept.close()
    del second, third
    gc.collect()
    assert [each() for each in blocks] == [None, None], "closed while it was in use"
