"""Orbax's `Context`: every field is obeyed or refused by name, passed or active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as orbax

import ckptkit
import ckptkit.v1
from ckptkit.model.boxes import CELL_BYTES
from tests.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
OURS = ckptkit.v1.Checkpointer
STATE = {"params": {"w": jnp.arange(8.0)}, "opt": {"m": jnp.ones(8)}}
PART = {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}}


def context_with(**fields: Any) -> Any:
    """A context with fields by their dotted names, dots written as two underscores."""
    context = orbax.Context()
    for dotted, value in fields.items():
        *groups, name = dotted.split("__")
        target: Any = context
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return context


def layout(step: Path) -> dict[str, Any]:
    found = json.loads((step / "state" / "_METADATA").read_text())
    return {"ocdbt": (step / "state" / "manifest.ocdbt").exists(), "zarr3": found["use_zarr3"]}


@pytest.mark.parametrize("kind", ["durable", "ram", "orbax"])
def test_partial_load_restores_the_part(tmp_path: Path, kind: str) -> None:
    """Parameters without the optimizer, or without LoRA, could not be loaded."""
    tiers: Any = {"tiers": [ckptkit.Tier.ram(str(tmp_path / "ram"))]} if kind == "ram" else {}
    writer = orbax.training.Checkpointer if kind == "orbax" else OURS
    with writer(str(tmp_path / "root"), **tiers) as checkpointer:
        checkpointer.save(1, STATE)
    partial = context_with(pytree__loading__partial_load=True)
    with OURS(tmp_path / "root", **tiers) as checkpointer:
        with pytest.raises(ValueError, match="opt"):
            checkpointer.load(1, PART)
        with partial:
            assert_same(checkpointer.load(1, PART), {"params": STATE["params"]})
            response = checkpointer.load_async(1, PART)
        assert_same(response.result(), {"params": STATE["params"]})
    with OURS(tmp_path / "root", context=partial, **tiers) as checkpointer:
        assert_same(checkpointer.load(1, PART), {"params": STATE["params"]})
        with orbax.Context(), pytest.raises(ValueError, match="opt"):  # as in Orbax: the active one rules
            checkpointer.load(1, PART)
    with partial, OURS(tmp_path / "root", **tiers) as checkpointer:
        made_in = checkpointer
        assert_same(made_in.load(1, PART), {"params": STATE["params"]})


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"ocdbt": True, "zarr3": False}),
        ({"array__saving__use_zarr3": False}, {"ocdbt": True, "zarr3": False}),
        ({"array__saving__use_ocdbt": False}, {"ocdbt": False, "zarr3": True}),
        ({"array__saving__use_ocdbt": False, "array__saving__use_zarr3": False}, {"ocdbt": False, "zarr3": False}),
        ({"array__saving__storage_options__chunk_byte_size": 16}, {"ocdbt": True, "zarr3": False}),
    ],
)
def test_layout_of_the_context_is_written(tmp_path: Path, fields: Any, expected: Any, tiers: bool) -> None:
    """A reader that needs the layout could not read the step."""
    ours: Any = {"tiers": [ckptkit.Tier.ram(str(tmp_path / "ram"))]} if tiers else {}
    with OURS(tmp_path / "root", context=context_with(**fields), **ours) as checkpointer:
        checkpointer.save(1, STATE)
        assert layout(tmp_path / "root" / "1") == expected
        (listed,) = checkpointer.manager.steps()
        assert ("ram" in str(listed)) == tiers  # the ramdisk holds it whatever the layout
        assert_same(checkpointer.load(1), STATE)
    with OURS(tmp_path / "other", **ours) as checkpointer, context_with(**fields):
        checkpointer.save(1, STATE)
        assert layout(tmp_path / "other" / "1") == expected


def test_storage_dtype_is_that_of_every_tier(tmp_path: Path) -> None:
    """The ramdisk would give back other values than the durable step."""
    context = context_with(array__saving__storage_options__dtype=jnp.bfloat16)
    tier = ckptkit.Tier.ram(str(tmp_path / "ram"))
    with OURS(tmp_path / "root", context=context, tiers=[tier]) as checkpointer:
        checkpointer.save(1, {"w": jnp.full(4, 1.001)})
        assert checkpointer.load(1)["w"].dtype == jnp.bfloat16
    with OURS(tmp_path / "root") as checkpointer:
        assert checkpointer.load(1)["w"].dtype == jnp.bfloat16


def test_sizes_of_maxtext_keep_our_own_writer(tmp_path: Path) -> None:
    """Every durable step of MaxText would be without digests."""
    context = context_with(
        array__saving__ocdbt_target_data_file_size=2 << 30,
        array__saving__storage_options__chunk_byte_size=CELL_BYTES,
        memory__write_concurrent_bytes=96 << 30,
        memory__read_concurrent_bytes=96 << 30,
    )
    with OURS(tmp_path, context=context) as checkpointer:
        checkpointer.save(1, STATE)
        assert_same(checkpointer.load(1, STATE), STATE)
    assert [step.state for step in ckptkit.verify(str(tmp_path)).steps] == ["proven"]


def test_options_of_the_manager_are_those_of_the_constructor(tmp_path: Path) -> None:
    """A permission or a timeout of an active context would be ignored."""
    with OURS(tmp_path / "a", context=context_with(file__path_permission_mode=0o750)) as checkpointer:
        checkpointer.save(1, STATE)
        assert (tmp_path / "a" / "1").stat().st_mode & 0o777 == 0o750
        with orbax.Context(), pytest.raises(ValueError, match=r"Context\.file\.path_permission_mode=None is active"):
            checkpointer.save(2, STATE)
    longer = context_with(asynchronous__timeout_secs=7)
    refused = pytest.raises(ValueError, match=r"asynchronous\.timeout_secs=7 is active.*made with 1200")
    with OURS(tmp_path / "b") as checkpointer, longer, refused:
        checkpointer.save(1, STATE)
    with context_with(asynchronous__timeout_secs=7), OURS(tmp_path / "c") as checkpointer:
        assert checkpointer.save(1, STATE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoint_layout": "safetensors"}, "checkpoint_layout=SAFETENSORS"),
        ({"memory__expected_surge_bytes": 1}, "Context.memory.expected_surge_bytes=1"),
        ({"file__path_class": Path}, "Context.file.path_class"),
    ],
)
def test_field_that_cannot_be_obeyed_is_refused(tmp_path: Path, fields: Any, message: str) -> None:
    """It would be ignored."""
    context = context_with(**fields)
    with pytest.raises(ValueError, match=message):
        OURS(tmp_path, context=context)
    with OURS(tmp_path) as checkpointer, context:
        for call in (lambda: checkpointer.save(1, STATE), lambda: checkpointer.load(abstract_state=STATE)):
            with pytest.raises(ValueError, match=message):
                call()


def test_pathways_field_is_refused_only_on_pathways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MaxText sets it on every backend: its first save would raise."""
    context = context_with(pathways__checkpointing_impl=object())
    with OURS(tmp_path, context=context) as checkpointer:
        assert checkpointer.save(1, STATE)
    monkeypatch.setattr(orbax.multihost, "is_pathways_backend", lambda: True)
    with pytest.raises(ValueError, match=r"Context\.pathways\.checkpointing_impl"):
        OURS(tmp_path, context=context)


def test_padding_is_done_by_orbax(tmp_path: Path) -> None:
    """An array of another size would be refused where the context allows it."""
    with OURS(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.arange(4.0)})
        wider = {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=jnp.ones(1).sharding)}
        with pytest.raises(ValueError, match="w"):
            checkpointer.load(1, wider)
        with context_with(array__loading__enable_padding_and_truncation=True):
            np.testing.assert_array_equal(checkpointer.load(1, wider)["w"], [0, 1, 2, 3, 0, 0])


def test_load_and_broadcast_has_replicas_share(tmp_path: Path) -> None:
    """Every replica would read the whole checkpoint."""
    context = context_with(array__loading__use_load_and_broadcast=True)
    with OURS(tmp_path, context=context) as checkpointer:
        assert checkpointer.manager._settings.processes.broadcast.mode == "always"
        checkpointer.save(1, STATE)
        assert_same(checkpointer.load(1, STATE), STATE)
