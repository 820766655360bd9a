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
from trainer.proof import digest_state
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
    gated: list[int] = []
    whole, split = (compile_step(program, shape, split=split) for split in (False, True))
    a, b = program.init(), program.init()
    donated = named_leaves(a)["model/embed"], named_leaves(b)["model/embed"]
    losses, unequal = [], []
    start = start_position(corpus, global_batch=8, seed=1)
    for batch in open_batches(corpus, start, batch_sharding(mesh), steps=steps):
        a, loss = whole(a, batch.tokens, lambda: None)
        b, split_loss = split(b, batch.tokens, lambda: gated.append(1))
        losses.append(float(loss))
        if float(loss) != float(split_loss):
            unequal.append(batch.step)
    leaves = named_leaves(a)
    return {
        "losses": losses,
        "unequal_losses": unequal,
        "unequal_leaves": [p for p, d in digest_state(a).items() if d != digest_state(b)[p]],
        "donated": [leaf.is_deleted() for leaf in donated],
        "gated": len(gated),
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
