"""`merge --lora` against PEFT's rules in NumPy: scales by pattern, transposed bases, and settings that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.cli.conftest import Run
from tests.cli.conftest import ckpt as ckpt  # the fixture
from tests.conversion.test_assembling import read
from tests.formats.writers import by_safetensors

RNG = np.random.default_rng(7)
MODULES = ("model.layers.0.q", "model.layers.0.v", "model.layers.1.q", "lm_head.q_proj")
BASE = {f"{module}.weight": RNG.standard_normal((6, 6)).astype(np.float32) for module in MODULES}


def adapter(
    directory: Path, config: dict[str, Any], ranks: dict[str, int] | None = None
) -> tuple[Path, dict[str, Any]]:
    """An adapter of all modules, and the product of its halves by module."""
    directory.mkdir()
    tensors, products = {}, {}
    for module in MODULES:
        rank = (ranks or {}).get(module, 2)
        a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((rank, 6), (6, rank)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        products[module] = b @ a
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    return by_safetensors(directory / "adapter_model.safetensors", tensors), products


def merged(ckpt: Run, tmp_path: Path, path: object, *flags: object) -> dict[str, np.ndarray]:
    base = by_safetensors(tmp_path / "base.safetensors", BASE)
    assert ckpt("merge", base, path, tmp_path / "m", "--lora", "--to", "npz", *flags).code == 0
    return read(tmp_path / "m")


def assert_scaled(found: dict[str, np.ndarray], products: dict[str, Any], scales: dict[str, float]) -> None:
    for module in MODULES:
        expected = BASE[f"{module}.weight"] + scales[module] * products[module]
        np.testing.assert_allclose(found[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_alpha_and_rank_patterns_set_the_scale_of_a_module(ckpt: Run, tmp_path: Path) -> None:
    """A module with a strength of its own would be merged at the common one."""
    config = {
        "alpha_pattern": {"layers.0.q": 16, r"layers\.\d+\.q": 32, "model.layers.0.v": 8, "proj": 99},
        "rank_pattern": {"v": 4},
    }
    path, products = adapter(tmp_path / "a", config, {"model.layers.0.v": 4})
    scales = {"model.layers.0.q": 8.0, "model.layers.0.v": 2.0, "model.layers.1.q": 16.0, "lm_head.q_proj": 2.0}
    assert_scaled(merged(ckpt, tmp_path, path), products, scales)


def test_rank_stabilized_scale_divides_by_the_root_of_the_rank(ckpt: Run, tmp_path: Path) -> None:
    """A rank-stabilized update would be merged at a fraction of its strength; `--lora-alpha` replaces lora_alpha."""
    path, products = adapter(tmp_path / "a", {"use_rslora": True, "alpha_pattern": {"v": 6}})
    scales = dict.fromkeys(MODULES, 10 / math.sqrt(2)) | {"model.layers.0.v": 6 / math.sqrt(2)}
    assert_scaled(merged(ckpt, tmp_path, path, "--lora-alpha", 10), products, scales)


def test_fan_in_fan_out_transposes_the_update(ckpt: Run, tmp_path: Path) -> None:
    """A square weight of GPT-2's Conv1D would get the transposed update."""
    path, products = adapter(tmp_path / "a", {"fan_in_fan_out": True})
    found = merged(ckpt, tmp_path, path)
    assert_scaled(found, {module: product.T for module, product in products.items()}, dict.fromkeys(MODULES, 2.0))


def test_fan_in_fan_out_of_other_shapes_is_refused(ckpt: Run, tmp_path: Path) -> None:
    """The update of a base that is kept as [out, in] would be broadcast or cut."""
    (tmp_path / "a").mkdir()
    halves = {"w.lora_A.weight": np.ones((2, 5), np.float32), "w.lora_B.weight": np.ones((3, 2), np.float32)}
    path = by_safetensors(tmp_path / "a" / "adapter_model.safetensors", halves)
    base = by_safetensors(tmp_path / "base.safetensors", {"w.weight": np.ones((3, 5), np.float32)})
    config = tmp_path / "a" / "adapter_config.json"
    words = ("merge", base, path, tmp_path / "m", "--lora", "--to", "npz")
    config.write_text('{"lora_alpha": 4, "fan_in_fan_out": true}')
    said = ckpt(*words)
    assert (said.code, "its update [3, 2] x [2, 5], transposed by fan_in_fan_out" in said.err) == (12, True)
    config.write_text('{"lora_alpha": 4, "r": 4}')
    said = ckpt(*words)
    assert (said.code, "has an update of rank 2, and adapter_config.json has rank 4" in said.err) == (12, True)
    config.write_text('{"lora_alpha": 4, "r": 4, "rank_pattern": {"w": 2}}')
    assert ckpt(*words).code == 0


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["classifier"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"use_qalora": True},
        {"a_setting_of_next_year": {"scale": 2}},
    ],
)
def test_settings_that_change_the_result_are_refused(ckpt: Run, tmp_path: Path, config: dict[str, Any]) -> None:
    """Weights that PEFT would not give would be written as a success."""
    path, _ = adapter(tmp_path / "a", config)
    base = by_safetensors(tmp_path / "base.safetensors", BASE)
    said = ckpt("merge", base, path, tmp_path / "m", "--lora", "--lora-alpha", 4, "--to", "npz")
    assert (said.code, (tmp_path / "m").exists()) == (1, False)
    assert f"{next(iter(config))} = " in said.err
    assert "merge_and_unload" in said.err


