"""The replay of a run: `ckptkit certify ROOT --replay trainer.replaying:plan -- FLAGS`, with the flags of the run."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ckptkit.guard import ReplayPlan
from tools.corpus import build_corpus
from trainer.__main__ import main, read_flags
from trainer.checkpoint import wanted
from trainer.cluster import join
from trainer.config import MeshConfig
from trainer.data import open_batches, resume_position, start_position
from trainer.sharding import batch_sharding, make_mesh
from trainer.step import compile_step, make_program

STEPS_MAX = 1 << 40  # a replay ends where it ends


def plan(words: Sequence[str]) -> ReplayPlan:
    """The replay of the run with these flags. Raises InputError as the trainer does."""
    config = read_flags(main.make_context("trainer", list(words)).params)
    join(config.cluster, config.loop.compile_cache)
    corpus = build_corpus(config.data.data, config.data.corpus_dir, config.model.size.seq_len + 1)
    mesh = make_mesh(config.mesh or MeshConfig(fsdp=jax.device_count()))
    program = make_program(config.model, config.optimizer, mesh, seed=config.data.seed)
    start = start_position(corpus, global_batch=config.data.global_batch, seed=config.data.seed)

    def make_step() -> Any:
        take = compile_step(program, (config.data.global_batch, corpus.record_bytes))
        return lambda state, tokens: take(state, tokens)[0]

    def make_batches(step: int, restored: Any) -> Iterator[jax.Array]:
        position = resume_position(restored["data"], start)
        assert position.step == step
        return (batch.tokens for batch in open_batches(corpus, position, batch_sharding(mesh), steps=STEPS_MAX))

    return ReplayPlan(make_step=make_step, make_batches=make_batches, args=wanted(program.abstract_state))
