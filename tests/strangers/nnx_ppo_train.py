"""nnx-ppo, which saves with `StandardCheckpointer`: python nnx_ppo_train.py ROOT [--kill-after STEP] [--stock]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from nnx_ppo.algorithms import ppo  # pyright: ignore[reportMissingImports]
from nnx_ppo.algorithms.checkpointing import load_checkpoint, make_checkpoint_fn  # pyright: ignore[reportMissingImports]
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig, TrainConfig  # pyright: ignore[reportMissingImports]
from nnx_ppo.networks.factories import make_mlp_actor_critic as net  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

STEPS, BATCH = 6, 64
PPO = PPOConfig(n_envs=16, rollout_length=4, total_steps=STEPS * BATCH, n_epochs=2, n_minibatches=2)
CONFIG = TrainConfig(ppo=PPO, eval=EvalConfig(enabled=False), checkpoint_every_steps=BATCH)


@struct.dataclass
class Point:
    obs: Any
    reward: Any
    done: Any
    info: Any = struct.field(default_factory=dict)
    metrics: Any = struct.field(default_factory=dict)


class FindMiddle:
    def reset(self, rng: jax.Array) -> Point:
        return self._at(jax.random.uniform(rng, (2,)) - 0.5)

    def step(self, state: Point, action: jax.Array) -> Point:
        return self._at(state.obs + 0.1 * jnp.clip(action, -1, 1))

    def _at(self, place: jax.Array) -> Point:
        return Point(obs=place, reward=-jnp.square(place).sum(), done=jnp.where(jnp.abs(place).max() > 1, 1.0, 0.0))


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    env = FindMiddle()
    state = ppo.new_training_state(env, net(2, 2, [16], [16], rngs=nnx.Rngs(0)), PPO.n_envs, CONFIG.seed)
    places = sorted((run.root / "steps").glob("step_*/metadata.pkl"))
    if places:
        state = load_checkpoint(str(places[-1].parent), state.networks, state.optimizer)["training_state"]
    first, save = int(state.steps_taken) // BATCH, make_checkpoint_fn(str(run.root / "steps"))

    def checkpoint(state: Any, steps: int) -> None:
        if steps > first * BATCH:  # it is called before the first step, too
            save(state, steps)
            run.reached(steps // BATCH - 1)

    state = ppo.train_ppo(env, state.networks, CONFIG, initial_state=state, checkpoint_fn=checkpoint).training_state
    run.report(first, jax.tree.leaves(nnx.state((state.networks, state.optimizer))))


main(Run.from_arguments())