def test_default_settings_of_peft_are_accepted(ckpt: Run, tmp_path: Path) -> None:
    """An adapter that PEFT has saved with its defaults could not be merged."""
    neutral = {"use_dora": False, "bias": "none", "lora_dropout": 0.1, "target_modules": ["q"], "modules_to_save": None}
    more = {"init_lora_weights": True, "megatron_core": "megatron.core", "qalora_group_size": 16, "loftq_config": {}}
    path, products = adapter(tmp_path / "a", {**neutral, **more, "a_setting_of_next_year": None})
    assert_scaled(merged(ckpt, tmp_path, path), products, dict.fromkeys(MODULES, 2.0))


def test_config_of_an_adapter_in_a_bucket_is_read(ckpt: Run, tmp_path: Path) -> None:
    """Settings of an adapter would be ignored because it is not on a disk."""
    path, products = adapter(tmp_path / "a", {"fan_in_fan_out": True, "alpha_pattern": {"v": 8}})
    memory = fsspec.filesystem("memory")
    try:
        for file in (path, path.with_name("adapter_config.json")):
            memory.pipe_file(f"/lora/{file.name}", file.read_bytes())
        found = merged(ckpt, tmp_path, "memory://lora/adapter_model.safetensors")
    finally:
        memory.rm("/lora", recursive=True)
    transposed = {module: product.T for module, product in products.items()}
    assert_scaled(found, transposed, dict.fromkeys(MODULES, 2.0) | {"model.layers.0.v": 4.0})


class Adapted(nnx.Module):
    """A layer with an adapter next to it, as flax.nnx.LoRA, or one that has its adapter inside."""

    def __init__(self, kind: str):
        rngs = nnx.Rngs(3)
        self.up: Any
        if kind == "LoRA":
            self.up = nnx.LoRA(8, 2, 6, base_module=nnx.Linear(8, 6, rngs=rngs), rngs=rngs)
        else:
            self.up = nnx.LoRALinear(8, 6, lora_rank=2, rngs=rngs)
        lora = self.up if kind == "LoRA" else self.up.lora
        lora.lora_b[...] = jnp.asarray(RNG.standard_normal((2, 6)), jnp.float32)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("kind", ["LoRA", "LoRALinear"])
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_adapter_of_nnx_is_merged_as_nnx_saves_it(kind: str, to: str, ckpt: Run, tmp_path: Path) -> None:
    """The names that NNX saves end in `value`: its own adapters would be refused, or their strength be another."""
    model = Adapted(kind)
    x = jnp.asarray(RNG.standard_normal((3, 8)), jnp.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "all", nnx.state(model))
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = "up.base_module.*"\nto = "up.*"\n')
    rules = ("--map", tmp_path / "rules.toml") if kind == "LoRA" else ()
    base, adapter, done = tmp_path / "base", tmp_path / "adapter", tmp_path / "done.npz"
    assert ckpt("extract", tmp_path / "all", base, "--without", "**.lora_?", "--to", to, *rules).code == 0
    assert ckpt("extract", tmp_path / "all", adapter, "--only", "**.lora_?", "--to", to).code == 0
    flags = ("--lora", "--to", "npz", "--lora-alpha")
    assert ckpt("merge", base, adapter, done, *flags, 2).code == 0
    found = {name.removesuffix(".value"): leaf for name, leaf in read(done).items()}
    np.testing.assert_allclose(x @ found["up.kernel"] + found["up.bias"], model.up(x), rtol=1e-5, atol=1e-5)
    lora = model.up if kind == "LoRA" else model.up.lora
    kernel = (model.up.base_module if kind == "LoRA" else model.up).kernel[...]
    assert ckpt("merge", base, adapter, tmp_path / "strong.npz", *flags, 16).code == 0
    expected = kernel + lora.lora_a[...] @ lora.lora_b[...] * 16 / 2
    strong = {name.removesuffix(".value"): leaf for name, leaf in read(tmp_path / "strong.npz").items()}
    np.testing.assert_allclose(strong["up.kernel"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("stem", "why"),
    [
        (("q.lora_{0}.x.weight", "q.lora_{0}.y.weight"), "is a second update of the same weight"),
        (("q.lora_{1}", "q.lora.lora_{1}"), "q.kernel has a second update, q.lora"),
    ],
)
def test_two_updates_of_one_weight_are_refused(stem: tuple[str, str], why: str, ckpt: Run, tmp_path: Path) -> None:
    """Of two adapters in one file the last would be merged, without a message."""
    square = np.ones((6, 6), np.float32)
    update = {each.format(side, side.lower()): square for each in stem for side in "AB"}
    base = by_safetensors(tmp_path / "b.safetensors", {"q.weight": square, "q.kernel": square})
    path = by_safetensors(tmp_path / "a.safetensors", update)
    said = ckpt("merge", base, path, tmp_path / "m", "--lora", "--lora-alpha", 2, "--to", "npz")
    assert (said.code, why in said.err) == (12, True), said.err
