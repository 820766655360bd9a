"""`Quantize`: weights with scales out of floats and back, by the arithmetic of `convert --quantize`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from ckptkit.surgery import Init, LeafError, Quantize, Rename, Rule, SurgeryError, Take, plan_surgery, restore_into
from tests.cli.conftest import Run
from tests.cli.conftest import ckpt as ckpt  # the fixture
from tests.conversion.test_quantize import by_hand, undone, weights
from tests.formats.writers import by_safetensors

MESH = jax.make_mesh((2, 2), ("fsdp", "model"))
SPLIT = NamedSharding(MESH, PartitionSpec("fsdp", "model"))
WIDE = {
    "up": np.ascontiguousarray(weights((32, 64)).T),
    "down": weights((32, 32), ml_dtypes.bfloat16),
    "bias": np.ones(8, np.float32),
}


def saved(root: Path, tree: Any) -> Path:
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(jax.tree.map(jnp.asarray, tree)))
    return root


def narrow(device: bool) -> dict[str, Any]:
    """A model with a scale for each column of `up`, and each tile of `down`; the scales of `up` have no placement."""
    made = {
        "up": jax.ShapeDtypeStruct((64, 32), jnp.int8, sharding=SPLIT),
        "up_scale": jax.ShapeDtypeStruct((1, 32), jnp.float32),
        "down": {"q": jax.device_put(jnp.zeros((32, 32), jnp.float8_e4m3fn), SPLIT), "scale": jnp.zeros((4, 2))},
        "bias": jnp.zeros(8),
    }
    return made if device else jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), made)


RULES = (Quantize("up"), Quantize("**.q", "**.scale"), Rename("down", "down.q"), Take("**"))


@pytest.mark.parametrize("device", [True, False])
def test_quantised_model_is_that_of_numpy(tmp_path: Path, device: bool) -> None:
    """The weights would depend on the devices that they are quantised on, or get the scales of other blocks."""
    found, report = restore_into(saved(tmp_path / "run", WIDE), None, narrow(device), RULES)
    up, down = by_hand(WIDE["up"], "int8", (64, 1)), by_hand(WIDE["down"], "fp8", (8, 16))
    expected = {"up": up[0], "up_scale": up[1], "down": {"q": down[0], "scale": down[1]}, "bias": WIDE["bias"]}
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) == (plain.dtype, plain.tobytes())
    assert not device or (found["up"].sharding, found["down"]["q"].sharding) == (SPLIT, SPLIT)
    lost = np.abs(WIDE["up"] - undone(*up)).astype(np.float64)
    relative = np.sqrt(np.square(lost).sum() / np.square(WIDE["up"].astype(np.float64)).sum())
    np.testing.assert_allclose(
        [report.errors["up"].max_abs, report.errors["up"].relative_rms], [lost.max(), relative], rtol=1e-4
    )
    assert isinstance(report.errors["down.q"], LeafError)
    assert json.loads(json.dumps(report.to_json()))["errors"].keys() == {"up", "down.q"}
    assert re.search(r"\nquantised    down.q float8_e4m3fn\[32,32\] from down bfloat16\n", str(report))
    assert "\nerror        up max abs " in str(report)


@pytest.mark.parametrize("device", [True, False])
def test_quantised_checkpoint_is_read_back(tmp_path: Path, device: bool) -> None:
    """A full model could not continue from a quantised one, or would take its integers for weights."""
    up, down = by_hand(WIDE["up"], "int8", (64, 1)), by_hand(WIDE["down"], "fp8", (8, 16))
    stored = {"up": up[0], "up_scale": up[1], "down": {"q": down[0], "scale": down[1]}, "bias": WIDE["bias"]}
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), WIDE)
    if device:
        target = {
            **target,
            "up": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=SPLIT),
            "down": jax.device_put(jnp.zeros((32, 32), jnp.bfloat16), SPLIT),
        }
    rules = (Rename("down.q", "down"), *RULES)
    found, report = restore_into(saved(tmp_path / "run", stored), None, target, rules)
    assert np.asarray(found["up"]).tobytes() == undone(*up).tobytes()
    assert np.asarray(found["down"]).tobytes() == undone(*down).astype(ml_dtypes.bfloat16).tobytes()
    assert not device or (found["up"].sharding, found["down"].sharding) == (SPLIT, SPLIT)
    assert report.plan.unused_rules == (Rename("down", "down.q"),)
    assert "dequantised  down bfloat16[32,32] from down.q float8_e4m3fn" in str(report)


def test_model_of_hugging_face_goes_into_a_run_and_back(ckpt: Run, tmp_path: Path) -> None:
    """A published quantised model could not be trained on, nor its fine-tuned weights be published in its format."""
    by_safetensors(tmp_path / "w.safetensors", {"x.weight": WIDE["up"]})
    assert ckpt("convert", tmp_path / "w.safetensors", tmp_path / "q", "--to", "hf", "--quantize", "fp8").code == 0
    assert ckpt("convert", tmp_path / "q", tmp_path / "item", "--to", "orbax").code == 0
    target = {"x": {"weight": jnp.zeros((64, 32))}}
    state, _ = restore_into(tmp_path / "item", None, target, [Quantize("**.weight"), Take("**")])
    values, scales = by_hand(WIDE["up"], "fp8", (1, 32))
    assert np.asarray(state["x"]["weight"]).tobytes() == undone(values, scales).tobytes()
    abstract = {"weight": jnp.zeros((64, 32), jnp.float8_e4m3fn), "weight_scale": jnp.zeros((64, 1))}
    again, _ = restore_into(saved(tmp_path / "run", state), None, {"x": abstract}, [Quantize("**.weight"), Take("**")])
    restored = undone(np.asarray(again["x"]["weight"]), np.asarray(again["x"]["weight_scale"]))
    np.testing.assert_allclose(restored, np.asarray(state["x"]["weight"]), rtol=1e-6)


def test_lora_model_begins_from_a_quantised_base_and_is_folded_into_a_full_one(ckpt: Run, tmp_path: Path) -> None:
    """An adapter that was trained on a quantised base could not be put together with the full weights."""
    values, scales = by_hand(WIDE["up"], "int8", (64, 1))
    base = saved(tmp_path / "base", {"up": {"kernel": values, "kernel_scale": scales}})
    halves = {"lora_a": jnp.ones((64, 2)), "lora_b": jnp.full((2, 32), 0.5)}
    wrapped = {"up": {"base_module": {"kernel": jnp.zeros((64, 32), jnp.bfloat16)}, **halves}}
    rules = [Quantize("**.kernel"), Rename("up.*", "up.base_module.*"), Init("up.lora_?")]
    state, report = restore_into(base, None, wrapped, rules)
    assert [origin.act for origin in report.plan.origins] == ["dequantised", "initialised", "initialised"]
    tuned = saved(tmp_path / "tuned", {"up": {**halves, **state["up"]["base_module"]}})
    assert ckpt("extract", tuned, tmp_path / "b", "--without", "**.lora_?", "--to", "npz").code == 0
    assert ckpt("extract", tuned, tmp_path / "a", "--only", "**.lora_?", "--to", "npz").code == 0
    said = ckpt(
        "merge", tmp_path / "b", tmp_path / "a", tmp_path / "full", "--lora", "--lora-alpha", 2, "--to", "orbax"
    )
    assert said.code == 0
    full, _ = restore_into(tmp_path / "full", None, {"up": {"kernel": jnp.zeros((64, 32), jnp.bfloat16)}}, [Take("**")])
    expected = (undone(values, scales).astype(ml_dtypes.bfloat16).astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    assert np.asarray(full["up"]["kernel"]).tobytes() == expected.tobytes()


def test_values_with_their_scales_are_taken_as_they_are() -> None:
    """Quantised weights would be scaled twice."""
    tree = {"w": jnp.zeros((4, 4), jnp.int8), "w_scale": jnp.zeros((1, 4))}
    plan = plan_surgery(tree, tree, [Quantize("**"), Take("**")])
    assert [(origin.target, origin.act) for origin in plan.origins] == [("w", "taken"), ("w_scale", "taken")]
    assert plan.unused_rules == (Quantize("**"),)


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize(
    ("shape", "scales", "block", "given"),
    [
        ((192, 64), (2, 1), (128, 64), (128, 64)),
        ((192, 64), (2, 1), (96, 64), (96, 64)),
        ((192, 576), (2, 5), (128, 128), (128, 128)),
        ((576, 32), (5, 1), (128, 32), None),
        ((3, 192, 32), (3, 2, 1), (1, 128, 32), (128, 32)),
        ((64, 32), (1,), (64, 32), None),
        ((64, 32), (), (64, 32), None),
    ],
)
def test_blocks_that_the_edge_cuts_are_scaled_both_ways(
    tmp_path: Path, shape: Any, scales: Any, block: Any, given: Any, device: bool
) -> None:
    """Rows behind the middle of a weight would get the scale of another block, and the surgery succeed."""
    full = weights(shape)
    edge = [-n % b for n, b in zip(shape, block, strict=True)]
    values, made = by_hand(np.pad(full, [(0, rest) for rest in edge]), "fp8", block)
    inner = tuple(slice(n) for n in shape)
    target = {"w": np.zeros(shape, ml_dtypes.float8_e4m3fn), "w_scale": np.zeros(scales, np.float32)}
    rules = [Quantize("w", block=given), Take("**")]
    found, _ = restore_into(saved(tmp_path / "full", {"w": full}), None, _on(device, target), rules)
    assert np.asarray(found["w"]).tobytes() == values[inner].tobytes()
    assert np.asarray(found["w_scale"]).tobytes() == made.reshape(scales).tobytes()
    assert found["w_scale"].shape == scales
    narrow = saved(tmp_path / "narrow", {"w": values[inner], "w_scale": made.reshape(scales)})
    again, _ = restore_into(narrow, None, _on(device, {"w": np.zeros(shape, np.float32)}), rules)
    assert np.asarray(again["w"]).tobytes() == undone(values, made)[inner].tobytes()


def _on(device: bool, tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree) if device else tree


@pytest.mark.parametrize("block", [(), (0, 128), (128, -1)])
def test_block_without_a_positive_size_is_refused(block: Any) -> None:
    """It would divide by zero far from the line that is wrong."""
    with pytest.raises(ValueError, match=re.escape("is not a block: give positive sizes, such as (128, 128)")):
        Quantize("w", block=block)


@pytest.mark.parametrize("stored_is_narrow", [True, False])
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (
            Quantize("w"),
            "w is float32[192,64], and its scales, w_scale float32[2,1], may be of blocks of 96x64 or blocks of "
            "128x64: give Quantize(..., block=(128, 64)), or the other",
        ),
        (Quantize("w", block=(64, 64)), "the dimensions of its scales, w_scale float32[2,1], do not divide it"),
    ],
)
def test_scales_that_fit_several_blocks_are_refused(rule: Rule, why: str, stored_is_narrow: bool) -> None:
    """A guess would give a third of the weights the scale of another block."""
    full = {"w": jnp.zeros((192, 64))}
    narrow = {"w": jnp.zeros((192, 64), jnp.int8), "w_scale": jnp.zeros((2, 1))}
    sides = (narrow, full) if stored_is_narrow else (full, narrow)
    with pytest.raises(SurgeryError, match=re.escape(why)):
        plan_surgery(*sides, [rule, Take("**")])


@pytest.mark.parametrize(
    ("target", "rules", "why"),
    [
        ({"w_scale": jnp.zeros((3, 1))}, [Quantize("w")], "the dimensions of its scales, w_scale float32[3,1], do not"),
        ({"w_scale": jnp.zeros((1, 4), jnp.bfloat16)}, [Quantize("w")], "scales are made as float32"),
        ({}, [Quantize("w")], "add Cast('w') (or Quantize, for a weight with scales)"),
        ({"w_scale": jnp.zeros((1, 4))}, [], "w_scale float32[1,4] of the new model is covered by no rule"),
        ({"w_scale": jnp.zeros((1, 4))}, [Quantize("w"), Init("w")], "is taken from w and initialised by"),
    ],
)
def test_weights_that_cannot_be_scaled_are_named(target: dict[str, Any], rules: list[Rule], why: str) -> None:
    """A misspelt pattern would cast weights below 1 to integers, which are all 0."""
    model = {"w": jnp.zeros((4, 4), jnp.int8), **target}
    with pytest.raises(SurgeryError, match=re.escape(why)):
        plan_surgery({"w": jnp.zeros((4, 4))}, model, [*rules, Take("**")])


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """One NaN would make the scale of its channel NaN, and with it the channel."""
    root = saved(tmp_path / "run", {"w": jnp.full((4, 4), jnp.inf)})
    target = {"w": jnp.zeros((4, 4), jnp.int8), "w_scale": jnp.zeros((1, 4))}
    with pytest.raises(SurgeryError, match="w cannot be quantised: w has values that are not finite"):
        restore_into(root, None, target, [Quantize("w"), Take("**")])
