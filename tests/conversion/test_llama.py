"""The trainer's model, exported by rules, is a Llama to Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.cli.conftest import Run
from trainer.config import PRESETS, ModelConfig
from trainer.model import Transformer

RULES = Path(__file__).parents[2] / "trainer" / "llama.toml"


def test_exported_model_gives_the_same_logits(ckpt: Run, tmp_path: Path) -> None:
    """An exported model would load and talk nonsense: a transposed weight, halves in the wrong order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    base = PRESETS["25m"].model
    size = dataclasses.replace(base.size, layers=2)  # a first and a last one: those between are mapped by one rule
    config = dataclasses.replace(base, size=size, compute_dtype="float32", mlp="swiglu", head="untied", dropout=0.0)
    assert isinstance(config, ModelConfig)
    model = Transformer(config, nnx.Rngs(params=0))
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
    said = ckpt("convert", tmp_path / "model", tmp_path / "hf", "--to", "hf", "--map", RULES, "--shard-size", "10MiB")
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
