"""A device that computes one wrong bit: `make campaign NAME=demo-certify` finds the step, the leaf and the device.

The reference trainer's step runs twice on two devices, with a save after every step. In the second run one bit of the
gradient that device 1 holds is flipped at step 7. Nothing fails, and every save verifies. A replay of each run compares
every save: the first run is certified, the second is not, and the difference names what was flipped.

Exit codes: 0 if the replay finds exactly that difference, else 1.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # before JAX is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from ckptkit.guard import Certificate, replay
from trainer.config import MeshConfig, ModelConfig, ModelSize, OptimizerConfig
from trainer.sharding import batch_sharding, leaf_path, make_mesh
from trainer.step import Program, State, make_program

STEPS, BAD_STEP, BAD_DEVICE, BAD_LEAF = 10, 7, 1, "blocks/0/mlp/up"
MODEL = ModelSize(layers=1, d_model=64, heads=4, kv_heads=2, d_ff=128, vocab=256, seq_len=32)
ROWS = 4
ROOT = Path("runs/demo-certify")


def main() -> int:
    """Runs the demo; returns the exit code."""
    shutil.rmtree(ROOT, ignore_errors=True)
    mesh = make_mesh(MeshConfig(fsdp=2))
    # No clipping: the norm of all gradients would carry the wrong bit into every leaf at once.
    program = make_program(ModelConfig(size=MODEL), OptimizerConfig(clip_norm=1e9), mesh, seed=0)
    found = {}
    for name, bad_step in (("sound", None), ("one bit flipped", BAD_STEP)):
        train(program, ROOT / name, bad_step)
        found[name] = certify(program, ROOT / name)
        click.echo(f"{name}: {found[name].difference or f'{found[name].steps_replayed} steps are certified'}")
    difference = found["one bit flipped"].difference
    wanted = f"on {mesh.devices.flat[BAD_DEVICE]}"
    placed = (
        difference is not None
        and (difference.after_step, difference.step) == (BAD_STEP, BAD_STEP + 1)
        and all(BAD_LEAF in leaf and leaf.endswith(wanted) for leaf in difference.leaves)
    )
    proven = found["sound"].is_certified and placed
    click.echo(f"proven: step {BAD_STEP}, {BAD_LEAF}, {wanted}" if proven else "NOT PROVEN")
    return 0 if proven else 1


def train(program: Program, root: Path, bad_step: int | None) -> None:
    """Trains and saves after every step; at `bad_step` with one bit flipped."""
    state, data = program.init(), batches(program, 0)
    with ckptkit.CheckpointManager(root) as manager:
        for step in range(STEPS):
            gradients, _ = program.gradient(state, next(data))
            if step == bad_step:
                gradients = jax.tree_util.tree_map_with_path(flipped, gradients)
            state = program.update(state, gradients)
            saved = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave({"step": step + 1})}
            manager.save(step + 1, args=ocp.args.Composite(**saved))
            manager.wait_until_finished()


def certify(program: Program, root: Path) -> Certificate:
    """Replays every save after the first."""

    def take_step(state: State, batch: jax.Array) -> State:
        gradients, _ = program.gradient(state, batch)
        return program.update(state, gradients)

    wanted = {"state": ocp.args.StandardRestore(program.abstract_state), "data": ocp.args.JsonRestore()}
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ckptkit.CheckpointManager(root, options=options) as manager:
        return replay(
            manager,
            lambda: take_step,
            lambda step, restored: batches(program, restored["data"]["step"]),
            args=ocp.args.Composite(**wanted),
            first=1,
        )


def batches(program: Program, first: int) -> Iterator[jax.Array]:
    """Bytes of this file, from other places at every step."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    step = first
    while True:
        places = np.random.default_rng(step).integers(0, len(text) - MODEL.seq_len - 1, ROWS)
        rows = np.stack([text[place : place + MODEL.seq_len + 1] for place in places])
        yield jax.device_put(rows, batch_sharding(program.mesh))
        step += 1


def flipped(path: tuple[Any, ...], gradient: jax.Array) -> jax.Array:
    """The gradient as a device with a bad bit returns it: bit 20 of one number of its part."""
    if leaf_path(path) != BAD_LEAF:
        return gradient
    parts = [np.array(shard.data) for shard in gradient.addressable_shards]
    parts[BAD_DEVICE].reshape(-1).view(np.uint32)[5] ^= 1 << 20
    placed = [
        jax.device_put(part, shard.device) for part, shard in zip(parts, gradient.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(gradient.shape, gradient.sharding, placed)


if __name__ == "__main__":
    sys.exit(main())
