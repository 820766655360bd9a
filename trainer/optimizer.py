"""The optimizer: clip by global norm, AdamW, warm-up and cosine decay."""

import jax
import optax

from trainer.config import OptimizerConfig


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then a cosine to `final_fraction` of it, then flat."""
    warmup = min(config.warmup_steps, max(config.schedule_steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.schedule_steps, 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax chain. Its state per parameter is two float32 moments; norms and scales are not decayed.

    Gradient accumulation is not here but inside the step (`trainer.step`): it then costs no optimizer state, so a
    checkpoint never holds half an accumulation.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.betas[0],
            b2=config.betas[1],
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )
