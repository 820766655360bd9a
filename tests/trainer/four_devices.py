"""Run by test_trainer_step.py in a process of its own with 4 virtual CPU devices; prints one JSON object."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from tools.corpus import build_corpus
from trainer.config import MeshConfig, OptimizerConfig, preset
from trainer.data import open_batches, start_position
from trainer.sharding import batch_sharding, make_mesh, named_leaves
from trainer.step import compile_step, make_program


def scenario(corpus_dir: str, mesh_text: str, *, steps: int, accumulate: int, layers: int, remat: bool) -> dict:
    model = preset("tiny").model
    model = replace(model, size=replace(model.size, layers=layers), remat=remat)
    mesh = make_mesh(MeshConfig.parse(mesh_text))
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=5, schedule_steps=steps, accumulate=accumulate)
    program = make_program(model, optimizer, mesh, seed=1)
    corpus = build_corpus("stdlib", corpus_dir, model.size.seq_len + 1)
    shape = (8, corpus.record_bytes)
    take_step = compile_step(program, shape)
    state = program.init()
    donated = named_leaves(state)["model/embed"]
    losses = []
    start = start_position(corpus, global_batch=8, seed=1)
    for batch in open_batches(corpus, start, batch_sharding(mesh), steps=steps):
        state, loss = take_step(state, batch.tokens)
        losses.append(float(loss))
    leaves = named_leaves(state)
    return {
        "losses": losses,
        "donated": donated.is_deleted(),
        "dropout_count": int(leaves["dropout/count"]),
        "dropout_key": np.asarray(jax.random.key_data(leaves["dropout/key"])).tolist(),
        "moments": {
            p: [str(leaf.sharding.spec), leaf.is_fully_replicated] for p, leaf in leaves.items() if "/mu/" in p
        },
        "weights": {
            p: [str(leaf.sharding.spec), leaf.is_fully_replicated] for p, leaf in leaves.items() if p[0] == "m"
        },
        "finite": all(bool(jnp.isfinite(x).all()) for p, x in leaves.items() if p[0] == "m"),
    }


if __name__ == "__main__":
    done = {
        "tiny": scenario(sys.argv[1], "fsdp=2,model=2", steps=20, accumulate=1, layers=1, remat=False),
        "accumulated": scenario(sys.argv[1], "data=2,fsdp=2", steps=3, accumulate=2, layers=1, remat=True),
    }
    sys.stdout.write(json.dumps(done))
