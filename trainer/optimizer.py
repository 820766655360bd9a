"""The optimizer: clip by global norm, one of five families, warm-up and cosine decay."""

from typing import Any

import jax
import optax
import optax.contrib

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
    """The optax chain: clip by global norm, then the optimizer. Norms and scales are not decayed.

    State for each parameter, in float32: two moments for adamw, one for lion and sgd. Muon has one for matrices and
    two for the rest. Adafactor has a row and a column for a matrix of 128 and more. `weight_decay` is not sgd's.
    Gradient accumulation is not here but inside the step (`trainer.step`): it then costs no optimizer state, so a
    checkpoint never holds half an accumulation.
    """
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), _optimizer(config))


def _optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    rate, decay = make_schedule(config), config.weight_decay
    first, second = config.betas
    match config.name:
        case "adamw":
            return optax.adamw(rate, b1=first, b2=second, weight_decay=decay, mask=_matrices)
        case "muon":
            return optax.contrib.muon(rate, weight_decay=decay, weight_decay_mask=_matrices)
        case "lion":
            return optax.lion(rate, weight_decay=decay, mask=_matrices)
        case "adafactor":
            # Its decay is a share of the weight, not of the rate as adamw's is.
            return optax.adafactor(rate, weight_decay_rate=decay * config.learning_rate, weight_decay_mask=_matrices)
        case "sgd":
            return optax.sgd(rate, momentum=first)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)
