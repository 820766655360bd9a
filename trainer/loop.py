"""The training loop: prepare, restore or begin, then step, report and save until the end."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click
import jax

from ckptkit import EventLog, Kind
from ckptkit.goodput import steps_done
from ckptkit.guard import Alarm
from ckptkit.job.coordination import make_coordinator
from tools.corpus import build_corpus
from trainer.checkpoint import (
    check_writable,
    go_back,
    leave_if_preempted,
    make_guard,
    make_manager,
    prepare,
    restore_newest,
    save,
    save_end,
)
from trainer.cluster import join
from trainer.config import MeshConfig, RunConfig
from trainer.data import Position, check_same_data, open_batches, start_position
from trainer.proof import Proof
from trainer.sharding import batch_sharding, check_offload, check_rules, make_mesh, named_leaves
from trainer.step import State, compile_step, make_program, programs_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """All that a resumed run takes over; nothing else of the past may touch a later step."""

    state: State  # parameters, optimizer, dropout key and counter
    position: Position  # of the data; `position.step` steps are done


def train(config: RunConfig, events: EventLog) -> LoopState:
    """Train from the newest checkpoint, or from the start, to `config.loop.steps` steps.

    The result depends on the configuration alone, not on where it was interrupted: with the same mesh the bits are
    those of an uninterrupted run. All processes of the job call this together.

    Raises:
        InputError, CorpusError: input that the user has to correct, before the first step.
        Preempted: the cluster takes the machines back; the last save has ended.
        GuardStopError: the guard went back too often, or no save is old enough.
    """
    model, loop = config.model, config.loop
    with events.span("training_prep"):
        check_paths(config)
        corpus = build_corpus(config.data.data, config.data.corpus_dir, model.size.seq_len + 1)
    with events.span("initialization"):
        join(config.cluster, loop.compile_cache)
        mesh_config = config.mesh or MeshConfig(fsdp=jax.device_count())
        mesh = make_mesh(mesh_config)
        start = start_position(corpus, global_batch=config.data.global_batch, seed=config.data.seed)
        check_same_data(start, make_coordinator(config.cluster.start_timeout_s))
    with events.span("training_prep"):
        if config.optimizer.offload:
            check_offload()
        program = make_program(model, config.optimizer, mesh, seed=config.data.seed)
        check_rules(
            named_leaves(program.abstract_state["model"]),
            mesh_config,
            global_batch=config.data.global_batch,
            accumulate=config.optimizer.accumulate,
        )
        guard = make_guard(config.guard, events)
        manager = make_manager(config.checkpoint, events, guard)
        prepare(manager, program.abstract_state, start)
    with events.span("checkpoint_restore"):
        restoring = restore_newest(manager, program.abstract_state, start)
    with events.span("compile"):  # while the bytes come in
        batch_shape = (config.data.global_batch, corpus.record_bytes)
        take_step = compile_step(
            program,
            batch_shape,
            cache=programs_cache(loop.compile_cache),
            key=repr((model, config.optimizer, config.data.seed)),
        )
    with events.span("checkpoint_restore"):
        restored = restoring()
    with events.span("training_prep"):
        state, position = restored or (jax.block_until_ready(program.init()), start)
        if restored:
            done = steps_done(loop.events) if loop.events else None
            events.emit(
                Kind.RESUMED,
                step=position.step,
                repeated=None if done is None else max(0, done - position.step),
                processes=jax.process_count(),
                mesh=str(mesh_config),
            )
        if guard:
            guard.resume(position.guard)
        del restored, restoring  # they would keep the first state in memory
        loop_state = LoopState(state=state, position=position)
        batches = open_batches(corpus, position, batch_sharding(mesh), steps=loop.steps)
        proof = Proof(Path(loop.proof), jax.process_index()) if loop.proof else None

    progress = Progress(config, mesh_config, loop_state)
    if loop_state.position.step == loop.steps:  # a run that was lost between its last step and the end of its save
        with events.span("checkpoint_save", loop.steps):
            save_end(manager, loop_state.state, loop_state.position)
    while loop_state.position.step < loop.steps:
        step = loop_state.position.step
        with events.span("data_loading", step):
            batch = next(batches)
        if proof:
            proof.add_records(step, batch.rows)
        with events.span("step", step):
            state, loss = take_step(loop_state.state, batch.tokens)
            loss_nats = float(loss)  # waits: a save that found the step unfinished would count it as its own stall
        if proof:
            proof.add_loss(step, loss_nats)
        if guard and (alarm := guard.watch(step, loss=loss_nats)):
            del state  # or two states would be in memory
            state, position = go_back(manager, guard, alarm, program.abstract_state, start)
            loop_state = LoopState(state=state, position=position)
            batches = open_batches(corpus, position, batch_sharding(mesh), steps=loop.steps)
            progress.went_back(alarm, position)
            continue
        record = guard.to_json() if guard else loop_state.position.guard
        loop_state = LoopState(state=state, position=replace(loop_state.position, step=step + 1, guard=record))
        with events.span("checkpoint_save", step + 1):
            started_s = time.monotonic()
            is_last = step + 1 == loop.steps
            if not is_last:
                leave_if_preempted(manager, loop_state.state, loop_state.position, config.cluster.grace_s)
            if save(manager, loop_state.state, loop_state.position, force=is_last):
                progress.add_save(time.monotonic() - started_s)
        progress.add_step(step, loss_nats)

    if manager:
        with events.span("checkpoint_save"):
            manager.wait_until_finished()
            manager.close()
    if proof:
        proof.close(loop_state.state)
    return loop_state


def check_paths(config: RunConfig) -> None:
    """Find out now, not at the first save, that something cannot be written."""
    check_writable(config.checkpoint.directory, "--checkpoint", remote=True)
    check_writable(config.checkpoint.ram, "--ram")
    check_writable(config.checkpoint.ssd, "--ssd")
    check_writable(config.loop.proof, "--proof")
    check_writable(config.loop.compile_cache, "--compile-cache", remote=True)


class Progress:
    """A line on stdout every `log_every` steps, from process 0."""

    def __init__(self, config: RunConfig, mesh: MeshConfig, begin: LoopState):
        self._every = config.loop.log_every if jax.process_index() == 0 else None
        self._steps = config.loop.steps
        self._step_tokens = config.data.global_batch * config.model.size.seq_len
        self._stall_s: float | None = None
        self._mark_s, self._mark_step = time.monotonic(), begin.position.step
        if self._every:
            leaves = named_leaves(begin.state)
            params = sum(math.prod(leaf.shape) for path, leaf in leaves.items() if path.startswith("model/"))
            state_bytes = sum(leaf.nbytes for leaf in leaves.values())
            on = "1 process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
            click.echo(
                f"mesh {mesh} on {on}, {params:,} parameters, "
                f"state {state_bytes / 1e6:.1f} MB, from step {self._mark_step} to {self._steps}"
            )
            if self._mark_step >= self._steps:
                click.echo(f"step {self._mark_step} is done and --steps is {self._steps}: nothing left to do")

    def add_save(self, stall_s: float) -> None:
        """Note how long a save held the loop."""
        self._stall_s = stall_s

    def went_back(self, alarm: Alarm, position: Position) -> None:
        """Print that the guard returned the run to an earlier step."""
        if self._every:
            click.echo(f"{alarm}: back to step {position.step}; skipped batches: {position.skips}")

    def add_step(self, step: int, loss_nats: float) -> None:
        """Count a finished step and print when it is time; tokens/s include everything since the last line."""
        done = step + 1
        if not self._every or (done % self._every and done != self._steps):
            return
        now_s = time.monotonic()
        tokens_per_s = (done - self._mark_step) * self._step_tokens / (now_s - self._mark_s)
        stall = "" if self._stall_s is None else f"  last save stalled {1e3 * self._stall_s:.1f} ms"
        click.echo(f"step {done:>6}/{self._steps}  loss {loss_nats:.4f}  {tokens_per_s:,.0f} tokens/s{stall}")
        self._mark_s, self._mark_step = now_s, done
