"""nnx-ppo: its PPO on a point that is to find the middle, and the checkpoints of its library, over ckptkit.

    python nnx_ppo_train.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.StandardCheckpointer` is ckptkit's; nothing of it is for steps, or for tiers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from nnx_ppo.algorithms import ppo  # pyright: ignore[reportMissingImports]
from nnx_ppo.algorithms.checkpointing import load_checkpoint, make_checkpoint_fn  # pyright: ignore[reportMissingImports]
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig  # pyright: ignore[reportMissingImports]
from nnx_ppo.networks import factories  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

STEPS, BATCH = 6, 64
PPO = PPOConfig(n_envs=16, rollout_length=4, total_steps=STEPS * BATCH, n_epochs=2, n_minibatches=2)
CONFIG = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False), checkpoint_every_steps=BATCH)


@struct.dataclass
class Point:
    obs: Any
    reward: Any
    done: Any
    data: Any = struct.field(default_factory=dict)
    info: Any = struct.field(default_factory=dict)
    metrics: Any = struct.field(default_factory=dict)


class FindMiddle:
    observation_size, action_size = 2, 2

    def reset(self, rng: jax.Array) -> Point:
        return self._at(jax.random.uniform(rng, (2,)) - 0.5)

    def step(self, state: Point, action: jax.Array) -> Point:
        return self._at(state.obs + 0.1 * jnp.clip(action, -1, 1))

    def _at(self, place: jax.Array) -> Point:
        return Point(obs=place, reward=-jnp.square(place).sum(), done=jnp.where(jnp.abs(place).max() > 1, 1.0, 0.0))


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    env = FindMiddle()
    networks = factories.make_mlp_actor_critic(2, 2, [16], [16], rngs=nnx.Rngs(0), normalize_obs=True)
    state = ppo.new_training_state(env, networks, PPO.n_envs, CONFIG.seed, PPO.learning_rate)
    places = sorted((run.root / "steps").glob("step_*/metadata.pkl"))
    if places:
        state = load_checkpoint(str(places[-1].parent), state.networks, state.optimizer)["training_state"]
    first, save = int(state.steps_taken) // BATCH, make_checkpoint_fn(str(run.root / "steps"))

    def checkpoint(state: Any, steps: int) -> None:
        if steps > first * BATCH:  # it is called before the first step, too
            save(state, steps)
            run.reached(steps // BATCH - 1)

    state = ppo.train_ppo(env, networks, CONFIG, initial_state=state, checkpoint_fn=checkpoint).training_state
    run.report(first, jax.tree.leaves(nnx.state((state.networks, state.optimizer))))


if __name__ == "__main__":
    main(Run.from_arguments())
