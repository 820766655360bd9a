"""The trainer's model, exported by its rules, is a Llama to Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import ckptkit
from ckptkit.formats import open_checkpoint
from tests.cli.conftest import Run
from trainer import checkpoint
from trainer.config import PRESETS, InputError, OptimizerConfig, preset
from trainer.data import Position
from trainer.export import RULES, export_llama
from trainer.step import Train


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


def test_model_that_is_no_llama_is_not_exported(ckpt: Run, tmp_path: Path) -> None:
    """transformers would load another architecture, or somebody else's checkpoint, as a Llama of nonsense."""
    gelu = dataclasses.replace(preset("tiny").model, mlp="gelu")
    saved(Train(gelu, OptimizerConfig(), seed=0), tmp_path / "run")
    with pytest.raises(InputError, match="its mlp is GELU"):
        export_llama(str(tmp_path / "run"), str(tmp_path / "hf"))
    with ckptkit.CheckpointManager(tmp_path / "other") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(3.0)}))
    with pytest.raises(InputError, match=r"not a checkpoint of the trainer: 'model\.embed' is missing"):
        export_llama(str(tmp_path / "other"), str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_exported_model_gives_the_same_logits(head: Literal["tied", "untied"], tmp_path: Path) -> None:
    """An exported model would load and talk nonsense: a transposed weight, halves in the wrong order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    size = dataclasses.replace(PRESETS["25m"].model.size, layers=2)  # a first and a last one: one rule maps the others
    config = dataclasses.replace(PRESETS["25m"].model, size=size, head=head)
    train = Train(config, OptimizerConfig(), seed=0)
    saved(train, tmp_path / "run")
    export_llama(str(tmp_path / "run"), str(tmp_path / "hf"))
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert llama.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, size.vocab, (2, 16))
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(train.model(jax.numpy.asarray(tokens)))
    with torch.no_grad():
        found = llama(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
