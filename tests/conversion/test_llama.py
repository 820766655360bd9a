"""The trainer's model, exported by rules, is a Llama to Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import ckptkit
from ckptkit.formats import open_checkpoint
from tests.cli.conftest import Run
from trainer import checkpoint
from trainer.config import PRESETS, ModelConfig, OptimizerConfig, preset
from trainer.data import Position
from trainer.model import Transformer
from trainer.step import Train

RULES = Path(__file__).parents[2] / "trainer" / "llama.toml"


def saved(train: Train, root: Path) -> None:
    """A checkpoint of the trainer at step 3."""
    position = Position(step=3, global_batch=8, seed=0, source_digest="", records=8)
    with ckptkit.CheckpointManager(root) as manager:
        checkpoint.save(manager, nnx.state(train), position, force=True)


def test_checkpoint_of_the_trainer_converts_by_its_rules(ckpt: Run, tmp_path: Path) -> None:
    """The rules that ship with the trainer would not fit what the trainer writes."""
    train = Train(preset("tiny").model, OptimizerConfig(), seed=0)
    saved(train, tmp_path / "run")
    assert ckpt("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--map", RULES).code == 0
    with open_checkpoint(str(tmp_path / "hf")) as opened:
        found = {name: tensor.read() for name, tensor in opened.by_name().items()}
    assert {name.split(".")[0] for name in found} == {"model", "lm_head"}
    assert not any(name.endswith(".value") for name in found)
    np.testing.assert_array_equal(found["lm_head.weight"].T, np.asarray(train.model.head[...]))
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], np.asarray(train.model.embed[...]))
    assert found["model.layers.1.self_attn.k_proj.weight"].shape == (64, 128)


@pytest.mark.parametrize("name", ["model.embed", "model.embed.value", "state:model.embed", "state:model.embed.*"])
def test_extract_takes_the_names_that_inspect_prints(ckpt: Run, tmp_path: Path, name: str) -> None:
    """A name copied from `inspect`, or from the rules of a surgery, would match nothing."""
    tree = {"model": {"embed": {"value": np.arange(4.0)}, "head": {"value": np.arange(3.0)}}}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(tree)))
    assert "state:model.embed.value" in ckpt("inspect", tmp_path / "run").out
    words = ("--only", name, "--dtype", "**.embed=float32", "--to", "npz")
    assert ckpt("extract", tmp_path / "run", tmp_path / "part", *words).code == 0
    with open_checkpoint(str(tmp_path / "part")) as opened:
        assert {each: tensor.dtype.name for each, tensor in opened.by_name().items()} == {
            "model.embed.value": "float32"
        }


def test_exported_model_gives_the_same_logits(ckpt: Run, tmp_path: Path) -> None:
    """An exported model would load and talk nonsense: a transposed weight, halves in the wrong order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    base = PRESETS["25m"].model
    size = dataclasses.replace(base.size, layers=2)  # a first and a last one: those between are mapped by one rule
    config = dataclasses.replace(base, size=size, compute_dtype="float32", mlp="swiglu", head="untied", dropout=0.0)
    assert isinstance(config, ModelConfig)
    model = Transformer(config, nnx.Rngs(params=0))
    train = Train(config, OptimizerConfig(), seed=0)
    nnx.update(train.model, nnx.state(model))
    saved(train, tmp_path / "run")
    said = ckpt("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--map", RULES, "--shard-size", "10MiB")
    assert said.code == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.d_model,
        intermediate_size=size.d_ff,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "hf")
    llama, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(0).integers(0, size.vocab, (2, 16))
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(model(jax.numpy.asarray(tokens)))
    with torch.no_grad():
        found = llama(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
