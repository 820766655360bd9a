"""The layout of a user's own state, as a report shows it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ckptkit.diagnosis import ShardingReport, sharding_report
from trainer.config import MeshConfig, preset
from trainer.sharding import shard_state
from trainer.step import abstract_train

MESH = AbstractMesh((4, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


def leaf(spec: P | None, *shape: int) -> jax.ShapeDtypeStruct:
    sharding = None if spec is None else NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def problems(report: ShardingReport) -> dict[str, str]:
    return {each.about: each.problem for each in report.findings}


def test_bytes_are_those_of_the_fullest_device() -> None:
    """A state that fits by the report would not fit the device."""
    report = sharding_report({"a": leaf(P("fsdp", "model"), 10, 8), "b": leaf(None, 3), "c": leaf(P("fsdp"), 5)}, MESH)
    assert report.whole_bytes == 4 * (80 + 3 + 5)
    assert report.device_bytes == 4 * (20 + 3 + 3)
    assert report.groups == {"a": (320, 80), "b": (12, 12), "c": (20, 12)}
    assert problems(report) | {} == {"model": "idle axis", "fsdp": "idle axis", "c": "uneven"}


def test_each_silent_mistake_is_named() -> None:
    """Replicas that drift apart, or devices that repeat each other's work, would be found by nobody."""
    state = {
        "good": leaf(P("fsdp"), 1024, 1024),
        "whole": leaf(P(), 1024, 1024),
        "drifting": leaf(P("data"), 1024, 1024),
        "small": leaf(P(), 8),
    }
    report = sharding_report(state)
    assert problems(report) == {"whole": "whole", "drifting": "split over replicas", "model": "idle axis"}
    (whole,) = [each for each in report.findings if each.about == "whole"]
    assert whole.extra_bytes == 4 * 2**20 * 3 // 4
    assert "every data replica should be whole" in str(report)
    assert problems(sharding_report(state, replica_axes=())) == {"whole": "whole", "model": "idle axis"}


def test_reference_layout_has_nothing_to_look_at() -> None:
    """The report would cry wolf on a layout that is right."""
    _, abstract = abstract_train(preset("125m").model, _optimizer())
    report = sharding_report(shard_state(abstract, MESH))
    assert report.findings == ()
    assert report.devices == MeshConfig(data=4, fsdp=2, model=2).devices
    assert re.search(r"16 devices; \d+ leaves, .* 4\.\d\d copies of the state", str(report))  # one for each replica


def _optimizer():
    from trainer.config import OptimizerConfig

    return OptimizerConfig()


def test_keys_and_arrays_count_and_numbers_do_not() -> None:
    """A typed key would end the report with a TypeError."""
    state = {"key": jax.random.key(0), "w": jnp.ones(4), "epoch": 3}
    report = sharding_report(state, MESH)
    assert report.whole_bytes == 8 + 16
    assert report.leaves == 2


def test_state_without_a_mesh_is_refused() -> None:
    """A report over no devices is empty."""
    with pytest.raises(ValueError, match="give the mesh"):
        sharding_report({"w": jnp.ones(4)})
    other = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    assert problems(sharding_report({"w": leaf(P("fsdp"), 8)}, other)) == {"rows": "idle axis", "w": "unknown axis"}
