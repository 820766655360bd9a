"""The JSON of a sharding: that of Orbax, without a long list of devices where the order is the default one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptkit
from ckptkit.durable.orbax import shardings
from ckptkit.durable.orbax.shardings import sharding_of_text, sharding_text, without_devices
from tests.states import make_state, save_args


@pytest.fixture(autouse=True)
def few_devices_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four devices of a test count as more than 64."""
    monkeypatch.setattr(shardings, "_LISTED_DEVICES_MAX", 1)
    sharding_of_text.cache_clear()
    without_devices.cache_clear()


def on(devices: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices).reshape(-1, 2), ("a", "b")), PartitionSpec("a", None))


def test_mesh_of_all_devices_in_order_has_no_device_list() -> None:
    """The text would grow with the job, in every manifest."""
    sharding = on(jax.devices())
    text = sharding_text(sharding)
    assert text is not None
    assert "device_mesh" not in text
    assert ocp.metadata.NamedShardingMetadata.from_deserialized_dict(json.loads(text)).to_jax_sharding() == sharding
    assert sharding_of_text(text) == sharding


@pytest.mark.parametrize("devices", [[3, 2, 1, 0], [0, 1], [2, 3]])
def test_other_meshes_keep_their_device_list(devices: list[int]) -> None:
    """A restore would put boxes on other devices than the save had them on."""
    sharding = on([jax.devices()[at] for at in devices])
    text = sharding_text(sharding)
    assert text is not None
    assert sharding_of_text(text) == sharding
    assert ("device_mesh" in without_devices(text)) == (len(devices) < 4), "a file that repeats it for each leaf"


def test_mesh_without_device_list_is_put_on_the_first_devices() -> None:
    """A step of fewer devices could not be restored as it was saved."""
    words = json.loads(sharding_text(on(jax.devices())) or "")
    assert sharding_of_text(json.dumps({**words, "shape": [1, 2]})) == on(jax.devices()[:2])
    assert sharding_of_text(json.dumps({**words, "shape": [4, 2]})) is None, "more than there are"


def test_single_device_has_words() -> None:
    """A single device's array would be restored wherever JAX likes."""
    sharding = SingleDeviceSharding(jax.devices()[1])
    assert sharding_of_text(sharding_text(sharding) or "") == sharding


def test_unusual_memory_is_kept_and_passed_over_by_stock_orbax(tmp_path: Path) -> None:
    """An offloaded optimizer would come back in device memory, or stock Orbax would refuse the step."""
    sharding = on(jax.devices()).with_memory_kind("pinned_host")
    text = sharding_text(sharding)
    assert text is not None
    assert sharding_of_text(text) == sharding
    assert sharding_of_text(text.replace("pinned_host", "nowhere")) == on(jax.devices())
    state = {"moments": jax.device_put(np.arange(8.0), sharding.update(spec=PartitionSpec("a")))}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(1)["moments"].sharding.memory_kind == "pinned_host"
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        found = stock.restore(1, args=ocp.args.StandardRestore())  # pyright: ignore[reportCallIssue]
    assert (np.asarray(found["moments"]) == np.arange(8.0)).all()


def test_step_without_device_lists_is_read_by_stock_orbax(tmp_path: Path) -> None:
    """Stock Orbax would refuse the step, or place it elsewhere."""
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=save_args(make_state(1), 1))
    assert "device_mesh" not in (tmp_path / "run" / "1" / "state" / "_sharding").read_text()
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        found = stock.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]  # pyright: ignore[reportCallIssue]
    expected = make_state(1)
    assert [leaf.sharding for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array)] == [
        leaf.sharding for leaf in jax.tree.leaves(expected) if isinstance(leaf, jax.Array)
    ]


def test_manifest_that_no_restore_reads_is_refused_by_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would save for hours what its restart then calls implausibly large."""
    monkeypatch.setattr("ckptkit.model.manifest.MANIFEST_BYTES_MAX", 1000)
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        with pytest.raises(
            ValueError, match=r"manifest of this process's share needs \d+ bytes, and 1000 are the most"
        ):
            manager.save(1, args=save_args(make_state(1), 1))
        assert manager.all_steps() == []
