"""One process of the job that `python -m bench kill` kills: a small deterministic loop over all tiers.

It prints its acts, so that the bench can kill it in the middle, and notes a digest of its part of the
state after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ckptkit import CheckpointManager, Event, EventLog, EverySteps, Kind, ProcessOptions, Tier
from trainer.cluster import let_every_process_write_cache, use_compile_cache

RAM_EVERY, SSD_EVERY, DURABLE_EVERY = 2, 4, 8
PACE_S = 0.03  # a step takes at least so long: else most kills would fall into a start
ROWS, COLUMNS = 1024, 512  # 2 MB of float32
SPECS = {"w": ("fsdp",), "moment": (None, "fsdp"), "small": (), "key": (), "count": ()}


def main() -> None:
    """Restores, and trains until it is killed, or for `--steps` steps."""
    parser = argparse.ArgumentParser()
    for name in ("process", "processes", "attempt"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, help="to do in the last life; the others go on until killed")
    parser.add_argument("--last-attempt", type=int, default=-1, help="the first life that is the last")
    parser.add_argument("--compile-cache", help="a directory that hosts share  [default: the host's own]")
    parser.add_argument("--peer-copies", action="store_true", help="no data replicas: other hosts have copies")
    parser.add_argument("--plain", action="store_true", help="no checkpoints")
    args = parser.parse_args()
    own = Path(os.environ["HOST_DIR"])
    log = EventLog(own / "events" / f"attempt-{args.attempt}-process-{args.process}.jsonl", process=args.process)
    log.observe(_tell)
    log.emit(Kind.STARTED, attempt=args.attempt, pid=os.getpid())
    with log.span("initialization"):
        use_compile_cache(args.compile_cache or str(own / "compile-cache"))
        jax.distributed.initialize(heartbeat_timeout_seconds=30)
        let_every_process_write_cache()
        replicas = 1 if args.peer_copies else 2
        shape = (replicas, jax.device_count() // replicas)
        mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with log.span("training_prep"):
        shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in SPECS.items()}
        begin = jax.jit(initial, out_shardings=shardings)
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(initial),
            shardings,
        )
        manager = None if args.plain else make_manager(own, args.process, log, has_copies=args.peer_copies)
        handle = None
        if manager is not None:
            manager.prepare(_args(abstract, 0))
    with log.span("checkpoint_restore"):
        if manager is not None and manager.latest_step() is not None:
            handle = manager.restore_async(
                None,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract),  # pyright: ignore[reportCallIssue]
                    data=ocp.args.JsonRestore(),
                ),
            )
    with log.span("compile"):
        advance = jax.jit(step_of, donate_argnums=0, out_shardings=shardings).lower(abstract).compile()
    with log.span("checkpoint_restore"):
        restored = handle.result() if handle is not None else None
    with log.span("training_prep"):
        state, step = (restored["state"], restored["data"]["step"]) if restored is not None else (begin(), 0)
        del restored, handle
    log.emit(Kind.RESUMED, step=step, repeated=None, processes=args.processes, mesh=f"data={replicas},fsdp=rest")
    end = None if args.steps is None or args.attempt < args.last_attempt else step + args.steps
    with (own / f"proof-{args.attempt}.jsonl").open("a", buffering=1) as proof:
        while end is None or step < end:
            with log.span("step", step):
                state = jax.block_until_ready(advance(state))
                if not args.plain:
                    time.sleep(PACE_S)
                step += 1
                proof.write(json.dumps([step, digest(state)]) + "\n")  # a part of what this loop calls a step
            if manager is not None:
                with log.span("checkpoint_save", step):
                    manager.save(step, args=_args(state, step))
            print(f"step {step}", flush=True)
    if manager is not None:
        with log.span("checkpoint_save"):
            manager.close()
    log.emit(Kind.FINISHED)
    jax.distributed.shutdown()


def initial() -> dict[str, Any]:
    """The first state; the same bits everywhere."""
    w = (jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS) % 997 - 498) / 4096
    return {
        "w": w,
        "moment": jnp.zeros((COLUMNS, COLUMNS), jnp.float32),
        "small": jnp.full((COLUMNS,), -0.0, jnp.bfloat16),
        "key": jax.random.key(7),
        "count": jnp.int32(0),
    }


def step_of(state: dict[str, Any]) -> dict[str, Any]:
    """One step: every leaf depends on every other, and on chance."""
    key = jax.random.fold_in(state["key"], state["count"])
    moment = 0.9 * state["moment"] + 1e-3 * (state["w"].T @ state["w"])
    noise = jax.random.normal(key, (ROWS, COLUMNS)) * 1e-3
    w = state["w"] * 0.999 - 1e-3 * jnp.tanh(state["w"] @ moment) + noise + state["small"].astype(jnp.float32)
    small = (w.mean(axis=0) * 1e-2).astype(jnp.bfloat16)
    return {"w": w, "moment": moment, "small": small, "key": state["key"], "count": state["count"] + 1}


def make_manager(own: Path, process: int, log: EventLog, *, has_copies: bool) -> CheckpointManager:
    """Ramdisk, SSD and durable tier, as the host has them; with copies on other hosts if asked for."""
    tiers = [
        Tier.ram(os.environ["RAM"], save=EverySteps(RAM_EVERY)),
        Tier.ssd(str(own / "ssd"), save=EverySteps(SSD_EVERY)),
        *([Tier.peer()] if has_copies else []),
    ]
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=DURABLE_EVERY, max_to_keep=3, cleanup_tmp_directories=True
    )
    return CheckpointManager(
        os.environ["DURABLE"],
        options=options,
        tiers=tiers,
        host_id=f"host-{process}",
        events=log,
        processes=ProcessOptions(timeout_s=60.0),
    )


def digest(state: dict[str, Any]) -> str:
    """Of the bytes of this process's shards, in order of the leaves."""
    found = xxhash.xxh3_128()
    for name in sorted(state):
        leaf = jax.random.key_data(state[name]) if name == "key" else state[name]
        for shard in leaf.addressable_shards:
            found.update(np.ascontiguousarray(np.asarray(shard.data)).tobytes())
    return found.hexdigest()


def _args(state: Any, step: int) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
        data=ocp.args.JsonSave({"step": step}),  # pyright: ignore[reportCallIssue]
    )


def _tell(event: Event) -> None:
    """The moments at which the bench may kill."""
    if event.kind == Kind.PHASE:
        print(f"phase {event.tier or 'save'} {event.fields['phase']}", flush=True)
    elif event.kind == Kind.PLANNED:
        print("phase restore planned", flush=True)


if __name__ == "__main__":
    main()
