"""A checkpoint of the trainer as a Llama of Hugging Face's: weights by `llama.toml`, config.json from their shapes."""

import json
from pathlib import Path
from typing import Any, Literal

import jax

from ckptkit.conversion import ConvertPlan, convert, leased, plan_convert, read_rules
from ckptkit.formats import open_checkpoint
from trainer.config import InputError
from trainer.model import NORM_EPSILON, ROPE_THETA

RULES = Path(__file__).with_name("llama.toml")


def export_llama(checkpoint: str, target: str, *, dtype: Literal["float32", "bfloat16"] = "float32") -> ConvertPlan:
    """Writes the weights of a step, and config.json, into the directory `target`, which appears complete or not at all.

    transformers loads it as `LlamaForCausalLM`. Token ids are the bytes of the text, so the model needs no tokenizer.

    Raises:
        InputError: the step is not of the trainer, or its model is not a Llama (GELU).
        ckptkit.CheckpointError: as `ckptkit convert`.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here needs an accelerator
    with open_checkpoint(checkpoint) as opened, leased(opened.sources):
        stored = opened.by_name()
        shapes = {name.removesuffix(".value"): tensor.shape for name, tensor in stored.items()}
        config = llama_config(shapes, dtype)
        rules = [rule for rule in read_rules(str(RULES)) if rule.old != ("model.head",) or "model.head" in shapes]
        plan = plan_convert(opened, target, "hf", rules=rules, casts=[("**", dtype)] if dtype != "float32" else [])
        convert(opened, plan, beside={"config.json": json.dumps(config, indent=2).encode()})
    return plan


def llama_config(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Any]:
    """config.json of a model whose leaves have these shapes."""
    first = "model.blocks.0"
    try:
        vocab, width = shapes["model.embed"]
        _, heads, head_dim = shapes[f"{first}.attention.query"]
        _, _, kv_heads, _ = shapes[f"{first}.attention.key_value"]
        _, gates, d_ff = shapes[f"{first}.mlp.up"]
    except (KeyError, ValueError) as error:
        raise InputError(f"this is not a checkpoint of the trainer: {error} is missing or has another rank") from error
    if gates != 2:
        raise InputError("its mlp is GELU, and Hugging Face's Llama has SwiGLU alone: no rules fit this model")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": d_ff,
        "num_hidden_layers": sum(name.endswith(".mlp.up") for name in shapes if name.startswith("model.blocks.")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "model.head" not in shapes,
        "bos_token_id": None,  # a Llama's default ids, 1 and 2, are bytes of text here
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
